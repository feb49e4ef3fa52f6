"""Rotary position embedding (Su et al. 2021), with all scalings of `spec/rotary.py`.

Pairs are halves, as in GPT-NeoX and Llama, or neighbours. Angles, sines and cosines are computed in at least float32, and so is the
rotation.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.spec.rotary import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, RotarySpec, YarnScaling


def frequencies(spec: RotarySpec, device: torch.device, length: int = 1) -> torch.Tensor:
    """Angle per position of each rotated pair: float64 [r/2].

    Args:
        length: tokens of the whole sequence (see `spec/rotary.py`).
    """
    scaling, base = spec.scaling, spec.base
    if isinstance(scaling, DynamicScaling):
        base = scaling.base(base, spec.channels, length)
    exponents = torch.arange(0, spec.channels, 2, dtype=torch.float64, device=device) / spec.channels
    plain = base**-exponents
    match scaling:
        case LinearScaling():
            return plain / scaling.factor  # the same as dividing positions
        case Llama3Scaling():
            turns = scaling.original_context / (2 * math.pi / plain)
            kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
            return (1 - kept) * plain / scaling.factor + kept * plain
        case YarnScaling():
            first, last = _yarn_range(scaling, spec)
            pairs = torch.arange(spec.channels // 2, dtype=torch.float64, device=device)
            stretched = ((pairs - first) / (last - first)).clamp(0.0, 1.0)
            return stretched * plain / scaling.factor + (1 - stretched) * plain
        case LongScaling():
            # Asynchronous: the host does not wait for the device.
            factors = torch.tensor(scaling.factors(length), dtype=torch.float64).to(device, non_blocking=True)
            return plain / factors
        case _:
            return plain


def _yarn_range(scaling: YarnScaling, spec: RotarySpec) -> tuple[float, float]:
    """The pairs from which and up to which frequencies are mixed. A pair i turns context / (2 pi) x base^(-2i / r) times."""

    def pair_of(turns: float) -> float:
        return spec.channels / 2 * math.log(scaling.original_context / (2 * math.pi * turns)) / math.log(spec.base)

    first, last = pair_of(scaling.fast), pair_of(scaling.slow)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.channels - 1)
    return first, last + 0.001 if first == last else last


def rotary_table(positions: torch.Tensor, spec: RotarySpec, dtype: torch.dtype, length: int = 1) -> torch.Tensor:
    """The rotation at positions [s, b] of sequences of `length` tokens: [s, b, 1, 2, 2, r/2] in at least float32.

    For each pair it is the matrix that makes the turned pair of the pair: ((cos, -sin), (sin, cos)), times the spec's magnitude. So
    a rotation is one product and one sum whatever it turns, and the transpose goes back.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions.unsqueeze(-1).to(torch.float64) * frequencies(spec, positions.device, length)
    cos, sin = angles.cos(), angles.sin()
    if spec.magnitude != 1.0:
        cos, sin = cos * spec.magnitude, sin * spec.magnitude
    cos, sin = cos.to(wide), sin.to(wide)
    return torch.stack([cos, -sin, sin, cos], -2).unflatten(-2, (2, 2)).unsqueeze(2)


def turn(x: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, interleaved: bool = False) -> None:
    """Write the leading channels of x, turned, to those of `out`, which may be x.

    Args:
        x: [s, b, ..., d] with any number of dimensions of heads.
        table: [s, b, 1, 2, 2, r/2]; its transpose turns back.
        interleaved: whether neighbouring channels are a pair.
    """
    channels = 2 * table.shape[-1]
    pairs, turned = (_pairs(tensor[..., :channels], interleaved) for tensor in (x, out))
    while table.dim() < pairs.dim() + 1:
        table = table.unsqueeze(2)
    # Type promotion does both in the table's (wider) dtype, and only the result is rounded.
    products = pairs.unsqueeze(-3) * table
    torch.add(products[..., 0, :], products[..., 1, :], out=turned)


def _pairs(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """A view of channels [..., r] as pairs [..., 2, r/2]."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2) if interleaved else x.unflatten(-1, (2, -1))


class _Rotary(torch.autograd.Function):
    """Forward: rotate. Backward: rotate back. Keeps nothing but the table, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(table)
        ctx.interleaved = interleaved
        return _turned(x, table, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (table,) = ctx.saved_tensors
        return _turned(grad, table.transpose(-3, -2), ctx.interleaved), None, None


def _turned(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if (channels := 2 * table.shape[-1]) < x.shape[-1]:
        out[..., channels:] = x[..., channels:]
    turn(x, table, out, interleaved=interleaved)
    return out


def rotate(x: torch.Tensor, table: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the leading channels of each head: [s, b, ..., d] to the same."""
    return _traced(x, table, interleaved) if torch.compiler.is_compiling() else _Rotary.apply(x, table, interleaved)


def _traced(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The same in operations that a compiler fuses and differentiates: in the table's dtype, rounded once on each way."""
    while table.dim() < x.dim() + 2:
        table = table.unsqueeze(2)
    cos, sin = table[..., 0, 0, :], table[..., 1, 0, :]
    channels = 2 * cos.shape[-1]
    first, second = _pairs(x[..., :channels].to(table.dtype), interleaved).unbind(-2)
    turned = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    whole = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    # Without the check, an empty remainder would be concatenated: backward then goes through queries and keys a second time.
    return whole if channels == x.shape[-1] else torch.cat([whole, x[..., channels:]], -1)
