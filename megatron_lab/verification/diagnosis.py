"""Decide whether a parallel run equals the reference run, and find the cause if it does not. All functions are pure: they read only
the recorded values of both runs.

A difference causes others: a wrong activation makes the loss wrong, and with it the gradients, the weights and all later steps. So
quantities are compared in causal order, and the first that differs is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lab.verification.comparison import Comparison, ComparisonRow, FindingType, ProofFinding
from megatron_lab.verification.difference_text import format_integers
from megatron_lab.verification.findings import (
    check_dropout_masks,
    check_evaluations,
    check_forward,
    check_grad_norm,
    check_gradients,
    check_loss,
    check_overwritten,
    check_start,
    check_update,
)
from megatron_lab.verification.observation import Observation


@dataclass(frozen=True)
class Diagnosis:
    """Verdict on a parallel run: its differences from the reference run, with their causes."""

    findings: tuple[ProofFinding, ...]
    """Differences in causal order. The first may be the cause of all others."""
    worst: ComparisonRow
    """Tensor or scalar with the largest difference relative to its tolerance."""
    rows: tuple[ComparisonRow, ...]
    """A table row for every gradient and weight of every step, largest difference relative to its tolerance first. Rows of the
    first step with a difference precede all others."""
    num_steps: int
    num_parameters: int

    @property
    def equal(self) -> bool:
        """Whether the parallel run equals the reference run up to rounding."""
        return not self.findings


def diagnose(observation: Observation) -> Diagnosis:
    """Compare the parallel run with the reference run, and find the causes of differences.

    Args:
        observation: recorded values of both runs.

    Raises:
        ValueError: a run has no steps or no weights, so there is nothing to compare.
        AssertionError: a tensor or scalar differs, but none of the checks reports a difference.
    """
    comparison = Comparison(observation)
    if not comparison.reference.steps or not observation.start:
        raise ValueError(
            "there is nothing to compare: the run has no training steps, or the model has no weights. Raise --train-iters or "
            "--train-samples, or remove --iterations-to-skip"
        )
    findings = [*check_start(comparison)]
    if all(finding.kind is FindingType.INITIAL for finding in findings):  # then both runs load the same start weights
        findings += _check_steps(comparison)
    rows = comparison.build_tensor_rows()
    worst = max([*comparison.build_scalar_rows(), *rows], key=lambda row: row.difference.excess)
    if not findings and worst.difference.differs:
        raise AssertionError(
            f"internal error: the {worst.title} has a relative difference of {worst.difference.relative:.2e} from the reference "
            "run, but none of the checks in megatron_lab/verification/findings.py reports it. Please report this"
        )
    return Diagnosis(tuple(findings), worst, tuple(rows), comparison.num_steps, len(observation.start))


def _check_steps(comparison: Comparison) -> list[ProofFinding]:
    """Check the steps in order up to the first that differs from the reference run, and the evaluations before that step. Return
    the differences."""
    findings: list[ProofFinding] = []
    num_agreeing_steps = 0
    for index in range(comparison.num_steps):
        if index == 0:
            findings += check_forward(comparison)
        findings += check_loss(comparison, index, forward_agrees=not findings)
        findings += check_gradients(comparison, index)
        if not findings:
            findings += check_grad_norm(comparison, index)
        if not findings:
            findings += check_update(comparison, index)
        findings += check_overwritten(comparison, index)
        if findings:
            break
        num_agreeing_steps = index + 1
    if not findings and any(len(rank.steps) != len(comparison.reference.steps) for rank in comparison.ranks):
        counts = sorted({len(rank.steps) for rank in comparison.ranks})
        text = (
            f"ranks made {format_integers(counts)} steps, the reference {len(comparison.reference.steps)}: "
            "the run does not end where it should"
        )
        findings.append(ProofFinding(FindingType.UPDATE, num_agreeing_steps, "the run", text, math.inf))
    forward_agrees = not any(
        finding.kind in (FindingType.FORWARD, FindingType.LOSS) and num_agreeing_steps == 0 for finding in findings
    )
    findings += check_evaluations(comparison, num_agreeing_steps) if forward_agrees else ()
    return findings or [*check_dropout_masks(comparison)]
