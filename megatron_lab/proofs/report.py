"""Report of a proof that a layout trains as one process does, as text and as JSON. First comes the verdict, then where and why the
layout's run differs from the reference run, then tables."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lab.verification.comparison import ComparisonRow, ProofFinding
from megatron_lab.verification.diagnosis import Diagnosis
from megatron_lab.verification.difference_text import TOLERANCE, format_factor

NUM_ROWS = 8
"""Rows of the table, if a run differs."""
NUM_ROWS_IF_EQUAL = 3
"""Rows of the table, if a run is equal."""
NUM_FURTHER_FINDINGS = 6
"""Maximum number of findings that are shown besides the first."""
NUM_TRACEBACK_LINES = 60
"""Maximum number of lines that are shown of an error."""
WIDTH = 120
"""Width of the report in characters."""
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit|Warning)\b")


@dataclass(frozen=True)
class Proof:
    """Result of one small run of the layout: its comparison with the reference run in one process, or the error with which it
    failed."""

    title: str
    """Layout of the run, such as `tensor 2 x pipeline 2 x data 2`."""
    diagnosis: Diagnosis | None
    failure: str = ""
    """Error message of a run that failed and so could not be compared; otherwise empty."""
    layout_findings: Sequence[ProofFinding] = ()
    """Errors in the assignment of layers to stages, found before the run. They are shown if the run could not be compared."""
    preserved: Sequence[str] = ()
    """Lines of the report, each about settings that are equal in the small run and in the user's run."""
    reduced: Sequence[str] = ()
    """Lines of the report, each about settings that were reduced or replaced in the small run."""
    isolation: Sequence[str] = ()
    """Lines of the report that say which settings must be on for the layout's run to differ from the reference run."""
    seconds: float = 0.0
    trace: Sequence[str] = ()
    """Lines of the report about the comparison with the trace file of an earlier run."""
    differs_from_trace: bool = False
    """Whether the run differs by more than rounding from the trace file of an earlier run."""

    @property
    def equal(self) -> bool:
        """Whether the layout's run equals the reference run up to rounding."""
        return self.diagnosis is not None and self.diagnosis.equal

    @property
    def findings(self) -> Sequence[ProofFinding]:
        """Differences from the reference run in causal order: a difference comes before those that it causes."""
        return self.layout_findings if self.diagnosis is None else self.diagnosis.findings


def format_report(proofs: Sequence[Proof]) -> list[str]:
    """Format the results of all small runs as the lines of the text report."""
    lines = [_format_verdict(proofs)]
    common_preserved, common_reduced = (
        _find_common_lines([getattr(proof, field) for proof in proofs]) for field in ("preserved", "reduced")
    )
    for proof in proofs:
        lines.append("")
        if len(proofs) > 1:
            lines.append(f"{proof.title}: {'equal' if proof.equal else 'DIFFERENT' if proof.findings else 'FAILS'}")
        lines += _format_body(proof)
        run_lines = (
            [line for line in proof.preserved if line not in common_preserved],
            [line for line in proof.reduced if line not in common_reduced],
        )
        lines += [*_format_setting_lines(*run_lines), f"took {proof.seconds:.1f} s"]
    if common_preserved or common_reduced:
        lines += [
            "",
            *(["in all of these layouts"] if len(proofs) > 1 else []),
            *_format_setting_lines(common_preserved, common_reduced),
        ]
    return lines


def build_report_json(proofs: Sequence[Proof]) -> dict[str, Any]:
    """Build the JSON report of all small runs, as a dict of JSON types. Numbers that are not finite become null."""
    equal = all(proof.equal and not proof.differs_from_trace for proof in proofs)
    return {"equal": equal, "tolerance": TOLERANCE, "runs": [_build_proof_json(proof) for proof in proofs]}


def _format_verdict(proofs: Sequence[Proof]) -> str:
    for proof in proofs:
        if proof.equal and proof.differs_from_trace:
            return f"EQUAL to one process, but not to the trace: {proof.title}: {proof.trace[0]}"
        if proof.findings:
            return f"DIFFERENT from one process: {proof.title}: {proof.findings[0].format()}"
        if proof.diagnosis is None:
            return f"FAILS: {proof.title} does not run to its end: {_find_error_line(proof.failure)}"
    diagnoses = [proof.diagnosis for proof in proofs if proof.diagnosis]
    worst = max((diagnosis.worst.difference for diagnosis in diagnoses), key=lambda difference: difference.excess)
    title = f"{proofs[0].title}" if len(proofs) == 1 else f"{len(proofs)} layouts ({'; '.join(proof.title for proof in proofs)})"
    steps = f"{diagnoses[0].num_steps} step{'s' * (diagnoses[0].num_steps > 1)}"
    return (
        f"EQUAL to one process: {title}: loss, {diagnoses[0].num_parameters} gradients and weights of {steps}; "
        f"largest relative difference {worst.relative:.1e}, allowed {worst.relative_allowed:.0e}"
    )


def _find_error_line(failure: str) -> str:
    """Find the most informative line of a run's error message: the error of the rank that failed first. If no rank failed, return
    the line about the ranks that did not finish."""
    lines = failure.strip().split("\n\n")[0].splitlines()
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])


def _format_body(proof: Proof) -> Iterator[str]:
    if proof.findings:
        yield from _format_findings(proof.findings)
    if proof.diagnosis is None:
        lines = proof.failure.strip().splitlines()
        yield from lines[:NUM_TRACEBACK_LINES]
        if len(lines) > NUM_TRACEBACK_LINES:
            yield f"... and {len(lines) - NUM_TRACEBACK_LINES} more lines of the other ranks"
    else:
        worst = proof.diagnosis.worst
        allowed = f"{worst.difference.relative_allowed:.0e}"
        yield f"largest relative difference  {_format_relative(worst.difference.relative)}  ({worst.title}; allowed {allowed})"
    if proof.isolation:
        yield "comes and goes with these settings"
        yield from (f"  {line}" for line in proof.isolation)
    if proof.diagnosis is not None:
        yield from _format_table(proof.diagnosis.rows[: NUM_ROWS_IF_EQUAL if proof.equal else NUM_ROWS])
    if proof.trace:
        yield "against the trace"
        yield from (f"  {line}" for line in proof.trace)


def _format_setting_lines(preserved: Sequence[str], reduced: Sequence[str]) -> Iterator[str]:
    for heading, settings in (("kept", preserved), ("reduced or replaced", reduced)):
        if settings:
            yield heading
            yield from (f"  {setting}" for setting in settings)


def _find_common_lines(line_lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines that are in all of these lists, so that the report prints them only once."""
    return [line for line in line_lists[0] if all(line in other_lines for other_lines in line_lists[1:])]


def _format_findings(findings: Sequence[ProofFinding]) -> Iterator[str]:
    first = findings[0]
    yield f"where   {first.place}"
    yield f"when    {'step ' + str(first.step) if first.step else 'before the first step'}"
    yield f"kind    {first.kind}"
    if first.group:
        yield f"group   {first.group}"
    if first.ranks:
        yield f"ranks   {', '.join(map(str, first.ranks[:16]))}{', ...' if len(first.ranks) > 16 else ''}"
    yield from textwrap.wrap(first.text, WIDTH, initial_indent="what    ", subsequent_indent=" " * 8)
    if len(findings) > 1:
        yield "further differences, perhaps consequences"
        yield from (
            textwrap.shorten(f"- {finding.format()}", WIDTH, placeholder=" ...")
            for finding in findings[1 : 1 + NUM_FURTHER_FINDINGS]
        )
        if len(findings) > 1 + NUM_FURTHER_FINDINGS:
            yield f"  and {len(findings) - 1 - NUM_FURTHER_FINDINGS} more"


def _format_table(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    width = max([len("parameter"), *(len(row.name) for row in rows)])
    yield f"  {'step':>4}  {'of':8}  {'parameter':{width}}  {'stage':>5}  {'difference':>10}  ratio"
    for row in rows:
        stages = ",".join(map(str, row.stages))
        ratio = "" if row.difference.ratio is None else f"{format_factor(row.difference.ratio)}x"
        far = _format_relative(row.difference.relative)
        yield f"  {row.step:4d}  {row.quantity:8}  {row.name:{width}}  {stages:>5}  {far:>10}  {ratio}".rstrip()


def _format_relative(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "all of it"


def _build_proof_json(proof: Proof) -> dict[str, Any]:
    diagnosis = proof.diagnosis
    return {
        "layout": proof.title,
        "equal": proof.equal,
        "parts_from_trace": proof.differs_from_trace,
        "failure": proof.failure or None,
        "steps": diagnosis.num_steps if diagnosis else None,
        "parameters": diagnosis.num_parameters if diagnosis else None,
        "largest": {"relative": _finite_or_none(diagnosis.worst.difference.relative), "of": diagnosis.worst.title}
        if diagnosis
        else None,
        "findings": [_build_finding_json(finding) for finding in proof.findings],
        "worst": [_build_row_json(row) for row in diagnosis.rows[:NUM_ROWS]] if diagnosis else [],
        "alone": list(proof.isolation),
        "kept": list(proof.preserved),
        "changed": list(proof.reduced),
        "trace": list(proof.trace),
        "seconds": round(proof.seconds, 2),
    }


def _build_finding_json(finding: ProofFinding) -> dict[str, Any]:
    return {**asdict(finding), "relative": _finite_or_none(finding.relative), "group": finding.group or None}


def _build_row_json(row: ComparisonRow) -> dict[str, Any]:
    return {
        "step": row.step,
        "of": row.quantity,
        "parameter": row.name,
        "stages": list(row.stages),
        "relative": _finite_or_none(row.difference.relative),
        "ratio": None if row.difference.ratio is None else _finite_or_none(row.difference.ratio),
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
