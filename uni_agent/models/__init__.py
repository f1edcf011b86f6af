"""Hugging Face models: loading, adapters, packed attention, the one logprob function. Imports torch."""

from uni_agent.models.attention import PACKED_ATTENTION, Packing, register_packed_attention
from uni_agent.models.hf import HFAutoModel, HFModel, Reference, count_parameters, disable_dropout
from uni_agent.models.logprobs import LogitRule, TokenOutputs, causal_lm, score_tokens
from uni_agent.models.lora import LoRA, merged_weights

__all__ = [
    "PACKED_ATTENTION",
    "HFAutoModel",
    "HFModel",
    "LoRA",
    "LogitRule",
    "Packing",
    "Reference",
    "TokenOutputs",
    "causal_lm",
    "count_parameters",
    "disable_dropout",
    "merged_weights",
    "register_packed_attention",
    "score_tokens",
]
