"""Rotary frequencies of the reference model, with the methods that scale them for longer sequences.

Rotary position embedding rotates each pair of channels by an angle proportional to the position. A turn is a rotation by 2 pi: a
pair with frequency f makes c f / (2 pi) turns in c tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RotaryScaling:
    """Method and options by which rotary frequencies are scaled for longer sequences. An option names the methods that use it."""

    scaling_type: Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
    factor: float
    original_context: int = 1
    """Sequence length for which the unscaled frequencies were chosen."""
    min_turns: float = 1.0
    """llama3, yarn: the frequency of a channel pair that makes fewer turns (rotations by 2 pi) than this in the original context is
    divided by the factor."""
    max_turns: float = 4.0
    """llama3, yarn: the frequency of a channel pair that makes more turns (rotations by 2 pi) than this in the original context is
    not changed."""
    rounds_bounds: bool = True
    """yarn: round the pair indices at which `min_turns` and `max_turns` are reached to integers, so that the range between them
    grows."""
    attention_factor: float = 1.0
    """yarn, longrope: factor by which queries and keys are multiplied."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency in sequences within the original context."""
    long_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency in longer sequences."""


def compute_rotary_frequencies(
    base: float, num_rotary_channels: int, scaling: RotaryScaling | None, seq_length: int
) -> list[float]:
    """Compute the angle per position of each channel pair.

    Args:
        num_rotary_channels: rotated channels of a head; two form a pair.
        seq_length: tokens in the sequence, on which dynamic and longrope scaling depend.

    Returns:
        num_rotary_channels / 2 frequencies, in the order of the pairs.
    """
    if scaling is not None and scaling.scaling_type == "dynamic" and seq_length > scaling.original_context:
        # The slowest pair, with exponent (rotated - 2) / rotated, is slowed by `slowdown`, faster pairs by less (bloc97 2023).
        slowdown = scaling.factor * seq_length / scaling.original_context - scaling.factor + 1
        base = base * slowdown ** (num_rotary_channels / (num_rotary_channels - 2))
    frequencies = [base ** (-2 * i / num_rotary_channels) for i in range(num_rotary_channels // 2)]
    if scaling is None or scaling.scaling_type == "dynamic":
        return frequencies
    if scaling.scaling_type == "linear":
        return [frequency / scaling.factor for frequency in frequencies]
    if scaling.scaling_type == "longrope":
        divisors = scaling.short_factors if seq_length <= scaling.original_context else scaling.long_factors
        return [frequency / divisor for frequency, divisor in zip(frequencies, divisors, strict=True)]
    unscaled_shares = (
        _unscaled_shares_llama3(frequencies, scaling)
        if scaling.scaling_type == "llama3"
        else _unscaled_shares_yarn(base, num_rotary_channels, scaling)
    )
    return [
        share * frequency + (1 - share) * frequency / scaling.factor
        for share, frequency in zip(unscaled_shares, frequencies, strict=True)
    ]


def _unscaled_shares_llama3(frequencies: list[float], scaling: RotaryScaling) -> list[float]:
    """Compute, for each frequency, the weight of the unscaled frequency in its mix with the scaled one. The weight is linear in the
    number of turns (rotations by 2 pi) that the channel pair makes in the original context (Llama 3.1)."""
    turns = [scaling.original_context * frequency / (2 * math.pi) for frequency in frequencies]
    return [_linear_ramp(pair_turns, scaling.min_turns, scaling.max_turns) for pair_turns in turns]


def _unscaled_shares_yarn(base: float, num_rotary_channels: int, scaling: RotaryScaling) -> list[float]:
    """Compute, for each frequency, the weight of the unscaled frequency in its mix with the scaled one. The weight is linear in the
    index of the channel pair, as in the published code of YaRN (Peng et al. 2023)."""

    def find_pair(pair_turns: float) -> float:
        """Return the fractional index of the channel pair that makes `pair_turns` turns (rotations by 2 pi) in the original
        context.

        The index solves context x base^(-2 index / number of rotated channels) = 2 pi turns.
        """
        return num_rotary_channels * math.log(scaling.original_context / (pair_turns * 2 * math.pi), base) / 2

    low, high = find_pair(scaling.max_turns), find_pair(scaling.min_turns)
    if scaling.rounds_bounds:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(0.0, low), min(num_rotary_channels - 1.0, high)
    if low == high:
        high += 0.001
    return [1 - _linear_ramp(pair, low, high) for pair in range(num_rotary_channels // 2)]


def _linear_ramp(x: float, low: float, high: float) -> float:
    """Return 0 up to `low`, 1 from `high` on, and a linear ramp between them."""
    return min(1.0, max(0.0, (x - low) / (high - low)))
