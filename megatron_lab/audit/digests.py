"""Digests: short summaries of tensors, by which ranks compare large tensors. They are computed on the tensor's device without a
wait of the host. There are two types: a bit digest detects any changed bit, and a sketch compares up to rounding.

A bit digest is a wrapping 64-bit sum of the tensor's 64-bit integers, each multiplied by an odd weight. A single changed integer
always changes the digest, because the product of an odd weight and a nonzero difference is not 0. Other changes are missed with a
probability of about 2^-63.

A sketch consists of four sums of all elements with random signs, and the sum of squares. The mean squared difference of the signed
sums of two sketches is an unbiased estimate of the squared distance of the tensors (Alon, Matias and Szegedy 1996, section 2.2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from megatron.parallel.random import compute_stable_seed

_ROW_LENGTH = 1 << 14
"""Integers or elements per row. Each position of a row has a weight, and each row has another weight."""
_ROWS_PER_BLOCK = 64
_NUM_SIGNS = 4
_MIN_RELATIVE_NORM = 1e-3
"""Smallest norm that counts as different from zero, relative to the norm of all gradients. Gradients below it, such as that of
a key bias, are zero except for rounding."""


def compute_bit_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a 64-bit hash of a tensor's bytes: an int64 scalar on the tensor's device. Tensors with equal bytes in equal order
    have equal hashes, wherever they are in memory."""
    integers = _view_as_int64(tensor)
    num_rows = -(-len(integers) // _ROW_LENGTH)
    weights, row_weights = _get_weights(tensor.device), _get_row_weights(tensor.device, num_rows.bit_length())
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    full_rows = integers[: len(integers) // _ROW_LENGTH * _ROW_LENGTH].view(-1, _ROW_LENGTH)
    for start in range(0, len(full_rows), _ROWS_PER_BLOCK):
        rows = (full_rows[start : start + _ROWS_PER_BLOCK] * weights).sum(1)
        total += (rows * row_weights[start : start + len(rows)]).sum()
    remainder = integers[full_rows.numel() :]
    if len(remainder):
        total += (remainder * weights[: len(remainder)]).sum() * row_weights[num_rows - 1]
    return total


def compute_sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the sketch of a tensor: four sums of all elements, each with other random signs, and the sum of squares. The distance
    of two tensors can be estimated from their sketches.

    Args:
        tensor: tensor of any shape and floating-point dtype.

    Returns:
        float64 [5] on the tensor's device. The sum of squares is the last element.
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros(_NUM_SIGNS + 1, dtype=torch.float64, device=tensor.device)
    signs = _get_signs(_get_weights(tensor.device))
    row_signs = _get_signs(_get_row_weights(tensor.device, (-(-len(flat) // _ROW_LENGTH)).bit_length()))
    for block_index, start in enumerate(range(0, len(flat), _ROW_LENGTH * _ROWS_PER_BLOCK)):
        block = flat[start : start + _ROW_LENGTH * _ROWS_PER_BLOCK].to(torch.float64)
        num_full_rows = len(block) // _ROW_LENGTH
        row_sums = block[: num_full_rows * _ROW_LENGTH].view(num_full_rows, _ROW_LENGTH) @ signs
        first_row = block_index * _ROWS_PER_BLOCK
        total[:_NUM_SIGNS] += (row_sums * row_signs[first_row : first_row + num_full_rows]).sum(0)
        remainder = block[num_full_rows * _ROW_LENGTH :]
        if len(remainder):
            total[:_NUM_SIGNS] += (remainder @ signs[: len(remainder)]) * row_signs[first_row + num_full_rows]
        total[_NUM_SIGNS] += torch.linalg.vector_norm(block).square()
    return total


@dataclass(frozen=True)
class DigestComparer:
    """Computes and compares digests of tensors that should be equal, because two ranks or two forward-backward passes have computed
    the same.

    A digest is either a hash of the tensor's bits, or a sketch: five sums from which the distance of two tensors is estimated.

    Args:
        tolerance: largest distance of two tensors that counts as rounding, relative to the norm of the tensor. None compares hashes
            of the bits instead of sketches, which requires deterministic kernels.
    """

    tolerance: float | None = None

    def allocate_digests(self, rows: int, device: torch.device) -> torch.Tensor:
        """Allocate the digests of `rows` tensors, filled with zeros: int64 [rows, 1] for hashes of the bits, float64 [rows, 5] for
        sketches (four signed sums of the elements and the sum of squares, which are compared up to rounding)."""
        if self.tolerance is None:
            return torch.zeros(rows, 1, dtype=torch.int64, device=device)
        return torch.zeros(rows, _NUM_SIGNS + 1, dtype=torch.float64, device=device)

    def compute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute the digest of one tensor: a hash of its bits (int64 scalar), or a sketch for a comparison up to rounding (float64
        [5]: four signed sums of the elements and the sum of squares)."""
        return compute_bit_digest(tensor) if self.tolerance is None else compute_sketch(tensor)

    def find_differences(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Compare the digests that two computations gave, row by row. Return which rows differ: bool [rows].

        Each row is the digest of one parameter's gradient. The last row is the digest of the loss. For sketches, the tolerance is
        relative to the norm of the row's gradient, or to `_MIN_RELATIVE_NORM` times the norm of all gradients if that is larger.

        Args:
            a: digests of the first computation: int64 [rows, 1] (hashes of the bits) or float64 [rows, 5] (sketches).
            b: digests of the second computation, of the same shape.
        """
        if self.tolerance is None:
            return (a != b).any(1)
        distance = (a - b)[:, :_NUM_SIGNS].square().mean(1).sqrt()
        norms = torch.maximum(a[:, _NUM_SIGNS], b[:, _NUM_SIGNS]).sqrt()
        min_norm = _MIN_RELATIVE_NORM * torch.linalg.vector_norm(norms[:-1])
        scales = torch.cat([norms[:-1].clamp(min=min_norm), norms[-1:]])
        return (distance <= self.tolerance * scales).logical_not()  # NaN counts as a difference


def get_rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference that rounding can cause between two computations of the same gradient, relative to the norm of
    the gradient. `dtype` is the dtype of the model."""
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return max(1e4 * eps, 4 * torch.finfo(dtype).eps)


def _view_as_int64(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a tensor as 64-bit integers, of which a bit digest is computed. The bytes are padded with zeros to a
    multiple of 8."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-raw.numel() // 8) * 8)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)


@functools.lru_cache(maxsize=8)
def _get_weights(device: torch.device) -> torch.Tensor:
    """Return a random odd integer for each position within a row: int64 [16384]. Digests view a flattened tensor as rows of 16384
    values: 64-bit integers for a bit digest, elements for a sketch. A bit digest multiplies the values by these random integers. A
    sketch derives signs from them."""
    return _draw_odd_integers(_ROW_LENGTH).to(device)


@functools.lru_cache(maxsize=64)
def _get_row_weights(device: torch.device, bits: int) -> torch.Tensor:
    """Return a random odd integer for each row of 16384 values of a flattened tensor: int64 [2^bits]. A bit digest multiplies the
    sums of the rows by these integers. A sketch derives signs from them.

    `bits` is the bit length of the number of rows. Tensors of similar size thus share one cached result.
    """
    return _draw_odd_integers(1 << bits).to(device)


def _draw_odd_integers(count: int) -> torch.Tensor:
    """Draw the random odd integers that digests use as weights and as a source of signs: int64 [count], in host memory. The seed is
    always the same, so a longer tensor starts with the values of a shorter tensor."""
    data = np.random.Generator(np.random.Philox(compute_stable_seed("bits"))).bytes(8 * count)
    return torch.from_numpy(np.frombuffer(data, dtype=np.int64) | 1)


def _get_signs(integers: torch.Tensor) -> torch.Tensor:
    """Convert each random integer to four random signs: int64 [n] to float64 [n, 4] with elements 1 and -1. The signs are four bits
    of the integer. A sketch of a tensor contains four sums of its elements, each with other signs."""
    bits = torch.stack([(integers >> (32 + k)) & 1 for k in range(_NUM_SIGNS)], 1)
    return 1.0 - 2.0 * bits.to(torch.float64)
