"""The reference's products in 8 bits, by arithmetic on float64 numbers alone: no type of 8 bits occurs here.

Shapes: B sequences of s tokens; n = B s tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class EightBits:
    """How a layer computes its products."""

    recipe: str
    """tensorwise, rowwise or blockwise."""
    hybrid: bool = False
    """Whether gradients of outputs have 2 bits of mantissa and not 3."""


def on_grid(x: Tensor, mantissa: int) -> Tensor:
    """Numbers of 8 bits next to x, ties to the even one: sign, 7 - mantissa bits of exponent, mantissa (Micikevicius et al. 2022,
    table 1). With 3 bits of mantissa the largest is 448, as one pattern is no number; with 2 it is 57344. Larger ones are cut.

    Numbers pass through float32, as they do in torch.
    """
    least, largest = {3: (-6, 448.0), 2: (-14, 57344.0)}[mantissa]
    x = x.clamp(-largest, largest).float().double()
    exponent = (torch.frexp(x).exponent.double() - 1).clamp(min=least)  # below `least` numbers are equally far apart
    step = torch.exp2(exponent - mantissa)
    return (x / step).round() * step


def scaled_to_grid(x: Tensor, mantissa: int, sharing: tuple[int, int]) -> Tensor:
    """x [rows, columns], each number replaced by one of 8 bits times the scale that a block of `sharing` numbers has in common."""
    high, wide = sharing
    rows, columns = x.shape
    blocks = x.reshape(rows // high, high, columns // wide, wide)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = largest / {3: 448.0, 2: 57344.0}[mantissa]
    scale[scale == 0] = 1.0
    return (on_grid(blocks / scale, mantissa) * scale).reshape(rows, columns)


def product(eight: EightBits, x: Tensor, weight: Tensor) -> Tensor:
    """x w^T and its gradients: x [B, s, in], w [out, in] to [B, s, out]."""
    tokens = x.transpose(0, 1).flatten(0, 1)  # tokens are counted position by position: that says which share a block
    y: Tensor = _Product.apply(tokens, weight, eight)
    return y.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eight: EightBits) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eight = eight
        return _rounded(eight, x, 3) @ _rounded(eight, weight, 3, is_weight=True).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        eight, mantissa = ctx.eight, 2 if ctx.eight.hybrid else 3
        dx = _rounded(eight, dy, mantissa) @ _rounded(eight, weight.T, 3, is_weight=True).T
        dw = _rounded(eight, dy.T, mantissa) @ _rounded(eight, x.T, 3).T
        return dx, dw, None


def _rounded(eight: EightBits, x: Tensor, mantissa: int, *, is_weight: bool = False) -> Tensor:
    """A factor [rows, k] of a product that sums over k."""
    rows, columns = x.shape
    sharing = {"tensorwise": (rows, columns), "rowwise": (1, columns), "blockwise": (128, 128) if is_weight else (1, 128)}
    return scaled_to_grid(x, mantissa, sharing[eight.recipe])
