"""A learner's state on disk: trained weights (safetensors), optimizer moments, counters, RNG state."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from uni_agent.errors import CheckpointError, RunError

_WEIGHTS = "trained.safetensors"
_OPTIMIZER = "optimizer.pt"
_PROGRESS = "progress.json"
_RNG = "rng.pt"

_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError)

Named = Sequence[tuple[str, nn.Parameter]]


class Progress(NamedTuple):
    """The learner's counters."""

    num_steps: int
    num_skipped: int
    streak: int
    version: int


def save(path: Path, named: Named, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write into the folder `path`, which is made if needed. Raises RunError for weights not finite."""
    bad = [name for name, parameter in named if not bool(torch.isfinite(parameter).all())]
    if bad:
        raise RunError(
            f"weights are not finite in {', '.join(bad[:3])} ({len(bad)} tensors); they are not saved, "
            "resume from the checkpoint before"
        )
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: parameter.detach().contiguous() for name, parameter in named}, path / _WEIGHTS)
    torch.save({"state": optimizer.state_dict()["state"]}, path / _OPTIMIZER)
    torch.save(_rng_state(), path / _RNG)
    (path / _PROGRESS).write_text(json.dumps({**progress._asdict(), "python_rng": _python_rng()}))


def load(path: Path, named: Named, optimizer: torch.optim.Optimizer) -> Progress:
    """Read in place, the random generators last. Raises CheckpointError, before anything has changed."""
    try:
        weights = load_file(path / _WEIGHTS)
        moments: dict[str, Any] = torch.load(path / _OPTIMIZER, weights_only=True, map_location="cpu")
        rng: dict[str, Any] = torch.load(path / _RNG, weights_only=True)
        counters: dict[str, Any] = json.loads((path / _PROGRESS).read_text())
        progress = Progress(**{key: int(counters[key]) for key in Progress._fields})
    except _UNREADABLE as error:
        first_line = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{path} cannot be read as a learner's state: {first_line}") from error
    _check_same(path, named, weights)
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(weights[name])
    # Settings (learning rates, decay) stay this run's own; only the moments are taken over.
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments["state"], "param_groups": settings})
    torch.set_rng_state(rng["torch"])
    if torch.cuda.is_available() and len(rng["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(rng["cuda"])
    key = rng["numpy_key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, rng["numpy_pos"], *rng["numpy_gauss"]))
    kind, words, gauss = counters["python_rng"]
    random.setstate((kind, tuple(words), gauss))
    return progress


def _check_same(path: Path, named: Named, weights: dict[str, torch.Tensor]) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in named}
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    different = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
    if different:
        name = different[0]
        raise CheckpointError(
            f"{path} is of another model: {name} is {saved.get(name, 'missing')} there and "
            f"{shapes.get(name, 'missing')} here ({len(different)} tensors differ)"
        )


def _rng_state() -> dict[str, Any]:
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy_key": torch.from_numpy(np.asarray(key).astype(np.int64)),
        "numpy_pos": int(position),
        "numpy_gauss": [int(has_gauss), float(gauss)],
    }


def _python_rng() -> list[Any]:
    kind, words, gauss = random.getstate()
    return [kind, list(words), gauss]
