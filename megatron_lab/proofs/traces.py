"""Comparison of the traces of two runs, step by step and within a step in causal order, to find where the runs diverge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_lab.audit.trace_file import Signature, TraceHeader, TraceRun, TraceStep, read_trace
from megatron_lab.verification.difference_text import NEGLIGIBLE, compute_relative, format_factor, format_integers, get_layer_index

MAX_LISTED = 8
_JUMP_FACTOR = 10.0
"""If a difference grows by more than this factor in one step, its cause lies in that step."""


class Tolerance(NamedTuple):
    """Largest relative differences that rounding may cause between two correct runs."""

    loss: float
    tensor: float
    """Largest relative difference of gradients, weights and the gradient norm."""


TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-9),
    "float32": Tolerance(1e-5, 1e-3),
    "float16": Tolerance(2e-3, 0.1),
    "bfloat16": Tolerance(1e-2, 0.3),
}
"""Tolerances by the dtype of the parameters. A signature determines a distance only up to a factor of about three, so the
tolerance of tensors is larger than in a comparison of all elements."""


@dataclass(frozen=True)
class TraceDifference:
    """Difference between two traces in one quantity (such as the loss, or a parameter's gradient) of one step."""

    step: int
    quantity: str
    name: str
    """Name of the parameter; empty for a scalar such as the loss."""
    relative: float
    allowed: float
    detail: str = ""
    is_nonfinite: bool = False
    """Whether the value is NaN or infinite in both traces, so that it cannot be compared."""

    @property
    def differs(self) -> bool:
        """Whether the difference is larger than rounding can explain."""
        return self.excess > 1

    @property
    def excess(self) -> float:
        """Relative difference divided by the allowed relative difference: above 1 if the traces differ by more than rounding."""
        return math.inf if math.isnan(self.relative) else self.relative / self.allowed

    def format(self) -> str:
        """Return the difference as one line of text."""
        title = f"{self.quantity} of {self.name}" if self.name else self.quantity
        difference = f"{self.relative:.1e}" if math.isfinite(self.relative) else "all of it"
        return f"step {self.step}: {title} differs by {difference} (allowed {self.allowed:.0e}){self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Return the difference as a dict of JSON types. A relative difference that is not finite becomes null."""
        relative = self.relative if math.isfinite(self.relative) else None
        return {
            "step": self.step,
            "what": self.quantity,
            "parameter": self.name or None,
            "relative": relative,
            "allowed": self.allowed,
        }


@dataclass(frozen=True)
class TraceComparison:
    """Result of comparing two traces: the first step that differs, and the steps that could not be compared."""

    first: tuple[TraceDifference, ...]
    """Differences larger than rounding in the first step that has any, in causal order."""
    is_drift: bool
    """Whether the difference of the two traces grew slowly from step to step, as rounding errors do."""
    max_difference: TraceDifference | None
    """Difference that is largest relative to its tolerance, over all steps; None if nothing could be compared."""
    steps: tuple[int, ...]
    """Iterations of the steps that both traces contain."""
    unmatched_steps: tuple[tuple[int, ...], tuple[int, ...]]
    """Steps that only the first trace contains, and steps that only the second contains."""
    skipped: tuple[int, ...]
    """Steps whose update both runs skipped."""
    nonfinite_steps: tuple[int, ...]
    """Steps with a value that is NaN or infinite in both traces."""
    setup_differences: tuple[str, ...]
    """Lines of text about differences between the settings of the two runs."""

    @property
    def differs(self) -> bool:
        """Whether the traces diverge: they differ by more than rounding, and not by a slow drift."""
        return bool(self.first) and not self.is_drift


def compare_files(path: str, reference_path: str) -> TraceComparison:
    """Compare a trace file with the trace file of a reference run.

    Raises:
        ValueError: a file cannot be read, or the two runs cannot be compared.
    """
    return compare(read_run(path), read_run(reference_path))


def read_run(path: str) -> TraceRun:
    """Read a trace file as one run, even if the run was stopped and resumed. If a step was repeated, its last record counts.

    Raises:
        ValueError: the file cannot be read.
    """
    runs = read_trace(path)
    steps = {step.iteration: step for run in runs for step in run.steps}
    return TraceRun(runs[-1].header, runs[0].iteration, runs[0].weights, [steps[iteration] for iteration in sorted(steps)])


def _explain_different_masks(header: TraceHeader, reference: TraceHeader) -> str | None:
    """Explain why two runs draw different dropout masks and so cannot be compared. Return None if they can be compared.

    Dropout masks depend on the tensor-parallel size, the context-parallel size and the micro-batch size.
    """
    model_settings = [run_header.settings["model"] for run_header in (header, reference)]
    if not any(model[name] for model in model_settings for name in ("attention_dropout", "hidden_dropout")):
        return None
    for setting, get_value in (
        ("tensor-parallel size", lambda run_header: run_header.layout["tp"]),
        ("context-parallel size", lambda run_header: run_header.layout["cp"]),
        ("micro-batch size", lambda run_header: run_header.settings["training"]["micro_batch_size"]),
    ):
        if get_value(header) != get_value(reference):
            return (
                "the runs cannot be compared: they have dropout, which draws other masks at another "
                f"{setting} ({get_value(header)} and {get_value(reference)}). "
                "Repeat both with --attention-dropout 0 --hidden-dropout 0."
            )
    return None


def compare(run: TraceRun, reference: TraceRun) -> TraceComparison:
    """Compare the trace of a run (signatures of gradients and weights, written by --save-trace) with the trace of a reference run.

    Returns:
        the first step that differs by more than rounding, with its differences, and the steps that could not be compared.

    Raises:
        ValueError: the runs have different models, draw different dropout masks, or have no step in common.
    """
    if run.header.parameters != reference.header.parameters:
        raise ValueError(
            f"the traces are of different models: {_describe_model_difference(run.header, reference.header)}. Record both traces "
            "with the same model settings"
        )
    if message := _explain_different_masks(run.header, reference.header):
        raise ValueError(message)
    steps, reference_steps = ({step.iteration: step for step in traced_run.steps} for traced_run in (run, reference))
    common_steps = sorted(set(steps) & set(reference_steps))
    if not common_steps:
        raise ValueError(
            f"the traces have no step in common: steps {format_integers(steps) or 'none'} and "
            f"{format_integers(reference_steps) or 'none'}. Save both traces from the same iteration on."
        )
    tolerance = max(
        (TOLERANCES[traced_run.header.dtype] for traced_run in (run, reference)), key=lambda tolerance: tolerance.tensor
    )
    names = list(reference.header.parameters)[::-1]  # the order of backward
    all_differences: list[TraceDifference] = []
    first: tuple[TraceDifference, ...] = ()
    is_drift, previous_excess, rate_sum = False, 0.0, 0.0
    if run.iteration == reference.iteration:
        all_differences += _compare_tensors(run.iteration, "start weight", run.weights, reference.weights, names[::-1], tolerance)
        first = tuple(difference for difference in all_differences if difference.differs)
    for iteration in common_steps:
        rate_sum += reference_steps[iteration].learning_rate
        differences = list(
            _compare_step(
                steps[iteration],
                reference_steps[iteration],
                names,
                tolerance,
                _estimate_weight_drift(reference.header, rate_sum, tolerance),
            )
        )
        all_differences += differences
        excess = max(difference.excess for difference in differences)
        if not first and excess > 1:
            first, is_drift = (
                tuple(difference for difference in differences if difference.differs),
                excess < _JUMP_FACTOR * previous_excess,
            )
        previous_excess = excess
    largest = max(all_differences, key=lambda difference: difference.excess, default=None)
    return TraceComparison(
        first,
        is_drift,
        largest,
        steps=tuple(common_steps),
        unmatched_steps=(tuple(sorted(set(steps) - set(reference_steps))), tuple(sorted(set(reference_steps) - set(steps)))),
        skipped=tuple(step for step in common_steps if steps[step].skipped and reference_steps[step].skipped),
        nonfinite_steps=tuple(sorted({difference.step for difference in all_differences if difference.is_nonfinite})),
        setup_differences=tuple(_format_setup_differences(run.header, reference.header)),
    )


def _estimate_weight_drift(header: TraceHeader, rate_sum: float, tolerance: Tolerance) -> dict[str, float]:
    """Estimate how far rounding alone may move each weight tensor between two correct runs.

    If a gradient is pure rounding error, Adam makes a full step in either direction. In float64 such a gradient is smaller than
    Adam's epsilon, so the step is negligible.

    Args:
        rate_sum: sum of the learning rates of all steps so far.
        tolerance: tolerance of the comparison, which shows the dtype.

    Returns:
        norm of the movement by parameter name; empty for float64.
    """
    if tolerance == TOLERANCES["float64"]:
        return {}
    return {name: 2 * rate_sum * math.sqrt(math.prod(shape)) for name, shape in header.parameters.items()}


def format_traces(comparison: TraceComparison, name: str, reference: str) -> list[str]:
    """Format the comparison of two traces as lines of text, the verdict first.

    Args:
        name: name of the run in the text.
        reference: name of the reference run in the text.
    """
    steps = _format_steps(comparison.steps)
    if comparison.first:
        verdict = "DIVERGE"
        if comparison.is_drift:
            verdict = "DRIFT apart slowly, as rounding does; beyond the tolerance from this step on"
        lines = [f"{verdict}: {comparison.first[0].format()}"]
        lines += [f"  {difference.format()}" for difference in comparison.first[1:MAX_LISTED]]
        lines += [f"  and {len(comparison.first) - MAX_LISTED} more in this step"] if len(comparison.first) > MAX_LISTED else []
    else:
        lines = [f"EQUAL to rounding: {steps} of {name} and {reference}"]
    if comparison.max_difference is not None:
        lines.append(f"largest of all that was compared: {comparison.max_difference.format()}")
    lines.append(f"compared: {steps}; {name} with {reference}, which counts as the reference")
    return lines + [f"  {line}" for line in (*_format_step_notes(comparison, name, reference), *comparison.setup_differences)]


def build_traces_json(comparison: TraceComparison, name: str, reference: str) -> dict[str, Any]:
    """Build the comparison of two traces as a dict of JSON types. The traces diverge if neither `equal` nor `drifts` is true in
    this dict.

    Args:
        name: name of the run.
        reference: name of the reference run.
    """
    return {
        "equal": not comparison.first,
        "drifts": comparison.is_drift,
        "traces": [name, reference],
        "steps": list(comparison.steps),
        "steps_of_one": [list(steps) for steps in comparison.unmatched_steps],
        "skipped_in_both": list(comparison.skipped),
        "not_finite_in_both": list(comparison.nonfinite_steps),
        "first": [difference.to_json() for difference in comparison.first],
        "largest": None if comparison.max_difference is None else comparison.max_difference.to_json(),
        "notes": list(comparison.setup_differences),
    }


def _format_steps(steps: Sequence[int]) -> str:
    return f"steps {format_integers(steps)}" if len(steps) > 1 else f"step {steps[0]}"


def _format_step_notes(comparison: TraceComparison, name: str, reference: str) -> Iterator[str]:
    """Yield lines of text about steps and values that could not be compared.

    Args:
        name: name of the run in the text.
        reference: name of the reference run in the text.
    """
    for trace_name, steps in zip((f"{name} (the first)", f"{reference} (the reference)"), comparison.unmatched_steps, strict=True):
        if steps:
            yield f"only {trace_name} has {_format_steps(steps)}: not compared"
    if comparison.skipped:
        count, skipped = f"{len(comparison.skipped)} step{'s' * (len(comparison.skipped) > 1)}", _format_steps(comparison.skipped)
        yield f"both skipped the update of {count}, for a gradient that overflowed and is not compared: {skipped}"
    if comparison.nonfinite_steps:
        yield f"not finite in either trace, which counts as equal: a value in {_format_steps(comparison.nonfinite_steps)}"


def _compare_step(
    actual: TraceStep, reference: TraceStep, names: Sequence[str], tolerance: Tolerance, weight_drifts: Mapping[str, float]
) -> Iterator[TraceDifference]:
    """Compare one step of two traces. Yield the differences in causal order: batch, loss, gradients in the order of backward,
    gradient norm, learning rate and weight decay, weights.

    Args:
        names: parameters in the order of backward.
        weight_drifts: norm by which rounding alone may move each weight tensor, by parameter name.
    """
    step = actual.iteration
    for quantity, a, b in (
        ("the number of samples", actual.samples, reference.samples),
        ("the samples consumed", actual.consumed_samples, reference.consumed_samples),
        ("the count of tokens", actual.tokens, reference.tokens),
    ):
        yield TraceDifference(
            step, quantity, "", compute_relative(a - b, b), 1e-12, f": {a:,.0f} and {b:,.0f}, so the batches are not the same"
        )
    yield _compare_scalar(step, "the loss", actual.loss, reference.loss, tolerance.loss)
    if actual.skipped != reference.skipped:
        skipping, updating = ("the first", "the reference") if actual.skipped else ("the reference", "the first")
        detail = f": {skipping} skipped it, for a gradient that overflowed, and {updating} did not"
        yield TraceDifference(step, "the update", "", math.inf, tolerance.tensor, detail)
    elif not actual.skipped:  # a gradient that overflowed is not compared; its norm is not finite
        yield from _compare_tensors(step, "gradient", actual.gradients, reference.gradients, names, tolerance)
        yield _compare_scalar(step, "the gradient norm", actual.grad_norm, reference.grad_norm, tolerance.tensor)
    yield _compare_scalar(step, "the learning rate", actual.learning_rate, reference.learning_rate, 1e-9)
    yield _compare_scalar(step, "the weight decay", actual.weight_decay, reference.weight_decay, 1e-9)
    yield from _compare_tensors(step, "weight", actual.weights, reference.weights, names[::-1], tolerance, weight_drifts)


def _compare_scalar(step: int, quantity: str, a: float, b: float, allowed: float) -> TraceDifference:
    is_nonfinite = _are_both_nonfinite(a, b)
    return TraceDifference(
        step, quantity, "", 0.0 if is_nonfinite else compute_relative(a - b, b), allowed, f": {a!r} and {b!r}", is_nonfinite
    )


def _are_both_nonfinite(x: float, b: float) -> bool:
    """Check whether both values are NaN or infinite. A trace stores infinities and NaN alike, so the two values then count as
    equal."""
    return not math.isfinite(x) and not math.isfinite(b)


def _compare_tensors(
    step: int,
    quantity: str,
    actual: Mapping[str, Signature],
    reference: Mapping[str, Signature],
    names: Sequence[str],
    tolerance: Tolerance,
    weight_drifts: Mapping[str, float] | None = None,
) -> Iterator[TraceDifference]:
    """Compare all gradients, or all weights, of one step by their signatures (norm, and several signed sums of the elements). Yield
    a difference for each tensor.

    Args:
        quantity: text that says which tensors these are, such as "gradient".
        actual: signatures of the run, by parameter name.
        reference: signatures of the reference run, by parameter name.
        names: parameters in causal order.
        weight_drifts: norm by which rounding alone may move each weight tensor, by parameter name.
    """
    joint_norm = math.hypot(*(signature[0] for signature in reference.values() if math.isfinite(signature[0])))
    for name in names:
        if name not in actual or name not in reference:
            if (name in actual) != (name in reference):
                yield TraceDifference(step, quantity, name, math.inf, tolerance.tensor, ": only one of the traces has it")
            continue
        a, b = actual[name], reference[name]
        factor = _find_factor(a, b, tolerance)
        distance = _estimate_distance(a, b) if factor is None else abs(factor - 1) * b[0]
        scale = b[0] if b[0] > _get_negligible_share(tolerance) * joint_norm else joint_norm
        allowed = tolerance.tensor + compute_relative((weight_drifts or {}).get(name, 0.0), scale)
        layer = get_layer_index(name)
        detail = "" if layer is None else f", layer {layer}"
        detail += "" if factor is None else f": {format_factor(factor)}x the other"
        yield TraceDifference(
            step, quantity, name, compute_relative(distance, scale), allowed, detail, any(map(_are_both_nonfinite, a, b))
        )


def _get_negligible_share(tolerance: Tolerance) -> float:
    """Return the share of the joint norm of all tensors below which a tensor counts as pure rounding error. The true gradient of
    such a tensor may be zero, so its difference is measured relative to the joint norm."""
    return NEGLIGIBLE * tolerance.tensor / TOLERANCES["float64"].tensor


def _estimate_distance(a: Signature, b: Signature) -> float:
    """Estimate the norm of the difference of two tensors from their signatures. The result is infinite if some value is finite in
    only one of the signatures.

    A signature holds the norm of a tensor and several sums of its elements with different signs. The square of the estimate is the
    mean of the squared differences of these sums. The estimate is at least the difference of the norms.
    """
    norm, *signed = (0.0 if _are_both_nonfinite(x, y) else x - y for x, y in zip(a, b, strict=True))
    if not all(map(math.isfinite, (norm, *signed))):
        return math.inf
    return max(abs(norm), math.hypot(*signed) / math.sqrt(len(signed)))


def _find_factor(a: Signature, b: Signature, tolerance: Tolerance) -> float | None:
    """Return the factor c with a = c b for two tensors, computed from their signatures (norm and several signed sums). Return None
    if no constant factor relates the tensors, or if the factor is 1."""
    if not a[0] or not b[0] or not all(b):
        return None
    ratios = [x / y for x, y in zip(a[1:], b[1:], strict=True)]
    rel_tol = max(1e-6, tolerance.loss)
    if not all(math.isclose(ratio, ratios[0], rel_tol=rel_tol) for ratio in (*ratios, math.copysign(a[0] / b[0], ratios[0]))):
        return None
    return ratios[0] if abs(ratios[0] - 1) > 10 * rel_tol else None


def _describe_model_difference(header: TraceHeader, reference: TraceHeader) -> str:
    names = sorted(set(header.parameters) ^ set(reference.parameters))
    if names:
        return f"only one has {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    name = next(name for name, shape in header.parameters.items() if reference.parameters[name] != shape)
    return f"{name} has the shape {header.parameters[name]} in one and {reference.parameters[name]} in the other"


def _format_setup_differences(header: TraceHeader, reference: TraceHeader) -> Iterator[str]:
    for header_field in ("layout", "layers", "dtype", "torch", "vocab_size"):
        a, b = getattr(header, header_field), getattr(reference, header_field)
        if a != b:
            yield f"{header_field} differs: {_format_value(a)} and {_format_value(b)}"
    for section in sorted(set(header.settings) | set(reference.settings)):
        values, reference_values = header.settings.get(section, {}), reference.settings.get(section, {})
        for field in sorted(set(values) | set(reference_values)):
            if section not in ("checkpoint", "logging", "debug", "parallel") and values.get(field) != reference_values.get(field):
                yield f"--{field.replace('_', '-')} differs: {values.get(field)} and {reference_values.get(field)}"


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return " x ".join(f"{name} {size}" for name, size in value.items())
    if isinstance(value, list):
        return " | ".join(f"{len(layers)}" for _, layers in value) + " layers"
    return str(value)
