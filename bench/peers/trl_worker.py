# pyright: basic, reportMissingImports=false
"""TRL's GRPOTrainer as an arm, one step at a time. Runs in bench/.peers/trl."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from typing import Any

import datasets
import torch
import transformers
import trl
from lines import serve
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def mean_id(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The mean token id: a reward only has to differ within a group."""
    return [sum(ids) / len(ids) / 1000 for ids in completion_ids]


class TimedTrainer(GRPOTrainer):
    """Notes how long sampling takes, and that every completion is as long as it was asked to be."""

    generation_s = 0.0

    def _generate(self, prompts: list) -> Any:
        began = time.perf_counter()
        result = super()._generate(prompts)
        self.generation_s += time.perf_counter() - began
        lengths = {len(ids) for ids in result[1]}
        if lengths != {self.max_completion_length}:
            raise RuntimeError(
                f"completions of {sorted(lengths)} tokens, asked for {self.max_completion_length}"
            )
        return result


class Gate(TrainerCallback):
    """Holds the training loop before each step until it is asked for, and answers how long it took."""

    def __init__(self) -> None:
        self.go: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[dict[str, float] | Exception] = queue.SimpleQueue()
        self.trainer: Any = None
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.go.get()
        self.trainer.generation_s = 0.0
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, generation = time.perf_counter() - self.began, self.trainer.generation_s
        self.done.put({"generation": generation, "training": step - generation, "step": step})


class Peer:
    """One trainer, in a thread of its own that waits between steps."""

    def __init__(self) -> None:
        self.gate = Gate()

    def versions(self) -> dict[str, str]:
        return {
            "trl": trl.__version__,
            "trl_transformers": transformers.__version__,
            "trl_torch": torch.__version__,
        }

    def load(
        self,
        *,
        model: str,
        prompts: list[str],
        group_size: int,
        new_tokens: int,
        steps: int,
        lr: float,
        lora_rank: int,
        bf16: bool,
        batch_size: int,
    ) -> None:
        """Make the trainer; it takes the prompts in their order, the same number of them each step.

        `batch_size` is in completions, of one forward and backward.
        """
        asked = len(prompts) // steps * group_size
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="bench-trl-"),
            use_cpu=True,
            bf16=bf16,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=asked // batch_size,
            gradient_checkpointing=False,  # recomputing would cost it time; its default is on
            num_generations=group_size,
            max_completion_length=new_tokens,
            generation_kwargs={"min_new_tokens": new_tokens},
            temperature=1.0,
            beta=0.0,
            learning_rate=lr,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            max_steps=steps,
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear"
        )
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            reward_funcs=mean_id,
            args=config,
            train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in prompts]),
            peft_config=lora if lora_rank else None,
            callbacks=[self.gate],
        )
        self.gate.trainer = trainer
        threading.Thread(target=self._train, args=(trainer,), daemon=True).start()

    def step(self) -> dict[str, float]:
        """Let the trainer make its next step: seconds of generation, of training and of both."""
        self.gate.go.put(None)
        result = self.gate.done.get()
        if isinstance(result, Exception):
            raise result
        return result

    def _train(self, trainer: Any) -> None:
        try:
            trainer.train()
        except Exception as error:
            self.gate.done.put(error)
            raise


if __name__ == "__main__":
    peer = Peer()
    serve({"versions": peer.versions, "load": peer.load, "step": peer.step})
