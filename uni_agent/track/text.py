"""Text that models and tools produced, made safe to show."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"


def clean_text(text: str, limit: int | None = None) -> str:
    """Replace what terminals, browsers and trackers choke on, and cap the length.

    Control characters, lone surrogates, private-use and unassigned code points become `\\x..` or
    `\\u....` escapes; new lines and tabs stay. Past `limit` characters the middle is cut, and a
    marker says how much is missing.
    """
    if limit is not None and len(text) > limit:
        head, tail = limit - limit // 4, limit // 4
        marker = f"\n[... {len(text) - head - tail} characters cut ...]\n"
        text = text[:head] + marker + text[len(text) - tail :]
    if text.isprintable():
        return text
    return "".join(letter if _is_safe(letter) else _escape(letter) for letter in text)


def _is_safe(letter: str) -> bool:
    # category C holds control, surrogate, private-use and unassigned; Cf (joiners, direction marks)
    # is kept except for the overrides that can make a line read backwards
    if letter in _KEPT:
        return True
    category = unicodedata.category(letter)
    if category == "Cf":
        return not "\u202a" <= letter <= "\u202e" and not "\u2066" <= letter <= "\u2069"
    return category[0] != "C" and category not in ("Zl", "Zp")


def _escape(letter: str) -> str:
    code = ord(letter)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
