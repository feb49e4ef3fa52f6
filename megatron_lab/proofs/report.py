"""The report of a proof, as lines of text and as JSON: the verdict first, then where and what, then figures."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lab.verification.comparison import ComparisonRow, ProofFinding
from megatron_lab.verification.diagnosis import Diagnosis
from megatron_lab.verification.wording import TOLERANCE, short

WORST = 8
"""Number of rows in the table."""
WORST_OF_EQUAL = 3
FURTHER = 6
"""Number of findings that are shown beside the first."""
TRACEBACK = 60
"""Number of lines that are shown of an error."""
WIDTH = 120
"""Width of the report in columns."""
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit|Warning)\b")


@dataclass(frozen=True)
class Proof:
    """One run that was compared, or that failed."""

    title: str
    """Its layout, such as `tensor 2 x pipeline 2 x data 2`."""
    diagnosis: Diagnosis | None
    failure: str = ""
    """The error, if there is nothing to compare."""
    seen: Sequence[ProofFinding] = ()
    """What is wrong before anything runs; shown if there is nothing to compare."""
    kept: Sequence[str] = ()
    """What stayed as in the user's settings."""
    changed: Sequence[str] = ()
    """What was made smaller or replaced."""
    alone: Sequence[str] = ()
    """The settings with which a difference comes and goes."""
    seconds: float = 0.0
    trace: Sequence[str] = ()
    """The comparison with a trace."""
    parts_from_trace: bool = False
    """Whether it differs from the trace."""

    @property
    def equal(self) -> bool:
        """Whether the layout trains as one process does."""
        return self.diagnosis is not None and self.diagnosis.equal

    @property
    def findings(self) -> Sequence[ProofFinding]:
        """Differences in the order of cause."""
        return self.seen if self.diagnosis is None else self.diagnosis.findings


def format_report(proofs: Sequence[Proof]) -> list[str]:
    """The report as text, easy to read for somebody who is tired."""
    lines = [_verdict(proofs)]
    kept, changed = (_common([getattr(proof, what) for proof in proofs]) for what in ("kept", "changed"))
    for proof in proofs:
        lines.append("")
        if len(proofs) > 1:
            lines.append(f"{proof.title}: {'equal' if proof.equal else 'DIFFERENT' if proof.findings else 'FAILS'}")
        lines += _body(proof)
        own = [note for note in proof.kept if note not in kept], [note for note in proof.changed if note not in changed]
        lines += [*_notes(*own), f"took {proof.seconds:.1f} s"]
    if kept or changed:
        lines += ["", *(["in all of these"] if len(proofs) > 1 else []), *_notes(kept, changed)]
    return lines


def report_json(proofs: Sequence[Proof]) -> dict[str, Any]:
    """The report for programs. Numbers that are not finite are null."""
    equal = all(proof.equal and not proof.parts_from_trace for proof in proofs)
    return {"equal": equal, "tolerance": TOLERANCE, "runs": [_proof_json(proof) for proof in proofs]}


def _verdict(proofs: Sequence[Proof]) -> str:
    for proof in proofs:
        if proof.equal and proof.parts_from_trace:
            return f"EQUAL to one process, but not to the trace: {proof.title}: {proof.trace[0]}"
        if proof.findings:
            return f"DIFFERENT from one process: {proof.title}: {proof.findings[0].line()}"
        if proof.diagnosis is None:
            return f"FAILS: {proof.title} does not run to its end: {_error(proof.failure)}"
    found = [proof.diagnosis for proof in proofs if proof.diagnosis]
    worst = max((each.worst.measured for each in found), key=lambda measured: measured.excess)
    what = f"{proofs[0].title}" if len(proofs) == 1 else f"{len(proofs)} layouts ({'; '.join(proof.title for proof in proofs)})"
    steps = f"{found[0].num_steps} step{'s' * (found[0].num_steps > 1)}"
    return (
        f"EQUAL to one process: {what}: loss, {found[0].num_parameters} gradients and weights of {steps}; "
        f"largest relative difference {worst.relative:.1e}, allowed {worst.relative_allowed:.0e}"
    )


def _error(failure: str) -> str:
    """The line with the error of the rank that failed first; or the ranks that did not finish."""
    lines = failure.strip().split("\n\n")[0].splitlines()
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])


def _body(proof: Proof) -> Iterator[str]:
    if proof.findings:
        yield from _findings(proof.findings)
    if proof.diagnosis is None:
        lines = proof.failure.strip().splitlines()
        yield from lines[:TRACEBACK]
        if len(lines) > TRACEBACK:
            yield f"... and {len(lines) - TRACEBACK} more lines of the other ranks"
    else:
        worst = proof.diagnosis.worst
        allowed = f"{worst.measured.relative_allowed:.0e}"
        yield f"largest relative difference  {_relative(worst.measured.relative)}  ({worst.title}; allowed {allowed})"
    if proof.alone:
        yield "comes and goes with"
        yield from (f"  {line}" for line in proof.alone)
    if proof.diagnosis is not None:
        yield from _table(proof.diagnosis.rows[: WORST_OF_EQUAL if proof.equal else WORST])
    if proof.trace:
        yield "against the trace"
        yield from (f"  {line}" for line in proof.trace)


def _notes(kept: Sequence[str], changed: Sequence[str]) -> Iterator[str]:
    for heading, notes in (("kept", kept), ("reduced or replaced", changed)):
        if notes:
            yield heading
            yield from (f"  {note}" for note in notes)


def _common(notes: Sequence[Sequence[str]]) -> list[str]:
    """The notes that all of these lists have."""
    return [note for note in notes[0] if all(note in others for others in notes[1:])]


def _findings(findings: Sequence[ProofFinding]) -> Iterator[str]:
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
        yield "what differs too, perhaps as a consequence"
        yield from (textwrap.shorten(f"- {finding.line()}", WIDTH, placeholder=" ...") for finding in findings[1 : 1 + FURTHER])
        if len(findings) > 1 + FURTHER:
            yield f"  and {len(findings) - 1 - FURTHER} more"


def _table(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    width = max([len("parameter"), *(len(row.name) for row in rows)])
    yield f"  {'step':>4}  {'of':8}  {'parameter':{width}}  {'stage':>5}  {'difference':>10}  ratio"
    for row in rows:
        stages = ",".join(map(str, row.stages))
        ratio = "" if row.measured.ratio is None else f"{short(row.measured.ratio)}x"
        far = _relative(row.measured.relative)
        yield f"  {row.step:4d}  {row.what:8}  {row.name:{width}}  {stages:>5}  {far:>10}  {ratio}".rstrip()


def _relative(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "all of it"


def _proof_json(proof: Proof) -> dict[str, Any]:
    found = proof.diagnosis
    return {
        "layout": proof.title,
        "equal": proof.equal,
        "parts_from_trace": proof.parts_from_trace,
        "failure": proof.failure or None,
        "steps": found.num_steps if found else None,
        "parameters": found.num_parameters if found else None,
        "largest": {"relative": _number(found.worst.measured.relative), "of": found.worst.title} if found else None,
        "findings": [_finding_json(finding) for finding in proof.findings],
        "worst": [_row_json(row) for row in found.rows[:WORST]] if found else [],
        "alone": list(proof.alone),
        "kept": list(proof.kept),
        "changed": list(proof.changed),
        "trace": list(proof.trace),
        "seconds": round(proof.seconds, 2),
    }


def _finding_json(finding: ProofFinding) -> dict[str, Any]:
    return {**asdict(finding), "relative": _number(finding.relative), "group": finding.group or None}


def _row_json(row: ComparisonRow) -> dict[str, Any]:
    return {
        "step": row.step,
        "of": row.what,
        "parameter": row.name,
        "stages": list(row.stages),
        "relative": _number(row.measured.relative),
        "ratio": None if row.measured.ratio is None else _number(row.measured.ratio),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
