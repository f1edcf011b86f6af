"""The local engine as the recipes' config describes it."""

from __future__ import annotations

import torch

from uni_agent.engines.local import LocalEngine
from uni_agent.models import HFModel
from uni_agent.protocols import Renderer
from uni_agent.recipes.sections import EngineConfig

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def make_engine(
    config: EngineConfig, model: HFModel, renderer: Renderer, *, max_running: int, seed: int
) -> LocalEngine:
    """Make an engine on the model's parameters; its thread runs until `close`."""
    return LocalEngine(
        model.module,
        context_size=model.context_size,
        dtype=_DTYPES[config.dtype],
        max_running=max_running,
        cache_bytes=round(config.cache_gib * 2**30) or None,
        decode=renderer.decode,
        seed=seed,
        chunk_interval_s=None,
        batch_invariant=config.batch_invariant,
        native=None if config.native else False,
    )
