"""The facts about one kind of schedule: how it is made, where its chunks lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.spec.operations import Op, OpKind, Schedule, loop


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
class ScheduleSpec:
    """One kind of schedule. Each stands beside its generator; `megatron.spec.schedules` lists them."""

    name: str
    """Its name in `--pipeline-schedule`."""
    make: Callable[[int, int, int], Schedule]
    """Makes the schedule from (stages, microbatches, chunks a stage)."""
    place: Callable[[int, int], tuple[int, ...]] = loop
    """Gives the stage of each chunk from (stages, chunks a stage)."""
    chunks_per_stage: int | None = 1
    """The only possible number of chunks a stage. None: any number from two on (with one it would be another schedule)."""
    splits_backward: bool = False
    """Whether it has input gradients and weight gradients in place of whole backwards."""
    about_chunks: str = "It has one virtual stage (chunk) on each pipeline rank."
    """What it does with its chunks, as a sentence that begins with "It"."""

    def takes(self, chunks_per_stage: int) -> bool:
        """Whether a user may ask for it with this number of chunks a stage."""
        return chunks_per_stage == self.chunks_per_stage if self.chunks_per_stage else chunks_per_stage > 1
