"""A model of a few thousand parameters for the learner."""

import copy

import pytest
import torch

from uni_agent.models import PACKED_ATTENTION, Reference, register_packed_attention

torch.set_num_threads(1)


class TinyModel:
    """A Qwen3 of a few thousand parameters behind the attributes of HFModel that a learner uses."""

    def __init__(self, *, seed=0, dtype=torch.float32, dropout=0.0, **config):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        settings = {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "attention_dropout": dropout,
            "initializer_range": 0.3,
        }
        register_packed_attention()
        made = Qwen3Config(**(settings | config), attn_implementation=PACKED_ATTENTION)
        self.module = Qwen3ForCausalLM(made).to(dtype)

    def fresh_reference(self):
        return Reference(copy.deepcopy(self.module).eval().requires_grad_(False), beneath_adapter=False)

    def save(self, path):
        self.module.save_pretrained(path)


@pytest.fixture
def tiny():
    return TinyModel
