"""Compares two tensors: whether they are the same, where they first differ, and where most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_AT_ONCE = 1 << 20
"""Elements that are widened to float64 at once."""


@dataclass(frozen=True)
class Element:
    """One element of each tensor."""

    index: tuple[int, ...]
    first: float
    second: float


@dataclass(frozen=True)
class TensorDifference:
    """How two tensors of one shape differ."""

    differing: int
    """Elements that are not equal (NaN equals NaN)."""
    first: Element
    """The first of them, row-major."""
    largest: Element
    """The one with the largest absolute difference; NaN against a number counts as infinite."""
    absolute: float
    """That difference."""
    relative: float
    """Norm of the difference over the norm of the first tensor; infinite where that is 0 or a difference is not finite."""


def difference(first: torch.Tensor, second: torch.Tensor) -> TensorDifference | None:
    """Compare by value; dtypes may differ. None if all elements are equal.

    Args:
        first: any shape, on the CPU.
        second: the same shape.
    """
    flat_first, flat_second = first.reshape(-1), second.reshape(-1)
    differing, square, reference, largest = 0, 0.0, 0.0, -1.0
    first_at = largest_at = -1
    for start in range(0, flat_first.numel(), _AT_ONCE):
        a, b = (_wide(flat[start : start + _AT_ONCE]) for flat in (flat_first, flat_second))
        reference += float(a.double().square().sum())
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        count = int(unequal.sum())
        if not count:
            continue
        gap = (a - b).double().abs().where(unequal, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
        if first_at < 0:
            first_at = start + int(unequal.int().argmax())
        at = int(gap.argmax())
        if float(gap[at]) > largest:
            largest, largest_at = float(gap[at]), start + at
        differing += count
        square += float(gap.square().sum())
    if not differing:
        return None
    relative = (square / reference) ** 0.5 if 0 < reference < float("inf") else float("inf")
    elements = [Element(_index(at, first.shape), float(flat_first[at]), float(flat_second[at])) for at in (first_at, largest_at)]
    return TensorDifference(differing, elements[0], elements[1], largest, relative)


def _wide(part: torch.Tensor) -> torch.Tensor:
    """In a dtype in which differences are exact enough: float64, and integers as they are."""
    return part.double() if part.is_floating_point() else part


def _index(at: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        at, inside = divmod(at, size)
        index.append(inside)
    return tuple(reversed(index))
