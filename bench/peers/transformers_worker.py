# pyright: basic
"""transformers' `generate` as an arm, at its best plain settings: SDPA, dynamic cache, no padding, greedy."""

from __future__ import annotations

import time
from typing import Any

import torch
from lines import serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging


class Peer:
    """One model."""

    def __init__(self) -> None:
        self.model: Any = None

    def load(self, model: str, dtype: str) -> float:
        """Load; seconds from the files to the first token."""
        began = time.perf_counter()
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.generate([[5, 6, 7, 8]], 1)
        return time.perf_counter() - began

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds for all prompts in one batch; they are equally long, so that nothing is padded."""
        ids = torch.tensor(prompts)
        config = GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
        began = time.perf_counter()
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        seconds = time.perf_counter() - began
        if out.shape[1] != ids.shape[1] + new_tokens:
            raise RuntimeError(f"{out.shape[1] - ids.shape[1]} new tokens, asked for {new_tokens}")
        return seconds


if __name__ == "__main__":
    logging.disable_progress_bar()
    peer = Peer()
    serve({"load": peer.load, "generate": peer.generate})
