"""Tiny seeded models and an engine that is closed after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from uni_agent.engines.local import LocalEngine
from uni_agent.types import Completion, Sampling

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # sharp enough that argmax and logprobs mean something
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    shape = SHAPE | changes
    if kind == "llama":
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                **{"rope_parameters": rope, "tie_word_embeddings": True, "attention_bias": True} | shape
            )
        )
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**{"tie_word_embeddings": False} | shape))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 12, "tie_word_embeddings": True} | shape))
    else:
        gemma = {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 9.0,
        }
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE | gemma | changes))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide a norm or bias that is left out
            one = "norm" in name and kind != "gemma3"
            torch.nn.init.normal_(parameter, mean=1.0 if one else 0.0, std=0.3)
    return model.eval()


@pytest.fixture
def make_model() -> Callable[..., Any]:
    return build


@pytest.fixture
async def make_engine() -> AsyncIterator[Callable[..., LocalEngine]]:
    engines: list[LocalEngine] = []

    def make(module: Any, **settings: Any) -> LocalEngine:
        engine = LocalEngine(module, **({"context_size": 256, "max_running": 8} | settings))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def run() -> Callable[..., Any]:
    async def complete(
        engine: LocalEngine, prompt: list[int], session: str = "s", **sampling: Any
    ) -> Completion:
        items = [item async for item in engine.generate(prompt, Sampling(**sampling), session)]
        assert isinstance(items[-1], Completion)
        return items[-1]

    return complete


@pytest.fixture
def reference() -> Callable[..., np.ndarray]:
    @torch.no_grad()
    def logprobs(model: Any, prompt: list[int], completion: Any, temperature: float = 1.0) -> np.ndarray:
        """What a plain forward of the whole sequence says about each token of the completion."""
        ids = torch.tensor([list(prompt) + [int(t) for t in completion]])
        logits = model(ids).logits[0].float() / temperature
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return rows.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()

    return logprobs


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    def ids(n: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()

    return ids
