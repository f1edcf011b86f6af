"""Linear layers with weights of the engine's own: oneDNN's packed layout where it runs, plain elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from uni_agent.engines.local.params import Effective, Writer

TILE = 16
"""Rows of one call in batch-invariant mode."""


class Staging:
    """Memory in which a weight is put together before it is packed; one for all layers."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.writer = Writer()
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def buffer(self, rows: int, width: int) -> Tensor:
        """An uninitialised [rows, width], valid until the next call."""
        if self._memory.numel() < rows * width:
            self._memory = self._memory.new_empty(rows * width)
        return self._memory[: rows * width].view(rows, width)


class Linear:
    """x [N, in] -> [N, out] with the rows of several layers' weights under one another, once `load` ran.

    `tile` makes a row's result independent of the rows beside it: all calls have that many rows.
    """

    __slots__ = ("bias", "packed", "tile", "weight")

    def __init__(self, sources: Sequence[Effective], like: Tensor, *, packed: bool, tile: int) -> None:
        """`like` is any tensor of the engine's dtype and device."""
        self.packed, self.tile = packed, tile
        rows, width = sum(len(s.weight) for s in sources), sources[0].weight.shape[1]
        self.weight = torch.empty(0) if packed else like.new_empty(rows, width)
        biased = any(s.bias is not None or s.bias_updates for s in sources)
        self.bias = like.new_empty(rows) if biased else None

    def load(self, sources: Sequence[Effective], staging: Staging) -> None:
        """Take the sources' weights as they are now."""
        rows = sum(len(source.weight) for source in sources)
        width = sources[0].weight.shape[1]
        target = staging.buffer(rows, width) if self.packed else self.weight
        start = 0
        for source in sources:
            end = start + len(source.weight)
            staging.writer.weight(target[start:end], source)
            if self.bias is not None:
                staging.writer.bias(self.bias[start:end], source)
            start = end
        if self.packed:
            self.pack(target)

    def pack(self, weight: Tensor) -> None:
        """Take `weight` [out, in], already of the engine's dtype, into the packed layout."""
        self.weight = torch.empty(0)  # freed first: the new one can take its place
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.tile:
            return self._call(x)
        rows = len(x)
        short = -rows % self.tile
        if short:
            x = F.pad(x, (0, 0, 0, short))
        parts = [self._call(part.contiguous()) for part in x.split(self.tile)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out[:rows] if short else out

    def _call(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


@functools.cache
def packing_works(dtype: torch.dtype, device_type: str) -> bool:
    """Whether oneDNN's packed layout exists here and computes what F.linear does.

    Its operators are private to torch: they may be missing, change, or not know a dtype or this CPU.
    """
    if device_type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    operators: Any = torch.ops.mkldnn
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 40, generator=generator)
    x, bias = torch.randn(5, 40, generator=generator), torch.randn(48, generator=generator)
    weight, x, bias = weight.to(dtype), x.to(dtype), bias.to(dtype)
    want = F.linear(x.float(), weight.float(), bias.float())
    try:
        packed = operators._reorder_linear_weight(weight, 64)
        for rows in (1, 5):
            got = operators._linear_pointwise(x[:rows], packed, bias, "none", [], "")
            scale = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
            if not bool(((got.float() - want[:rows]).abs() <= scale * (want[:rows].abs() + 8)).all()):
                return False
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True
