"""Matrices in 8 bits with scales: value = number in 8 bits x scale. A scale is the largest magnitude of those that share it over
the largest number of the format, so that none is cut.

Every matrix is [rows, k] with the dimension k that a product sums over last. Who shares a scale, its grain, is

======= ======================== =====================
grain   shares a scale           shape of the scales
======= ======================== =====================
tensor  the matrix               [1, 1]
row     a row                    [rows, 1]
strip   128 numbers of a row     [rows, k / 128]
tile    a square of 128 x 128    [rows / 128, k / 128]
======= ======================== =====================

Scales are float32, float64 for a model in float64. They are not rounded to powers of two: products of H100 take any, and a scale
that fits loses less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

# ---- The two formats of 8 bits (Micikevicius et al. 2022), and the rounding of numbers to them.


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


Grain = Literal["tensor", "row", "strip", "tile"]
BLOCK = 128
"""Length of a strip, side of a tile."""
_ELEMENTS_AT_ONCE = 1 << 25
"""Numbers that are in float32 at once while a matrix is quantised; a multiple of a tile's rows."""


@dataclass(frozen=True)
class Quantised:
    """A matrix [rows, k] in 8 bits, rows contiguous."""

    values: torch.Tensor
    scale: torch.Tensor
    grain: Grain

    def decoded(self) -> torch.Tensor:
        """The numbers that it stands for, in the dtype of its scales."""
        values = self.values.to(self.scale.dtype)
        return _in_blocks(values, self.grain).mul_(_beside_blocks(self.scale, self.grain)).view_as(values)

    def rows(self, first: int, end: int) -> Quantised:
        """Some of its rows, of any grain but tile."""
        scale = self.scale if self.grain == "tensor" else self.scale[first:end]
        return Quantised(self.values[first:end], scale, self.grain)


def magnitudes(x: torch.Tensor, grain: Grain) -> torch.Tensor:
    """The largest magnitude among those of x [rows, k] that share a scale, in the shape and dtype of the scales. One that is not a
    number makes the whole so."""
    dims = {"tensor": (0, 1), "row": (1,), "strip": (2,), "tile": (1, 3)}[grain]
    found: torch.Tensor = torch.linalg.vector_norm(_in_blocks(x, grain), math.inf, dim=dims, keepdim=grain in ("tensor", "row"))
    return found.to(torch.promote_types(x.dtype, torch.float32))


def quantised(x: torch.Tensor, largest: torch.Tensor, grain: Grain, format_: Format) -> Quantised:
    """Round a matrix [rows, k], of any strides.

    Args:
        largest: the magnitudes that stand for the largest numbers of the format. Where it is 0, the scale is 1.
    """
    scale = largest / format_.largest
    scale = scale.masked_fill_(scale == 0, 1.0)
    values = torch.empty(x.shape, dtype=format_.dtype, device=x.device)
    # As many rows at once as are so many numbers, and whole tiles.
    size = max(1, _ELEMENTS_AT_ONCE // (BLOCK * x.shape[1])) * BLOCK
    for first in range(0, len(x), size):
        part, scales = x[first : first + size], scale
        if grain in ("row", "strip"):
            scales = scale[first : first + size]
        elif grain == "tile":
            scales = scale[first // BLOCK : (first + size) // BLOCK]
        # A scale has as many dimensions as x, so the quotient has its dtype.
        numbers = _in_blocks(part, grain) / _beside_blocks(scales, grain)
        rounded_into(_in_blocks(values[first : first + size], grain), numbers, format_)
    return Quantised(values, scale, grain)


def _in_blocks(x: torch.Tensor, grain: Grain) -> torch.Tensor:
    """A view with one dimension for the blocks of each split dimension."""
    if grain == "strip":
        return x.unflatten(1, (-1, BLOCK))
    return x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)) if grain == "tile" else x


def _beside_blocks(scale: torch.Tensor, grain: Grain) -> torch.Tensor:
    """Scales in a shape that goes with `_in_blocks`."""
    if grain == "strip":
        return scale[:, :, None]
    return scale[:, None, :, None] if grain == "tile" else scale
