"""Loops of which each turn does the same as the one before, on tensors of the same shapes. A run takes every turn. A plan, whose
tensors have no numbers, takes three of them, and counts the second as often as it would come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Repeats = Callable[[int], contextlib.AbstractContextManager[None]]
"""What happens while it is entered counts so many times."""

_repeats: Repeats | None = None


@contextlib.contextmanager
def few_turns(repeats: Repeats) -> Iterator[None]:
    """While it is entered, of each loop only the first, the second and the last turn are taken."""
    global _repeats
    before, _repeats = _repeats, repeats
    try:
        yield
    finally:
        _repeats = before


def turns(places: Sequence[T]) -> Iterator[T]:
    """The places of a loop, one a turn. Those between the first and the last are as large as each other, and a turn at one of them
    leaves no memory behind that it did not find."""
    if _repeats is None or len(places) <= 3:
        yield from places
        return
    yield places[0]
    with _repeats(len(places) - 2):
        yield places[1]
    yield places[-1]
