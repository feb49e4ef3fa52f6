"""The two formats of 8 bits (Micikevicius et al. 2022), and the rounding of numbers to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A format of 8 bits: sign, exponent, mantissa."""

    name: str
    dtype: torch.dtype
    largest: float
    """The largest number; what is above it is cut to it."""


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)


def rounded_into(out: torch.Tensor, numbers: torch.Tensor, format_: Format) -> None:
    """Write numbers, in float32 or float64, to `out` in a format of 8 bits: cut to its range, then to the nearest, ties to even.

    A float64 is rounded to float32 first, as torch does it. What is not a number stays so. `numbers` are changed.
    """
    out.copy_(numbers.clamp_(-format_.largest, format_.largest).float())
