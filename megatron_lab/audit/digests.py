"""Digests of a tensor, computed where it is without a wait of the host: of its bits, and of its values up to rounding.

A digest of bits is a wrapping 64-bit sum of the tensor's words, each times an odd weight. One changed word always changes it, since
an odd weight times a difference is not 0. Other changes are missed once in about 2^63.

A sketch has four signed sums of all elements, with random signs, and the sum of squares. The mean square of the differences of two
sketches' signed sums is an unbiased estimate of the square of the tensors' distance (Alon, Matias and Szegedy 1996, section 2.2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from megatron.parallel.random import stable_seed

_ROW = 1 << 14
"""Words, or elements, in a row. Each of a row has a weight, and each row has a further weight."""
_ROWS_AT_ONCE = 64
_NUM_SIGNS = 4
_LEAST = 1e-3
"""Part of the norm of all gradients. One that is smaller, as that of a key's bias, is zero but for rounding."""


def bit_digest(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 scalar on the tensor's device: the same for the same bytes in the same order, at any address."""
    words = _words(tensor)
    count = -(-len(words) // _ROW)
    weights, row_weights = _weights(tensor.device), _row_weights(tensor.device, count.bit_length())
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    whole = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
    for start in range(0, len(whole), _ROWS_AT_ONCE):
        rows = (whole[start : start + _ROWS_AT_ONCE] * weights).sum(1)
        total += (rows * row_weights[start : start + len(rows)]).sum()
    rest = words[whole.numel() :]
    if len(rest):
        total += (rest * weights[: len(rest)]).sum() * row_weights[count - 1]
    return total


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """The sketch of a tensor of any floating-point dtype: float64 [5] on its device."""
    flat = tensor.detach().reshape(-1)
    total = torch.zeros(_NUM_SIGNS + 1, dtype=torch.float64, device=tensor.device)
    signs = _signs(_weights(tensor.device))
    row_signs = _signs(_row_weights(tensor.device, (-(-len(flat) // _ROW)).bit_length()))
    for number, start in enumerate(range(0, len(flat), _ROW * _ROWS_AT_ONCE)):
        block = flat[start : start + _ROW * _ROWS_AT_ONCE].to(torch.float64)
        whole = len(block) // _ROW
        sums = block[: whole * _ROW].view(whole, _ROW) @ signs
        first = number * _ROWS_AT_ONCE
        total[:_NUM_SIGNS] += (sums * row_signs[first : first + whole]).sum(0)
        rest = block[whole * _ROW :]
        if len(rest):
            total[:_NUM_SIGNS] += (rest @ signs[: len(rest)]) * row_signs[first + whole]
        total[_NUM_SIGNS] += torch.linalg.vector_norm(block).square()
    return total


@dataclass(frozen=True)
class Likeness:
    """How tensors that were computed twice are compared.

    Args:
        band: how far two may be apart, as a part of their norm; None where kernels give the same bits.
    """

    band: float | None = None

    def empty(self, rows: int, device: torch.device) -> torch.Tensor:
        """Room for the digests of so many tensors: [rows, 1], or [rows, 5] of sketches."""
        if self.band is None:
            return torch.zeros(rows, 1, dtype=torch.int64, device=device)
        return torch.zeros(rows, _NUM_SIGNS + 1, dtype=torch.float64, device=device)

    def digest(self, tensor: torch.Tensor) -> torch.Tensor:
        """One row."""
        return bit_digest(tensor) if self.band is None else sketch(tensor)

    def apart(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Which tensors differ, bool [rows], by the digests of both; the last row is the loss, which has no part in the norm of
        all."""
        if self.band is None:
            return (one != other).any(1)
        distance = (one - other)[:, :_NUM_SIGNS].square().mean(1).sqrt()
        norms = torch.maximum(one[:, _NUM_SIGNS], other[:, _NUM_SIGNS]).sqrt()
        least = _LEAST * torch.linalg.vector_norm(norms[:-1])
        sizes = torch.cat([norms[:-1].clamp(min=least), norms[-1:]])
        return (distance <= self.band * sizes).logical_not()  # so that NaN is apart


def rounding_band(dtype: torch.dtype) -> float:
    """How far the same gradient computed twice may be apart by the rounding of a model in this dtype, as a part of its norm."""
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return max(1e4 * wide, 4 * torch.finfo(dtype).eps)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as 64-bit words, padded with zeros."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-raw.numel() // 8) * 8)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """Weights of the words of a row: int64 [16384]."""
    return _odd_numbers(_ROW).to(device)


@functools.lru_cache(maxsize=64)
def _row_weights(device: torch.device, bits: int) -> torch.Tensor:
    """Weights of rows whose number has so many bits: int64 [2^bits]."""
    return _odd_numbers(1 << bits).to(device)


def _odd_numbers(count: int) -> torch.Tensor:
    """Fixed random odd numbers: int64 [count], in host memory. A longer list begins with a shorter one."""
    drawn = np.random.Generator(np.random.Philox(stable_seed("bits"))).bytes(8 * count)
    return torch.from_numpy(np.frombuffer(drawn, dtype=np.int64) | 1)


def _signs(numbers: torch.Tensor) -> torch.Tensor:
    """Signs by four of the bits of random numbers [n]: float64 [n, 4]."""
    bits = torch.stack([(numbers >> (32 + k)) & 1 for k in range(_NUM_SIGNS)], 1)
    return 1.0 - 2.0 * bits.to(torch.float64)
