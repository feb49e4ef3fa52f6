"""Comparison of two tensors: whether they are equal, their first difference, and their largest difference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK_NUMEL = 1 << 20
"""Number of elements that are converted to float64 at a time."""


@dataclass(frozen=True)
class Element:
    """Element of two tensors that are compared: its index, and its value in the first and in the second tensor."""

    index: tuple[int, ...]
    first: float
    second: float


@dataclass(frozen=True)
class TensorDifference:
    """Result of comparing two tensors of the same shape that are not equal."""

    num_different: int
    """Number of elements in which the two tensors differ (NaN equals NaN)."""
    first_difference: Element
    """First element in which the two tensors differ, in row-major order."""
    max_difference: Element
    """Element with the largest absolute difference. The difference between NaN and a number counts as infinite."""
    max_abs_difference: float
    """Absolute difference of the two values of `max_difference`, the largest of all elements. Infinite if either value is
    infinite or NaN."""
    relative_norm: float
    """Euclidean norm of the difference of the two tensors, divided by the norm of the first tensor. Infinite if the norm of the
    first tensor is 0 or not finite, or if a difference is not finite."""


def compare_tensors(first: torch.Tensor, second: torch.Tensor) -> TensorDifference | None:
    """Compare the elements of two tensors, whose dtypes may differ. Returns None if all elements are equal; NaN equals NaN.

    Args:
        first: tensor of any shape, on the CPU.
        second: tensor of the same shape, on the CPU.
    """
    flat_first, flat_second = first.reshape(-1), second.reshape(-1)
    num_different, difference_sq_sum, first_sq_sum, max_difference = 0, 0.0, 0.0, -1.0
    first_index = max_index = -1
    for start in range(0, flat_first.numel(), _BLOCK_NUMEL):
        a, b = (_to_float64(flat[start : start + _BLOCK_NUMEL]) for flat in (flat_first, flat_second))
        first_sq_sum += float(a.double().square().sum())
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        count = int(unequal.sum())
        if not count:
            continue
        abs_difference = (a - b).double().abs().where(unequal, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
        if first_index < 0:
            first_index = start + int(unequal.int().argmax())
        offset = int(abs_difference.argmax())
        if float(abs_difference[offset]) > max_difference:
            max_difference, max_index = float(abs_difference[offset]), start + offset
        num_different += count
        difference_sq_sum += float(abs_difference.square().sum())
    if not num_different:
        return None
    relative = (difference_sq_sum / first_sq_sum) ** 0.5 if 0 < first_sq_sum < float("inf") else float("inf")
    elements = [
        Element(_unravel_index(offset, first.shape), float(flat_first[offset]), float(flat_second[offset]))
        for offset in (first_index, max_index)
    ]
    return TensorDifference(num_different, elements[0], elements[1], max_difference, relative)


def _to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a floating-point tensor to float64, so that differences of its elements are precise enough. Return an integer tensor
    unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _unravel_index(flat_index: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat_index, coordinate = divmod(flat_index, size)
        index.append(coordinate)
    return tuple(reversed(index))
