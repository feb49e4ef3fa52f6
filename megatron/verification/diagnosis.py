"""Whether a run at a layout equals that of one process and, if not, what the cause is. Pure functions of what was observed.

One difference makes others: a wrong activation makes a wrong loss, that wrong gradients, those wrong weights, and these make all
the following steps wrong. So things are compared in the order in which one causes the next, and the first that differs is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.pipeline_parallel.partition import Chunk
from megatron.verification.comparison import ComparedTensors, Comparison, ComparisonRow, FindingKind, ProofFinding
from megatron.verification.forward_findings import forward_findings, loss_findings
from megatron.verification.gradient_findings import gradient_findings
from megatron.verification.observation import Observation
from megatron.verification.update_findings import evaluation_findings, norm_findings, overwritten_findings, update_findings
from megatron.verification.wording import TOLERANCE, layer_of, listing, place_words, stages_of


@dataclass(frozen=True)
class Worst:
    """The largest relative difference, measured by what is allowed."""

    relative: float
    allowed: float
    what: str
    """The quantity that differs: `loss of step 2`, `gradient of layers.0.mlp.up.weight in step 1`."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of comparing two runs."""

    findings: tuple[ProofFinding, ...]
    """Differences in the order of cause: the first is the one to look at."""
    worst: Worst
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
    rows = runs.rows()
    found = Diagnosis(tuple(findings), _worst(runs, rows), tuple(rows), runs.num_steps, len(observation.start))
    if found.equal and not found.worst.relative <= found.worst.allowed:
        raise AssertionError(f"{found.worst.what} differs by {found.worst.relative:.2e}, and nothing is found")
    return found


def _step_findings(runs: Comparison) -> list[ProofFinding]:
    """Differences in the first step that has any, and in the evaluations until then."""
    found: list[ProofFinding] = []
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
        found.append(ProofFinding(FindingKind.UPDATE, agreed, "the run", text, math.inf))
    forward_agrees = not any(finding.kind in (FindingKind.FORWARD, FindingKind.LOSS) and agreed == 0 for finding in found)
    return [*found, *(evaluation_findings(runs, agreed) if forward_agrees else ())]


def _worst(runs: Comparison, rows: list[ComparisonRow]) -> Worst:
    """The largest difference over numbers and tensors, measured by what is allowed."""
    told = [
        Worst(far, TOLERANCE, f"{what} {'of step ' + str(step) if step else 'before step 1'}") for step, what, far in runs.numbers()
    ]
    for row in rows:
        told.append(Worst(row.measured.relative, row.measured.relative_allowed, f"{row.what} of {row.name} in step {row.step}"))
    return max(told, key=lambda worst: worst.relative / worst.allowed if worst.allowed else worst.relative)


def start_findings(runs: Comparison) -> Iterator[ProofFinding]:
    """Differences before anything is computed."""
    start = runs.observation.start
    yield from layer_findings(runs.table, runs.observation.config.model.num_layers, start)
    yield from _parameters(runs)
    yield from _values(
        runs, FindingKind.START, runs.start(), "is not what the run was given: values are loaded or published wrongly"
    )
    yield from _values(
        runs,
        FindingKind.INITIAL,
        runs.initial(),
        "is initialised to other values than in one process: initialisation depends on the layout",
    )


def layer_findings(table: Sequence[Chunk], num_layers: int, parameters: Iterable[str] = ()) -> Iterator[ProofFinding]:
    """Check that the table gives each layer to one chunk, in order.

    Args:
        parameters: names of the model's parameters.
    """

    def finding(names: Sequence[str], text: str) -> ProofFinding:
        place, stages = place_words(names[0], table), tuple(stages_of(names[0], table))
        return ProofFinding(FindingKind.PARAMETERS, 0, place, text, math.inf, tuple(names), stages)

    for layer in range(num_layers):
        chunks = [chunk for chunk in table if layer in chunk.layers]
        if len(chunks) != 1:
            text = "the layer is dropped: the layer table gives it to no stage, so it is never computed and never trained"
            if chunks:
                text = f"the layer is doubled: chunks {listing(chunk.index for chunk in chunks)} both hold it"
            yield finding([f"layers.{layer}", *(each for each in parameters if layer_of(each) == layer)], text)
    for before, chunk in pairwise(chunk for chunk in sorted(table, key=lambda chunk: chunk.index) if chunk.layers):
        first, last = chunk.layers[0], before.layers[-1]
        if first <= last:
            behind = f"behind layer {last} of chunk {before.index}"
            text = f"the layers are out of order: chunk {chunk.index} begins with layer {first}, {behind}"
            yield finding([f"layers.{first}"], text)
            return


def _parameters(runs: Comparison) -> Iterator[ProofFinding]:
    """Check that each parameter is held whole, and no other is."""
    held, wanted = runs.start().joined, runs.observation.start
    for name, tensor in wanted.items():
        if layer_of(name) is not None and not stages_of(name, runs.table):
            continue  # a finding about the whole layer says it already
        text, shape = "", tuple(tensor.shape)
        if name not in held:
            text = "no rank holds it"
        elif held[name].shapes != {shape}:
            shapes = ", ".join(str(list(found)) for found in sorted(held[name].shapes))
            text = f"ranks take its whole shape for {shapes}; it is {list(shape)}"
        elif held[name].holes:
            text = f"no rank holds {held[name].holes:,} of its {tensor.numel():,} elements"
        if text:
            yield runs.finding(FindingKind.PARAMETERS, None, [name], text)
    for name in held:
        if name not in wanted:
            yield runs.finding(FindingKind.PARAMETERS, None, [name], "the model of these settings has no such parameter")


def _values(runs: Comparison, kind: FindingKind, compared: ComparedTensors, text: str) -> Iterator[ProofFinding]:
    """One finding for all tensors that differ, named after the first in the order of the forward."""
    if differing := compared.differing[::-1]:
        worst = max(compared.measured[name].relative for name in differing)
        yield runs.finding(kind, None, differing, f"{text} ({compared.measured[differing[0]].words()})", worst)
