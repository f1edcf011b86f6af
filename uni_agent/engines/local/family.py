"""What distinguishes the dense decoders of transformers from one another, read from a module's config."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uni_agent.engines.local.model import Geometry
from uni_agent.errors import ModelError

SUPPORTED = ("llama", "qwen2", "qwen3", "gemma3_text")
"""Model types of transformers with a fast path; SmolLM and SmolLM2 are of type llama."""

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}


class Family(NamedTuple):
    """How this decoder computes.

    Norm weights are stored as w - 1 where `norm_plus_one`. `sandwich` norms stand after attention and
    MLP too. `ropes[layer]` is a key of `rope_tables`, whose cos and sin are float32[context, D].
    """

    geometry: Geometry
    hidden_size: int
    eps: float
    gelu: bool
    norm_plus_one: bool
    sandwich: bool
    qk_norm: bool
    embed_scale: float | None
    logit_softcap: float | None
    ropes: tuple[str, ...]
    rope_tables: dict[str, tuple[Tensor, Tensor]]


def read_family(module: nn.Module, context_size: int) -> Family:
    """Read the config of an unwrapped causal LM.

    Raises ModelError for a model type or a setting that the dense decoder does not compute.
    """
    config: Any = getattr(module, "config", None)
    kind = getattr(config, "model_type", type(module).__name__)
    if kind not in SUPPORTED:
        raise ModelError(
            f"model type {kind!r} does not run on the local engine's dense decoder; supported: "
            f"{', '.join(SUPPORTED)} (SmolLM is llama)"
        )
    gemma = kind == "gemma3_text"
    _check(config, str(kind), context_size)
    model: Any = module
    attention: Any = model.model.layers[0].self_attn
    layers = int(config.num_hidden_layers)
    kinds = tuple(getattr(config, "layer_types", None) or ["full_attention"] * layers)[:layers]
    window = getattr(config, "sliding_window", None)
    windows = tuple(int(window) if k == "sliding_attention" and window else None for k in kinds)
    activation = config.hidden_activation if gemma else config.hidden_act
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"activation {activation!r} of this {kind} does not run on the local engine's dense decoder; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    ropes = kinds if gemma else ("",) * layers
    return Family(
        geometry=Geometry(
            layers=layers,
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            head_dim=int(attention.head_dim),
            vocab_size=int(config.vocab_size),
            scale=float(attention.scaling),
            windows=windows,  # attn_logit_softcapping: transformers' Gemma 3 does not apply it
        ),
        hidden_size=int(config.hidden_size),
        eps=float(config.rms_norm_eps),
        gelu=_ACTIVATIONS[activation],
        norm_plus_one=gemma,
        sandwich=gemma,
        qk_norm=kind in ("qwen3", "gemma3_text"),
        embed_scale=float(config.hidden_size) ** 0.5 if gemma else None,
        logit_softcap=config.final_logit_softcapping if gemma else None,
        ropes=ropes,
        rope_tables={
            key: _rope(model.model, key, int(attention.head_dim), context_size) for key in set(ropes)
        },
    )


def _check(config: Any, kind: str, context_size: int) -> None:
    if context_size > int(config.max_position_embeddings):
        raise ModelError(
            f"context_size {context_size} exceeds the model's max_position_embeddings "
            f"{config.max_position_embeddings}; ask for less"
        )
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        rope_type = rope.get("rope_type", "default")
        if rope_type not in _STATIC_ROPE:
            raise ModelError(
                f"rotary type {rope_type!r} of this {kind} depends on the length; the local engine's dense "
                f"decoder supports {', '.join(_STATIC_ROPE)}"
            )
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        raise ModelError(f"{kind} with pretraining_tp {config.pretraining_tp} is not supported; set it to 1")
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError(f"{kind} with use_bidirectional_attention looks ahead and cannot generate")


def _rope(inner: Any, key: str, head_dim: int, context_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin float32[context, D] as the model's own rotary module computes them."""
    device = inner.embed_tokens.weight.device
    like = torch.empty(0, dtype=torch.float32, device=device)
    positions = torch.arange(context_size, device=device)[None]
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = inner.rotary_emb(like, positions, key) if key else inner.rotary_emb(like, positions)
    if cos.shape[-1] != head_dim:
        raise ModelError(
            f"the rotary embedding turns {cos.shape[-1]} of {head_dim} dimensions of a head; the local "
            "engine's dense decoder turns all of them"
        )
    return cos[0].contiguous(), sin[0].contiguous()
