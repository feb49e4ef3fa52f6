"""Find the mistake that explains why a tensor or scalar of the parallel run differs from the reference run.

The coefficients of the difference identify the mistake. A tensor that is a constant multiple of its reference was summed too often
or divided wrongly. A gradient is a sum of the contributions of the microbatches, so a wrong coefficient shows a microbatch that is
missing or counted twice. New weights are a combination of the old weights and the correct update, so wrong coefficients show a
wrong learning rate or weight decay. `find_cause` tries these explanations in turn and returns the first that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_lab.verification.comparison import ComparedTensors, Comparison, FindingType, ProofFinding
from megatron_lab.verification.difference_text import TOLERANCE, Factor, compute_relative, explain_factor, format_integers
from megatron_lab.verification.gathered_tensors import (
    AXIS_NAMES,
    GatheredTensor,
    RankTensor,
    TensorDifference,
    compute_norm,
    find_constant_ratio,
    is_near,
    solve_combination,
)
from megatron_lab.verification.observation import ReferenceRun

MAX_LISTED_NAMES = 5
"""Maximum number of further names that a finding lists."""
_SUM_TOLERANCE = 1e3 * TOLERANCE
"""Relative difference below which a sum counts as correct. It allows for the rounding of a few more operations than
`TOLERANCE`."""


@dataclass(frozen=True)
class Cause:
    """Explanation of why a tensor of the parallel run differs from the reference run. Tensors with equal causes are reported
    together."""

    text: str
    """The explanation; empty if none of the known mistakes explains the difference."""
    locations: tuple[str, ...] = ()
    """Sentences for the report: on which ranks the tensor differs (if not on all), and along which axes ranks disagree."""
    group: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class DifferingTensor:
    """Tensor of the parallel run that differs from the reference run, together with its reference values."""

    actual: GatheredTensor
    expected: Tensor
    difference: TensorDifference

    @cached_property
    def rank_tensors(self) -> tuple[RankTensor, ...]:
        """Local tensors of the ranks that differ from their slices of the reference. If each local tensor is within its tolerance
        and only the full tensor is not, this is all local tensors."""
        rank_tensors = self.actual.rank_tensors
        max_distance = self.difference.allowed / math.sqrt(len(rank_tensors))
        return (
            tuple(
                rank_tensor
                for rank_tensor in rank_tensors
                if not compute_norm(rank_tensor.local.values - rank_tensor.local.select(self.expected)) <= max_distance
            )
            or rank_tensors
        )

    @cached_property
    def values(self) -> Tensor:
        """Elements of the local tensors in `rank_tensors`, flattened and concatenated."""
        return torch.cat([rank_tensor.local.values.flatten() for rank_tensor in self.rank_tensors])

    @property
    def excess(self) -> Tensor:
        """Difference: `values` minus the reference values of the same elements, flattened."""
        return self.values - self.select(self.expected)

    def select(self, full: Tensor) -> Tensor:
        """Return those elements of a full tensor that the local tensors in `rank_tensors` cover, in the order of `values`."""
        return torch.cat([rank_tensor.local.select(full).flatten() for rank_tensor in self.rank_tensors])


Explanation = Callable[[DifferingTensor], tuple[str, str]]
"""Function that explains a difference of one type of tensor (gradient, weight, output). It returns the explanation and the name
of the axis that it concerns; both are empty if the explanation does not fit."""


def find_cause(tensor: DifferingTensor, factors: Sequence[Factor], explain: Explanation) -> Cause:
    """Find out why a tensor of the parallel run differs from the reference run.

    The checks run in this order: wrong shape, values that are not finite, missing sum over an axis, constant factor, and finally
    `explain`.

    Args:
        tensor: the tensor, with its reference values.
        factors: sizes and counts of the run (such as the tensor-parallel size) by which the tensor may be wrongly multiplied or
            divided.
        explain: function that looks for the mistakes of one type of tensor, such as gradients.
    """
    if tensor.actual.shapes != {tuple(tensor.expected.shape)}:
        return Cause(tensor.difference.describe())
    nonfinite_ranks = tuple(
        sorted({rank_tensor.rank for rank_tensor in tensor.rank_tensors if not rank_tensor.local.values.isfinite().all()})
    )
    if nonfinite_ranks:
        return Cause(f"not finite, on rank {format_integers(nonfinite_ranks)}", ranks=nonfinite_ranks)
    if missing_sum := _find_missing_sum(tensor):
        return missing_sum
    ratio = find_constant_ratio(tensor.values, tensor.select(tensor.expected))
    text, group = explain(tensor) if ratio is None else explain_factor(ratio, factors)
    locations, all_rank_tensors = [], tensor.actual.rank_tensors
    for axis, name in AXIS_NAMES.items():
        axis_ranks, all_axis_ranks = (
            {holder.coordinates[axis] for holder in rank_tensors} for rank_tensors in (tensor.rank_tensors, all_rank_tensors)
        )
        if axis_ranks != all_axis_ranks:
            locations.append(f"only on {name} rank {format_integers(axis_ranks)}")
    if replica_axes := list(dict.fromkeys(AXIS_NAMES[replicas.axis] for replicas in tensor.actual.find_differing_replicas())):
        locations.append(f"the {' and '.join(replica_axes)} ranks hold different values")
        group = group or replica_axes[0]
    differing_ranks, all_ranks = (
        {rank_tensor.rank for rank_tensor in rank_tensors} for rank_tensors in (tensor.rank_tensors, all_rank_tensors)
    )
    return Cause(text, tuple(locations), group, tuple(sorted(differing_ranks)) if differing_ranks != all_ranks else ())


_MISSING_SUM_TEMPLATE = (
    "the sum over the {} group is missing: each rank keeps its partial sum, and the total of the partial sums is right"
)
_MISSING_SUM_TEXTS = {axis: _MISSING_SUM_TEMPLATE.format(name) for axis, name in AXIS_NAMES.items()}
_MISSING_SUM_TEXTS["pp"] = (
    "the gradient of the tied embedding is not reduced: the first and the last stage each keep the gradient of their own use of "
    "it, and the sum of both is right"
)


def _find_missing_sum(tensor: DifferingTensor) -> Cause | None:
    """Return a cause if a reduction is missing: the ranks along one axis hold different summands, and their sum is the reference.
    Otherwise, return None.

    If each rank also adds a bias before the missing reduction, the sum contains the bias several times. This case is recognized
    too.
    """
    differing_sets = tensor.actual.find_differing_replicas()
    for axis, text in _MISSING_SUM_TEXTS.items():
        axis_sets = [replica_set for replica_set in differing_sets if replica_set.axis == axis]
        if not axis_sets:
            continue
        bias_note = ""
        for replica_set in axis_sets:
            expected = replica_set.replicas[0].local.select(tensor.expected)
            residual, max_residual = replica_set.sum() - expected, _SUM_TOLERANCE * compute_norm(expected)
            if not compute_norm(residual) <= max_residual:
                bias_note = ", except for a bias that each rank adds"
                if residual.dim() < 3 or not compute_norm(residual - residual[:1, :1]) <= max_residual:
                    break
        else:
            ranks = axis_sets[0].ranks
            return Cause(f"{text}{bias_note} (for example ranks {format_integers(ranks)})", group=AXIS_NAMES[axis], ranks=ranks)
    return None


def explain_nothing(tensor: DifferingTensor) -> tuple[str, str]:
    """Return two empty texts: no explanation. Used for tensors whose type has no typical mistakes."""
    return "", ""


def build_microbatch_explanation(reference: ReferenceRun) -> Explanation:
    """Build the function that explains wrong gradients of the first step by the microbatches whose contribution is missing,
    repeated or weighted wrongly."""
    token_counts = dict(zip(reference.microbatches, reference.microbatch_tokens, strict=True))

    def explain(tensor: DifferingTensor) -> tuple[str, str]:
        contributions = zip(reference.microbatches, reference.contributions[tensor.actual.name], strict=True)
        coefficients = solve_combination(
            tensor.values, {microbatch: tensor.select(contribution) for microbatch, contribution in contributions}
        )
        if coefficients is None:
            return "", ""
        text = describe_microbatch_counts(coefficients, token_counts)
        return text, AXIS_NAMES["dp"] if len({rank for rank, _ in coefficients}) > 1 and "overwrites" not in text else ""

    return explain


def describe_microbatch_counts(coefficients: Mapping[tuple[int, int], float], token_counts: Mapping[tuple[int, int], float]) -> str:
    """Describe which microbatches a gradient does not contain exactly once, and which mistake may be the reason. Return an empty
    string if the gradient contains each exactly once.

    Args:
        coefficients: how often the gradient contains the contribution of a microbatch, by (data-parallel rank, index of the
            microbatch).
        token_counts: number of tokens of a microbatch that count in the loss, by the same keys.
    """
    wrong_coefficients = {
        microbatch: coefficient for microbatch, coefficient in coefficients.items() if not is_near(coefficient, 1)
    }
    if not wrong_coefficients:
        return ""
    missing = [microbatch for microbatch, coefficient in wrong_coefficients.items() if is_near(coefficient, 0)]
    last_microbatches = dict(sorted(coefficients))
    earlier_microbatches = [microbatch for microbatch in coefficients if microbatch[1] != last_microbatches[microbatch[0]]]
    rank_token_counts = {
        rank: math.fsum(token_counts[microbatch] for microbatch in coefficients if microbatch[0] == rank)
        for rank in last_microbatches
    }
    for unit, unit_token_counts in (
        ("microbatch", token_counts),
        ("data rank", {microbatch: rank_token_counts[microbatch[0]] for microbatch in coefficients}),
    ):
        weights = [unit_token_counts[microbatch] * coefficient for microbatch, coefficient in coefficients.items()]
        if max(weights) - min(weights) < 1e-6 * max(weights):
            return f"each {unit} weighs the same, however many tokens count in it: a mean of means"
    if missing and set(missing) == set(wrong_coefficients) == set(earlier_microbatches):
        return "only the last microbatch is in it: each overwrites those before it"
    if len(missing) < len(wrong_coefficients):
        reason = (
            "written or reduced again"
            if all(is_near(coefficient, round(coefficient)) for coefficient in wrong_coefficients.values())
            else "weighed wrongly"
        )
    elif len(last_microbatches) == 1:
        reason = "never added"  # with one data rank there is no reduction
    else:
        reason = (
            "reduced too early, or never added"
            if set(missing) & set(earlier_microbatches)
            else "reduced before the last gradient was in it"
        )
    descriptions = [
        f"microbatch {index} of data rank {rank} {'is missing' if (rank, index) in missing else f'counts {coefficient:.6g} times'}"
        for (rank, index), coefficient in list(wrong_coefficients.items())[:4]
    ]
    return f"{', '.join(descriptions)}{' and others' if len(wrong_coefficients) > 4 else ''}: {reason}"


def build_stale_gradient_explanation(previous: Mapping[str, GatheredTensor]) -> Explanation:
    """Build the function that explains wrong gradients by gradients of the previous step that were not zeroed.

    Args:
        previous: gradients of the previous step, by the name of the parameter.
    """

    def explain(tensor: DifferingTensor) -> tuple[str, str]:
        coefficients = solve_combination(tensor.excess, {"before": tensor.select(previous[tensor.actual.name].tensor)})
        if coefficients is None:
            return "", ""
        times = "" if is_near(coefficients["before"], 1) else f"{coefficients['before']:.6g} times "
        return f"it still holds {times}the gradient of the step before: gradients are not zeroed between steps", ""

    return explain


def build_update_explanation(previous: Mapping[str, Tensor]) -> Explanation:
    """Build the function that explains wrong weights after an update: not updated at all, moved too far or not far enough, or a
    wrong weight decay.

    Args:
        previous: weights before the step, by name.
    """

    def explain(tensor: DifferingTensor) -> tuple[str, str]:
        start_values = tensor.select(previous[tensor.actual.name])
        if torch.equal(tensor.values, start_values):
            return "the weights did not change: no update reached them", ""
        coefficients = solve_combination(
            tensor.excess, {"update": tensor.select(tensor.expected) - start_values, "weights": start_values}
        )
        if coefficients is None:
            return "differs by no constant factor: clipping, moments or the update rule are wrong", ""
        if not is_near(coefficients["update"], 0):
            # No group: the gradient is right, so the sums over groups are right too.
            return f"the change is {explain_factor(1 + coefficients['update'])[0]}", ""
        return (
            f"it differs by {coefficients['weights']:.6g} times the old weights: weight decay is wrong",
            "",
        )

    return explain


# ---- checks that yield findings


def check_tensors(
    comparison: Comparison,
    index: int | None,
    finding_type: FindingType,
    compared: ComparedTensors,
    lead: str = "",
    *,
    names: Sequence[str] | None = None,
    factors: Sequence[Factor] = (),
    explain: Explanation = explain_nothing,
) -> Iterator[ProofFinding]:
    """Find out why tensors of the parallel run differ from the reference run, and yield one report entry for each cause.

    Args:
        index: index of the step; None before the first step.
        finding_type: type of the report entries.
        compared: tensors of both runs, with their differences.
        lead: text at the beginning of each report entry, before the cause.
        names: names of the tensors to explain, in causal order. By default all tensors that differ, in the order of the forward.
        factors: sizes and counts of the run by which a tensor may be wrongly multiplied or divided.
        explain: function that looks for the mistakes of this type of tensor, such as gradients.
    """
    names_by_cause: dict[Cause, list[str]] = {}
    for name in compared.differing_names if names is None else names:
        tensor = DifferingTensor(compared.actual[name], compared.expected[name], compared.differences[name])
        names_by_cause.setdefault(find_cause(tensor, factors, explain), []).append(name)
    for cause, cause_names in names_by_cause.items():
        text = cause.text or f"differs by no constant factor ({compared.differences[cause_names[0]].describe()})"
        further_names = format_further_names(cause_names)
        if finding_type is FindingType.GRADIENT and len(cause_names) == len(compared.differences) > 1:
            further_names = "so are the gradients of all parameters"
        max_relative = max(compared.differences[name].relative for name in cause_names)
        text = join_clauses(lead, text, *cause.locations, further_names)
        yield comparison.build_finding(index, finding_type, cause_names, text, max_relative, group=cause.group, ranks=cause.ranks)


def check_scalar(
    comparison: Comparison,
    index: int | None,
    finding_type: FindingType,
    location: str | Sequence[str],
    quantity: str,
    actual: float,
    expected: float,
    hint: str = "",
    *,
    is_divisor: bool = False,
) -> Iterator[ProofFinding]:
    """Yield a report entry if a scalar of the parallel run differs from the reference run by more than rounding.

    Args:
        index: index of the step; None before the first step.
        finding_type: type of the report entry.
        location: where the scalar differs: names of parameters, or a description.
        quantity: name of the scalar in the report.
        actual: scalar of the parallel run.
        expected: scalar of the reference run.
        hint: text about a possible cause.
        is_divisor: whether the loss and every gradient are divided by the scalar. A scalar that is too large then makes them too
            small.
    """
    if abs(actual - expected) <= TOLERANCE * abs(expected):
        return
    text = f"{quantity} is {actual:.12g}, the reference's {expected:.12g}"
    if math.isfinite(actual) and actual and expected:
        factor, _ = explain_factor(expected / actual if is_divisor else actual / expected, comparison.build_factors(index or 0))
        text += f": {'the loss and every gradient are ' * is_divisor}{factor}"
    yield comparison.build_finding(
        index, finding_type, location, join_clauses(text, hint), compute_relative(actual - expected, expected)
    )


def format_further_names(names: Sequence[str]) -> str:
    """Return a clause that lists all names except the first, or an empty string if there is only one name."""
    num_unlisted = len(names) - 1 - MAX_LISTED_NAMES
    return (
        f"likewise {', '.join(names[1 : 1 + MAX_LISTED_NAMES])}{f' and {num_unlisted} others' if num_unlisted > 0 else ''}"
        if names[1:]
        else ""
    )


def join_clauses(*clauses: str) -> str:
    """Join the non-empty clauses with semicolons."""
    return "; ".join(filter(None, clauses))
