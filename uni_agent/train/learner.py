"""The learner in one process: batches in, new weights out.

Scoring and stepping run the same forward (dropout off, same packing, the one logprob function), so
that the ratio is 1 on the first step. Nothing moves before the loss and all gradients are known to be
finite. It knows no engine: `publish` hands out the live module under a new version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from uni_agent.algos.losses import Outputs, TensorBatch, finish_stats, merge_stats
from uni_agent.errors import RunError
from uni_agent.models import HFModel, Reference, score_tokens
from uni_agent.protocols import Loss, TokenScores
from uni_agent.train import state
from uni_agent.train.batch import microbatches, score_batch
from uni_agent.train.critic import Critic
from uni_agent.train.optim import OptimConfig, lr_factor, make_adamw
from uni_agent.types import Batch, Float32Array, Trajectory, Weights

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How the learner computes.

    microbatch_tokens: rows * columns of one forward and backward. row_tokens: of a packed row when
    scoring. entropy: compute it for losses and metrics (needs the whole distribution). max_skipped:
    how many steps in a row may be skipped for numbers that are not finite before the run stops.
    """

    optim: OptimConfig = field(default_factory=OptimConfig)
    microbatch_tokens: int = 16384
    row_tokens: int = 2048
    entropy: bool = True
    max_skipped: int = 3


class _Forward(NamedTuple):
    """One forward: outputs per token, and the critic's values after each segment, float[B, S]."""

    outputs: Outputs
    end_values: Tensor | None


class TorchLearner:
    """Owns a model's weights, and satisfies `protocols.Learner`.

    `reference` gives `ref_logprobs`, `critic` gives values; both are optional. `num_steps` counts
    optimizer updates, `num_skipped` the steps that were skipped.
    """

    def __init__(
        self,
        model: HFModel,
        config: LearnerConfig,
        *,
        reference: Reference | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.reference = reference
        self.critic = critic
        self.optimizer = make_adamw(config.optim, model.module, critic.module if critic else None)
        self.num_steps = 0
        self.num_skipped = 0
        self._streak = 0
        self._version = 0

    @property
    def version(self) -> int:
        """The version that `publish` handed out last; 0 before the first."""
        return self._version

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.module.parameters()).device

    def publish(self) -> Weights:
        """Name the current weights a new version. The location is the live module: nothing is copied."""
        self._version += 1
        return Weights(self._version, self.model.module)

    # --- scoring ---

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> list[TokenScores]:
        """Logprobs at the sampling temperature, values and reference logprobs where configured."""
        if not trajectories:
            return []
        self._dropout_off()
        batch, place = score_batch(trajectories, self.config.row_tokens)
        shape = batch.token_ids.shape
        logprobs = np.zeros(shape, np.float32)
        values = np.zeros(shape, np.float32) if self.critic else None
        ends = np.zeros((shape[0], int(place.segments.max())), np.float32)
        ref_logprobs = np.zeros(shape, np.float32) if self.reference else None
        start = 0
        for micro in microbatches(batch, self.config.microbatch_tokens):
            rows, width = micro.token_ids.shape
            part = (slice(start, start + rows), slice(0, width))
            start += rows
            tensors = TensorBatch.from_numpy(micro, device=self.device)
            done = self._forward(tensors, entropy=False)
            _put(logprobs, part, done.outputs.logprobs, tensors)
            if values is not None and done.outputs.values is not None and done.end_values is not None:
                _put(values, part, done.outputs.values, tensors)
                ends[part[0], : done.end_values.shape[1]] = done.end_values.float().cpu().numpy()
            if ref_logprobs is not None:
                _put(ref_logprobs, part, self._reference_logprobs(tensors), tensors)
        per_values = place.gather(values) if values is not None else None
        per_ref = place.gather(ref_logprobs) if ref_logprobs is not None else None
        return [
            TokenScores(
                own,
                values=per_values[i] if per_values else None,
                ref_logprobs=per_ref[i] if per_ref else None,
                bootstrap=float(ends[place.rows[i], place.segments[i] - 1]),
            )
            for i, own in enumerate(place.gather(logprobs))
        ]

    def _forward(self, tensors: TensorBatch, *, entropy: bool) -> _Forward:
        with_hidden = self.critic is not None and self.critic.needs_hidden
        out = score_tokens(
            self.model.module,
            tensors.token_ids,
            tensors.positions,
            tensors.segments,
            tensors.temperature,
            wanted=tensors.trained,
            with_entropy=entropy,
            with_hidden=with_hidden,
        )
        if self.critic is None:
            return _Forward(Outputs(out.logprobs, out.entropy), None)
        values = self.critic.values(tensors, out)
        return _Forward(Outputs(out.logprobs, out.entropy, values.before), values.end)

    def _reference_logprobs(self, tensors: TensorBatch) -> Tensor:
        assert self.reference is not None
        with self.reference.active() as module:
            out = score_tokens(
                module,
                tensors.token_ids,
                tensors.positions,
                tensors.segments,
                tensors.temperature,
                wanted=tensors.trained,
            )
        return out.logprobs

    def _dropout_off(self) -> None:
        # Each time: whoever shares the module may have switched it to train mode in between.
        self.model.module.eval()
        if self.critic is not None:
            self.critic.module.eval()

    # --- stepping ---

    def step(self, batch: Batch, loss: Loss) -> Mapping[str, float]:
        """Make one optimizer step of the sum of `loss` over micro-batches, and return its metrics.

        A batch in which nothing trains, and one whose loss or gradient is not finite, is skipped:
        weights, moments and step count stay as they are. Raises RunError after a streak of the latter.
        """
        num_tokens = batch.num_trained_tokens
        if num_tokens == 0:
            self.num_skipped += 1
            return {"train/skipped": 1.0, "train/skipped_total": float(self.num_skipped), "train/tokens": 0.0}
        self._dropout_off()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            total, stats = self._backward(batch, loss)
            norm = torch.nn.utils.clip_grad_norm_(
                self._parameters(), self.config.optim.max_grad_norm or torch.inf
            )
            metrics = finish_stats({"loss": total, "grad_norm": norm, **stats}, num_tokens)
            if np.isfinite(metrics["train/loss"]) and np.isfinite(metrics["train/grad_norm"]):
                self._update()
                metrics["train/skipped"] = 0.0
            else:
                self._skip(metrics["train/loss"])
                metrics["train/skipped"] = 1.0
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        metrics["train/lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["train/tokens"] = float(num_tokens)
        metrics["train/skipped_total"] = float(self.num_skipped)
        return metrics | _staleness(batch, self._version)

    def _backward(self, batch: Batch, loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
        totals: dict[str, Tensor] = {}
        total = torch.zeros((), device=self.device)
        for micro in microbatches(batch, self.config.microbatch_tokens):
            if micro.num_trained_tokens == 0:
                continue
            tensors = TensorBatch.from_numpy(micro, device=self.device)
            value, stats = loss(self._forward(tensors, entropy=self.config.entropy).outputs, tensors)
            value.backward()
            total = total + value.detach()
            merge_stats(totals, stats)
        return total, totals

    def _update(self) -> None:
        self.num_steps += 1
        self._streak = 0
        factor = lr_factor(self.config.optim, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        self.optimizer.step()

    def _skip(self, loss: float) -> None:
        self.num_skipped += 1
        self._streak += 1
        bad = [
            name
            for name, parameter in self._named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        where = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        told = f"step {self.num_steps + 1}: loss {loss:g}, gradient not finite in {where or 'no tensor'}"
        if self._streak > self.config.max_skipped:
            raise RunError(
                f"{told}; {self._streak} steps in a row were skipped and at most {self.config.max_skipped} "
                "may be; resume from the last checkpoint with a lower learning rate"
            )
        _LOG.warning("%s; the step is skipped (%d in a row)", told, self._streak)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = list(self.model.module.named_parameters())
        if self.critic is not None:
            named += [(f"critic.{name}", p) for name, p in self.critic.module.named_parameters()]
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._named_parameters()]

    # --- saving ---

    def save(self, path: Path) -> None:
        """Write everything that a resumed run needs, and `model/`, which transformers can load.

        Raises RunError when a weight is not finite: such a checkpoint would be of no use.
        """
        progress = state.Progress(self.num_steps, self.num_skipped, self._streak, self._version)
        state.save(path, self._named_parameters(), self.optimizer, progress)
        self.model.save(path / "model")

    def load(self, path: Path) -> None:
        """Continue as the learner that saved: weights (in place), moments, counters and RNG state.

        Learning rates and the other settings are this learner's own. Raises CheckpointError.
        """
        progress = state.load(path, self._named_parameters(), self.optimizer)
        self.num_steps, self.num_skipped, self._streak, self._version = progress


def _put(target: Float32Array, part: tuple[slice, slice], values: Tensor, tensors: TensorBatch) -> None:
    target[part] = torch.where(tensors.trained, values, 0.0).float().cpu().numpy()


def _staleness(batch: Batch, version: int) -> dict[str, float]:
    """How many versions old the trained tokens are; tokens without a version are left out."""
    versions = batch.versions[(batch.weights != 0) & (batch.versions >= 0)]
    if not len(versions):
        return {}
    return {
        "train/staleness_mean": float(version - versions.mean()),
        "train/staleness_max": float(version - versions.min()),
    }
