"""Finds where two runs diverge: compares their traces, step by step, in the order in which one thing causes the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_lab.audit.trace_file import Signature, TraceHeader, TraceRun, TraceStep, read_trace
from megatron_lab.verification.wording import NEGLIGIBLE, layer_of, listing, relative, short

LISTED = 8
_JUMP = 10.0
"""A difference that grows by more than this factor in a step has a cause in that step."""


class Band(NamedTuple):
    """Relative differences that two right runs may have."""

    loss: float
    tensor: float
    """The relative difference of gradients, weights, and the gradient norm."""


BANDS = {
    "float64": Band(1e-10, 1e-9),
    "float32": Band(1e-5, 1e-3),
    "float16": Band(2e-3, 0.1),
    "bfloat16": Band(1e-2, 0.3),
}
"""Allowed differences, by the dtype of the parameters. A signature gives a distance within a factor of about three, so tensors have
more room than where they are compared in full."""


@dataclass(frozen=True)
class TracePart:
    """One quantity that two traces have."""

    step: int
    what: str
    name: str
    """The parameter, if it is about one."""
    relative: float
    allowed: float
    note: str = ""
    blind: bool = False
    """Whether something of it is not finite in either trace, so that it cannot be compared."""

    @property
    def parts(self) -> bool:
        """Whether the difference is more than rounding."""
        return self.excess > 1

    @property
    def excess(self) -> float:
        """The difference over what is allowed."""
        return math.inf if math.isnan(self.relative) else self.relative / self.allowed

    def line(self) -> str:
        """The difference in one line."""
        what = f"{self.what} of {self.name}" if self.name else self.what
        far = f"{self.relative:.1e}" if math.isfinite(self.relative) else "all of it"
        return f"step {self.step}: {what} differs by {far} (allowed {self.allowed:.0e}){self.note}"

    def json(self) -> dict[str, Any]:
        """The part as JSON types; a difference that is not finite is null."""
        far = self.relative if math.isfinite(self.relative) else None
        return {"step": self.step, "what": self.what, "parameter": self.name or None, "relative": far, "allowed": self.allowed}


@dataclass(frozen=True)
class TraceComparison:
    """What two traces have in common, and where they diverge."""

    first: tuple[TracePart, ...]
    """What differs by more than rounding in the first step in which anything does, in the order of cause."""
    drifts: bool
    """Whether the difference grew step by step, each little further than the one before, as rounding errors do."""
    largest: TracePart | None
    """The largest of all differences that were compared, measured by what is allowed."""
    steps: tuple[int, ...]
    """Steps that both traces have."""
    alone: tuple[tuple[int, ...], tuple[int, ...]]
    """Steps that only the one has, and that only the other has."""
    skipped: tuple[int, ...]
    """Steps without an update in both."""
    blind: tuple[int, ...]
    """Steps in which something is not finite in either trace."""
    notes: tuple[str, ...]
    """Differences in the settings of the runs."""

    @property
    def parts(self) -> bool:
        """Whether a difference was found."""
        return bool(self.first) and not self.drifts


def compare_files(path: str, other: str) -> TraceComparison:
    """Compare two trace files; raises what `read_whole` and `compare` raise."""
    return compare(read_whole(path), read_whole(other))


def read_whole(path: str) -> TraceRun:
    """The run in a trace file. A run that was stopped and resumed is one run: of a step that was made again, the last counts.

    Raises:
        ValueError: the file cannot be read.
    """
    runs = read_trace(path)
    steps = {step.iteration: step for run in runs for step in run.steps}
    return TraceRun(runs[-1].header, runs[0].iteration, runs[0].weights, [steps[iteration] for iteration in sorted(steps)])


def _other_masks(header: TraceHeader, other: TraceHeader) -> str | None:
    """Why two runs with dropout cannot be compared, if they cannot: masks depend on the tensor and context sizes and on that of a
    microbatch."""
    models = [each.settings["model"] for each in (header, other)]
    if not any(model[name] for model in models for name in ("attention_dropout", "hidden_dropout")):
        return None
    for what, of in (
        ("tensor size", lambda each: each.layout["tp"]),
        ("context size", lambda each: each.layout["cp"]),
        ("micro-batch size", lambda each: each.settings["training"]["micro_batch_size"]),
    ):
        if of(header) != of(other):
            return (
                "the runs cannot be compared: they have dropout, which draws other masks at another "
                f"{what} ({of(header)} and {of(other)}). Repeat both with --attention-dropout 0 --hidden-dropout 0."
            )
    return None


def compare(run: TraceRun, other: TraceRun) -> TraceComparison:
    """Compare a run with another, which counts as the reference.

    Raises:
        ValueError: they are not of the same model, draw other dropout masks, or have no step in common.
    """
    if run.header.parameters != other.header.parameters:
        raise ValueError(f"the traces are of different models: {_model_words(run.header, other.header)}")
    if told := _other_masks(run.header, other.header):
        raise ValueError(told)
    mine, theirs = ({step.iteration: step for step in each.steps} for each in (run, other))
    common = sorted(set(mine) & set(theirs))
    if not common:
        raise ValueError(
            f"the traces have no step in common: steps {listing(mine) or 'none'} and {listing(theirs) or 'none'}. "
            "Save both from the same iteration on."
        )
    band = max((BANDS[each.header.dtype] for each in (run, other)), key=lambda band: band.tensor)
    order = list(other.header.parameters)[::-1]  # the order of backward
    all_parts: list[TracePart] = []
    first: tuple[TracePart, ...] = ()
    drifts, before, moved = False, 0.0, 0.0
    if run.iteration == other.iteration:
        all_parts += _tensors(run.iteration, "start weight", run.weights, other.weights, order[::-1], band)
        first = tuple(part for part in all_parts if part.parts)
    for iteration in common:
        moved += theirs[iteration].learning_rate
        parts = list(_step_parts(mine[iteration], theirs[iteration], order, band, _reach(other.header, moved, band)))
        all_parts += parts
        excess = max(part.excess for part in parts)
        if not first and excess > 1:
            first, drifts = tuple(part for part in parts if part.parts), excess < _JUMP * before
        before = excess
    largest = max(all_parts, key=lambda part: part.excess, default=None)
    return TraceComparison(
        first,
        drifts,
        largest,
        steps=tuple(common),
        alone=(tuple(sorted(set(mine) - set(theirs))), tuple(sorted(set(theirs) - set(mine)))),
        skipped=tuple(step for step in common if mine[step].skipped and theirs[step].skipped),
        blind=tuple(sorted({part.step for part in all_parts if part.blind})),
        notes=tuple(_setup_notes(run.header, other.header)),
    )


def _reach(header: TraceHeader, moved: float, band: Band) -> dict[str, float]:
    """How far apart rounding alone may have taken the weights. Of a gradient that is nothing but rounding, Adam makes a whole step
    in either direction. In float64 its epsilon is larger than that."""
    if band == BANDS["float64"]:
        return {}
    return {name: 2 * moved * math.sqrt(math.prod(shape)) for name, shape in header.parameters.items()}


def format_traces(found: TraceComparison, name: str, other: str) -> list[str]:
    """The comparison as lines of text, the verdict first."""
    steps = _steps(found.steps)
    if found.first:
        verdict = "PART"
        if found.drifts:
            verdict = "DRIFT apart as rounding does, without a jump; beyond what is allowed from here on"
        lines = [f"{verdict}: {found.first[0].line()}"]
        lines += [f"  {part.line()}" for part in found.first[1:LISTED]]
        lines += [f"  and {len(found.first) - LISTED} more in this step"] if len(found.first) > LISTED else []
    else:
        lines = [f"EQUAL to rounding: {steps} of {name} and {other}"]
    if found.largest is not None:
        lines.append(f"largest of all that was compared: {found.largest.line()}")
    lines.append(f"compared: {steps}; {name} with {other}, which counts as the reference")
    return lines + [f"  {note}" for note in (*_step_notes(found, name, other), *found.notes)]


def traces_json(found: TraceComparison, name: str, other: str) -> dict[str, Any]:
    """The comparison for programs. If neither `equal` nor `drifts` is true, the traces diverge."""
    return {
        "equal": not found.first,
        "drifts": found.drifts,
        "traces": [name, other],
        "steps": list(found.steps),
        "steps_of_one": [list(steps) for steps in found.alone],
        "skipped_in_both": list(found.skipped),
        "not_finite_in_both": list(found.blind),
        "first": [part.json() for part in found.first],
        "largest": None if found.largest is None else found.largest.json(),
        "notes": list(found.notes),
    }


def _steps(numbers: Sequence[int]) -> str:
    return f"steps {listing(numbers)}" if len(numbers) > 1 else f"step {numbers[0]}"


def _step_notes(found: TraceComparison, name: str, other: str) -> Iterator[str]:
    """Lines on what could not be compared."""
    for which, steps in zip((f"{name} (the first)", f"{other} (the reference)"), found.alone, strict=True):
        if steps:
            yield f"only {which} has {_steps(steps)}: not compared"
    if found.skipped:
        many = f"{len(found.skipped)} step{'s' * (len(found.skipped) > 1)}"
        yield f"both skipped the update of {many}, for a gradient that overflowed and is not compared: {_steps(found.skipped)}"
    if found.blind:
        yield f"not finite in either, which counts as equal: something in {_steps(found.blind)}"


def _step_parts(
    mine: TraceStep, theirs: TraceStep, order: Sequence[str], band: Band, reach: Mapping[str, float]
) -> Iterator[TracePart]:
    """Compare one step, in the order of cause: the batch, the loss, gradients from the end on, their norm, the update."""
    step = mine.iteration
    for what, a, b in (
        ("the number of samples", mine.samples, theirs.samples),
        ("the samples consumed", mine.consumed_samples, theirs.consumed_samples),
        ("the count of tokens", mine.tokens, theirs.tokens),
    ):
        yield TracePart(step, what, "", relative(a - b, b), 1e-12, f": {a:,.0f} and {b:,.0f}, so the batches are not the same")
    yield _number(step, "the loss", mine.loss, theirs.loss, band.loss)
    if mine.skipped != theirs.skipped:
        one, two = ("the first", "the reference") if mine.skipped else ("the reference", "the first")
        told = f": {one} skipped it, for a gradient that overflowed, and {two} did not"
        yield TracePart(step, "the update", "", math.inf, band.tensor, told)
    elif not mine.skipped:  # a gradient that overflowed is not compared, and its norm is not finite
        yield from _tensors(step, "gradient", mine.gradients, theirs.gradients, order, band)
        yield _number(step, "the gradient norm", mine.grad_norm, theirs.grad_norm, band.tensor)
    yield _number(step, "the learning rate", mine.learning_rate, theirs.learning_rate, 1e-9)
    yield _number(step, "the weight decay", mine.weight_decay, theirs.weight_decay, 1e-9)
    yield from _tensors(step, "weight", mine.weights, theirs.weights, order[::-1], band, reach)


def _number(step: int, what: str, a: float, b: float, allowed: float) -> TracePart:
    blind = _lost(a, b)
    return TracePart(step, what, "", 0.0 if blind else relative(a - b, b), allowed, f": {a!r} and {b!r}", blind)


def _lost(a: float, b: float) -> bool:
    """Whether neither is finite. A trace does not tell infinities from NaN, so they are not distinguished."""
    return not math.isfinite(a) and not math.isfinite(b)


def _tensors(
    step: int,
    what: str,
    mine: Mapping[str, Signature],
    theirs: Mapping[str, Signature],
    order: Sequence[str],
    band: Band,
    reach: Mapping[str, float] | None = None,
) -> Iterator[TracePart]:
    total = math.hypot(*(numbers[0] for numbers in theirs.values() if math.isfinite(numbers[0])))
    for name in order:
        if name not in mine or name not in theirs:
            if (name in mine) != (name in theirs):
                yield TracePart(step, what, name, math.inf, band.tensor, ": only one of the traces has it")
            continue
        a, b = mine[name], theirs[name]
        factor = _factor(a, b, band)
        apart = _distance(a, b) if factor is None else abs(factor - 1) * b[0]
        scale = b[0] if b[0] > _least(band) * total else total
        allowed = band.tensor + relative((reach or {}).get(name, 0.0), scale)
        layer = layer_of(name)
        note = "" if layer is None else f", layer {layer}"
        note += "" if factor is None else f": {short(factor)}x the other"
        yield TracePart(step, what, name, relative(apart, scale), allowed, note, any(map(_lost, a, b)))


def _least(band: Band) -> float:
    """A tensor smaller than this share of all together is rounding error: its true gradient may be zero."""
    return NEGLIGIBLE * band.tensor / BANDS["float64"].tensor


def _distance(a: Signature, b: Signature) -> float:
    """An estimate of the norm of the difference of two tensors: its square is the mean square of the differences of the signed
    sums. Infinite if something is finite in only one of them."""
    norm, *signed = (0.0 if _lost(x, y) else x - y for x, y in zip(a, b, strict=True))
    if not all(map(math.isfinite, (norm, *signed))):
        return math.inf
    return max(abs(norm), math.hypot(*signed) / math.sqrt(len(signed)))


def _factor(a: Signature, b: Signature, band: Band) -> float | None:
    """The factor of one tensor over the other, if there is one and it is not 1."""
    if not a[0] or not b[0] or not all(b):
        return None
    ratios = [x / y for x, y in zip(a[1:], b[1:], strict=True)]
    close = max(1e-6, band.loss)
    if not all(math.isclose(ratio, ratios[0], rel_tol=close) for ratio in (*ratios, math.copysign(a[0] / b[0], ratios[0]))):
        return None
    return ratios[0] if abs(ratios[0] - 1) > 10 * close else None


def _model_words(mine: TraceHeader, theirs: TraceHeader) -> str:
    names = sorted(set(mine.parameters) ^ set(theirs.parameters))
    if names:
        return f"only one has {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    name = next(name for name, shape in mine.parameters.items() if theirs.parameters[name] != shape)
    return f"{name} has the shape {mine.parameters[name]} in one and {theirs.parameters[name]} in the other"


def _setup_notes(mine: TraceHeader, theirs: TraceHeader) -> Iterator[str]:
    for what in ("layout", "layers", "dtype", "torch", "vocab_size"):
        a, b = getattr(mine, what), getattr(theirs, what)
        if a != b:
            yield f"{what} differs: {_words(a)} and {_words(b)}"
    for topic in sorted(set(mine.settings) | set(theirs.settings)):
        one, two = mine.settings.get(topic, {}), theirs.settings.get(topic, {})
        for field in sorted(set(one) | set(two)):
            if topic not in ("checkpoint", "logging", "debug", "parallel") and one.get(field) != two.get(field):
                yield f"--{field.replace('_', '-')} differs: {one.get(field)} and {two.get(field)}"


def _words(value: object) -> str:
    if isinstance(value, dict):
        return " x ".join(f"{name} {size}" for name, size in value.items())
    if isinstance(value, list):
        return " | ".join(f"{len(layers)}" for _, layers in value) + " layers"
    return str(value)
