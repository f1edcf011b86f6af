"""Finds stop strings in a growing completion, token by token, whatever the token borders are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]


class StopMatcher:
    """Says after which token a stop string is complete.

    Decodes a short tail of the completion after each token, never single tokens, so that characters
    and stop strings that are split over tokens are seen.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._tail: list[int] = []
        self._keep = 2 * max(len(stop) for stop in stops) + 8
        """Characters that the tail must keep: more than a match can reach back."""

    def push(self, token: int) -> bool:
        """Take the next token; True when it completes a stop string."""
        self._tail.append(token)
        text = self._decode(self._tail)
        if any(stop in text for stop in self._stops):
            return True
        if len(text) > 4 * self._keep:
            shorter = self._tail[len(self._tail) // 2 :]
            if len(self._decode(shorter)) >= self._keep:
                self._tail = shorter
        return False
