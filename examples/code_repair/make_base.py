"""Make the base model of the demo: tokenizer, expert episodes, supervised training.

    python examples/code_repair/make_base.py            # writes examples/code_repair/base/

Reads nothing; everything follows from the constants below. The model is trained by the `sft` recipe on
the episodes of a scripted expert (see expert.py) and on nothing else. It takes about 5 minutes on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from expert import TOOL, conversations
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from uni_agent.config import load_config
from uni_agent.recipes import sft

HERE = Path(__file__).parent
NUM_EPISODES, SEED = 10000, 1
SFT = (
    "--epochs=3",
    "--batch=32",
    "--optimizer.lr=2e-3",
    "--optimizer.warmup-steps=30",
    "--optimizer.decay=cosine",
)

# --- tokenizer ---

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
PHRASES = (
    *("system\n", "assistant\n", "user"),
    *(TOOLS_HEADER, "\n" + json.dumps(TOOL), TOOLS_FOOTER, "\nSome tests of this function fail:"),
    '\n{"name": "code_executor", "arguments": {"line": ',
    '\n{"name": "code_executor", "arguments": {"code": "',
    *(
        ', "code": "',
        '"}}\n',
        "/3 tests passed\n",
        "/3 tests passed",
        " returned ",
        ", expected ",
        " raised ",
    ),
    *(f"\n{number}|" for number in range(1, 10)),
)
"""Fixed wording, one token each: a conversation is then little more than the code itself."""

# Code reads the same in the prompt and inside the JSON of an answer: operators take the spaces around them,
# names take none, digits stand alone. That makes copying a matter of single tokens.
PIECES = (
    r'\n\d\||"""|(?:return|if|elif|while|for|def|not) | (?:in|and|or|is|else|if|for|not) '
    r"| ?[-+*/%<>=!&^~]+ ?|, | [A-Za-z]+|_?[A-Za-z]+|\d|\n| +|[^\sA-Za-z\d]+|\s+"
)


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Qwen3's special tokens and chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fixed = [*SPECIAL, *MARKERS, *PHRASES]
    cut = re.compile("|".join(re.escape(phrase) for phrase in sorted(fixed, key=len, reverse=True)))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(fixed),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=3,
        show_progress=False,
    )
    tokenizer.train_from_iterator([part for text in texts for part in cut.split(text) if part], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in (*MARKERS, *PHRASES)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=(HERE / "chat_template.jinja").read_text(),
    )


def spoken(episode: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of an episode as the tokenizer will meet them."""
    for message in episode["messages"]:
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield json.dumps(call["function"]["arguments"]["code"])[1:-1]


# --- model ---

VOCAB_SIZE = 768
MAX_POSITIONS = 2048
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 128, 3, 4, 384


def make_model(vocab_size: int, seed: int) -> Qwen3ForCausalLM:
    """Make a small Qwen3 with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return Qwen3ForCausalLM(config)


def write_base(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a folder that transformers and uni_agent load."""
    stop = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert isinstance(stop, list)
    model.config.eos_token_id, model.config.pad_token_id = stop[0], stop[1]
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=stop, pad_token_id=stop[1]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "renderer.json").write_text(json.dumps({"renderer": "qwen3"}) + "\n")


def main() -> None:
    """Make episodes, tokenizer and model, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "base")
    parser.add_argument("--num-episodes", type=int, default=NUM_EPISODES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        episodes = asyncio.run(conversations(args.num_episodes, SEED))
        (work / "expert.jsonl").write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
        tokenizer = make_tokenizer(
            [text for episode in episodes[:4000] for text in spoken(episode)], VOCAB_SIZE
        )
        write_base(work / "start", make_model(len(tokenizer), SEED), tokenizer)
        paths = (
            f"--model={work}/start",
            f"--data={work}/expert.jsonl",
            f"--run.root={work}",
            "--run.name=sft",
        )
        sft.run(load_config(sft.Config, [*paths, *SFT]))
        shutil.copytree(work / "sft/model", args.out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
