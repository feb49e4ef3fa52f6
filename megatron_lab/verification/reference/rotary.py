"""The reference's rotary frequencies, number by number, with each way to stretch them for longer sequences.

A pair of channels with frequency f turns c f / (2 pi) times in c tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RotaryStretch:
    """How frequencies are stretched."""

    kind: Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
    factor: float
    context: int = 1
    """Tokens for which the frequencies were chosen."""
    few_turns: float = 1.0
    """llama3, yarn: a pair that turns less often in the context has its frequency divided by the factor."""
    many_turns: float = 4.0
    """llama3, yarn: a pair that turns more often keeps it."""
    whole: bool = True
    """yarn: whether the pairs at which these two are reached are rounded to whole ones, outwards."""
    enlarged: float = 1.0
    """yarn, longrope: queries and keys are multiplied by this."""
    short: tuple[float, ...] = ()
    """longrope: the divisor of each frequency in sequences within the context."""
    long: tuple[float, ...] = ()
    """longrope: the same in longer ones."""


def rotary_frequencies(base: float, rotated: int, stretch: RotaryStretch | None, tokens: int) -> list[float]:
    """Angle per position of each of the rotated / 2 pairs, in a sequence of so many tokens."""
    if stretch is not None and stretch.kind == "dynamic" and tokens > stretch.context:
        # The slowest pair, of exponent (rotated - 2) / rotated, is slowed by `slower`, and the others in between (bloc97 2023).
        slower = stretch.factor * tokens / stretch.context - stretch.factor + 1
        base = base * slower ** (rotated / (rotated - 2))
    plain = [base ** (-2 * i / rotated) for i in range(rotated // 2)]
    if stretch is None or stretch.kind == "dynamic":
        return plain
    if stretch.kind == "linear":
        return [frequency / stretch.factor for frequency in plain]
    if stretch.kind == "longrope":
        divisors = stretch.short if tokens <= stretch.context else stretch.long
        return [frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True)]
    kept = _kept_by_turns(plain, stretch) if stretch.kind == "llama3" else _kept_by_pair(base, rotated, stretch)
    return [share * frequency + (1 - share) * frequency / stretch.factor for share, frequency in zip(kept, plain, strict=True)]


def _kept_by_turns(plain: list[float], stretch: RotaryStretch) -> list[float]:
    """The share of each frequency that is kept, linear in the number of turns (Llama 3.1)."""
    turns = [stretch.context * frequency / (2 * math.pi) for frequency in plain]
    return [_between(each, stretch.few_turns, stretch.many_turns) for each in turns]


def _kept_by_pair(base: float, rotated: int, stretch: RotaryStretch) -> list[float]:
    """The same, linear in the number of the pair, as the published program of YaRN has it (Peng et al. 2023)."""

    def reached(turns: float) -> float:
        """The pair, perhaps a broken number, that turns so often: context x base^(-2 pair / rotated) = 2 pi turns."""
        return rotated * math.log(stretch.context / (turns * 2 * math.pi), base) / 2

    first, last = reached(stretch.many_turns), reached(stretch.few_turns)
    if stretch.whole:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(0.0, first), min(rotated - 1.0, last)
    if first == last:
        last += 0.001
    return [1 - _between(pair, first, last) for pair in range(rotated // 2)]


def _between(x: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on, linear between them."""
    return min(1.0, max(0.0, (x - low) / (high - low)))
