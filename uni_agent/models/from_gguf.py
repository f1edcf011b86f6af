"""A GGUF file of the Llama family becomes a folder that transformers loads.

In: one file, as llama.cpp writes it. Out: config, bfloat16 safetensors, tokenizer, chat template,
generation config. Our own mapping over the `gguf` package's reader, because transformers' loading keeps
blocks quantized, refuses to save them, and does not know every tokenizer's way of splitting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from uni_agent.errors import MissingDependencyError, ModelError
from uni_agent.models.hf import quiet_transformers

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF

Share = Callable[[float], None]
"""Is told how much is done, from 0 to 1."""


def convert_gguf(file: Path, folder: Path, progress: Share) -> None:
    """Write `folder` from a GGUF file. Raises ModelError for what is no Llama of one of the known forms."""
    progress(0.0)
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as problem:
        raise MissingDependencyError(
            f"{problem.name} is not installed; get it with: pip install 'uni-agent-rl[train]'"
        ) from problem
    try:
        reader = GGUFReader(file)
    except (ValueError, OSError, IndexError) as problem:
        raise ModelError(f"{file} is not a GGUF file that can be read: {problem}") from problem
    facts = _Facts(file, reader.fields)
    model = _empty_model(facts, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = dict(_tensors(reader.tensors, facts, progress))
    missing = set(dict(model.named_parameters())) ^ set(weights)
    if missing:
        raise ModelError(f"{file} does not fill the model it describes: {sorted(missing)[0]} for one")
    model.load_state_dict(weights, strict=False, assign=True)  # the tied head is a view of the embedding
    model.tie_weights()
    with quiet_transformers():
        model.save_pretrained(folder)
    _tokenizer(facts).save_pretrained(folder)


class _Facts:
    """The file's key-value pairs; a missing one is an error that names it."""

    def __init__(self, file: Path, fields: Mapping[str, Any]) -> None:
        self.file = file
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ModelError(f"{self.file} has no {key}; it is not a GGUF file of the form that is read here")
        return self._fields[key].contents()

    def get(self, key: str) -> Any | None:
        return self[key] if key in self._fields else None

    def require(self, key: str, value: str) -> None:
        if self[key] != value:
            raise ModelError(f"{self.file} has {key} {self[key]!r}; only {value!r} is read here")


def _empty_model(facts: _Facts, *, tied: bool) -> Any:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    facts.require("general.architecture", "llama")
    ids: dict[str, Any] = {
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id"),
    }
    config = LlamaConfig(
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        # the file holds a float32; the model's authors wrote the decimal number
        rms_norm_eps=float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(facts["llama.rope.freq_base"])},
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **ids,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def _tensors(tensors: Any, facts: _Facts, progress: Share) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf.quants import dequantize

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    for number, tensor in enumerate(tensors, 1):
        name = tensor.name.removesuffix(".weight")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
        part = layer[2] if layer else name
        theirs = _LAYER.get(part) if layer else _OUTER.get(part)
        if theirs is None:
            raise ModelError(f"{facts.file} has a tensor {tensor.name!r}, which no Llama has")
        try:
            # a copy, because what is not quantized would stay a view of the read-only file
            values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        except (NotImplementedError, ValueError) as problem:
            raise ModelError(
                f"{facts.file}: tensor {tensor.name!r} cannot be unpacked: {problem}"
            ) from problem
        if part in heads:
            values = _halves_apart(values, heads[part])
        # bfloat16 is what the model was published in; 4-bit blocks lost far more than this rounding does
        prefix = f"model.layers.{layer[1]}." if layer else ""
        yield f"{prefix}{theirs}.weight", values.to(torch.bfloat16).contiguous()
        progress(number / len(tensors))


def _halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of a head's rows: rotary pairs side by side there, halves apart here."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(facts: _Facts) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    facts.require("tokenizer.ggml.model", "gpt2")
    facts.require("tokenizer.ggml.pre", "smollm")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    types: list[int] = facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {
        f"{role}_token": tokens[index]
        for role, key in roles.items()
        if (index := facts.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=facts["tokenizer.chat_template"],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )
