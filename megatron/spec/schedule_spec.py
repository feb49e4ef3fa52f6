"""The facts about one kind of schedule: how it is made, where its chunks lie, and what the papers say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.spec.operations import Op, OpKind, Schedule

Value = TypeVar("Value")


@dataclass(frozen=True)
class Costs:
    """Durations of the operations on one chunk, all in one unit (pictures take milliseconds)."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    p2p: float = 0.0
    """Time from the end of an operation until its result has arrived at another stage; 0 between chunks of one stage."""

    def of(self, op: Op) -> float:
        """Duration of an operation. A whole backward takes the time of an input gradient and a weight gradient."""
        if op.kind is OpKind.FORWARD:
            return self.forward
        if op.kind is OpKind.INPUT_GRAD:
            return self.input_grad
        return self.weight_grad if op.kind is OpKind.WEIGHT_GRAD else self.input_grad + self.weight_grad

    def divided(self, chunks_per_stage: int) -> Costs:
        """The costs of a chunk, if these are the costs of a whole stage."""
        n = chunks_per_stage
        return Costs(self.forward / n, self.input_grad / n, self.weight_grad / n, self.p2p)


@dataclass(frozen=True)
class Case:
    """The input of a formula: p stages, m microbatches, v chunks a stage, and the times of a whole stage (the same on all)."""

    p: int
    m: int
    v: int
    costs: Costs

    @property
    def work(self) -> float:
        """Time that a stage computes for one microbatch: F + I + W."""
        return self.costs.forward + self.costs.input_grad + self.costs.weight_grad


@dataclass(frozen=True)
class Formula(Generic[Value]):
    """A closed formula of a paper. F, I and W in it are the times of a forward, an input gradient and a weight gradient.

    It is used only where it holds exactly. Elsewhere its value is not even a reliable approximation.
    """

    text: str
    source: str
    value: Callable[[Case], Value]
    holds: Callable[[Case], bool] = lambda case: True
    needs: str = ""
    """The cases in which it is exact, in words; empty if it always is."""

    def __str__(self) -> str:
        return f"{self.text}{' where ' * bool(self.needs)}{self.needs} ({self.source})"


@dataclass(frozen=True)
class Expected:
    """What the papers' formulas give for a case; None where no formula holds."""

    bubble_time: float | None
    """Time that each stage waits in a step, in the unit of the costs."""
    peak_live: tuple[int, ...] | None
    """For each stage, the most microbatch activations, of one chunk each, kept at once. Each is kept until its weight gradient."""
    formulas: tuple[str, ...]
    """The formulas in words, whether they hold for the case or not."""


@dataclass(frozen=True)
class ScheduleSpec:
    """One kind of schedule. Each stands beside its generator; `megatron.spec.schedules` lists them."""

    name: str
    """Its name in `--pipeline-schedule`."""
    make: Callable[[int, int, int], Schedule]
    """Makes the schedule from (stages, microbatches, chunks a stage)."""
    place: Callable[[int, int], tuple[int, ...]]
    """Gives the stage of each chunk from (stages, chunks a stage)."""
    chunks_per_stage: int | None
    """The only possible number of chunks a stage. None: any number from two on (with one it would be another schedule)."""
    splits_backward: bool
    """Whether it has input gradients and weight gradients in place of whole backwards."""
    about_chunks: str
    """What it does with its chunks, as a sentence that begins with "It"."""
    bubble: Formula[float] | None = None
    """Time that each stage waits in a step, beside the m(F + I + W) in which it computes, if messages take no time."""
    peak_live: Formula[tuple[int, ...]] | None = None
    """For each stage, the most microbatch activations, of one chunk each, kept at once."""

    def takes(self, chunks_per_stage: int) -> bool:
        """Whether a user may ask for it with this number of chunks a stage."""
        return chunks_per_stage == self.chunks_per_stage if self.chunks_per_stage else chunks_per_stage > 1

    def expected(self, num_stages: int, num_microbatches: int, chunks_per_stage: int, costs: Costs) -> Expected:
        """What the papers' formulas give for a case. The costs are those of a whole stage, not of one of its chunks."""
        case = Case(num_stages, num_microbatches, chunks_per_stage, costs)
        bubble = self.bubble if self.bubble is not None and (costs.p2p == 0 or num_stages == 1) else None
        return Expected(
            bubble.value(case) if bubble is not None and bubble.holds(case) else None,
            self.peak_live.value(case) if self.peak_live is not None and self.peak_live.holds(case) else None,
            tuple(
                f"{what} {formula}" for what, formula in (("bubble", self.bubble), ("live", self.peak_live)) if formula is not None
            ),
        )
