"""Comparison of a parallel run with the reference run. Each tensor is assembled from the slices of its ranks and compared once. The
code that looks for the cause of a difference uses these comparisons."""

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
        """Name of the compared value with its step, such as `loss of step 2` or `gradient of layers.0.mlp.up.weight in step 1`."""
        when = f"step {self.step}" if self.step else "before step 1"
        return f"{self.quantity} of {self.name} in {when}" if self.name else f"{self.quantity}{' of' if self.step else ''} {when}"


@dataclass(frozen=True)
class ComparedTensors:
    """Tensors of one type (such as all gradients of a step) of the parallel run and of the reference run, with their
    differences."""

    actual: Mapping[str, GatheredTensor]
    """Tensors of the parallel run, by name."""
    expected: Mapping[str, Tensor]
    differences: Mapping[str, TensorDifference]
    """Difference of each tensor that both runs have, by name, in the order of the forward."""

    @property
    def differing_names(self) -> list[str]:
        """Names of the tensors that differ, in the order of the forward."""
        return [name for name, difference in self.differences.items() if difference.differs]


class Comparison:
    """Comparison of the parallel run with the reference run. Tensors of one type, such as activations, are compared when their
    attribute is first read."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.config = observation.config
        self.ranks: Sequence[RankObservation] = observation.ranks
        self.reference = observation.reference
        self.layer_table: Sequence[Chunk] = observation.layer_table
        self.num_steps = min(len(self.reference.steps), *(len(rank.steps) for rank in self.ranks))
        self.sizes = {axis: 1 + max(rank.coordinates[axis] for rank in self.ranks) for axis in AXIS_NAMES}
        """Number of ranks along each axis."""

    def get_num_samples(self, index: int) -> int:
        """Return the number of samples in the global batch of a step of the parallel run; `index` counts the steps from 0."""
        return self.ranks[0].steps[index].num_microbatches * self.sizes["dp"] * self.config.training.micro_batch_size

    def build_factors(self, index: int) -> list[Factor]:
        """List the sizes and counts of a step by which a value may be wrongly multiplied or divided, such as the tensor-parallel
        size or the number of microbatches."""
        precision = self.config.precision
        return build_factors(
            {AXIS_NAMES[axis]: size for axis, size in self.sizes.items()},
            self.ranks[0].steps[index].num_microbatches,
            self.reference.steps[index].token_count,
            self.get_num_samples(index) * self.config.model.seq_length,
            precision.loss_scale or (precision.initial_loss_scale if precision.fp16 else 1.0),
        )

    @cached_property
    def initial(self) -> ComparedTensors:
        """Initial values of the parameters as the parallel run generates them, compared with those that one process generates."""
        return self._compare([rank.initial for rank in self.ranks], self.observation.initial)

    @cached_property
    def start(self) -> ComparedTensors:
        """Parameters of the parallel run before the first step, compared with the start weights that both runs load."""
        return self._compare([rank.start for rank in self.ranks], self.observation.start)

    @cached_property
    def activations(self) -> ComparedTensors:
        """Outputs of embedding, layers, attention and MLPs in the first step."""
        return self._compare([rank.activations for rank in self.ranks], self.reference.activations)

    @cached_property
    def gradients(self) -> list[ComparedTensors]:
        """Gradients that the optimizer receives, by step."""
        return [
            self._compare([rank_step.gradients for rank_step in rank_steps], reference_step.gradients)
            for rank_steps, reference_step in self._step_pairs
        ]

    @cached_property
    def weights(self) -> list[ComparedTensors]:
        """Main parameters after the update, by step."""
        steps = zip(self._step_pairs, self._rounding_slack, strict=True)
        return [
            self._compare([rank_step.main_params for rank_step in rank_steps], reference_step.weights, slack)
            for (rank_steps, reference_step), slack in steps
        ]

    @cached_property
    def parameters(self) -> list[ComparedTensors]:
        """Model parameters after the update, as used by the next forward, by step. Parameters that FSDP shards are missing."""
        steps = zip(self._step_pairs, self._rounding_slack, strict=True)
        return [
            self._compare([rank_step.parameters for rank_step in rank_steps], reference_step.weights, slack)
            for (rank_steps, reference_step), slack in steps
        ]

    @property
    def _step_pairs(self) -> list[tuple[tuple[RankStep, ...], ReferenceStep]]:
        """Records of each step: those of all ranks of the parallel run, and that of the reference run."""
        return list(zip(zip(*(rank.steps for rank in self.ranks), strict=False), self.reference.steps, strict=False))

    def get_steps(self, index: int) -> tuple[RankStep, ReferenceStep]:
        """Return the record of a step on rank 0 of the parallel run, and its record in the reference run; `index` counts the steps
        from 0."""
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
        """Build a report entry about a difference.

        Args:
            index: index of the step; None before the first step.
            finding_type: type of the report entry.
            location: where the runs differ: a description, or names of parameters or modules. Of several names, the report shows
                the first as the location.
            text: description of the difference and its cause.
            relative: difference as a share of the reference.
            group: axis along which ranks disagree: tensor, context, data or pipeline.
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
        """Return the name of a parameter or module with its layer and pipeline stage."""
        return format_location(name, self.layer_table, stages=self.find_stages(name))

    def find_stages(self, name: str) -> tuple[int, ...]:
        """Return the pipeline stages that have a parameter or module.

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
        """Return a table row for every gradient and weight of every step, sorted by the difference relative to its tolerance,
        largest first.

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
        """Return a table row for every loss and gradient norm of a step and for every evaluation loss."""
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
        """Absolute difference that rounding may cause between the weights of both runs, by step and name of the parameter.

        The true gradient of some elements is zero (a key bias without rotary positions), but the computed gradient is a rounding
        error. Adam divides this error by a number that may be as small as epsilon, and so turns it into a visible update. The
        allowed difference is the sum, over the steps so far, of the largest updates that such rounding errors can cause.
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
        """Assemble each tensor from the slices of all ranks, and compare it with the reference. Tensors that only one run has are
        not compared.

        Args:
            local_tensors: for each rank, its local tensors.
            expected: full tensors of the reference, by name.
            slack: absolute difference that is allowed in addition to the tolerance, by name.
        """
        actual, joint_norm = gather_tensors(self.ranks, local_tensors), compute_joint_norm(expected.values())
        differences = {
            name: _measure_worst(actual[name], tensor, joint_norm, slack[name] if slack else 0.0)
            for name, tensor in expected.items()
            if name in actual
        }
        return ComparedTensors(actual, expected, differences)


def _measure_worst(actual: GatheredTensor, expected: Tensor, global_norm: float, slack: float) -> TensorDifference:
    """Measure how far a tensor is from its reference, using the rank whose replica differs most: if replicas disagree, one may be
    correct and another wrong."""
    differences = [measure_difference(tensor, expected, global_norm=global_norm, slack=slack) for tensor in actual.iter_versions()]
    return max(differences, key=lambda difference: difference.excess)


class FindingType(StrEnum):
    """Types of differences that the report lists, in causal order."""

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
    """Entry of the report: a difference between the parallel run and the reference run, with its location and cause. The fields are
    keys of the JSON report."""

    kind: FindingType
    step: int
    """Training step, counted from 1; 0 for a difference before the first step."""
    place: str
    """Location of the difference: a parameter or module, with its layer and stage."""
    text: str
    """Description of the difference and of its cause."""
    relative: float
    """Size of the difference as a share of the reference value; for a tensor, as a share of the reference's norm."""
    names: tuple[str, ...] = ()
    """Parameters or modules with this difference. `place` describes the first of them."""
    stages: tuple[int, ...] = ()
    group: str = ""
    """Axis along which ranks disagree: "tensor", "context", "data" or "pipeline"; empty if the ranks agree with each other."""
    ranks: tuple[int, ...] = ()
    """Ranks that show the difference; empty if all do."""

    def format(self) -> str:
        """Return the report entry as one line of text."""
        when = f"step {self.step}" if self.step else "before step 1"
        return f"{self.kind} of {self.place}, {when}: {self.text}"
