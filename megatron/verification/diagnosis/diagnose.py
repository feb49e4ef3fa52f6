"""Whether a run at a layout is that of one process and, where it is not, what the cause is. Functions of what was observed alone.

One difference makes others: a wrong activation makes a wrong loss, that wrong gradients, those wrong weights, and all of the steps
that follow. So things are looked at in the order in which one is the cause of the next, and the first that differs is what is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.verification.diagnosis.comparison import Comparison, Row
from megatron.verification.diagnosis.finding import Finding, Kind
from megatron.verification.diagnosis.forward import forward_findings, loss_findings
from megatron.verification.diagnosis.gradients import gradient_findings
from megatron.verification.diagnosis.places import listing
from megatron.verification.diagnosis.start import start_findings
from megatron.verification.diagnosis.tolerance import TOLERANCE
from megatron.verification.diagnosis.update import evaluation_findings, norm_findings, overwritten_findings, update_findings
from megatron.verification.observing.observation import Observation


@dataclass(frozen=True)
class Worst:
    """The relative difference that is largest, measured by what is allowed."""

    relative: float
    allowed: float
    what: str
    """Of what: `loss of step 2`, `gradient of layers.0.mlp.up.weight in step 1`."""


@dataclass(frozen=True)
class Diagnosis:
    """What the comparison of two runs gives."""

    findings: tuple[Finding, ...]
    """In the order of cause: the first is what to look at."""
    worst: Worst
    rows: tuple[Row, ...]
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
    if all(finding.kind is Kind.INITIAL for finding in findings):  # both runs are then given the same weights
        findings += _step_findings(runs)
    rows = runs.rows()
    found = Diagnosis(tuple(findings), _worst(runs, rows), tuple(rows), runs.num_steps, len(observation.start))
    if found.equal and not found.worst.relative <= found.worst.allowed:
        raise AssertionError(f"{found.worst.what} differs by {found.worst.relative:.2e}, and nothing is found")
    return found


def _step_findings(runs: Comparison) -> list[Finding]:
    """Of the first step in which anything differs, and of evaluations until then."""
    found: list[Finding] = []
    agreed = 0
    for index in range(runs.num_steps):
        if index == 0:
            found += forward_findings(runs)
        found += loss_findings(runs, index)
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
        found.append(Finding(Kind.UPDATE, agreed, "the run", text, math.inf))
    forward_agrees = not any(finding.kind in (Kind.FORWARD, Kind.LOSS) and agreed == 0 for finding in found)
    return [*found, *(evaluation_findings(runs, agreed) if forward_agrees else ())]


def _worst(runs: Comparison, rows: list[Row]) -> Worst:
    """Over numbers and tensors, measured by what is allowed."""
    told = [
        Worst(far, TOLERANCE, f"{what} {'of step ' + str(step) if step else 'before step 1'}") for step, what, far in runs.numbers()
    ]
    for row in rows:
        told.append(Worst(row.measured.relative, row.measured.relative_allowed, f"{row.what} of {row.name} in step {row.step}"))
    return max(told, key=lambda worst: worst.relative / worst.allowed if worst.allowed else worst.relative)
