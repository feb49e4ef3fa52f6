"""Rotary position embedding (Su et al. 2021), with Llama 3.1's stretching of low frequencies, or of all by one factor.

Pairs are halves, as in GPT-NeoX and Llama. Angles, sines and cosines are computed in at least float32, and so is the rotation.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.spec.layers import RotarySpec

# Llama 3.1: wavelengths beyond its original context are stretched by the factor, those a quarter of it and shorter are kept.
_ORIGINAL_CONTEXT, _LOW_FACTOR, _HIGH_FACTOR = 8192, 1.0, 4.0


def frequencies(spec: RotarySpec, device: torch.device) -> torch.Tensor:
    """Angle per position of each rotated pair: float64 [r/2].

    Dividing positions by a factor (Chen et al. 2023, position interpolation) is the same as dividing frequencies by it.
    """
    exponents = torch.arange(0, spec.channels, 2, dtype=torch.float64, device=device) / spec.channels
    found = spec.base**-exponents / spec.interpolation
    if spec.low_frequency_factor is None:
        return found
    wavelengths = 2 * math.pi / found
    smooth = ((_ORIGINAL_CONTEXT / wavelengths - _LOW_FACTOR) / (_HIGH_FACTOR - _LOW_FACTOR)).clamp(0.0, 1.0)
    return (1 - smooth) * found / spec.low_frequency_factor + smooth * found


def rotary_table(positions: torch.Tensor, spec: RotarySpec, dtype: torch.dtype) -> torch.Tensor:
    """The rotation at positions [s, b]: [s, b, 1, 2, 2, r/2] in at least float32.

    For each pair it is the matrix that makes the turned pair of the pair: ((cos, -sin), (sin, cos)). So a rotation is one product
    and one sum whatever it turns, and the transpose turns back.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions.unsqueeze(-1).to(torch.float64) * frequencies(spec, positions.device)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    return torch.stack([cos, -sin, sin, cos], -2).unflatten(-2, (2, 2)).unsqueeze(2)


def turn(x: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Write the leading channels of x, turned, to those of `out`, which may be x.

    Args:
        x: [s, b, ..., d] with any number of dimensions of heads.
        table: [s, b, 1, 2, 2, r/2]; its transpose turns back.
    """
    channels = 2 * table.shape[-1]
    pairs, turned = (tensor[..., :channels].unflatten(-1, (2, -1)) for tensor in (x, out))  # [s, b, ..., 2, r/2]
    while table.dim() < pairs.dim() + 1:
        table = table.unsqueeze(2)
    # Type promotion does both in the table's (wider) dtype, and only the result is rounded.
    products = pairs.unsqueeze(-3) * table
    torch.add(products[..., 0, :], products[..., 1, :], out=turned)


class _Rotary(torch.autograd.Function):
    """Forward: rotate. Backward: rotate back. Keeps nothing but the table, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(table)
        return _turned(x, table)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (table,) = ctx.saved_tensors
        return _turned(grad, table.transpose(-3, -2)), None


def _turned(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if (channels := 2 * table.shape[-1]) < x.shape[-1]:
        out[..., channels:] = x[..., channels:]
    turn(x, table, out)
    return out


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the leading channels of each head: [s, b, ..., d] to the same."""
    return _traced(x, table) if torch.compiler.is_compiling() else _Rotary.apply(x, table)


def _traced(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The same in operations that a compiler fuses and differentiates: in the table's dtype, rounded once on each way."""
    while table.dim() < x.dim() + 2:
        table = table.unsqueeze(2)
    cos, sin = table[..., 0, 0, :], table[..., 1, 0, :]
    half = cos.shape[-1]
    first, second = x[..., : 2 * half].to(table.dtype).unflatten(-1, (2, half)).unbind(-2)
    turned = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat([*turned, x[..., 2 * half :]], -1)
