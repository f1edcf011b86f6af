"""Tokenizers for the renderer tests: a byte-level BPE with Qwen3's control tokens, and FX-TOK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

QWEN3_TEMPLATE = (Path(__file__).parent / "qwen3.jinja").read_text()
CHATML_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As in Qwen3's own tokenizer: the turn markers are special, the reasoning and tool tags are not.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def build_bpe(extra: tuple[str, ...] = ()) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = [QWEN3_TEMPLATE, "user assistant system tool hello world " * 5, json.dumps({"name": "f"})] * 3
    core.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[*SPECIAL, *extra],
            show_progress=False,
        ),
    )
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def bpe() -> Any:
    return build_bpe()


def save(tokenizer: Any, folder: Path, template: str | None, renderer: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = None
    if renderer is not None:
        (folder / "renderer.json").write_text(json.dumps({"renderer": renderer}))
    return folder


@pytest.fixture(scope="session")
def qwen3_folder(bpe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(bpe, tmp_path_factory.mktemp("qwen3"), QWEN3_TEMPLATE, "qwen3")


@pytest.fixture(scope="session")
def chatml_folder(bpe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(bpe, tmp_path_factory.mktemp("chatml"), SMOLLM2_TEMPLATE, "chatml")


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FX-TOK (greedy longest match, token ids as in failures.md) with FX-CHAT."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = {0: "<pad>", 3: "\n", 4: "\n\n", 5: "user", 6: "assistant", 7: "tool", 8: "system"}
    names |= {10: "h", 11: "e", 12: "l", 13: "o", 14: "he", 15: "llo", 16: "hello"}
    names |= {17: "x", 18: "q", 19: "a", 20: "b", 1: "<|im_start|>", 2: "<|im_end|>"}
    names |= {
        23: "<",
        24: "|",
        25: ">",
        26: "_",
        27: "i",
        28: "m",
        29: "n",
        30: "d",
        31: "s",
        32: "t",
        33: "r",
    }
    used = set(names.values())
    rest = [chr(c) for c in range(32, 127) if chr(c) not in used]
    names |= {256 + ord(c): c for c in rest} | {600: "[UNK]"}
    core = Tokenizer(
        models.WordPiece(
            {text: i for i, text in names.items()},
            unk_token="[UNK]",
            continuing_subword_prefix="",
            max_input_chars_per_word=10000,
        )
    )
    core.decoder = decoders.Fuse()
    core.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", unk_token="[UNK]"
    )
    return save(tokenizer, tmp_path_factory.mktemp("toy"), CHATML_TEMPLATE, "chatml")


@pytest.fixture
def make_folder(bpe: Any, tmp_path: Path) -> Any:
    """Write a model folder: make_folder(template or its name, renderer=None, sub="")."""
    named = {"qwen3": QWEN3_TEMPLATE, "chatml": CHATML_TEMPLATE, "smollm2": SMOLLM2_TEMPLATE}

    def make(
        template: str | None, renderer: str | None = None, sub: str = "", change: tuple[str, str] = ("", "")
    ) -> Path:
        text = template if template is None else named.get(template, template).replace(*change)
        return save(bpe, tmp_path / sub, text, renderer)

    return make


@pytest.fixture(scope="session")
def glm_tokenizer() -> Any:
    marks = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink")
    return build_bpe((*marks, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
