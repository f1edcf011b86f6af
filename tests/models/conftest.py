"""Tiny models in folders: a Qwen3 (tied), a Llama, a GPT-2 (absolute positions), a sliding-window one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


def config_of(name: str) -> Any:
    import transformers as hf

    if name == "qwen3":
        return hf.Qwen3Config(**SMALL, tie_word_embeddings=True)
    if name == "qwen2":
        return hf.Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"})
    if name == "llama":
        return hf.LlamaConfig(**SMALL, tie_word_embeddings=False, attention_dropout=0.5)
    if name == "smollm3":
        return hf.SmolLM3Config(**SMALL)
    if name == "gpt2":
        return hf.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.5, attn_pdrop=0.5
        )
    if name == "gemma3":
        return hf.Gemma3TextConfig(
            **SMALL,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=8,
            final_logit_softcapping=2.0,
        )
    if name == "gemma2":
        return hf.Gemma2Config(**SMALL, sliding_window=4, query_pre_attn_scalar=8)
    raise AssertionError(name)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {f"t{i}": i for i in range(64)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0", pad_token="t0", eos_token="t1")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """folders(name): the folder of a tiny model with random weights of visible size."""
    from transformers import AutoModelForCausalLM

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            module = AutoModelForCausalLM.from_config(config_of(name))
            for parameter in module.parameters():  # the usual 0.02 gives nearly uniform logits
                if parameter.dim() > 1:
                    parameter.data.mul_(10)
            made[name] = tmp_path_factory.mktemp(name)
            module.save_pretrained(made[name])
            tokenizer().save_pretrained(made[name])
            (made[name] / "renderer.json").write_text(json.dumps({"renderer": "qwen3"}))
        return made[name]

    return folder
