"""Texts of quantities with a unit. This module does not import torch, so that pages can be written without it."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(num_bytes: float) -> str:
    """Format bytes with three digits and a decimal unit (kB is 1,000 bytes)."""
    return format_with_unit(num_bytes, [" bytes", " kB", " MB", " GB", " TB"])


def format_with_unit(value: float, units: Sequence[str]) -> str:
    """Format a number with three digits and a unit.

    Args:
        units: unit for each power of 1,000, such as [" bytes", " kB", " MB"].
    """
    *smaller, largest = units
    for unit in smaller:
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}{largest}"
