"""Comparison of the run at a layout with the reference run. Each tensor is gathered from its ranks and compared once; the code that
looks for causes reads the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.activations import get_choice_settings
from megatron_lab.verification.difference_text import NEGLIGIBLE, ROUNDING, Factor, build_factors, find_stages, format_location
from megatron_lab.verification.gathered_tensors import (
    AXIS_NAMES,
    GatheredTensor,
    TensorDifference,
    compute_joint_norm,
    gather_tensors,
    measure_difference,
)
from megatron_lab.verification.observation import LocalTensor, Observation, RankObservation, RankStep, ReferenceStep


@dataclass(frozen=True)
class ComparisonRow:
    """Row of the report's tables: a tensor or scalar of one step, and its difference from the reference."""

    step: int
    quantity: str
    """Type of the compared value: "gradient" or "weight" for a tensor; "loss", "gradient norm" or "evaluation" for a scalar."""
    name: str
    """Name of the parameter; empty for a scalar."""
    stages: tuple[int, ...]
    difference: TensorDifference

    @property
    def title(self) -> str:
        """Description such as `loss of step 2` or `gradient of layers.0.mlp.up.weight in step 1`."""
        when = f"step {self.step}" if self.step else "before step 1"
        return f"{self.quantity} of {self.name} in {when}" if self.name else f"{self.quantity}{' of' if self.step else ''} {when}"


@dataclass(frozen=True)
class ComparedTensors:
    """Tensors of one type (such as gradients) after one step or before the first, with their differences from the reference."""

    actual: Mapping[str, GatheredTensor]
    """Tensors of the run at the layout, by name."""
    expected: Mapping[str, Tensor]
    differences: Mapping[str, TensorDifference]
    """Differences of the tensors that both runs have, by name, in the order of the forward."""

    @property
    def differing_names(self) -> list[str]:
        """Names of the tensors that differ, in the order of the forward."""
        return [name for name, difference in self.differences.items() if difference.differs]


class Comparison:
    """Comparison of the layout's run with the reference run. Each type of tensors is compared when its attribute is first read."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.config = observation.config
        self.ranks: Sequence[RankObservation] = observation.ranks
        self.reference = observation.reference
        self.layer_table: Sequence[Chunk] = observation.layer_table
        self.num_steps = min(len(self.reference.steps), *(len(rank.steps) for rank in self.ranks))
        self.sizes = {axis: 1 + max(rank.coordinates[axis] for rank in self.ranks) for axis in AXIS_NAMES}
        """Number of ranks along each axis."""

    def num_samples(self, index: int) -> int:
        """Return the number of samples in the layout's step with this index."""
        return self.ranks[0].steps[index].num_microbatches * self.sizes["dp"] * self.config.training.micro_batch_size

    def build_factors(self, index: int) -> list[Factor]:
        """List the numbers of a step (sizes, counts) by which a value may be wrongly multiplied or divided."""
        precision = self.config.precision
        return build_factors(
            {AXIS_NAMES[axis]: size for axis, size in self.sizes.items()},
            self.ranks[0].steps[index].num_microbatches,
            self.reference.steps[index].token_count,
            self.num_samples(index) * self.config.model.seq_length,
            precision.loss_scale or (precision.initial_loss_scale if precision.fp16 else 1.0),
        )

    @cached_property
    def initial(self) -> ComparedTensors:
        """Values with which the run at the layout initializes parameters, compared with those in one process."""
        return self._compare([rank.initial for rank in self.ranks], self.observation.initial)

    @cached_property
    def start(self) -> ComparedTensors:
        """Parameters at the layout before the first step, compared with the start weights that both runs load."""
        return self._compare([rank.start for rank in self.ranks], self.observation.start)

    @cached_property
    def activations(self) -> ComparedTensors:
        """Outputs of modules in the first step."""
        return self._compare([rank.activations for rank in self.ranks], self.reference.activations)

    @cached_property
    def gradients(self) -> list[ComparedTensors]:
        """Gradients that the optimizer receives, for each step."""
        return [
            self._compare([rank_step.gradients for rank_step in rank_steps], reference_step.gradients)
            for rank_steps, reference_step in self._step_pairs
        ]

    @cached_property
    def weights(self) -> list[ComparedTensors]:
        """Main parameters after each step."""
        steps = zip(self._step_pairs, self._rounding_slack, strict=True)
        return [
            self._compare([rank_step.main_params for rank_step in rank_steps], reference_step.weights, slack)
            for (rank_steps, reference_step), slack in steps
        ]

    @cached_property
    def parameters(self) -> list[ComparedTensors]:
        """Parameters that the next forward uses, after each step, on ranks that hold unsharded parameters."""
        steps = zip(self._step_pairs, self._rounding_slack, strict=True)
        return [
            self._compare([rank_step.parameters for rank_step in rank_steps], reference_step.weights, slack)
            for (rank_steps, reference_step), slack in steps
        ]

    @property
    def _step_pairs(self) -> list[tuple[tuple[RankStep, ...], ReferenceStep]]:
        """Recorded steps of all ranks paired with the step of the reference, for each step."""
        return list(zip(zip(*(rank.steps for rank in self.ranks), strict=False), self.reference.steps, strict=False))

    def get_steps(self, index: int) -> tuple[RankStep, ReferenceStep]:
        """Return the record of the step with this index on rank 0, and that of the reference run."""
        return self.ranks[0].steps[index], self.reference.steps[index]

    def build_finding(
        self,
        index: int | None,
        finding_type: FindingType,
        location: str | Sequence[str],
        text: str,
        relative: float = math.inf,
        *,
        group: str = "",
        ranks: Sequence[int] = (),
    ) -> ProofFinding:
        """Build a finding about the step with this index.

        Args:
            index: index of the step; None before the first step.
            location: a text; or names of parameters or activations, the first of which the finding reports as the location.
            relative: difference as a share of the reference.
            group: axis along which values differ: tensor, context, data or pipeline.
            ranks: ranks that show the difference; empty if all do.
        """
        step = 0 if index is None else self.reference.steps[index].iteration
        if isinstance(location, str):
            return ProofFinding(finding_type, step, location, text, relative, (), (), group, tuple(ranks))
        stages = tuple(sorted({stage for name in location for stage in self.find_stages(name)}))
        return ProofFinding(
            finding_type, step, self.describe_location(location[0]), text, relative, tuple(location), stages, group, tuple(ranks)
        )

    def describe_location(self, name: str) -> str:
        """Return the name of a parameter or module with its layer and stage."""
        return format_location(name, self.layer_table, stages=self.find_stages(name))

    def find_stages(self, name: str) -> tuple[int, ...]:
        """Return the pipeline stages of a parameter or module.

        For a parameter, these are the stages whose ranks store it. For a module, they are the stages to which `layer_table`, the
        assignment of layers to stages, assigns it.

        Args:
            name: name of the parameter or module.
        """
        actual = self.start.actual.get(name)
        if actual is not None:
            return tuple(sorted({rank_tensor.coordinates["pp"] for rank_tensor in actual.rank_tensors}))
        return tuple(find_stages(name, self.layer_table))

    def build_tensor_rows(self) -> list[ComparisonRow]:
        """Return a row for every gradient and weight of every step, the largest difference relative to its tolerance first.

        Rows of the first step with a difference precede all others, because later differences follow from them.
        """
        rows = [
            ComparisonRow(self.reference.steps[index].iteration, quantity, name, self.find_stages(name), difference)
            for quantity, compared_steps in (("gradient", self.gradients), ("weight", self.weights))
            for index, compared in enumerate(compared_steps)
            for name, difference in compared.differences.items()
        ]
        first_differing_step = min((row.step for row in rows if row.difference.differs), default=None)
        return sorted(rows, key=lambda row: (row.step == first_differing_step, row.difference.excess), reverse=True)

    def build_scalar_rows(self) -> list[ComparisonRow]:
        """Return a row for every loss, gradient norm and evaluation."""
        scalars = []
        for index in range(self.num_steps):
            rank_step, reference_step = self.get_steps(index)
            scalars += [(reference_step.iteration, "loss", rank_step.loss, reference_step.loss)]
            scalars += [(reference_step.iteration, "gradient norm", rank_step.grad_norm, reference_step.grad_norm)]
        iterations = [0, *(step.iteration for step in self.reference.steps)]
        evaluations = zip(iterations, self.ranks[0].evaluations, self.reference.evaluations, strict=False)
        scalars += [(iteration, "evaluation", actual, expected) for iteration, actual, expected in evaluations]
        pairs = [
            (step, quantity, torch.tensor([actual_value, expected_value], dtype=torch.float64))
            for step, quantity, actual_value, expected_value in scalars
        ]
        return [ComparisonRow(step, quantity, "", (), measure_difference(pair[0], pair[1])) for step, quantity, pair in pairs]

    @cached_property
    def _rounding_slack(self) -> list[dict[str, float]]:
        """Absolute difference that rounding may cause between the weights of both runs, for each step and parameter.

        The true gradient of some elements is zero (a key bias without rotary positions), but the computed gradient is a rounding
        error. Adam divides it by a number that may be as small as epsilon, and so turns it into a visible update. The slack is the
        sum of the largest updates of this type over the steps.
        """
        optimizer, slack_by_step = self.config.optimizer, []
        slack = dict.fromkeys(self.observation.start, 0.0)
        for step in self.reference.steps[: self.num_steps]:
            if optimizer.optimizer in ("adam", "muon") or "adam_eps" in get_choice_settings("optimizer", optimizer.optimizer):
                update = step.learning_rate * ROUNDING * step.grad_norm / optimizer.adam_eps
                for name, gradient in step.gradients.items():
                    is_noise = (gradient != 0) & (gradient.abs() <= NEGLIGIBLE * step.grad_norm)
                    slack[name] += update * math.sqrt(int(is_noise.sum()))
            slack_by_step.append(dict(slack))
        return slack_by_step

    def _compare(
        self,
        local_tensors: Sequence[Sequence[LocalTensor]],
        expected: Mapping[str, Tensor],
        slack: Mapping[str, float] | None = None,
    ) -> ComparedTensors:
        """Gather the local tensors of all ranks, and compare the tensors that both runs have.

        Args:
            local_tensors: local tensors of each rank.
            expected: full tensors of the reference, by name.
            slack: additional absolute difference that is allowed, by name.
        """
        actual, joint_norm = gather_tensors(self.ranks, local_tensors), compute_joint_norm(expected.values())
        differences = {
            name: _measure_worst(actual[name], tensor, joint_norm, slack[name] if slack else 0.0)
            for name, tensor in expected.items()
            if name in actual
        }
        return ComparedTensors(actual, expected, differences)


def _measure_worst(actual: GatheredTensor, expected: Tensor, global_norm: float, slack: float) -> TensorDifference:
    """Measure the difference of the replica that differs most: if replicas disagree, one may be correct and another wrong."""
    differences = [measure_difference(tensor, expected, global_norm=global_norm, slack=slack) for tensor in actual.iter_versions()]
    return max(differences, key=lambda difference: difference.excess)


class FindingType(StrEnum):
    """Types of findings, in causal order."""

    PARAMETERS = "parameters"
    """Missing or unknown parameters, or parameters with a wrong shape."""
    START = "start weights"
    INITIAL = "initial weights"
    FORWARD = "forward"
    COUNT = "token count"
    LOSS = "loss"
    GRADIENT = "gradient"
    NORM = "gradient norm"
    UPDATE = "update"
    REPLICAS = "replicas"
    EVALUATION = "evaluation"
    DROPOUT = "dropout mask"
    TRANSFER = "transfer"


@dataclass(frozen=True)
class ProofFinding:
    """Difference between the run at a layout and the reference, with its location and cause. The fields are keys of the tool's JSON
    report."""

    kind: FindingType
    step: int
    """Step, counted from 1; 0 is before the first step."""
    place: str
    """Location of the difference: a parameter or module, with its layer and stage."""
    text: str
    """Description of the difference and of its cause."""
    relative: float
    """Size of the difference as a share of the reference value; for a tensor, as a share of the reference's norm."""
    names: tuple[str, ...] = ()
    """Parameters or activations with this difference. `place` describes the first of them."""
    stages: tuple[int, ...] = ()
    group: str = ""
    """Axis along which the ranks disagree (tensor, context, data or pipeline); empty if they agree."""
    ranks: tuple[int, ...] = ()
    """Ranks that show the difference; empty if all do."""

    def format(self) -> str:
        """Return the finding as one line of text."""
        when = f"step {self.step}" if self.step else "before step 1"
        return f"{self.kind} of {self.place}, {when}: {self.text}"
