"""Text out of tokens as they come, whole characters only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT = 16
"""Tokens before the new ones that are decoded with them: what a token looks like may depend on the one before (a blank)."""
_LONGEST_HELD = 8
"""Tokens that may wait for the rest of a character; a character of UTF-8 has at most four bytes."""


class TextStream:
    """Turns one sequence's tokens into text.

    Args:
        decode: text of token ids; bytes that are no UTF-8 show as U+FFFD.
        before: the tokens before the first new one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(before[-_CONTEXT:])
        self._said = len(self._ids)

    def add(self, id: int) -> str:
        """The text that a token brings; empty while it ends within a character."""
        self._ids.append(id)
        return self._new(whole=len(self._ids) - self._said < _LONGEST_HELD)

    def finish(self) -> str:
        """What was held back."""
        return self._new(whole=False)

    def _new(self, *, whole: bool) -> str:
        before, text = self._decode(self._ids[: self._said]), self._decode(self._ids)
        if whole and text.endswith("\ufffd"):
            return ""
        fresh = text[len(before) :]
        if fresh:  # of what has been said, only the last tokens are needed
            self._ids = self._ids[self._said :][-_CONTEXT:]
            self._said = len(self._ids)
        return fresh
