"""How far two tensors are apart, and what is telling about the difference: a constant factor, a few rows.

Tensors are compared by norm, not element by element: Adam divides small by small, so that single elements of two correct float64
runs differ by 1e-10 and more after a few steps, while tensor norms stay within 1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from megatron.verification.diagnosis.tolerance import NEGLIGIBLE, ROUNDING, TOLERANCE, relative, relative_words, short

_CONSTANT = 1e-6
"""What is left of a tensor, relative, when a constant factor has been taken out, for the factor to be one."""


@dataclass(frozen=True)
class Measured:
    """What lies between a tensor and its reference."""

    difference: float
    """Norm of the difference; infinite where the shapes are not the same."""
    size: float
    """Norm of the reference."""
    allowed: float
    """Of the difference."""
    scale: float
    """What the difference is told in parts of: the reference's norm, a small part of the global norm where that is more, or all of
    the global norm where the reference is negligible."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ratio: float | None = None
    """What the reference is to be multiplied by, where that is all that differs."""
    rows: tuple[int, ...] = ()
    """Rows that differ (indices of the first dimension), where not all do."""

    @property
    def differs(self) -> bool:
        """Whether the difference is more than rounding."""
        return not self.difference <= self.allowed  # so written, NaN differs

    @property
    def relative(self) -> float:
        """The difference in parts of the scale: infinite where that is zero, or where anything is not finite."""
        return relative(self.difference, self.scale)

    @property
    def relative_allowed(self) -> float:
        """What of `relative` is rounding."""
        return relative(self.allowed, self.scale)

    @property
    def excess(self) -> float:
        """Times what is allowed."""
        return self.difference / self.allowed if self.allowed and not math.isnan(self.difference) else math.inf

    def words(self) -> str:
        """What there is to say."""
        if self.shapes[0] != self.shapes[1]:
            return f"shape {list(self.shapes[0])}, reference {list(self.shapes[1])}"
        notes = [relative_words(self.difference, self.size)]
        notes += [] if self.ratio is None else [f"{short(self.ratio)}x the reference"]
        notes += [f"{rows_words(self.rows)} of {self.shapes[0][0]}"] if self.rows else []
        return "; ".join(notes)


def measure(
    actual: Tensor, reference: Tensor, *, global_norm: float = 0.0, tolerance: float = TOLERANCE, slack: float = 0.0
) -> Measured:
    """Compare a tensor with its reference.

    Args:
        global_norm: of all tensors of the kind together; its rounding is allowed, and what is negligible beside it is compared
            absolutely.
        tolerance: relative; with 0, rounding is not allowed either.
        slack: allowed besides, absolute.
    """
    shapes = tuple(actual.shape), tuple(reference.shape)
    a, b = actual.detach().double().cpu(), reference.detach().double().cpu()
    size, negligible = norm(b), NEGLIGIBLE * global_norm
    scale = max(size, ROUNDING / tolerance * global_norm) if tolerance else size
    allowed, scale = (tolerance * scale, scale) if size >= negligible else (negligible, global_norm)
    allowed += slack
    if shapes[0] != shapes[1]:
        return Measured(math.inf, size, allowed, scale, shapes)
    found = Measured(norm(a - b), size, allowed, scale, shapes)
    if not found.differs:
        return found
    return Measured(found.difference, size, allowed, scale, shapes, constant_ratio(a, b), differing_rows(a, b, allowed))


def joint_norm(tensors: Iterable[Tensor]) -> float:
    """Norm of all elements together."""
    return math.hypot(*(norm(tensor) for tensor in tensors))


def norm(tensor: Tensor) -> float:
    """Square root of the sum of squares, summed in float64."""
    return tensor.detach().double().square().sum().sqrt().item()


def constant_ratio(a: Tensor, b: Tensor) -> float | None:
    """The number that b is to be multiplied by to give a, if there is one and it is not 1: the sign of a wrong scale, of a sum that
    was forgotten or one made twice."""
    if not a.isfinite().all() or not (square := b.square().sum().item()):
        return None
    ratio = (a * b).sum().item() / square
    constant = norm(a - ratio * b) <= _CONSTANT * norm(a)
    return ratio if constant and abs(ratio - 1) > _CONSTANT else None


def differing_rows(a: Tensor, b: Tensor, allowed: float) -> tuple[int, ...]:
    """Which rows differ, where not all do: the sign of a wrong slice."""
    if a.dim() == 0 or len(a) < 2:
        return ()
    rows = (a - b).flatten(1).norm(dim=1) if a.dim() > 1 else (a - b).abs()
    bad = (~(rows <= allowed / math.sqrt(len(rows)))).nonzero().flatten().tolist()
    return tuple(bad) if len(bad) < len(rows) else ()


def rows_words(rows: tuple[int, ...]) -> str:
    """`rows 4 to 7`, or how many from where on."""
    if len(rows) > 1 and rows[-1] - rows[0] == len(rows) - 1:
        return f"rows {rows[0]} to {rows[-1]}"
    return f"{len(rows)} rows from {rows[0]} on"
