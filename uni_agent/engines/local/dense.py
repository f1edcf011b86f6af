"""A dense decoder's forward pass over packed tokens, from weights of its own in the engine's precision.

In: token ids int64[N] with their positions, and an attention function that owns the cache. Out: hidden
states and logits. Weights are copied from a Hugging Face module at `refresh`. This module must not know
about requests, rows of a cache or sampling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uni_agent.engines.local.family import Family, read_family
from uni_agent.engines.local.model import Attend
from uni_agent.engines.local.native import Native, load_native, require_native
from uni_agent.engines.local.packed import TILE, Linear, Staging, packing_works
from uni_agent.engines.local.params import Effective, effective, trained_copy
from uni_agent.engines.local.weights import unwrap
from uni_agent.errors import ModelError

_PROJECTIONS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


class _Layer(NamedTuple):
    """Linear layers and norm weights (float32) of one block; norms are None where the family has none."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    norm_in: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_attended: Tensor | None
    norm_mlp: Tensor
    norm_added: Tensor | None

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        return self.qkv, self.out, self.gate_up, self.down


class DenseDecoder:
    """Llama-shaped decoders of transformers (Llama, SmolLM, Qwen2, Qwen3, Gemma 3 text), also under LoRA.

    `dtype` is the module's where it is None. `native` None uses the C++ kernels where they can be had,
    True raises ModelError where they cannot, False leaves them out. `batch_invariant` makes a row's result
    bitwise independent of the rows beside it: linear layers then run in calls of 16 rows.

    float32 log-probabilities are within 1e-4 of transformers' own, with kernels and without, and within
    1e-5 of each other; in bfloat16 sums are rounded less often than there, so that the gap to float32 is no
    wider than transformers' own. Raises ModelError for a model or setting that it does not compute.
    """

    def __init__(
        self,
        module: nn.Module,
        context_size: int,
        *,
        dtype: torch.dtype | None = None,
        native: bool | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.module = unwrap(module)
        self._family = read_family(self.module, context_size)
        inner: Any = self.module
        embedding = effective(inner.model.embed_tokens, "embed_tokens").weight
        self.device, self.dtype = embedding.device, dtype or embedding.dtype
        self.geometry = self._family.geometry
        self._tile = TILE if batch_invariant else 0
        self._packed = packing_works(self.dtype, self.device.type)
        self._native = self._kernels(native)
        self._staging = Staging(self.dtype, self.device)
        with torch.inference_mode(False), torch.no_grad():
            self._embed = torch.empty_like(embedding, dtype=self.dtype, requires_grad=False)
            self._norm = torch.empty(self._family.hidden_size, dtype=torch.float32, device=self.device)
            blocks = inner.model.layers[: self.geometry.layers]
            self._layers = [self._build(block, i) for i, block in enumerate(blocks)]
            self._head = Linear([self._head_source()], self._embed, packed=self._packed, tile=self._tile)
        self._steps: list[Any] = []
        self.refresh()

    def refresh(self) -> None:
        """Take the module's parameters as they are now (an optimizer stepped, an adapter changed)."""
        model: Any = self.module
        with torch.inference_mode(False), torch.no_grad():
            embedding = effective(model.model.embed_tokens, "embed_tokens")
            self._staging.writer.weight(self._embed, embedding)
            for index, layer in enumerate(self._layers):
                block = model.model.layers[index]
                for linear, names in zip(layer.linears, _PROJECTIONS, strict=True):
                    linear.load([_source(block, name, index) for name in names], self._staging)
                self._load_norms(layer, block)
            self._load_norm(self._norm, model.model.norm)
            head = self._head_source()
            if self._packed and head.plain and head.weight is embedding.weight and embedding.plain:
                self._head.pack(self._embed)
            else:
                self._head.load([head], self._staging)
        if self._native is not None:
            self._steps = [self._native_step(self._native, i) for i in range(len(self._layers))]
        elif not self._steps:
            self._steps = [_PlainStep(self._family, self._layers, i) for i in range(len(self._layers))]

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers: int64[N], int64[N] -> [N, H], after the last norm."""
        x = F.embedding(tokens, self._embed)
        if self._family.embed_scale is not None:
            x = x * torch.tensor(self._family.embed_scale, dtype=self.dtype, device=self.device)
        native = self._native
        where: Any = positions if native else self._rotations(positions)
        added: Tensor | None = None
        for index, step in enumerate(self._steps):
            q, k, v = step.start(x, added, where)
            added = step.finish(x, attend(index, q, k, v))
        post, eps = self._layers[-1].norm_added, self._family.eps
        if native:
            return native.add_norm(x, added, post, self._norm, eps)
        return _add_norm(x, added, post, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32[N, V]."""
        logits = self._head(hidden).float()
        cap = self._family.logit_softcap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)

    def _kernels(self, wanted: bool | None) -> Native | None:
        fits = self.device.type == "cpu" and self.dtype in (torch.float32, torch.bfloat16)
        if wanted and not fits:
            raise ModelError(
                f"native kernels compute float32 and bfloat16 on CPU; this model is {self.dtype} on "
                f"{self.device}: leave native out"
            )
        if wanted:
            return require_native()
        return load_native() if wanted is None and fits else None

    def _rotations(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and signed sin [N, 1, D] of each rotary table; the sign is that of rotate_half."""
        rotations: dict[str, tuple[Tensor, Tensor]] = {}
        for key, (cos, sin) in self._family.rope_tables.items():
            turned = sin[positions]
            turned[:, : turned.shape[1] // 2].neg_()
            rotations[key] = cos[positions].to(self.dtype)[:, None], turned.to(self.dtype)[:, None]
        return rotations

    def _build(self, block: Any, index: int) -> _Layer:
        g, hidden = self.geometry, self._family.hidden_size
        linears = [
            Linear(
                [_source(block, name, index) for name in names],
                self._embed,
                packed=self._packed,
                tile=self._tile,
            )
            for names in _PROJECTIONS
        ]

        def norm(size: int, wanted: bool) -> Tensor | None:
            return torch.empty(size, dtype=torch.float32, device=self.device) if wanted else None

        family = self._family
        q_norm, k_norm = norm(g.head_dim, family.qk_norm), norm(g.head_dim, family.qk_norm)
        first, second = norm(hidden, True), norm(hidden, True)
        assert first is not None
        assert second is not None
        after, last = norm(hidden, family.sandwich), norm(hidden, family.sandwich)
        qkv, out, gate_up, down = linears
        return _Layer(qkv, out, gate_up, down, first, q_norm, k_norm, after, second, last)

    def _load_norms(self, layer: _Layer, block: Any) -> None:
        sandwich = self._family.sandwich
        self._load_norm(layer.norm_in, block.input_layernorm)
        if layer.q_norm is not None and layer.k_norm is not None:
            self._load_norm(layer.q_norm, block.self_attn.q_norm)
            self._load_norm(layer.k_norm, block.self_attn.k_norm)
        if layer.norm_attended is not None and layer.norm_added is not None:
            self._load_norm(layer.norm_attended, block.post_attention_layernorm)
            self._load_norm(layer.norm_added, block.post_feedforward_layernorm)
        second = block.pre_feedforward_layernorm if sandwich else block.post_attention_layernorm
        self._load_norm(layer.norm_mlp, second)

    def _load_norm(self, target: Tensor, norm: nn.Module) -> None:
        weight: Any = trained_copy(norm).weight
        target.copy_(weight)
        if self._family.norm_plus_one:
            target += 1

    def _head_source(self) -> Effective:
        model: Any = self.module
        return effective(model.lm_head, "lm_head")

    def _native_step(self, native: Native, index: int) -> Any:
        family, layer = self._family, self._layers[index]
        cos, sin = family.rope_tables[family.ropes[index]]
        before = self._layers[index - 1].norm_added if index else None
        linears = [(linear.weight, linear.bias) for linear in layer.linears]
        norms = [before, layer.norm_in, layer.q_norm, layer.k_norm, layer.norm_attended, layer.norm_mlp]
        g = self.geometry
        return native.Layer(
            linears,
            norms,
            cos,
            sin,
            g.heads,
            g.kv_heads,
            family.eps,
            family.gelu,
            self._packed,
            self._tile,
        )


class _PlainStep:
    """A layer in torch, with the interface of the native one (kernels/dense.cpp)."""

    def __init__(self, family: Family, layers: list[_Layer], index: int) -> None:
        self._family, self._layer, self._key = family, layers[index], family.ropes[index]
        self._before = layers[index - 1].norm_added if index else None

    def start(
        self, x: Tensor, added: Tensor | None, where: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        g, eps, layer = self._family.geometry, self._family.eps, self._layer
        h = _add_norm(x, added, self._before, layer.norm_in, eps)
        qkv = layer.qkv(h).view(len(x), g.heads + 2 * g.kv_heads, g.head_dim)
        both = qkv[:, : g.heads + g.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = both.split([g.heads, g.kv_heads], 1)
            both = torch.cat((_rms_norm(q, layer.q_norm, eps), _rms_norm(k, layer.k_norm, eps)), 1)
        cos, sin = where[self._key]
        both = (both * cos).addcmul_(torch.roll(both, g.head_dim // 2, -1), sin)
        return both[:, : g.heads], both[:, g.heads :], qkv[:, g.heads + g.kv_heads :]

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        layer = self._layer
        projected = layer.out(mixed.reshape(len(x), -1))
        h = _add_norm(x, projected, layer.norm_attended, layer.norm_mlp, self._family.eps)
        gate, up = layer.gate_up(h).chunk(2, -1)
        active = F.gelu(gate, approximate="tanh") if self._family.gelu else F.silu(gate)
        return layer.down(active.mul_(up))


def _source(block: Any, name: str, index: int) -> Effective:
    return effective(block.get_submodule(name), f"layers.{index}.{name}")


def _add_norm(x: Tensor, added: Tensor | None, post: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x += added (normed under `post` where given), in place; the RMS norm of x under `weight`."""
    if added is not None:
        x += added if post is None else _rms_norm(added, post, eps)
    return _rms_norm(x, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
