"""A dense decoder's forward pass over packed tokens, through the module's own parameters.

In: token ids int64[N] with their positions, and an attention function that owns the cache. Out:
hidden states and logits. Nothing is copied: linear layers, norms and embeddings are read from the
Hugging Face module at every call, so an optimizer step or a LoRA update is seen at once. This module
must not know about requests, slots or sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uni_agent.errors import ModelError

SUPPORTED = ("llama", "qwen2", "qwen3")
"""Model types of transformers that run here; SmolLM and SmolLM2 are of type llama."""

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")

Map = Callable[[Tensor], Tensor]


class Attend(Protocol):
    """Writes k and v to the cache of `layer` and attends: [N, Hq, D], [N, Hk, D] twice -> [N, Hq, D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Geometry(NamedTuple):
    """What a cache must know of the model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


class _Layer(NamedTuple):
    norm_in: Map
    q: Map
    k: Map
    v: Map
    q_norm: Map | None
    k_norm: Map | None
    o: Map
    norm_mlp: Map
    gate: Map
    up: Map
    down: Map
    act: Map


class Decoder:
    """Llama-shaped decoders (Llama, SmolLM, Qwen2, Qwen3) of transformers, plain or under PEFT LoRA.

    Raises ModelError for another model type, or a setting (sliding window, length-dependent rotary)
    that would change the result within `context_size`.
    """

    def __init__(self, module: nn.Module, context_size: int) -> None:
        self.module = unwrap(module)
        config: Any = getattr(self.module, "config", None)
        kind = getattr(config, "model_type", type(self.module).__name__)
        if kind not in SUPPORTED:
            raise ModelError(
                f"model type {kind!r} does not run on the local engine; supported: {', '.join(SUPPORTED)} "
                "(SmolLM is llama)"
            )
        _check_config(config, str(kind), context_size)
        inner: Any = self.module.model
        weight: Tensor = inner.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        head_dim: int = inner.layers[0].self_attn.head_dim
        self.geometry = Geometry(
            layers=int(config.num_hidden_layers),
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            head_dim=head_dim,
            vocab_size=int(config.vocab_size),
        )
        with torch.no_grad():
            positions = torch.arange(context_size, device=self.device)[None]
            cos, sin = inner.rotary_emb(weight[:1, :1], positions)
        # rotate_half(x) is roll(x, D/2) with the first half negated: the sign goes into the table
        sign = torch.ones(head_dim, device=self.device, dtype=sin.dtype)
        sign[: head_dim // 2] = -1
        self._cos, self._sin = cos[0].contiguous(), (sin[0] * sign).contiguous()
        self.bind()

    def bind(self) -> None:
        """Look up the parameters again, in case the learner replaced objects (new adapters, say)."""
        model: Any = self.module
        inner = model.model
        self._embed = _embedding(inner.embed_tokens)
        self._norm = _rms_norm(inner.norm)
        self._head = _linear(model.lm_head, "lm_head")
        self._layers = [_layer(block, i) for i, block in enumerate(inner.layers[: self.geometry.layers])]

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers: int64[N], int64[N] -> [N, H], after the last norm."""
        geometry = self.geometry
        hq, hk, dim = geometry.heads, geometry.kv_heads, geometry.head_dim
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = self._embed(tokens)
        for index, layer in enumerate(self._layers):
            h = layer.norm_in(x)
            q, k, v = layer.q(h).view(-1, hq, dim), layer.k(h).view(-1, hk, dim), layer.v(h).view(-1, hk, dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = layer.q_norm(q), layer.k_norm(k)
            qk = torch.cat((q, k), 1)
            qk = (qk * cos).addcmul_(torch.roll(qk, dim // 2, -1), sin)
            mixed = attend(index, qk[:, :hq], qk[:, hq:], v)
            x = x + layer.o(mixed.reshape(-1, hq * dim))
            h = layer.norm_mlp(x)
            x = x + layer.down(layer.act(layer.gate(h)).mul_(layer.up(h)))
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32[N, V]."""
        return self._head(hidden).float()


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


def _check_config(config: Any, kind: str, context_size: int) -> None:
    if context_size > int(config.max_position_embeddings):
        raise ModelError(
            f"context_size {context_size} exceeds the model's max_position_embeddings "
            f"{config.max_position_embeddings}; ask for less"
        )
    kinds = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and int(window) < context_size:
        raise ModelError(
            f"{kind} with a sliding window of {window} tokens does not run on the local engine beyond that "
            f"many; got context_size {context_size}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _STATIC_ROPE:
        raise ModelError(
            f"rotary type {rope_type!r} of this {kind} depends on the length; the local engine supports "
            f"{', '.join(_STATIC_ROPE)}"
        )
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        raise ModelError(f"{kind} with pretraining_tp {config.pretraining_tp} is not supported; set it to 1")


def _layer(block: Any, index: int) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    q_norm = getattr(attention, "q_norm", None)
    k_norm = getattr(attention, "k_norm", None)

    def linear(parent: Any, name: str) -> Map:
        return _linear(getattr(parent, name), f"layers.{index}.{name}")

    return _Layer(
        norm_in=_rms_norm(block.input_layernorm),
        q=linear(attention, "q_proj"),
        k=linear(attention, "k_proj"),
        v=linear(attention, "v_proj"),
        q_norm=None if q_norm is None else _rms_norm(q_norm),
        k_norm=None if k_norm is None else _rms_norm(k_norm),
        o=linear(attention, "o_proj"),
        norm_mlp=_rms_norm(block.post_attention_layernorm),
        gate=linear(mlp, "gate_proj"),
        up=linear(mlp, "up_proj"),
        down=linear(mlp, "down_proj"),
        act=_activation(mlp.act_fn),
    )


def _activation(module: nn.Module) -> Map:
    if "silu" in type(module).__name__.lower():
        return lambda x: F.silu(x, inplace=True)
    return module


def _trained_copy(module: nn.Module) -> nn.Module:
    """The copy that PEFT trains where a layer is in `modules_to_save`, else the layer itself."""
    copies: Any = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict) and len(copies):
        active: Any = getattr(module, "active_adapters", None) or list(copies)
        return copies[active[0] if active[0] in copies else next(iter(copies))]
    return module


def _rms_norm(module: nn.Module) -> Map:
    module = _trained_copy(module)
    weight: Any = module.weight
    eps: float = getattr(module, "variance_epsilon")  # noqa: B009 - nn.Module types attributes as Tensor
    shape = (int(weight.shape[0]),)
    return lambda x: F.rms_norm(x, shape, weight, eps)


def _embedding(module: nn.Module) -> Map:
    module = _trained_copy(module)
    if type(module) is not nn.Embedding:
        return module  # an adapter's embedding has no dropout and its own forward
    weight = module.weight
    return lambda tokens: F.embedding(tokens, weight)


def _linear(module: nn.Module, name: str) -> Map:
    """The layer as a function of its own parameters; skips the cost of a module call where it can."""
    module = _trained_copy(module)
    if type(module) is nn.Linear:
        weight, bias = module.weight, module.bias
        return lambda x: F.linear(x, weight, bias)
    layer: Any = module
    if hasattr(module, "lora_A") and type(layer.base_layer) is nn.Linear and not layer.lora_variant:
        return _lora(layer, name)
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        raise ModelError(
            f"{name} is a {type(module).__name__} with dropout, which the local engine cannot leave out; "
            "set its dropout to 0"
        )
    return module


def _lora(layer: Any, name: str) -> Map:
    """W x + scale * B A x, without dropout, and also while the learner has its adapters disabled."""
    base = _linear(layer.base_layer, name)
    pairs: list[tuple[Tensor, Tensor, Tensor | None, float]] = [
        (layer.lora_A[a].weight, layer.lora_B[a].weight, layer.lora_B[a].bias, float(layer.scaling[a]))
        for a in layer.active_adapters
        if a in layer.lora_A
    ]

    def forward(x: Tensor) -> Tensor:
        out = base(x)
        if layer.merged_adapters:  # W holds the adapter already
            return out
        for a, b, bias, scale in pairs:
            low = F.linear(x.to(a.dtype), a)
            out = out.add_(F.linear(low, b, bias).to(out.dtype), alpha=scale)
        return out

    return forward
