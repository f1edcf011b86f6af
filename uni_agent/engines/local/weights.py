"""New weights for the local engine's module: checked as a whole, then copied in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uni_agent.errors import EngineError, nearest

_WRAPPERS = ("_orig_mod.", "module.", "base_model.model.")


def unwrap(module: nn.Module) -> nn.Module:
    """The causal LM inside torch.compile, DDP and PEFT wrappers."""
    current: Any = module
    while True:
        if hasattr(current, "_orig_mod"):
            current = current._orig_mod
        elif isinstance(current, nn.parallel.DistributedDataParallel):
            current = current.module
        elif hasattr(current, "get_base_model"):
            current = current.get_base_model()
        else:
            return current


def apply_weights(module: nn.Module, location: Any, *, partial: bool = False) -> None:
    """Copy what is at `location` into `module`; nothing moves unless all of it fits.

    `location` is a module, a mapping of names to tensors, or the path of a safetensors file or
    folder. Wrapper prefixes (torch.compile, DDP, PEFT) are ignored on both sides. Of tied
    parameters one name is enough. `partial` allows parameters to be missing. Raises EngineError.
    """
    base = unwrap(module)
    if isinstance(location, nn.Module) and unwrap(location) is base:
        return
    plan = _plan(_parameters(base), _tensors(location), partial)
    with torch.inference_mode(False), torch.no_grad():
        for target, tensor in plan:
            target.copy_(tensor)


def _plain_name(name: str) -> str:
    """`name` without wrapper prefixes."""
    while True:
        for prefix in _WRAPPERS:
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        else:
            return name


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Every name of every parameter and saved buffer, tied ones under each of their names."""
    named: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        named[_plain_name(name)] = tensor
    return named


def _tensors(location: Any) -> dict[str, Tensor]:
    if isinstance(location, nn.Module):
        named: Iterable[tuple[Any, Any]] = unwrap(location).state_dict().items()
    elif isinstance(location, Mapping):
        named = location.items()  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(location, str | Path):
        named = _read(Path(location)).items()
    else:
        raise EngineError(
            f"weights are at a {type(location).__name__}; the local engine takes a module, a dict of "
            "tensors, or the path of a safetensors file or folder"
        )
    payload: dict[str, Tensor] = {}
    for name, tensor in named:
        plain = _plain_name(str(name))
        if plain in payload:
            raise EngineError(f"weights name {plain!r} twice, once as {name!r}; send each parameter once")
        payload[plain] = tensor
    return payload


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise EngineError(f"weights folder {path} has no *.safetensors file")
    payload: dict[str, Tensor] = {}
    for file in files:
        try:
            payload.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"weights file {file} cannot be read: {error}") from error
    return payload


def _plan(
    targets: dict[str, Tensor], payload: dict[str, Tensor], partial: bool
) -> list[tuple[Tensor, Tensor]]:
    """Pairs (parameter, new value), one per distinct parameter; all checks are done here."""
    unknown = [name for name in payload if name not in targets]
    if unknown:
        raise EngineError(
            f"weights hold {len(unknown)} names that the model has not, first {unknown[0]!r}; "
            f"{nearest(unknown[0], targets)}"
        )
    plan: dict[int, tuple[Tensor, Tensor]] = {}
    missing: dict[int, str] = {}
    for name, target in targets.items():
        key = target.data_ptr()
        if name not in payload:
            missing.setdefault(key, name)
            continue
        tensor = payload[name]
        if tensor.shape != target.shape:
            raise EngineError(
                f"weights for {name!r} have shape {tuple(tensor.shape)}; the model has {tuple(target.shape)}"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise EngineError(f"weights for {name!r} hold NaN or infinity; the engine keeps its old weights")
        plan.setdefault(key, (target, tensor))  # tied: the first name, the embedding, decides
    lost = [name for key, name in missing.items() if key not in plan]
    if lost and not partial:
        raise EngineError(
            f"weights lack {len(lost)} of the model's parameters, first {lost[0]!r}; send all of them, or "
            "say partial=True"
        )
    if not plan:
        raise EngineError("weights are empty: not one parameter would change")
    return list(plan.values())
