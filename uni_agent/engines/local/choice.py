"""Which model class and which stepper serve a module: the one place that knows all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from uni_agent.engines.local.attention import Attention, TorchAttention
from uni_agent.engines.local.blocked import HEAD_DIMS, NativeAttention
from uni_agent.engines.local.cache import PagedCache, default_bytes, num_blocks
from uni_agent.engines.local.dense import DenseDecoder
from uni_agent.engines.local.model import StepModel
from uni_agent.engines.local.module import ModuleModel
from uni_agent.engines.local.native import load_native
from uni_agent.engines.local.recurrent import StateStepper
from uni_agent.engines.local.rows import Rows
from uni_agent.engines.local.shell import is_recurrent
from uni_agent.engines.local.state_model import StateModel
from uni_agent.engines.local.step import PagedStepper
from uni_agent.engines.local.stepper import Refused, Sampled, Stepper
from uni_agent.errors import ModelError

_LOG = logging.getLogger(__name__)

Build = Callable[[Sampled, Refused], Stepper]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The settings of `LocalEngine` that models and caches are made from."""

    context_size: int
    dtype: torch.dtype | None
    max_running: int
    cache_bytes: int | None
    prefill_tokens: int
    batch_invariant: bool
    native: bool | None


class Choice(NamedTuple):
    """What serves a module: `build` makes the stepper, given where sampled tokens and refusals go."""

    vocab_size: int
    build: Build


def choose(module: nn.Module, shape: EngineShape) -> Choice:
    """Make the model and its cache. Raises ModelError and EngineError where that cannot be done."""
    model = make_model(module, shape)
    if isinstance(model, StateModel):
        return Choice(model.vocab_size, _state_stepper(model, shape))
    return Choice(model.geometry.vocab_size, _paged_stepper(model, shape))


def make_model(module: nn.Module, shape: EngineShape) -> StepModel | StateModel:
    """The fast path where the family has one, else the module's own forward: over the paged cache where
    its attention can be expressed so, else with a state of its own.

    Only the fast path and `StateModel` can be batch-invariant.
    """
    size, dtype = shape.context_size, shape.dtype
    if not is_recurrent(module):
        try:
            return DenseDecoder(
                module, size, dtype=dtype, native=shape.native, batch_invariant=shape.batch_invariant
            )
        except ModelError as error:
            if shape.native:
                raise
            _LOG.info("not on the fast path: %s", error)
        if not shape.batch_invariant:
            try:
                return ModuleModel(module, size, dtype=dtype)
            except ModelError as error:
                _LOG.info("not over the paged cache: %s", error)
    return StateModel(module, size, dtype=dtype)


def _paged_stepper(model: StepModel, shape: EngineShape) -> Build:
    geometry = model.geometry
    blocks = num_blocks(
        geometry,
        cache_bytes=shape.cache_bytes,
        max_running=shape.max_running,
        context=shape.context_size,
        dtype=model.dtype,
        device=model.device,
    )
    cache = PagedCache(
        geometry,
        blocks=blocks,
        count=shape.max_running,
        context=shape.context_size,
        dtype=model.dtype,
        device=model.device,
    )
    native = None if shape.native is False or model.device.type != "cpu" else load_native()
    attention: Attention = TorchAttention(cache, batch_invariant=shape.batch_invariant)
    if native is not None and geometry.head_dim in HEAD_DIMS and model.dtype in _KERNEL_DTYPES:
        attention = NativeAttention(cache, native, batch_invariant=shape.batch_invariant)

    def build(sampled: Sampled, refused: Refused) -> Stepper:
        return PagedStepper(
            model,
            cache,
            Rows(shape.max_running, shape.context_size),
            attention,
            kernel=native,
            prefill_tokens=shape.prefill_tokens,
            sampled=sampled,
            refused=refused,
        )

    return build


def _state_stepper(model: StateModel, shape: EngineShape) -> Build:
    budget = default_bytes(model.device) if shape.cache_bytes is None else shape.cache_bytes

    def build(sampled: Sampled, refused: Refused) -> Stepper:
        return StateStepper(
            model,
            Rows(shape.max_running, shape.context_size),
            cache_bytes=budget,
            prefill_tokens=shape.prefill_tokens,
            batch_invariant=shape.batch_invariant,
            sampled=sampled,
            refused=refused,
        )

    return build
