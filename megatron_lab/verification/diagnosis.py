"""Whether a run at a layout equals that of one process and, if not, what the cause is. Pure functions of what was observed.

One difference makes others: a wrong activation makes a wrong loss, that wrong gradients, those wrong weights, and these make all
the following steps wrong. So things are compared in the order in which one causes the next, and the first that differs is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lab.verification.comparison import Comparison, ComparisonRow, FindingKind, ProofFinding
from megatron_lab.verification.findings import (
    evaluation_findings,
    forward_findings,
    gradient_findings,
    loss_findings,
    mask_findings,
    norm_findings,
    overwritten_findings,
    start_findings,
    update_findings,
)
from megatron_lab.verification.observation import Observation
from megatron_lab.verification.wording import listing


@dataclass(frozen=True)
class Diagnosis:
    """The result of comparing two runs."""

    findings: tuple[ProofFinding, ...]
    """Differences in the order of cause: the first is the one to look at."""
    worst: ComparisonRow
    """The largest difference, measured by what is allowed."""
    rows: tuple[ComparisonRow, ...]
    """Every gradient and weight of every step, the worst first."""
    num_steps: int
    num_parameters: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.findings


def diagnose(observation: Observation) -> Diagnosis:
    """Compare both runs of an observation.

    Raises:
        ValueError: there is nothing to compare.
    """
    runs = Comparison(observation)
    if not runs.plain.steps or not observation.start:
        raise ValueError("a run without steps proves nothing")
    findings = [*start_findings(runs)]
    if all(finding.kind is FindingKind.INITIAL for finding in findings):  # both runs are then given the same weights
        findings += _step_findings(runs)
    rows = runs.tensors()
    worst = max([*runs.numbers(), *rows], key=lambda row: row.measured.excess)
    if not findings and worst.measured.differs:
        raise AssertionError(f"{worst.title} differs by {worst.measured.relative:.2e}, and nothing is found")
    return Diagnosis(tuple(findings), worst, tuple(rows), runs.num_steps, len(observation.start))


def _step_findings(runs: Comparison) -> list[ProofFinding]:
    """Differences in the first step that has any, and in the evaluations until then."""
    found: list[ProofFinding] = []
    agreed = 0
    for index in range(runs.num_steps):
        if index == 0:
            found += forward_findings(runs)
        found += loss_findings(runs, index, forward_agrees=not found)
        found += gradient_findings(runs, index)
        if not found:
            found += norm_findings(runs, index)
        if not found:
            found += update_findings(runs, index)
        found += overwritten_findings(runs, index)
        if found:
            break
        agreed = index + 1
    if not found and any(len(rank.steps) != len(runs.plain.steps) for rank in runs.ranks):
        counts = sorted({len(rank.steps) for rank in runs.ranks})
        text = f"ranks made {listing(counts)} steps, the reference {len(runs.plain.steps)}: the run does not end where it should"
        found.append(ProofFinding(FindingKind.UPDATE, agreed, "the run", text, math.inf))
    forward_agrees = not any(finding.kind in (FindingKind.FORWARD, FindingKind.LOSS) and agreed == 0 for finding in found)
    found += evaluation_findings(runs, agreed) if forward_agrees else ()
    return found or [*mask_findings(runs)]
