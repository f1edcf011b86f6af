"""Make the base model of the demo: tokenizer, expert episodes, supervised training.

    python examples/code_repair/make_base.py            # writes examples/code_repair/base/

Reads nothing; everything follows from the constants below. The model is trained on the episodes of a scripted
expert (right at the first try, or at the second after a plausible mistake that is not trained on) and on
nothing else. The episodes are written beside it, so that the control of the demo can train on the same ones.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from renderers.qwen3 import Qwen3Renderer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from uni_agent.envs.repair_tasks import Edit, Task, expert_episode, generate_tasks

HERE = Path(__file__).parent

SYSTEM = "You repair Python functions. Replace the wrong line through the tool until all tests pass."
INTRO = "Some tests of this function fail:"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "code_executor",
        "description": "Run the tests on the code.",
        "parameters": {
            "type": "object",
            "properties": {
                "line": {
                    "type": "integer",
                    "description": "The line to replace; without it, code is the whole program.",
                },
                "code": {"type": "string", "description": "Python code."},
            },
            "required": ["code"],
        },
    },
}

Messages = list[dict[str, Any]]
Row = tuple[list[int], list[float]]
"""Token ids and the weight of each."""

# ---- conversations


def user_text(code: str) -> str:
    """Show the code with its line numbers."""
    return INTRO + "".join(f"\n{number}|{line}" for number, line in enumerate(code.split("\n"), 1))


def run_tests(code: str, tests: list[str]) -> str:
    """Say how many tests pass and how the first failing one fails, in the words of the environment.

    Runs in this process: only for programs that the generator and its expert wrote.
    """
    namespace: dict[str, object] = {}
    try:
        exec(code, namespace)
    except Exception as error:
        return f"0/{len(tests)} tests passed\nerror: {type(error).__name__}"
    failures: list[str] = []
    for test in tests:
        call, expected = test.removeprefix("assert ").rsplit(" == ", 1)
        try:
            value = repr(eval(call, namespace))[:40]
            if value != expected:
                failures.append(f"{call} returned {value}, expected {expected}")
        except Exception as error:
            failures.append(f"{call} raised {type(error).__name__}, expected {expected}")
    return "\n".join([f"{len(tests) - len(failures)}/{len(tests)} tests passed", *failures[:1]])


def expert_messages(task: Task, seed: int) -> Messages:
    """Write an expert's episode as messages; `weight` says which of its answers train."""
    code, tests = str(task["code"]), task["tests"]
    assert isinstance(tests, list)
    messages: Messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user_text(code)}]
    edits = expert_episode(task, seed)
    for number, edit in enumerate(edits, 1):
        call = {"name": "code_executor", "arguments": {"line": edit.line, "code": edit.code}}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
                "weight": int(number == len(edits)),
            }
        )
        messages.append(
            {"role": "tool", "content": run_tests(apply_edit(code, edit), [str(t) for t in tests])}
        )
    return messages


def apply_edit(code: str, edit: Edit) -> str:
    """Replace one line of `code`."""
    lines = code.split("\n")
    lines[edit.line - 1] = edit.code
    return "\n".join(lines)


def to_row(renderer: Qwen3Renderer, messages: Messages) -> Row:
    """Render an episode, up to its last token that trains."""
    plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    rendered = renderer.render(plain, tools=[TOOL])  # type: ignore[arg-type, list-item]
    weights = [
        float(sampled and messages[index].get("weight", 0))
        for sampled, index in zip(rendered.sampled_mask, rendered.message_indices, strict=True)
    ]
    end = max(index for index, weight in enumerate(weights) if weight) + 1
    return rendered.token_ids[:end], weights[:end]


# ---- tokenizer

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
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
PHRASES = (
    *("system\n", "assistant\n", "user"),
    *(SYSTEM, TOOLS_HEADER, "\n" + json.dumps(TOOL), TOOLS_FOOTER, "\n" + INTRO),
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


def spoken(messages: Messages) -> Iterator[str]:
    """Yield the texts of an episode as the tokenizer will meet them."""
    for message in messages:
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield json.dumps(call["function"]["arguments"]["code"])[1:-1]


# ---- model and training

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


def train(
    model: Qwen3ForCausalLM, rows: list[Row], *, steps: int, batch_size: int, lr: float, seed: int
) -> None:
    """Minimize cross-entropy on the weighted tokens; the learning rate falls linearly to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    rng, start = random.Random(seed), time.monotonic()
    order: list[int] = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 20) * max(0.1, 1 - step / steps)
        if len(order) < batch_size:
            order += rng.sample(range(len(rows)), len(rows))
        batch, order = [rows[index] for index in order[:batch_size]], order[batch_size:]
        loss = sft_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            print(
                f"step {step}/{steps}  loss {loss.item():.3f}  {time.monotonic() - start:.0f} s", flush=True
            )


def sft_loss(model: Qwen3ForCausalLM, batch: list[Row]) -> torch.Tensor:
    """Mean cross-entropy over the weighted tokens of a padded batch."""
    length = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
    mask = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in batch])[:, 1:] > 0
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[mask]
    return F.cross_entropy(hidden @ model.lm_head.weight.T, ids[:, 1:][mask])


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
    """Make tasks, episodes, tokenizer and model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "base")
    parser.add_argument("--data", type=Path, default=HERE / "expert.jsonl", help="where the episodes go")
    parser.add_argument("--num-tasks", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    episodes = [expert_messages(task, args.seed) for task in generate_tasks(args.num_tasks, seed=args.seed)]
    with args.data.open("w") as file:
        file.writelines(json.dumps({"messages": m, "tools": [TOOL]}) + "\n" for m in episodes)
    tokenizer = make_tokenizer([text for m in episodes for text in spoken(m)], VOCAB_SIZE)
    renderer = Qwen3Renderer(tokenizer)  # type: ignore[arg-type]
    rows = [to_row(renderer, messages) for messages in episodes]
    model = make_model(len(tokenizer), args.seed)
    num = sum(parameter.numel() for parameter in model.parameters())
    length = sum(len(ids) for ids, _ in rows) / len(rows)
    print(f"{len(rows)} episodes, {length:.0f} tokens each; {num:,} parameters")
    train(model, rows, steps=args.steps, batch_size=args.batch_size, lr=args.lr, seed=args.seed)
    write_base(args.out, model, tokenizer)


if __name__ == "__main__":
    main()
