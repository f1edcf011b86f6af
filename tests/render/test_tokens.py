"""A tokenizer that remembers what it encoded answers as one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from uni_agent.render.tokens import plain_copy, remember

TEXTS = ["", "hello", "<|im_start|>user\nhello<|im_end|>", " hello  world\n\n", "é 😀", "x" * 300, "hello"]


@pytest.fixture
def pair(bpe: Any) -> tuple[Any, Any]:
    return plain_copy(bpe), remember(plain_copy(bpe))


def test_same_ids_as_without_and_again(pair: tuple[Any, Any]) -> None:
    usual, remembering = pair
    for text in TEXTS * 2:
        for special in (True, False):
            ids = usual.encode(text, add_special_tokens=special)
            assert remembering.encode(text, add_special_tokens=special) == ids
            found = remembering(text, add_special_tokens=special, return_offsets_mapping=True)
            assert dict(found) == dict(usual(text, add_special_tokens=special, return_offsets_mapping=True))
        assert usual.decode(usual.encode(text)) == remembering.decode(remembering.encode(text))
    assert type(remembering).__name__ == type(usual).__name__


def test_a_changed_result_does_not_reach_the_next_one(pair: tuple[Any, Any]) -> None:
    usual, remembering = pair
    ids = usual.encode("hello world")
    remembering.encode("hello world").append(99)
    assert remembering.encode("hello world") == ids
    found = remembering("hello world", return_offsets_mapping=True)
    found["input_ids"].append(99)
    found["offset_mapping"].clear()
    del found["attention_mask"]
    again = remembering("hello world", return_offsets_mapping=True)
    assert dict(again) == dict(usual("hello world", return_offsets_mapping=True))
    assert again.char_to_token(0) == 0


def test_settings_of_a_call_are_told_apart(pair: tuple[Any, Any]) -> None:
    usual, remembering = pair
    text = "hello world hello world"
    for settings in ({}, {"truncation": True, "max_length": 2}, {"split_special_tokens": False}):
        assert remembering.encode(text, **settings) == usual.encode(text, **settings)
        assert dict(remembering(text, **settings)) == dict(usual(text, **settings))


def test_what_cannot_be_remembered_is_passed_on(pair: tuple[Any, Any]) -> None:
    usual, remembering = pair
    batch = ["hello", "world hello"]
    assert dict(remembering(batch)) == dict(usual(batch))
    assert remembering.encode("hello", "world") == usual.encode("hello", "world")
    assert dict(remembering("a", text_pair="b")) == dict(usual("a", text_pair="b"))
    assert dict(remembering(text=["a", "b"], text_pair=["c", "d"])) == dict(usual(["a", "b"], ["c", "d"]))


def test_two_tokenizers_do_not_share_what_they_remember(bpe: Any) -> None:
    marked, plain = remember(bpe.__class__(tokenizer_object=bpe.backend_tokenizer)), remember(plain_copy(bpe))
    text = "<|im_end|>"
    assert len(plain.encode(text)) > 1 == len(marked.encode(text))


def test_only_the_latest_texts_are_kept(bpe: Any) -> None:
    tokenizer = plain_copy(bpe)
    asked: list[str] = []

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **settings: Any) -> list[int]:
            asked.append(text)
            return super().encode(text, **settings)

    tokenizer.__class__ = Counting
    remembering = remember(tokenizer, texts=2)
    for text in ("a", "a", "b", "c", "c", "a"):
        remembering.encode(text)
    assert asked == ["a", "b", "c", "a"]
