"""Rotary position embedding (Su et al. 2021), with all scalings of `spec/rotary.py`.

The two channels of a pair are half a head apart, as in GPT-NeoX and Llama, or adjacent (interleaved). Angles, sines and cosines are
computed in at least float32, and so is the rotation.

Shapes: `s` sequence, `b` microbatch, `d` head size, `r` rotated channels of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.spec.rotary import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, RotarySpec, YarnScaling


def compute_frequencies(spec: RotarySpec, device: torch.device, sequence_length: int = 1) -> torch.Tensor:
    """Compute the rotation angle per position of each pair of channels: float64 [r/2], for r rotated channels of a head.

    Args:
        sequence_length: tokens of the full sequence, on which some scalings depend (`DynamicScaling`, `LongScaling`).
    """
    scaling, base = spec.scaling, spec.base
    if isinstance(scaling, DynamicScaling):
        base = scaling.scale_base(base, spec.rotary_dim, sequence_length)
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64, device=device) / spec.rotary_dim
    unscaled = base**-exponents
    match scaling:
        case LinearScaling():
            return unscaled / scaling.factor  # equivalent to dividing the positions
        case Llama3Scaling():
            turns = scaling.original_context / (2 * math.pi / unscaled)
            unscaled_share = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(
                0.0, 1.0
            )
            return (1 - unscaled_share) * unscaled / scaling.factor + unscaled_share * unscaled
        case YarnScaling():
            first, last = _compute_yarn_range(scaling, spec)
            pair_indices = torch.arange(spec.rotary_dim // 2, dtype=torch.float64, device=device)
            scaled_share = ((pair_indices - first) / (last - first)).clamp(0.0, 1.0)
            return scaled_share * unscaled / scaling.factor + (1 - scaled_share) * unscaled
        case LongScaling():
            # Asynchronous: the host does not wait for the device.
            factors = torch.tensor(scaling.select_factors(sequence_length), dtype=torch.float64).to(device, non_blocking=True)
            return unscaled / factors
        case _:
            return unscaled


def _compute_yarn_range(scaling: YarnScaling, spec: RotarySpec) -> tuple[float, float]:
    """Return the indices of the first and last channel pair between which YaRN interpolates from original to scaled frequencies.

    Over the context length of the original model, pair i of r/2 makes context / (2 * pi) * base^(-2i / r) full rotations.
    """

    def find_pair(turns: float) -> float:
        return spec.rotary_dim / 2 * math.log(scaling.original_context / (2 * math.pi * turns)) / math.log(spec.base)

    first, last = find_pair(scaling.beta_fast), find_pair(scaling.beta_slow)
    if scaling.rounds_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    return first, last + 0.001 if first == last else last


def build_rotary_table(positions: torch.Tensor, spec: RotarySpec, dtype: torch.dtype, sequence_length: int = 1) -> torch.Tensor:
    """Build the rotation matrices for positions [s, b]: [s, b, 1, 2, 2, r/2] in at least float32, for r rotated channels of a head.

    The matrix of a channel pair is ((cos, -sin), (sin, cos)) times the attention factor of the spec. So a rotation is one product
    and one sum, and the transposed table rotates back.

    Args:
        sequence_length: tokens of the full sequence, on which some scalings depend.
    """
    table_dtype = torch.promote_types(dtype, torch.float32)
    angles = positions.unsqueeze(-1).to(torch.float64) * compute_frequencies(spec, positions.device, sequence_length)
    cos, sin = angles.cos(), angles.sin()
    if spec.attention_factor != 1.0:
        cos, sin = cos * spec.attention_factor, sin * spec.attention_factor
    cos, sin = cos.to(table_dtype), sin.to(table_dtype)
    return torch.stack([cos, -sin, sin, cos], -2).unflatten(-2, (2, 2)).unsqueeze(2)


def rotate_into(x: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, interleaved: bool = False) -> None:
    """Rotate the leading channels of x and write the rotated channels to the leading channels of `out`, which may be x.

    Args:
        x: [s, b, ..., d] with any number of head dimensions.
        table: rotation matrices [s, b, 1, 2, 2, r/2] from `build_rotary_table`; the transposed table rotates back.
        interleaved: whether the channels of a pair are adjacent.
    """
    channels = 2 * table.shape[-1]
    x_pairs, out_pairs = (_view_pairs(tensor[..., :channels], interleaved) for tensor in (x, out))
    while table.dim() < x_pairs.dim() + 1:
        table = table.unsqueeze(2)
    # By type promotion, product and sum are in the table's wider dtype, and only the result is rounded.
    terms = x_pairs.unsqueeze(-3) * table
    torch.add(terms[..., 0, :], terms[..., 1, :], out=out_pairs)


def _view_pairs(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """View r channels [..., r] as r/2 pairs [..., 2, r/2]."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2) if interleaved else x.unflatten(-1, (2, -1))


class _Rotary(torch.autograd.Function):
    """Autograd function that rotates channels in forward and rotates their gradients back in backward. Saves only the rotation
    table, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(table)
        ctx.interleaved = interleaved
        return _rotate_to_new(x, table, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (table,) = ctx.saved_tensors
        return _rotate_to_new(grad, table.transpose(-3, -2), ctx.interleaved), None, None


def _rotate_to_new(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if (channels := 2 * table.shape[-1]) < x.shape[-1]:
        out[..., channels:] = x[..., channels:]
    rotate_into(x, table, out, interleaved=interleaved)
    return out


def rotate(x: torch.Tensor, table: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the leading channels of each head by the matrices from `build_rotary_table`: [s, b, ..., d] to the same shape.

    Args:
        interleaved: whether the channels of a pair are adjacent.
    """
    return (
        _rotate_in_traceable_ops(x, table, interleaved) if torch.compiler.is_compiling() else _Rotary.apply(x, table, interleaved)
    )


def _rotate_in_traceable_ops(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate channels as `rotate` does, but in operations that torch.compile can fuse and differentiate.

    Forward and backward compute in the dtype of the table and round once.
    """
    while table.dim() < x.dim() + 2:
        table = table.unsqueeze(2)
    cos, sin = table[..., 0, 0, :], table[..., 1, 0, :]
    channels = 2 * cos.shape[-1]
    first, second = _view_pairs(x[..., :channels].to(table.dtype), interleaved).unbind(-2)
    rotated = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    rotated_channels = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    # Do not concatenate an empty remainder: backward would make a second pass over queries and keys.
    return rotated_channels if channels == x.shape[-1] else torch.cat([rotated_channels, x[..., channels:]], -1)
