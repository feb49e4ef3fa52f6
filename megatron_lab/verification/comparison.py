"""Both runs side by side. Every tensor is joined from its ranks and measured once, for all code that looks for a cause."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.activations import read_with
from megatron_lab.verification.joined import AXES, JoinedTensor, Measured, join, joint_norm, measure
from megatron_lab.verification.observation import Observation, PlainStep, RankObservation, RankStep, TensorPart
from megatron_lab.verification.wording import NEGLIGIBLE, ROUNDING, Factor, layout_factors, place_words, stages_of


@dataclass(frozen=True)
class ComparisonRow:
    """One tensor or number of one step, measured against the reference."""

    step: int
    what: str
    """What is compared: gradient or weight; loss, gradient norm or evaluation."""
    name: str
    """The parameter, if it is of one."""
    stages: tuple[int, ...]
    measured: Measured

    @property
    def title(self) -> str:
        """`loss of step 2`, `gradient of layers.0.mlp.up.weight in step 1`."""
        when = f"step {self.step}" if self.step else "before step 1"
        return f"{self.what} of {self.name} in {when}" if self.name else f"{self.what}{' of' if self.step else ''} {when}"


@dataclass(frozen=True)
class ComparedTensors:
    """Tensors of one kind at one moment."""

    joined: Mapping[str, JoinedTensor]
    """The tensors of the layout's run."""
    reference: Mapping[str, Tensor]
    measured: Mapping[str, Measured]
    """The measures of tensors that both runs have, in the order of the forward."""

    @property
    def differing(self) -> list[str]:
        """Names of the tensors that differ, in the order of the forward."""
        return [name for name, found in self.measured.items() if found.differs]


class Comparison:
    """The comparison of two runs. Each part is made when it is first asked for."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.config = observation.config
        self.ranks: Sequence[RankObservation] = observation.ranks
        self.plain = observation.plain
        self.table: Sequence[Chunk] = observation.layer_table
        self.num_steps = min(len(self.plain.steps), *(len(rank.steps) for rank in self.ranks))
        self.sizes = {axis: 1 + max(rank.coordinates[axis] for rank in self.ranks) for axis in AXES}
        """Number of ranks along each axis."""

    def num_samples(self, index: int) -> int:
        """Number of samples in the layout's step of this index."""
        return self.ranks[0].steps[index].num_microbatches * self.sizes["dp"] * self.config.training.micro_batch_size

    def factors(self, index: int) -> list[Factor]:
        """The numbers of a step that a wrong factor may be made of."""
        precision = self.config.precision
        return layout_factors(
            {AXES[axis]: size for axis, size in self.sizes.items()},
            self.ranks[0].steps[index].num_microbatches,
            self.plain.steps[index].token_count,
            self.num_samples(index) * self.config.model.seq_length,
            precision.loss_scale or (precision.initial_loss_scale if precision.fp16 else 1.0),
        )

    @cached_property
    def initial(self) -> ComparedTensors:
        """The initial values of the layout, and those of one process."""
        return self._compare([rank.initial for rank in self.ranks], self.observation.initial)

    @cached_property
    def start(self) -> ComparedTensors:
        """The values before the first step, and the start weights that were given."""
        return self._compare([rank.start for rank in self.ranks], self.observation.start)

    @cached_property
    def activations(self) -> ComparedTensors:
        """The outputs of modules in the first step."""
        return self._compare([rank.activations for rank in self.ranks], self.plain.activations)

    @cached_property
    def gradients(self) -> list[ComparedTensors]:
        """The gradients that the optimizer gets in each step."""
        return [self._compare([each.gradients for each in mine], plain.gradients) for mine, plain in self._steps]

    @cached_property
    def weights(self) -> list[ComparedTensors]:
        """The weights that the optimizer holds after each step."""
        steps = zip(self._steps, self._slack, strict=True)
        return [self._compare([each.main_params for each in mine], plain.weights, slack) for (mine, plain), slack in steps]

    @cached_property
    def parameters(self) -> list[ComparedTensors]:
        """The parameters that the forward after each step will use, on ranks that hold parameters whole."""
        steps = zip(self._steps, self._slack, strict=True)
        return [self._compare([each.parameters for each in mine], plain.weights, slack) for (mine, plain), slack in steps]

    @property
    def _steps(self) -> list[tuple[tuple[RankStep, ...], PlainStep]]:
        """Each step as all ranks saw it, and the reference's."""
        return list(zip(zip(*(rank.steps for rank in self.ranks), strict=False), self.plain.steps, strict=False))

    def steps(self, index: int) -> tuple[RankStep, PlainStep]:
        """The step of this index, as rank 0 and the reference report it."""
        return self.ranks[0].steps[index], self.plain.steps[index]

    def finding(
        self,
        index: int | None,
        kind: FindingKind,
        where: str | Sequence[str],
        text: str,
        far: float = math.inf,
        *,
        group: str = "",
        ranks: Sequence[int] = (),
    ) -> ProofFinding:
        """A difference in the step of this index, or before the first.

        Args:
            where: names of parameters or activations, the first of which is the place; or the place in words.
            far: the difference, as a share of the reference.
        """
        step = 0 if index is None else self.plain.steps[index].iteration
        if isinstance(where, str):
            return ProofFinding(kind, step, where, text, far, (), (), group, tuple(ranks))
        stages = tuple(sorted({stage for name in where for stage in self.stages(name)}))
        return ProofFinding(kind, step, self.place(where[0]), text, far, tuple(where), stages, group, tuple(ranks))

    def place(self, name: str) -> str:
        """A parameter or module, with its layer and stage."""
        return place_words(name, self.table, stages=self.stages(name))

    def stages(self, name: str) -> tuple[int, ...]:
        """The pipeline stages whose ranks hold a parameter; for a module, those of the layer table."""
        held = self.start.joined.get(name)
        if held is not None:
            return tuple(sorted({each.coordinates["pp"] for each in held.held}))
        return tuple(stages_of(name, self.table))

    def tensors(self) -> list[ComparisonRow]:
        """Every gradient and weight of every step, the worst first. Those of the first step in which any differs come before all
        others, which are their consequences."""
        found = [
            ComparisonRow(self.plain.steps[index].iteration, what, name, self.stages(name), measured)
            for what, steps in (("gradient", self.gradients), ("weight", self.weights))
            for index, compared in enumerate(steps)
            for name, measured in compared.measured.items()
        ]
        first = min((row.step for row in found if row.measured.differs), default=None)
        return sorted(found, key=lambda row: (row.step == first, row.measured.excess), reverse=True)

    def numbers(self) -> list[ComparisonRow]:
        """Every loss, gradient norm and evaluation."""
        found = []
        for index in range(self.num_steps):
            mine, plain = self.steps(index)
            found += [(plain.iteration, "loss", mine.loss, plain.loss)]
            found += [(plain.iteration, "gradient norm", mine.grad_norm, plain.grad_norm)]
        iterations = [0, *(step.iteration for step in self.plain.steps)]
        both = zip(iterations, self.ranks[0].evaluations, self.plain.evaluations, strict=False)
        found += [(iteration, "evaluation", mine, plain) for iteration, mine, plain in both]
        pairs = [(step, what, torch.tensor([mine, plain], dtype=torch.float64)) for step, what, mine, plain in found]
        return [ComparisonRow(step, what, "", (), measure(pair[0], pair[1])) for step, what, pair in pairs]

    @cached_property
    def _slack(self) -> list[dict[str, float]]:
        """How far weights may be apart after each step because Adam divides rounding errors by little. The true gradient of some
        elements is zero (of a key bias without rotary positions). The computed one is not, and the update is its quotient by at
        least epsilon."""
        optimizer, found = self.config.optimizer, []
        slack = dict.fromkeys(self.observation.start, 0.0)
        for step in self.plain.steps[: self.num_steps]:
            if optimizer.optimizer in ("adam", "muon") or "adam_eps" in read_with("optimizer", optimizer.optimizer):
                update = step.learning_rate * ROUNDING * step.grad_norm / optimizer.adam_eps
                for name, gradient in step.gradients.items():
                    noise = (gradient != 0) & (gradient.abs() <= NEGLIGIBLE * step.grad_norm)
                    slack[name] += update * math.sqrt(int(noise.sum()))
            found.append(dict(slack))
        return found

    def _compare(
        self, parts: Sequence[Sequence[TensorPart]], reference: Mapping[str, Tensor], slack: Mapping[str, float] | None = None
    ) -> ComparedTensors:
        """Join the parts of each rank, and measure what both runs have."""
        joined, total = join(self.ranks, parts), joint_norm(reference.values())
        measured = {
            name: _worst_of(joined[name], wanted, total, slack[name] if slack else 0.0)
            for name, wanted in reference.items()
            if name in joined
        }
        return ComparedTensors(joined, reference, measured)


def _worst_of(joined: JoinedTensor, wanted: Tensor, global_norm: float, slack: float) -> Measured:
    """The measure of the holder whose values are worst: where replicas differ, one may be right and another not."""
    found = [measure(tensor, wanted, global_norm=global_norm, slack=slack) for tensor in joined.versions()]
    return max(found, key=lambda each: each.excess)


class FindingKind(StrEnum):
    """Kinds of difference, in the order in which one is the cause of the next."""

    PARAMETERS = "parameters"
    """Parameters are missing, unknown, or of another shape."""
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
    """One difference."""

    kind: FindingKind
    step: int
    """The step, counted from 1; 0 is before the first."""
    place: str
    """The parameter or module, with layer and stage."""
    text: str
    """What is wrong there and what it means, in plain words."""
    relative: float
    """The difference, as a share of the reference."""
    names: tuple[str, ...] = ()
    """Parameters or activations that have this difference, the place's own first."""
    stages: tuple[int, ...] = ()
    group: str = ""
    """The ranks (tensor, data, pipeline) along which values differ, if they do."""
    ranks: tuple[int, ...] = ()
    """Ranks on which it is seen, if not on all."""

    def line(self) -> str:
        """The difference in one line."""
        when = f"step {self.step}" if self.step else "before step 1"
        return f"{self.kind} of {self.place}, {when}: {self.text}"
