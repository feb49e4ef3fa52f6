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


def rotary_table(positions: torch.Tensor, spec: RotarySpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions [s, b]: two tensors [s, b, 1, r/2] in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions.unsqueeze(-1).to(torch.float64) * frequencies(spec, positions.device)
    return angles.cos().to(wide).unsqueeze(2), angles.sin().to(wide).unsqueeze(2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Type promotion does the products in the table's (wider) dtype.
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = rest
    return out


class _Rotary(torch.autograd.Function):
    """Forward: rotate. Backward: rotate back. Keeps nothing but the table, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the leading channels of each head: [s, b, n, d] to the same."""
    return _Rotary.apply(x, *table)
