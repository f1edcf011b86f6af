"""The benches' models and prompts.

Qwen3 of 5M and of 100M seeded random parameters with a byte-level tokenizer, made once and kept in
`bench/.peers/models`; SmolLM2-135M-Instruct from where `uni-agent model fetch smollm2` put it.

    python bench/models.py qwen3-5m     make one (benches do it themselves)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import BENCH, PEERS

from uni_agent.config.known_models import known_folder

NAMES = ("qwen3-5m", "qwen3-100m", "smollm2")
_SHAPES: dict[str, dict[str, int]] = {
    "qwen3-5m": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen3-100m": {
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}


def model_folder(name: str, smollm2: Path | None) -> Path:
    """The folder of a model by its name, made where it is missing. `smollm2` overrides that one's place."""
    if name in _SHAPES:
        folder = PEERS / "models" / name
        if not (folder / "model.safetensors").exists():
            # in a process of its own: a bench's main process holds no torch
            subprocess.run([sys.executable, str(BENCH / "models.py"), name], check=True)
        return folder
    if name != "smollm2":
        raise SystemExit(f"there is no model {name!r} in the benches; expected one of {', '.join(NAMES)}")
    folder = smollm2 or known_folder(name)
    if not (folder / "config.json").is_file():
        raise SystemExit(
            f"SmolLM2 is not in {folder}; fetch it with: uni-agent model fetch smollm2; or name its folder "
            "with --smollm2, or leave it out with --models (step.py: --cases)"
        )
    return folder.resolve()


def find_all(names: Iterable[str], smollm2: Path | None) -> None:
    """See that all models are there before any is measured. Raises SystemExit."""
    for name in names:
        model_folder(name, smollm2)


def prompts(folder: Path, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids that are no special tokens."""
    vocab = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    rng = np.random.default_rng(seed)
    return rng.integers(vocab // 16, vocab, (count, length)).tolist()


def text_prompts(folder: Path, count: int, length: int, seed: int) -> list[str]:
    """`count` texts that the folder's tokenizer turns into exactly `length` tokens each.

    Made of words that are one token with the space before them, else (byte level) of letters.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    plain = sorted(word[1:] for word in vocabulary if word.startswith("Ġ") and word[1:].encode().isalpha())
    words = [f" {word}" for word in plain] or [chr(code) for code in range(ord("a"), ord("z") + 1)]
    rng = np.random.default_rng(seed)
    texts = ["".join(words[int(i)] for i in rng.integers(0, len(words), length)) for _ in range(count)]
    for text in texts:
        found = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if found != length:
            raise SystemExit(
                f"the tokenizer of {folder} makes {found} tokens of a prompt meant to have {length}"
            )
    return texts


def _make(name: str) -> None:
    """Write a random model and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = PEERS / "models" / name
    shape: dict[str, Any] = _SHAPES[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.05
    )
    model = Qwen3ForCausalLM(config)
    alphabet: Sequence[str] = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vocabulary = {token: number for number, token in enumerate((*special, *alphabet))}
    byte_level = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    for part, how in (
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("decoder", decoders.ByteLevel()),
    ):
        setattr(byte_level, part, how)  # the stubs declare both as read-only
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        _make(wanted)
