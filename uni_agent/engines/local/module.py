"""Any causal LM of transformers as a StepModel: its own forward, with the engine's cache and attention.

The model runs as a `Shell` whose attention function is ours: it hands q, k and v to the `attend` of
the pass. transformers then makes no masks and keeps no cache. What a cache must know (heads, windows,
scale) is not read from the config but seen in the calls of a probing pass, and the whole is compared
with the model's own forward before anything is sampled. What cannot be expressed so (attention sinks,
chunks, ALiBi, recurrent layers) is refused; `recurrent` runs those.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from uni_agent.engines.local.model import Attend, Geometry
from uni_agent.engines.local.probe import MASKED_PROBE, LayerCall, ProbeCache, dense_attend, window_of
from uni_agent.engines.local.shell import Shell, is_recurrent
from uni_agent.errors import ModelError

ENGINE_ATTENTION = "uni_agent_engine"
"""Our attention function's name in transformers' registry."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""How far logprobs may be from the model's own forward at load, in nats."""

_MAX_PROBED = 3

Call = Callable[[LayerCall], Tensor]
_PASS: ContextVar[Call] = ContextVar("uni_agent_engine_pass")


class ModuleModel:
    """Runs a causal LM through its own forward; satisfies `model.StepModel`.

    `dtype` None is the module's own, and then nothing is copied; another one keeps a cast copy of all
    tensors, adapters included. Raises ModelError when the model's attention is more than a cache with
    windows, a scale and a soft cap can express, and when the result is not the model's own.
    """

    def __init__(self, module: nn.Module, context_size: int, *, dtype: torch.dtype | None = None) -> None:
        _register()
        self.module = module
        self._shell = Shell(module, dtype)
        self.device, self.dtype = self._shell.device, self._shell.dtype
        self._kind = str(self._shell.config.model_type)
        check_positions(self._shell, context_size)
        if is_recurrent(module):
            raise self._refusal("its layers keep states of their own")
        if not self._shell.set_attention(ENGINE_ATTENTION):
            raise self._refusal("its attention is not called through transformers' interface")
        with torch.no_grad():
            calls = self._probe(context_size)
            self.geometry = self._geometry(calls, context_size)
            self._value_dim = calls[0].v.shape[-1]
            self._factors = [call.scale / self.geometry.scale for call in calls]
            self._check(context_size)

    def refresh(self) -> None:
        """Take the module's parameters as they are now (an optimizer stepped, an adapter changed)."""
        self._shell.refresh()

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers: int64[N], int64[N] -> [N, H], after the last norm."""
        layer = 0

        def call(given: LayerCall) -> Tensor:
            nonlocal layer
            q, k, v = given.q, given.k, given.v
            if self._factors[layer] != 1:
                q = q * self._factors[layer]
            if v.shape[-1] < k.shape[-1]:  # latent attention: the cache has one size for both
                v = nn.functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
            out = attend(layer, q, k, v)
            layer += 1
            return out[..., : self._value_dim]

        return self._run(tokens, positions, call)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32[N, V]."""
        return self._shell.logits(hidden)

    def _run(self, tokens: Tensor, positions: Tensor, call: Call, cache: Any = None) -> Tensor:
        token = _PASS.set(call)
        try:
            return self._shell.hidden(tokens[None], positions[None], cache)[0]
        finally:
            _PASS.reset(token)

    def _probe(self, context_size: int) -> list[LayerCall]:
        """Run the last tokens of a full context, and note what each layer asks of attention."""
        calls: list[LayerCall] = []

        def call(given: LayerCall) -> Tensor:
            calls.append(given)
            return given.q.new_zeros((*given.q.shape[:2], given.v.shape[-1]))

        count = min(_MAX_PROBED, context_size)
        tokens = torch.arange(count, device=self.device)
        positions = tokens + context_size - count
        cache = ProbeCache(context_size - count)
        try:
            with self._shell.attention(MASKED_PROBE):
                self._run(tokens, positions, call, cache)
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as problem:
            raise self._refusal(f"a probing pass failed: {first_line(problem)}") from problem
        if not calls:
            raise self._refusal("it has no attention that a cache could serve")
        return calls

    def _geometry(self, calls: list[LayerCall], context_size: int) -> Geometry:
        first = calls[0]
        shapes = [(*call.q.shape[1:], *call.k.shape[1:], *call.v.shape[1:]) for call in calls]
        if any(call.k.shape[0] != call.q.shape[0] for call in calls):
            raise self._refusal("its layers attend to other tokens than those of the pass")
        if any(shape != shapes[0] for shape in shapes):
            raise self._refusal("its layers differ in heads or head size")
        if any(call.sinks for call in calls):
            raise self._refusal("its attention has sinks")
        if any(call.softcap != first.softcap for call in calls):
            raise self._refusal("its layers differ in the soft cap of their scores")
        if first.v.shape[-1] > first.k.shape[-1]:
            raise self._refusal("its values are wider than its keys")
        windows = [window_of(call, context_size) for call in calls]
        if any(window == 0 for window in windows):
            raise self._refusal("its attention mask is neither causal nor a sliding window")
        return Geometry(
            layers=len(calls),
            heads=first.q.shape[1],
            kv_heads=first.k.shape[1],
            head_dim=first.k.shape[-1],
            vocab_size=self._shell.vocab_size,
            scale=first.scale,
            windows=tuple(windows),
            softcap=first.softcap,
        )

    def _check(self, context_size: int) -> None:
        """Compare with the model's own forward: two sequences, the first one's tokens in two passes."""
        sizes = (min(17, context_size), min(9, context_size))
        cut = sizes[0] - sizes[0] // 3
        place = [torch.arange(size, device=self.device) for size in sizes]
        sequences = [(where * 5 + len(where)) % self.geometry.vocab_size for where in place]
        try:
            attend = dense_attend(self.geometry, [[0] * cut, [0] * (sizes[0] - cut) + [1] * sizes[1]])
            early = self.hidden(sequences[0][:cut], place[0][:cut], attend)
            rest = (torch.cat([sequences[0][cut:], sequences[1]]), torch.cat([place[0][cut:], place[1]]))
            ours = self.logits(torch.cat([early, self.hidden(*rest, attend)]))
            with self._shell.attention("eager"):
                theirs = [self._shell.whole(ids, where) for ids, where in zip(sequences, place, strict=True)]
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as problem:
            raise self._refusal(f"a trial failed: {first_line(problem)}") from problem
        gap = float((ours.log_softmax(-1) - torch.cat(theirs).log_softmax(-1)).abs().max())
        if not gap <= TOLERANCE.get(self.dtype, 1e-3):
            raise self._refusal(f"logprobs differ from the model's own forward by {gap:.2g} nats")

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"model type {self._kind!r} does not run on the local engine's paged cache: {why}; "
            "run it with a cache of its own (recurrent), or serve it over HTTP"
        )


def check_positions(shell: Shell, context_size: int) -> None:
    """Raise ModelError where the model's positions end within the context, or a token's position
    means another thing once others reach further: then a request would depend on its neighbours.
    """
    config = shell.config
    limit = vars(config).get("max_position_embeddings") or vars(config).get("n_positions")
    if limit is not None and context_size > int(limit):
        raise ModelError(
            f"context_size {context_size} exceeds the model's max_position_embeddings {limit}; ask for less"
        )
    rope: Any = vars(config).get("rope_parameters") or {}
    for part in [rope, *[value for value in rope.values() if isinstance(value, dict)]]:
        original = part.get("original_max_position_embeddings") or limit
        if part.get("rope_type") in ("dynamic", "longrope") and context_size > int(original or 0):
            raise ModelError(
                f"rotary type {part['rope_type']!r} of this {config.model_type} depends on the length beyond "
                f"{original} tokens; got context_size {context_size}, ask for less"
            )


def first_line(problem: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


def _engine_attention(  # noqa: PLR0917 - transformers' signature of attention functions
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # transformers hands every attention function what any of them takes
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D], by the `attend` of this pass."""
    q, k, v = (_rows(states) for states in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = LayerCall(q, k, v, scale, sliding_window, softcap or None, s_aux is not None, attention_mask)
    return _PASS.get()(call)[None], None


def _rows(states: Tensor) -> Tensor:
    """[1, H, N, D] -> [N, H, D], the last dimension contiguous."""
    rows = states[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _register() -> None:
    """Make our attention known to transformers, with and without masks; twice is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from uni_agent.engines.local.probe import full_mask

    AttentionInterface.register(ENGINE_ATTENTION, _engine_attention)
    AttentionInterface.register(MASKED_PROBE, _engine_attention)
    AttentionMaskInterface.register(MASKED_PROBE, full_mask)
