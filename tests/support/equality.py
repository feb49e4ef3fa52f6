"""What "equal" means between a run at some layout and the float64 reference, and a message that helps where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_lab.verification.difference_text import TOLERANCE, format_relative_difference
from megatron_lab.verification.gathered_tensors import compute_joint_norm, measure_difference
from tests.support.reference_runs import ReferenceRun

LISTED = 10
"""Lines of a message."""


def assert_equal_runs(actual: ReferenceRun, reference: ReferenceRun) -> None:
    """Losses, gradient norms, first gradients and final weights of two runs are equal.

    Raises:
        AssertionError: they are not; says of every part what differs most.
    """
    assert reference.losses, "a run without steps proves nothing"
    problems: list[str] = []
    for what in ("losses", "grad_norms"):
        problems += number_differences(what, getattr(actual, what), getattr(reference, what), TOLERANCE)
    for what in ("first_gradients", "weights_after"):
        problems += tensor_differences(what, getattr(actual, what), getattr(reference, what), TOLERANCE)
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
        f"  step {step}: {a!r}, reference {b!r} ({format_relative_difference(abs(a - b), abs(b))})"
        for step, (a, b) in enumerate(zip(actual, reference, strict=True), start=1)
        if not abs(a - b) <= tolerance * abs(b)  # so written, NaN differs
    ]
    return [f"{what} differ in {len(lines)} of {len(reference)} steps:", *lines[:LISTED]] if lines else []


def tensor_differences(what: str, actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """Lines that say which of two sets of named tensors differ, the worst first; none if they are equal."""
    lines = []
    if missing := sorted(set(reference) - set(actual)):
        lines.append(f"{what}: missing {', '.join(missing)}")
    if unknown := sorted(set(actual) - set(reference)):
        lines.append(f"{what}: not in the reference {', '.join(unknown)}")
    total = compute_joint_norm(reference.values())
    common = [name for name in reference if name in actual]
    found = {name: measure_difference(actual[name], reference[name], global_norm=total, tolerance=tolerance) for name in common}
    differing = sorted((name for name in common if found[name].differs), key=lambda name: found[name].excess, reverse=True)
    if differing:
        lines.append(f"{what} differ in {len(differing)} of {len(common)} tensors, the worst first:")
        width = max(len(name) for name in differing[:LISTED])
        lines += [f"  {name:{width}}  {found[name].describe()}" for name in differing[:LISTED]]
        if equal := [name for name in common if not found[name].differs]:
            lines.append(f"  equal: {', '.join(equal[:LISTED])}{', ...' if len(equal) > LISTED else ''}")
    return lines
