"""Work of a step. The planner counts it, and `step_time.py` predicts from it how long the step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.spec.operations import OpType, Schedule
from megatron_lab.planner.plan import RankProfile
from megatron_lab.planner.rank_profiles import CrossingMask
from megatron_lab.planner.storages import MemorySpan


@dataclass(frozen=True)
class StepWork:
    """Work of a step on all ranks: schedule, memory and traffic of its operations, and rank profiles."""

    schedule: Schedule
    """Pipeline schedule. It may contain fewer microbatches than a step has, if the planner is `shortened`."""
    num_microbatches: int
    """Number of microbatches of a step, including those that `schedule` does not contain."""
    ops: tuple[Mapping[OpType, MemorySpan], ...]
    """Work and communication of each operation type within its stage, for each model chunk."""
    message_bytes: int
    """Bytes that a rank sends to the next stage for a microbatch."""
    crosses_nodes: tuple[bool, ...]
    """Whether messages from each stage to the next stage go to another node."""
    profiles: tuple[RankProfile, ...]
    """Rank profiles of all stages, or of the first and last stage of each group of equal stages."""
    scheduled_share: float
    """Share of a step's microbatches that `schedule` contains. The activation traffic in `profiles` also covers only these
    microbatches."""
    groups: Mapping[str, tuple[int, float]]
    """Size and ranks per node of each process group, by the name of the group."""


def estimate_ranks_per_node(size: int, crossings: CrossingMask) -> float:
    """Estimate the number of a group's ranks on each node. In a ring with r ranks per node, one of r sends leaves the node."""
    inter_node_share = float(crossings.mean())
    return size if not inter_node_share else min(size, 1 / inter_node_share)
