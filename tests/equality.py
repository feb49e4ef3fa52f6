"""What "equal" means between a run at some layout and the float64 reference, and a message that helps where they are not.

Tensors are compared by norm, not element by element: Adam divides small by small, so that single elements of two correct float64
runs differ by 1e-10 and more after a few steps, while tensor norms stay within 1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.training import ReferenceRun

TOLERANCE = 1e-10
"""Relative, of tensors, losses and norms."""
NEGLIGIBLE = 1e-12
"""A tensor whose reference is below this part of the global norm is rounding error (the true gradient of a key bias is zero): it is
compared absolutely at that scale."""
LISTED = 10
"""Lines of a message."""


def assert_equal_runs(actual: ReferenceRun, reference: ReferenceRun, tolerance: float = TOLERANCE) -> None:
    """Losses, gradient norms, first gradients and final weights of two runs are equal.

    Raises:
        AssertionError: they are not; says of every part what differs most.
    """
    assert reference.losses, "a run without steps proves nothing"
    problems: list[str] = []
    for what in ("losses", "grad_norms"):
        problems += number_differences(what, getattr(actual, what), getattr(reference, what), tolerance)
    for what in ("first_gradients", "weights_after"):
        problems += tensor_differences(what, getattr(actual, what), getattr(reference, what), tolerance)
    assert not problems, "\n".join(problems)


def assert_equal_tensors(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float = TOLERANCE, what: str = "tensors"
) -> None:
    """Two sets of named tensors are equal.

    Raises:
        AssertionError: they are not; lists the tensors that differ most.
    """
    problems = tensor_differences(what, actual, reference, tolerance)
    assert not problems, "\n".join(problems)


def assert_same_bits(actual: ReferenceRun, expected: ReferenceRun) -> None:
    """Losses, gradient norms, first gradients and final weights of two runs are the same, bit for bit.

    Raises:
        AssertionError: they are not; names what differs.
    """
    differing = [what for what in ("losses", "grad_norms") if getattr(actual, what) != getattr(expected, what)]
    for what in ("first_gradients", "weights_after"):
        found, wanted = getattr(actual, what), getattr(expected, what)
        assert found.keys() == wanted.keys() and wanted
        differing += [f"{what}: {name}" for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not differing, f"not the same bits: {', '.join(differing[:LISTED])}{', ...' if len(differing) > LISTED else ''}"


def number_differences(what: str, actual: Sequence[float], reference: Sequence[float], tolerance: float) -> list[str]:
    """Lines that say where two lists of numbers, one a step, differ; none if they are equal."""
    if len(actual) != len(reference):
        return [f"{what}: {len(actual)} steps, the reference has {len(reference)}"]
    lines = [
        f"  step {step}: {a!r}, reference {b!r} ({_relative(abs(a - b), abs(b))})"
        for step, (a, b) in enumerate(zip(actual, reference, strict=True), start=1)
        if not abs(a - b) <= tolerance * abs(b)  # so written, NaN differs
    ]
    return [f"{what} differ in {len(lines)} of {len(reference)} steps:", *lines[:LISTED]] if lines else []


@dataclass(frozen=True)
class _Difference:
    name: str
    excess: float
    """Times what is allowed."""
    text: str


def tensor_differences(what: str, actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """Lines that say which of two sets of named tensors differ, the worst first; none if they are equal."""
    lines = []
    if missing := sorted(set(reference) - set(actual)):
        lines.append(f"{what}: missing {', '.join(missing)}")
    if unknown := sorted(set(actual) - set(reference)):
        lines.append(f"{what}: not in the reference {', '.join(unknown)}")
    global_norm = math.hypot(*(_norm(tensor) for tensor in reference.values()))
    common = [name for name in reference if name in actual]
    found = [_compare(name, actual[name], reference[name], tolerance, NEGLIGIBLE * global_norm) for name in common]
    differing = sorted((d for d in found if d is not None), key=lambda d: d.excess, reverse=True)
    if differing:
        lines.append(f"{what} differ in {len(differing)} of {len(common)} tensors, the worst first:")
        width = max(len(d.name) for d in differing[:LISTED])
        lines += [f"  {d.name:{width}}  {d.text}" for d in differing[:LISTED]]
        if equal := [name for name in common if name not in {d.name for d in differing}]:
            lines.append(f"  equal: {', '.join(equal[:LISTED])}{', ...' if len(equal) > LISTED else ''}")
    return lines


def _compare(name: str, actual: Tensor, reference: Tensor, tolerance: float, negligible: float) -> _Difference | None:
    """None if equal."""
    if actual.shape != reference.shape:
        return _Difference(name, math.inf, f"shape {list(actual.shape)}, reference {list(reference.shape)}")
    a, b = actual.detach().double().cpu(), reference.detach().double().cpu()
    difference, size = _norm(a - b), _norm(b)
    allowed = tolerance * size if size >= negligible else negligible
    if difference <= allowed:
        return None
    excess = difference / allowed if allowed and not math.isnan(difference) else math.inf
    notes = [_relative(difference, size), _ratio(a, b), _rows(a, b, allowed)]
    return _Difference(name, excess, "; ".join(note for note in notes if note))


def _relative(difference: float, size: float) -> str:
    if not math.isfinite(difference):
        return "not finite"
    return f"relative difference {difference / size:.2e}" if size else f"difference {difference:.2e} from zero"


def _ratio(a: Tensor, b: Tensor) -> str:
    """Says so when a is b times a number: the sign of a wrong scale, a sum that was forgotten or one made twice."""
    if not a.isfinite().all() or not (square := b.square().sum().item()):
        return ""
    ratio = (a * b).sum().item() / square
    constant = _norm(a - ratio * b) <= 1e-6 * _norm(b)
    return f"{_short(ratio)}x the reference" if constant and abs(ratio - 1) > 1e-6 else ""


def _short(ratio: float) -> str:
    return f"{ratio:.1f}" if math.isclose(ratio, round(ratio, 1), rel_tol=1e-5) else f"{ratio:.6g}"


def _rows(a: Tensor, b: Tensor, allowed: float) -> str:
    """Which rows differ, where not all do: the sign of a wrong slice."""
    if a.dim() == 0 or len(a) < 2:
        return ""
    rows = (a - b).flatten(1).norm(dim=1) if a.dim() > 1 else (a - b).abs()
    bad = (~(rows <= allowed / math.sqrt(len(rows)))).nonzero().flatten().tolist()
    if not bad or len(bad) == len(rows):
        return ""
    where = (
        f"rows {bad[0]} to {bad[-1]}" if len(bad) > 1 and bad[-1] - bad[0] == len(bad) - 1 else f"{len(bad)} rows from {bad[0]} on"
    )
    return f"{where} of {len(rows)}"


def _norm(tensor: Tensor) -> float:
    return tensor.detach().double().square().sum().sqrt().item()
