"""Linear layers of the reference model in FP8, emulated with float64 arithmetic. The code uses no FP8 dtype.

Shapes: B sequences of s tokens; n = B x s tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fp8Spec:
    """FP8 recipe of a linear layer's matrix products: granularity of the scales, and number formats."""

    recipe: str
    """Granularity of the scales: tensorwise, rowwise or blockwise."""
    hybrid: bool = False
    """Whether output gradients are E5M2 (2 mantissa bits) instead of E4M3 (3 mantissa bits)."""


def round_to_fp8(x: Tensor, mantissa_bits: int) -> Tensor:
    """Round each element of x to the nearest FP8 number with 1 sign bit, 7 - `mantissa_bits` exponent bits and `mantissa_bits`
    mantissa bits. Ties go to the even number.

    The formats are E4M3 (3 mantissa bits, largest number 448) and E5M2 (2 mantissa bits, largest number 57344) of Micikevicius et
    al. 2022, table 1. Larger numbers are clamped. As in torch, elements are first rounded to float32.
    """
    min_exponent, max_value = {3: (-6, 448.0), 2: (-14, 57344.0)}[mantissa_bits]
    x = x.clamp(-max_value, max_value).float().double()
    exponent = (torch.frexp(x).exponent.double() - 1).clamp(min=min_exponent)  # subnormal numbers have equal spacing
    spacing = torch.exp2(exponent - mantissa_bits)
    return (x / spacing).round() * spacing


def quantize_blocks(x: Tensor, mantissa_bits: int, block_shape: tuple[int, int]) -> Tensor:
    """Quantize x [num_rows, num_columns] in blocks of shape `block_shape`: each block has its own scale, and its elements become
    FP8 numbers times this scale."""
    block_rows, block_columns = block_shape
    num_rows, num_columns = x.shape
    blocks = x.reshape(num_rows // block_rows, block_rows, num_columns // block_columns, block_columns)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = amax / {3: 448.0, 2: 57344.0}[mantissa_bits]
    scale[scale == 0] = 1.0
    return (round_to_fp8(blocks / scale, mantissa_bits) * scale).reshape(num_rows, num_columns)


def fp8_linear(spec: Fp8Spec, x: Tensor, weight: Tensor) -> Tensor:
    """Compute the product x weight^T of a linear layer in FP8. Its gradients are computed in FP8 too.

    Args:
        spec: granularity of the scales and number formats.
        x: [B, s, in], where `in` is the number of input features.
        weight: [out, in], where `out` is the number of output features.

    Returns:
        [B, s, out].
    """
    tokens = x.transpose(0, 1).flatten(0, 1)  # order by position, then sample: it determines which tokens share a block
    y: Tensor = _Fp8Linear.apply(tokens, weight, spec)
    return y.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spec: Fp8Spec) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eight = spec
        return _quantize_operand(spec, x, 3) @ _quantize_operand(spec, weight, 3, is_weight=True).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        spec, grad_mantissa_bits = ctx.eight, 2 if ctx.eight.hybrid else 3
        dx = _quantize_operand(spec, dy, grad_mantissa_bits) @ _quantize_operand(spec, weight.T, 3, is_weight=True).T
        dw = _quantize_operand(spec, dy.T, grad_mantissa_bits) @ _quantize_operand(spec, x.T, 3).T
        return dx, dw, None


def _quantize_operand(spec: Fp8Spec, x: Tensor, mantissa_bits: int, *, is_weight: bool = False) -> Tensor:
    """Quantize one factor [rows, k] of a matrix product that sums over k, in the blocks that the FP8 recipe prescribes.

    Args:
        spec: granularity of the scales (the FP8 recipe).
        mantissa_bits: mantissa bits of the FP8 format.
        is_weight: whether the factor is a weight. With the recipe blockwise, weights have blocks of 128 x 128 elements, other
            factors blocks of 1 x 128.
    """
    num_rows, num_columns = x.shape
    block_shapes = {
        "tensorwise": (num_rows, num_columns),
        "rowwise": (1, num_columns),
        "blockwise": (128, 128) if is_weight else (1, 128),
    }
    return quantize_blocks(x, mantissa_bits, block_shapes[spec.recipe])
