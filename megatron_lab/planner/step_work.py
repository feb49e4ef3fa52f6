"""Work of a step: FLOPs, memory traffic and communication. The planner counts the work, and `step_time.py` predicts from it how
long the step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.spec.operations import OpType, Schedule
from megatron_lab.planner.plan import RankProfile
from megatron_lab.planner.rank_profiles import CrossingMask
from megatron_lab.planner.storages import MemorySpan


@dataclass(frozen=True)
class StepWork:
    """Work of a step on all ranks: the schedule, the work and communication of each operation, and the memory and traffic of the
    ranks."""

    schedule: Schedule
    """Pipeline schedule. It may contain only the first microbatches of a step, up to the memory peak (`Planner` with
    `shortened`)."""
    num_microbatches: int
    """Number of microbatches of a step, including those that `schedule` does not contain."""
    ops: tuple[Mapping[OpType, MemorySpan], ...]
    """Work and communication of each operation type on one microbatch, for each model chunk. Messages between stages are not
    included."""
    message_bytes: int
    """Bytes of a message between stages: the hidden states of a microbatch that a rank sends to the next stage."""
    crosses_nodes: tuple[bool, ...]
    """Whether messages from each stage to the next stage go to another node."""
    profiles: tuple[RankProfile, ...]
    """Memory and traffic of the ranks. They cover all stages, or the first and the last stage of each group of stages with
    equal layers."""
    scheduled_share: float
    """Share of a step's microbatches that `schedule` contains. The activation traffic in `profiles` also covers only these
    microbatches."""
    groups: Mapping[str, tuple[int, float]]
    """Size of each process group, and number of its ranks on each node, by name of the group."""


def estimate_ranks_per_node(size: int, crossings: CrossingMask) -> float:
    """Estimate how many ranks of a process group are on each node. In a ring with r ranks per node, one of r sends leaves the node.

    Args:
        size: size of the process group.
        crossings: for each rank of a stage, whether the next rank in its ring is on another node.
    """
    inter_node_share = float(crossings.mean())
    return size if not inter_node_share else min(size, 1 / inter_node_share)
