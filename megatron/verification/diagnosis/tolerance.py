"""What is allowed between two right runs, and differences in parts. Needs no torch."""

from __future__ import annotations

import math

TOLERANCE = 1e-10
"""Relative, of tensors, losses and norms."""
ROUNDING = 1e-14
"""Error of a number that sums others as large as the global norm, in parts of that: what is much smaller than they are has lost the
digits below it, and agrees to no better."""
NEGLIGIBLE = 1e-12
"""A tensor whose reference is below this part of the global norm is rounding error (the true gradient of a key bias is zero): it is
compared absolutely at that scale."""


def relative(difference: float, scale: float) -> float:
    """A difference in parts of a scale: infinite where that is zero, or where anything is not finite."""
    if not math.isfinite(difference):
        return math.inf
    if not scale:
        return math.inf if difference else 0.0
    return abs(difference) / abs(scale)


def relative_words(difference: float, size: float) -> str:
    """A difference in parts of a reference of this norm, in words."""
    if not math.isfinite(difference):
        return "not finite"
    return f"relative difference {difference / size:.2e}" if size else f"difference {difference:.2e} from zero"


def short(ratio: float) -> str:
    """A factor in few digits, but as many as tell it from 1."""
    if 0 < abs(ratio - 1) < 1e-5:
        return f"{ratio:.12g}"
    return f"{ratio:.1f}" if math.isclose(ratio, round(ratio, 1), rel_tol=1e-5) else f"{ratio:.6g}"
