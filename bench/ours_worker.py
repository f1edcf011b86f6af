"""Our side of the benches as an arm: the local engine and the learner, as the recipes use them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from peers.lines import serve
from safetensors.torch import load_file

from uni_agent.algos.advantages import grpo_turns
from uni_agent.algos.losses import policy_clip
from uni_agent.engines.local import LocalEngine
from uni_agent.models import HFAutoModel, HFModel, LoRA
from uni_agent.train.batch import items, make_batch
from uni_agent.train.learner import LearnerConfig, TorchLearner
from uni_agent.train.optim import OptimConfig
from uni_agent.types import Completion, Episode, Group, Message, Sampling, Task, Trajectory, Turn, Weights

Ids = list[int]
DtypeName = Literal["float32", "bfloat16"]
TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Ours:
    """One model, its engine, and for training its learner."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._model: HFModel | None = None
        self._engine: LocalEngine | None = None
        self._learner: TorchLearner | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._held: dict[str, torch.Tensor] = {}
        self._num_sessions = 0
        self._version = 0

    # --- generation ---

    def load(
        self,
        *,
        model: str,
        dtype: DtypeName,
        context: int,
        native: bool | None = None,
        module_dtype: DtypeName | None = None,
        lora_rank: int = 0,
    ) -> float:
        """Load a folder and make its engine; seconds from the files to the first token.

        `native` False samples on plain torch; `module_dtype` is the module's, where it is not the engine's.
        """
        self.close()
        began = time.perf_counter()
        lora = LoRA(r=lora_rank) if lora_rank else None
        self._model = HFAutoModel.from_pretrained(model, dtype=module_dtype or dtype, lora=lora)
        self._engine = LocalEngine(
            self._model.module,
            context_size=context,
            dtype=TORCH_DTYPE[dtype],
            max_running=64,
            native=native,
            chunk_interval_s=None,
        )
        self.greedy([5, 6, 7, 8], 1)
        return time.perf_counter() - began

    def close(self) -> None:
        """Drop model and engine."""
        if self._engine is not None:
            self._runner.run(self._engine.close())
        self._model = self._engine = self._learner = self._optimizer = None
        self._version = 0
        gc.collect()

    def generate(self, prompts: list[Ids], new_tokens: int) -> float:
        """Seconds for all prompts, greedy."""
        began = time.perf_counter()
        self._runner.run(self._sample_all(prompts, Sampling(max_tokens=new_tokens, temperature=0.0)))
        return time.perf_counter() - began

    def greedy(self, prompt: Ids, new_tokens: int) -> Ids:
        """The greedy tokens after a prompt."""
        sampling = Sampling(max_tokens=new_tokens, temperature=0.0)
        return self._runner.run(self._sample_all([prompt], sampling))[0].token_ids.tolist()

    async def _sample_all(self, prompts: Sequence[Ids], sampling: Sampling) -> list[Completion]:
        return await asyncio.gather(*(self._sample(prompt, sampling) for prompt in prompts))

    async def _sample(self, prompt: Ids, sampling: Sampling) -> Completion:
        """One call in a session of its own."""
        session = self._new_session()
        completion = await self._call(prompt, sampling, session)
        await self._live_engine.end_session(session)
        return completion

    async def _call(self, prompt: Ids, sampling: Sampling, session: str) -> Completion:
        async for part in self._live_engine.generate(prompt, sampling, session):
            if isinstance(part, Completion):
                if len(part.token_ids) != sampling.max_tokens:
                    raise RuntimeError(f"{len(part.token_ids)} tokens, asked for {sampling.max_tokens}")
                return part
        raise RuntimeError(f"session {session} ended without a completion")

    def _new_session(self) -> str:
        self._num_sessions += 1
        return f"bench-{self._num_sessions}"

    @property
    def _live_engine(self) -> LocalEngine:
        assert self._engine is not None, "load a model first"
        return self._engine

    @property
    def _live_model(self) -> HFModel:
        assert self._model is not None, "load a model first"
        return self._model

    # --- weights ---

    def hold_weights(self, model: str) -> None:
        """Keep the float32 weights of a folder as those that updates come from."""
        self._held = {name: w.float() for name, w in load_file(f"{model}/model.safetensors").items()}

    def update(self, change: float, roll: int = 0) -> float:
        """Take the held weights, each times (1 + change), the vocabulary rolled; seconds of the taking."""
        fresh = {name: weight * (1.0 + change) for name, weight in self._held.items()}
        if roll:
            embedding = "model.embed_tokens.weight"
            fresh[embedding] = fresh[embedding].roll(roll, 0)
        self._version += 1
        began = time.perf_counter()
        self._runner.run(self._live_engine.load_weights(Weights(self._version, fresh)))
        return time.perf_counter() - began

    def publish(self, prompt: Ids) -> float:
        """Seconds from the end of an optimizer step to the first token that the new weights sampled."""
        module = self._live_model.module
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        return self._runner.run(self._step_and_publish(self._optimizer, prompt))

    async def _step_and_publish(self, optimizer: torch.optim.Optimizer, prompt: Ids) -> float:
        engine, module = self._live_engine, self._live_model.module
        await engine.pause()
        optimizer.step()
        self._version += 1
        began = time.perf_counter()
        await engine.load_weights(Weights(self._version, module))
        await engine.resume()
        completion = await self._sample(prompt, Sampling(max_tokens=1, temperature=1.0))
        seconds = time.perf_counter() - began
        if completion.versions.tolist() != [self._version]:
            raise RuntimeError(f"sampled by {completion.versions.tolist()}, published {self._version}")
        return seconds

    # --- episodes ---

    def episodes(
        self, prompts: list[Ids], observations: list[list[Ids]], new_tokens: int
    ) -> dict[str, float]:
        """Play one episode per prompt: sample, append the next observation, sample, .. each at its own pace.

        Returns seconds and sampled tokens.
        """
        sampling = Sampling(max_tokens=new_tokens, temperature=1.0)
        began = time.perf_counter()
        tokens = self._runner.run(self._episodes(prompts, observations, sampling))
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    async def _episodes(self, prompts: list[Ids], observations: list[list[Ids]], sampling: Sampling) -> int:
        played = zip(prompts, observations, strict=True)
        return sum(await asyncio.gather(*(self._episode(p, o, sampling) for p, o in played)))

    async def _episode(self, prompt: Ids, observations: list[Ids], sampling: Sampling) -> int:
        session, history, sampled = self._new_session(), list(prompt), 0
        for observation in [*observations, []]:
            completion = await self._call(history, sampling, session)
            history += completion.token_ids.tolist() + observation
            sampled += len(completion.token_ids)
        await self._live_engine.end_session(session)
        return sampled

    # --- a GRPO step ---

    def make_learner(self, lr: float, microbatch_tokens: int) -> None:
        """A learner with AdamW on the loaded model."""
        optim = OptimConfig(lr=lr, betas=(0.9, 0.999), max_grad_norm=1.0)
        config = LearnerConfig(optim=optim, microbatch_tokens=microbatch_tokens)
        self._learner = TorchLearner(self._live_model, config)

    def step(self, prompts: list[str], group_size: int, new_tokens: int) -> dict[str, float]:
        """One step as the grpo recipe makes it: sample groups, compare, update, publish.

        Returns seconds of generation, of training (with publishing) and of both.
        """
        return self._runner.run(self._grpo_step(prompts, group_size, new_tokens))

    async def _grpo_step(self, texts: list[str], group_size: int, new_tokens: int) -> dict[str, float]:
        engine, learner = self._live_engine, self._learner
        assert learner is not None, "make_learner first"
        began = time.perf_counter()
        sampling = Sampling(max_tokens=new_tokens, temperature=1.0)
        encode = self._live_model.tokenizer.encode
        prompts: list[Ids] = [encode(text, add_special_tokens=False) for text in texts]
        asked = [prompt for prompt in prompts for _ in range(group_size)]
        completions = await self._sample_all(asked, sampling)
        generated = time.perf_counter()
        groups: list[Group] = []
        for number, prompt in enumerate(prompts):
            members = completions[number * group_size : (number + 1) * group_size]
            episodes = tuple(_episode(number, i, prompt, one, sampling) for i, one in enumerate(members))
            groups.append(Group(str(number), episodes))
        await engine.pause()
        batch = make_batch(items(groups, grpo_turns(groups, ())))
        loss = partial(policy_clip, clip_low=0.2, clip_high=0.2, kl_coef=0.0, entropy_coef=0.0)
        metrics = await asyncio.to_thread(learner.step, batch, loss)
        if metrics["train/tokens"] != len(asked) * new_tokens or metrics["train/skipped"]:
            raise RuntimeError(
                f"{metrics['train/tokens']:.0f} tokens trained, {len(asked) * new_tokens} sampled"
            )
        await engine.load_weights(learner.publish())
        await engine.resume()
        ended = time.perf_counter()
        return {
            "generation": generated - began,
            "training": ended - generated,
            "step": ended - began,
        }


def _episode(task: int, number: int, prompt: Ids, completion: Completion, sampling: Sampling) -> Episode:
    """A one-turn episode; its reward (the mean token id) only has to differ within a group."""
    start, size = len(prompt), len(prompt) + len(completion.token_ids)
    pad = np.zeros(start, np.float32)
    sampled = np.arange(size) >= start
    turn = Turn((0, start), (start, size), (), Message("assistant", ""), completion.finish, sampling)
    trajectory = Trajectory(
        "main",
        np.concatenate([np.asarray(prompt, np.int32), completion.token_ids]),
        sampled,
        np.concatenate([pad, completion.logprobs]),
        np.concatenate([np.full(start, -1, np.int32), completion.versions]),
        (turn,),
    )
    reward = float(np.mean(completion.token_ids)) / 1000
    question = Task(str(task), (Message("user", ""),))
    return Episode(f"{task}/{number}", question, (trajectory,), "done", {"reward": reward}, reward)


if __name__ == "__main__":
    ours = Ours()
    operations: dict[str, Any] = {
        "load": ours.load,
        "generate": ours.generate,
        "greedy": ours.greedy,
        "hold_weights": ours.hold_weights,
        "update": ours.update,
        "publish": ours.publish,
        "episodes": ours.episodes,
        "make_learner": ours.make_learner,
        "step": ours.step,
    }
    serve(operations)
    ours.close()
