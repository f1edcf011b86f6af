"""Supervised fine-tuning on conversations with tool calls, start to end in one file: copy it and edit.

    uni-agent train sft --model FOLDER --data conversations.jsonl --epochs 3

A line of the file is {"messages": [...], "tools": [...]} in the OpenAI shape. Only what the assistant
says is learned; an assistant message with "weight": 0 is context.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from uni_agent.algos.losses import sft
from uni_agent.config import BaseConfig
from uni_agent.errors import TaskFileError, UniAgentError
from uni_agent.models import HFAutoModel, LoRA
from uni_agent.protocols import Renderer
from uni_agent.recipes.interrupt import Interrupted, interruptible, resume_hint
from uni_agent.recipes.sections import Count, CountOrOff, Factor, OptimizerConfig, RunConfig
from uni_agent.render import dialogue_from_json, load_renderer, tool_from_json, truncate
from uni_agent.track import LiveConsole, Run
from uni_agent.train.batch import Item, make_batch
from uni_agent.train.checkpoint import Checkpoints
from uni_agent.train.demonstrations import demonstration
from uni_agent.train.learner import LearnerConfig, TorchLearner
from uni_agent.types import derive_seed


class Config(BaseConfig):
    """Train a policy on demonstrations."""

    model: str
    """A model folder that transformers loads, or a name from `uni-agent model list`."""
    renderer: str = ""
    """Chat format; "" reads it from the model folder."""
    data: str
    """A .jsonl file of conversations."""
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    epochs: Count = 1
    """Passes over the file."""
    batch: Count = 32
    """Conversations per optimizer step; the last step of an epoch may be smaller."""
    max_length: CountOrOff = 0
    """Tokens after which a conversation is cut; 0 takes the model's context."""
    max_seconds: Factor = 0.0
    """Wall-clock seconds after which training ends early; 0 sets no limit."""
    seed: int = 0
    """Of the order of the conversations."""
    resume: str = ""
    """A run directory to go on with."""


def plan(config: Config) -> Mapping[str, object]:
    """What `run` is going to do."""
    renderer = load_renderer(config.model, name=config.renderer or None)
    found = read_conversations(Path(config.data), renderer, config.max_length)
    tokens = sum(len(item.trajectory.token_ids) for item in found)
    steps = config.epochs * -(-len(found) // config.batch)
    return {"conversations": len(found), "tokens": tokens * config.epochs, "steps": steps}


def read_conversations(path: Path, renderer: Renderer, max_length: int) -> list[Item]:
    """Read and render a file; a bad line raises TaskFileError with its number."""
    if not path.is_file():
        raise TaskFileError(f"there is no file {path}; expected a .jsonl file of conversations")
    found: list[Item] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # a text may hold U+2028
        if not line.strip():
            continue
        try:
            body: dict[str, Any] = json.loads(line.decode("utf-8-sig"))
            messages = dialogue_from_json(body["messages"])
            tools = [tool_from_json(tool) for tool in body.get("tools") or []]
            trained = [m["role"] == "assistant" and m.get("weight", 1) != 0 for m in body["messages"]]
            dialogue = renderer.render_dialogue(messages, tools)
            cut = truncate(dialogue, max_length) if max_length else dialogue
            found.append(demonstration(cut, messages, trained=trained, number=len(found)))
        except (UniAgentError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TaskFileError(f"{path}:{number}: {type(error).__name__}: {error}") from error
    if not found:
        raise TaskFileError(f"{path} has no conversations")
    return found


def run(config: Config) -> Mapping[str, object]:
    """Train; checkpoints and the final model are in the run directory."""
    model = HFAutoModel.from_pretrained(
        config.model, lora=LoRA(r=config.optimizer.lora_rank) if config.optimizer.lora_rank else None
    )
    renderer = load_renderer(config.model, name=config.renderer or None)
    found = read_conversations(Path(config.data), renderer, config.max_length or model.context_size)
    per_epoch = -(-len(found) // config.batch)
    learner = TorchLearner(
        model,
        LearnerConfig(
            optim=config.optimizer.to_optim(config.epochs * per_epoch),
            microbatch_tokens=config.optimizer.microbatch_tokens,
            entropy=False,
        ),
    )
    root, name = config.run.path_of(config.resume)
    with (
        Run.create("sft", config, root=root, name=name, resume=bool(config.resume)) as record,
        LiveConsole() as live,
        interruptible() as interrupt,
    ):
        checkpoints = Checkpoints(record.checkpoints_dir)
        step = 0
        if config.resume:
            latest = checkpoints.resumed()
            step = int(latest.state["step"])
            learner.load(latest.learner)
        live.phase(
            f"Supervised training on {len(found)} conversations",
            config.epochs * per_epoch,
            seconds=config.max_seconds,
        )
        began = time.perf_counter()
        nll: float | None = None
        while step < config.epochs * per_epoch and not 0 < config.max_seconds <= time.perf_counter() - began:
            epoch, place = divmod(step, per_epoch)
            order = np.random.default_rng(derive_seed(config.seed, epoch)).permutation(len(found))
            part = [found[i] for i in order[place * config.batch : (place + 1) * config.batch]]
            metrics = learner.step(make_batch(part), sft)
            step += 1
            nll = metrics.get("train/nll")
            record.log(step, metrics)
            live.step(step, {"nll": nll, "grad": metrics.get("train/grad_norm")})
            if config.run.save_every and step % config.run.save_every == 0:
                checkpoints.save(step, learner.save, {"step": step})
            try:
                interrupt.check()
            except Interrupted:
                checkpoints.save(step, learner.save, {"step": step})
                raise KeyboardInterrupt(resume_hint("sft", record.path)) from None
        checkpoints.save(step, learner.save, {"step": step})
        model.save(record.path / "model")
        summary: dict[str, object] = {
            "steps": step,
            "seconds": time.perf_counter() - began,
            "nll": nll,
            "model": str(record.path / "model"),
            "run": str(record.path),
        }
        record.write_summary(summary)
        live.note(f"model in {record.path / 'model'}")
    return summary
