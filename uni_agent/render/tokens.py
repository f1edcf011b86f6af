"""Tokenizers from model folders, and text encoding in which control-token text stays plain text."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uni_agent.errors import MessageError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a folder's tokenizer, never from the network. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as problem:  # the Rust tokenizers raise bare Exception for a corrupt file
        raise ModelError(f"cannot load a tokenizer from {folder}: {first_line(problem)}") from problem


def first_line(problem: BaseException) -> str:
    """The first line of a foreign error's message."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


def plain_copy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Copy a tokenizer so that text such as `<|im_end|>` is encoded as characters, not as control.

    A copy, because the setting is state of the tokenizer, which other threads may be using.
    """
    plain = copy.deepcopy(tokenizer)
    plain.split_special_tokens = True
    plain.model_max_length = 1 << 40  # length is the engine's business; silences a warning
    return plain


def remember(tokenizer: PreTrainedTokenizerBase, *, texts: int = 8192) -> PreTrainedTokenizerBase:
    """Let a tokenizer remember the latest texts it encoded; returns it.

    A renderer encodes the same scaffolding, lines and test results over and over, a dozen pieces a
    turn. The class changes in place, because renderers ask for the tokenizer's own methods.
    """
    kind: Any = type(tokenizer)
    encode = functools.lru_cache(texts)(functools.partial(kind.encode, tokenizer))
    call = functools.lru_cache(texts)(functools.partial(kind.__call__, tokenizer))

    def known(text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        simple = all(value is None or isinstance(value, str | int) for value in kwargs.values())
        return isinstance(text, str) and not args and simple

    def encode_again(_: object, text: Any, *args: Any, **kwargs: Any) -> Any:
        if not known(text, args, kwargs):
            return kind.encode(tokenizer, text, *args, **kwargs)
        return list(encode(text, **kwargs))

    def call_again(_: object, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not known(text, args, kwargs):
            return kind.__call__(tokenizer, text, *args, **kwargs)
        found = call(text, **kwargs)
        own = {key: list(value) if isinstance(value, list) else value for key, value in found.items()}
        return type(found)(own, found.encodings)

    tokenizer.__class__ = type(kind.__name__, (kind,), {"encode": encode_again, "__call__": call_again})
    return tokenizer


class PlainEncoder:
    """Encodes message bodies: control-token text in them stays plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        if not tokenizer.is_fast:
            raise ModelError(f"the tokenizer of {source} has no fast form (tokenizer.json); convert it first")
        backend: Any = copy.deepcopy(tokenizer).backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        control = control_tokens(tokenizer)
        self._control_ids = frozenset(control)
        self._control_text = re.compile("|".join(map(re.escape, control.values())) or "(?!)")

    def __call__(self, text: str) -> list[int]:
        ids = self._ids(text)
        if self._control_ids.isdisjoint(ids):
            return ids
        # A vocabulary that holds the control text as a word: cut that word behind its first character.
        cuts = [0, *(match.start() + 1 for match in self._control_text.finditer(text)), len(text)]
        return [i for begin, end in itertools.pairwise(cuts) for i in self._ids(text[begin:end])]

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids) if text else []


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Id and text of the tokens that the tokenizer marks as special (turn markers, end, padding)."""
    # all_special_ids leaves out those that have no role such as eos, <|im_start|> for one.
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return {i: token.content for i, token in added.items() if token.special}


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    """The id of one whole token, None where the vocabulary lacks it."""
    found: Any = tokenizer.convert_tokens_to_ids(token)
    return found if isinstance(found, int) and found != tokenizer.unk_token_id else None


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode all ids, control tokens included; bytes that are not UTF-8 become U+FFFD."""
    text: Any = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def until_stop(token_ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """The ids before the first stop token."""
    for index, token in enumerate(token_ids):
        if token in stop_ids:
            return list(token_ids[:index])
    return list(token_ids)


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    prompt: bool,
    source: str,
) -> str:
    """Render with the tokenizer's chat template; `prompt` opens the assistant's turn.

    Raises MessageError, naming `source`, where the template refuses the messages.
    """
    from jinja2 import TemplateError

    try:
        text: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=prompt,
            tokenize=False,
        )
    except (TemplateError, TypeError, ValueError) as problem:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise MessageError(
            f"the chat template of {source} cannot render messages with roles {roles}: {first_line(problem)}"
        ) from problem
    return text


def require_template(tokenizer: PreTrainedTokenizerBase, source: str, renderer: str) -> None:
    """Raise ModelError where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {source} has no chat template, which renderer {renderer!r} needs; add "
            "chat_template.jinja to the folder or choose another renderer"
        )


def read_eos_ids(folder: Path) -> list[int]:
    """The end-of-sequence ids that generation_config.json names; empty without the file."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    try:
        eos: Any = json.loads(file.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as problem:
        raise ModelError(f"{file} is not a JSON object: {problem}") from problem
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)
