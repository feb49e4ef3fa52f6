"""Rotary frequencies of the reference model, with the methods that scale them for longer sequences.

Rotary position embedding rotates each pair of channels by an angle proportional to the position. A turn is a rotation by 2 pi: a
pair with frequency f makes c x f / (2 pi) turns in c tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RotaryScaling:
    """Method by which rotary frequencies are scaled for longer sequences, with its options. The docstring of an option starts with
    the methods that use it."""

    scaling_type: Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
    factor: float
    original_context: int = 1
    """Sequence length for which the unscaled frequencies were chosen."""
    min_turns: float = 1.0
    """llama3, yarn: the frequency of a channel pair that makes fewer turns (rotations by 2 pi) than this in the original
    context is divided by `factor`."""
    max_turns: float = 4.0
    """llama3, yarn: the frequency of a channel pair that makes more turns (rotations by 2 pi) than this in the original context is
    not changed."""
    rounds_bounds: bool = True
    """yarn: whether the range of channel pairs between `max_turns` and `min_turns`, where frequencies change gradually, is
    enlarged to integer bounds."""
    attention_factor: float = 1.0
    """yarn, longrope: factor by which queries and keys are multiplied."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies in sequences within the original context, one for each channel pair."""
    long_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies in longer sequences, one for each channel pair."""


def compute_rotary_frequencies(
    base: float, num_rotary_channels: int, scaling: RotaryScaling | None, seq_length: int
) -> list[float]:
    """Compute the rotary frequency (angle per position, in radians) of each channel pair.

    Args:
        base: rotary base, such as 10000.
        num_rotary_channels: rotated channels of a head; two form a pair.
        scaling: method that scales the frequencies; None for unscaled frequencies.
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
        _compute_unscaled_shares_llama3(frequencies, scaling)
        if scaling.scaling_type == "llama3"
        else _compute_unscaled_shares_yarn(base, num_rotary_channels, scaling)
    )
    return [
        share * frequency + (1 - share) * frequency / scaling.factor
        for share, frequency in zip(unscaled_shares, frequencies, strict=True)
    ]


def _compute_unscaled_shares_llama3(frequencies: list[float], scaling: RotaryScaling) -> list[float]:
    """Return, for each frequency, the share s in the mix s x unscaled frequency + (1 - s) x scaled frequency (Llama 3.1).

    The share rises linearly from 0 to 1 with the number of turns (rotations by 2 pi) that the channel pair makes in the original
    context.
    """
    turns = [scaling.original_context * frequency / (2 * math.pi) for frequency in frequencies]
    return [_compute_linear_ramp(pair_turns, scaling.min_turns, scaling.max_turns) for pair_turns in turns]


def _compute_unscaled_shares_yarn(base: float, num_rotary_channels: int, scaling: RotaryScaling) -> list[float]:
    """Return, for each frequency, the share s in the mix s x unscaled frequency + (1 - s) x scaled frequency. The share falls
    linearly from 1 to 0 with the index of the channel pair, as in the published code of YaRN (Peng et al. 2023)."""

    def find_pair(pair_turns: float) -> float:
        """Return the fractional index of the channel pair that makes `pair_turns` turns (rotations by 2 pi) in the original
        context.

        The index solves context x base^(-2 x index / number of rotated channels) = 2 pi x turns.
        """
        return num_rotary_channels * math.log(scaling.original_context / (pair_turns * 2 * math.pi), base) / 2

    low, high = find_pair(scaling.max_turns), find_pair(scaling.min_turns)
    if scaling.rounds_bounds:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(0.0, low), min(num_rotary_channels - 1.0, high)
    if low == high:
        high += 0.001
    return [1 - _compute_linear_ramp(pair, low, high) for pair in range(num_rotary_channels // 2)]


def _compute_linear_ramp(x: float, low: float, high: float) -> float:
    """Return 0 for x up to `low`, 1 for x from `high` on, and a linear ramp between them."""
    return min(1.0, max(0.0, (x - low) / (high - low)))
