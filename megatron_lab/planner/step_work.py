"""What a step does, as a plan finds it and a prediction of its time reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.spec.operations import OpKind, Schedule
from megatron_lab.planner.kinds import Crossing
from megatron_lab.planner.plan import RankKind
from megatron_lab.planner.storages import MemorySpan


@dataclass(frozen=True)
class StepWork:
    """What a step does on all ranks, for whoever says how long that takes."""

    schedule: Schedule
    """Laid out for as many microbatches as show how the others go."""
    num_microbatches: int
    """All of a step."""
    ops: tuple[Mapping[OpKind, MemorySpan], ...]
    """For each chunk, what each kind of operation does and sends to ranks of its stage."""
    message: int
    """Bytes that a rank sends to the next stage for a microbatch."""
    crossings: tuple[bool, ...]
    """Whether messages from each stage to the next one go to another node."""
    kinds: tuple[RankKind, ...]
    """Those of all stages, or of the first and last of stages that look alike."""
    share: float
    """The share of a step's microbatches in the schedule, and in what kinds send for activations."""
    groups: Mapping[str, tuple[int, float]]
    """For each group that ranks send over by its name: its ranks, and how many of them a node has."""


def per_node(size: int, crossing: Crossing) -> float:
    """Ranks of a group that a node has: of a ring, one in as many sends leaves it."""
    leaving = float(crossing.mean())
    return size if not leaving else min(size, 1 / leaving)
