"""--step-batch-size-schedule: the batch size of each stretch of the run, as Megatron-LM writes it.

`0:768 250B:1536 500B:3072` is a batch of 768 sequences from the start, of 1,536 from 250 billion tokens on, and so forth. K, M, B
and T stand for powers of a thousand. Entries are apart by spaces or commas, in one word or several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

_POWERS = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?)", re.IGNORECASE)


class BatchStep(NamedTuple):
    """A batch size, and from where on it holds."""

    tokens: int
    """Tokens that the run has read before."""
    batch_size: int
    """Sequences."""

    def __str__(self) -> str:
        return f"{_short(self.tokens)}:{self.batch_size}"


def batch_steps(words: Iterable[str]) -> list[BatchStep]:
    """The entries of a schedule in order, which is empty for no words.

    Raises:
        ValueError: an entry cannot be read, the first does not begin with the run, or one does not go beyond the one before it.
    """
    steps = sorted(_entry(text) for word in words for text in word.replace(",", " ").split())
    if steps and steps[0].tokens:
        raise ValueError(f"says nothing of the time before {steps[0]}. The first entry begins at 0, as in 0:{steps[0].batch_size}")
    for before, after in pairwise(steps):
        if after.tokens == before.tokens:
            raise ValueError(f"has two batch sizes from the same place on, {before} and {after}")
        if after.batch_size < before.batch_size:
            raise ValueError(f"shrinks from {before} to {after}. A batch only grows: a run is laid out for the last one")
    return steps


def readable_steps(words: Iterable[str]) -> list[BatchStep]:
    """The same, but empty where a rule says what is wrong."""
    try:
        return batch_steps(words)
    except ValueError:
        return []


def as_words(steps: Sequence[BatchStep]) -> tuple[str, ...]:
    """A schedule as the setting holds it."""
    return (" ".join(map(str, steps)),)


def _entry(text: str) -> BatchStep:
    found = [_NUMBER.fullmatch(part) for part in text.split(":")]
    if len(found) != 2 or None in found:
        raise ValueError(f"has {text!r}, which is no TOKENS:BATCH, such as 250B:1536")
    tokens, batch_size = (Fraction(match[1]) * 1000 ** _POWERS[match[2].upper()] for match in found if match is not None)
    if batch_size < 1 or batch_size.denominator > 1:
        raise ValueError(f"has {text!r}, whose batch size is no whole number of sequences from 1 on")
    return BatchStep(int(tokens), int(batch_size))


def _short(number: int) -> str:
    """A number with the largest suffix that leaves it whole."""
    for suffix, power in reversed(_POWERS.items()):
        if number and number % 1000**power == 0:
            return f"{number // 1000**power}{suffix}"
    return str(number)
