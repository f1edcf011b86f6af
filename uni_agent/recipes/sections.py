"""Sections that the recipes' configs share: names, numbers, their ranges and meaning. No behaviour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from uni_agent.config import BaseConfig
from uni_agent.train.optim import OptimConfig
from uni_agent.types import Sampling

Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
"""0 means what the field's documentation says."""
Factor = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class WorldConfig(BaseConfig):
    """The world half of a run."""

    env: str = "code_debug_env"
    """Name of a registered environment, or `module:Class` of your own."""
    tools: tuple[str, ...] = ("code_executor",)
    """Shipped tool names, or `module:function` of your own."""
    reward: str = "code_test_pass_rate"
    """Shipped reward, `module:function` of your own, or "" for the sum of the step rewards."""
    system_prompt: str = ""
    """The system message; "" sends none."""
    max_turns: CountOrOff = 0
    """Model calls per episode; 0 takes the environment's registered max_steps."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Wall-clock seconds per episode; what takes longer ends as `timeout` and does not train."""
    concurrency: Count = 64
    """Episodes in flight."""


class SamplingConfig(BaseConfig):
    """How the policy draws tokens."""

    temperature: Factor = 1.0
    """0 is greedy, which is for evaluation only."""
    max_tokens: Count = 256
    """Per turn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 is off; for evaluation only."""
    top_k: CountOrOff = 0
    """0 is off; for evaluation only."""

    def to_sampling(self) -> Sampling:
        """As the engines take it."""
        return Sampling(**self.model_dump())


class EngineConfig(BaseConfig):
    """How the local engine computes. What it samples is recorded with its own logprobs, whatever is set."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of its copy of the weights and of its cache; "auto" is the model's. bfloat16 is faster and takes half
    the memory; `engine/logprob_gap` says each step how far its logprobs are from the learner's."""
    cache_gib: Factor = 0.0
    """Most memory for keys and values; 0 takes what `concurrency` full contexts need, at most 4 GiB and a
    quarter of the free memory."""
    native: bool = True
    """Use the compiled kernels, where a compiler is; they are built once."""
    batch_invariant: bool = False
    """A request with a seed gives the same tokens whatever runs beside it; slower."""


class OptimizerConfig(BaseConfig):
    """AdamW, and how much is computed at once."""

    lr: Factor = 1e-4
    """Peak learning rate."""
    warmup_steps: CountOrOff = 5
    """Optimizer steps of linear warm-up; 0 begins at `lr`."""
    weight_decay: Factor = 0.0
    """On matrices only."""
    max_grad_norm: Factor = 1.0
    """Over all parameters; 0 does not clip."""
    microbatch_tokens: Count = 65536
    """Tokens of one forward and backward; bounds memory, never changes the result."""
    lora_rank: CountOrOff = 0
    """0 trains all weights; above, a LoRA adapter of this rank."""

    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, from the end of the warm-up to a tenth at the last step."""

    def to_optim(self, total_steps: int) -> OptimConfig:
        """As the learner takes it; `total_steps` are optimizer steps."""
        return OptimConfig(
            lr=self.lr,
            decay=self.decay,
            total_steps=total_steps,
            final_lr_ratio=0.1,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )


class HeldOutConfig(BaseConfig):
    """Evaluation on tasks that are never trained on, with the training's own sampling."""

    tasks: tuple[str, ...] = ("test",)
    """Files, or splits of the environment's own task set; the first one decides which checkpoint is best.
    Empty evaluates nothing."""
    num_tasks: CountOrOff = 100
    """0 takes a whole file."""
    every: CountOrOff = 0
    """Steps between evaluations during training; 0 evaluates before and after only."""
    success_at: Finite = 1.0
    """An episode is a success from this reward on."""
    seed: int = 0
    """Of generated tasks; apart from the run's own seed, so that runs are measured on the same tasks."""


class RunConfig(BaseConfig):
    """The run directory, checkpoints and trackers."""

    name: str = ""
    """Folder under `root`; "" derives one from recipe, date and a number."""
    root: str = "runs"
    """Where run directories are made."""
    save_every: CountOrOff = 20
    """Steps between checkpoints; 0 saves at the end only."""
    trackers: tuple[str, ...] = ()
    """Beside the run directory: `tensorboard`, `wandb`."""

    def path_of(self, resume: str) -> tuple[Path, str | None]:
        """Root and name: of the run to resume, or of the new one."""
        if resume:
            return Path(resume).resolve().parent, Path(resume).resolve().name
        return Path(self.root), self.name or None
