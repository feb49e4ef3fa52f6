"""Memory and traffic of all ranks of a job, as few profiles. A profile is a set of ranks that use exactly the same number of bytes
for each purpose. Equal stages share profiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data_parallel.traffic import format_axes, format_fsdp_groups
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES, Topology
from megatron_lab.planner.allowances import Allowance, estimate_allowances
from megatron_lab.planner.plan import RankMemory, RankProfile, RankRange, Traffic
from megatron_lab.planner.state_layout import Bytes, StateComponent, StateLayout, StateMemory
from megatron_lab.planner.state_size import OptimizerState
from megatron_lab.planner.storages import Transfer


@dataclass(frozen=True)
class StageSend:
    """Bytes that one rank of a stage sends in a step over one process group for one purpose."""

    group: str
    purpose: str
    bytes: int
    peer: int | None = None
    """Receiving pipeline stage, if the traffic is a message between stages."""
    is_to_experts: bool = False
    """Whether the traffic is the token dispatch of experts, in which a rank sends equally many bytes to each other rank of the
    group."""
    ring_groups: tuple[str, ...] = ()
    """Names of the process groups that carry the traffic in place of `group`. They have the ranks of `group`, but separate
    communicators, whose memory counts separately."""


@dataclass(frozen=True)
class StagePlan:
    """Memory and traffic of the ranks of one pipeline stage."""

    stage: int
    contents: Mapping[RankContent, Sequence[RankRange]]
    activations: Bytes
    """Bytes of activations at the peak of a step, equal on all ranks of the stage."""
    offloaded_bytes: int
    """Bytes of activations that a rank copies to host memory and back in a step."""
    sends: Sequence[StageSend]
    """Traffic of one rank in a step, by process group and purpose. It is equal on all ranks of the stage."""


_ProfileKey = tuple[object, tuple[Bytes, int], tuple[tuple[str, str, int], ...], tuple[Allowance, ...]]
"""Everything on which it depends whether stages share profiles: memory of their ranks, activations, traffic, and CUDA's own
memory."""
_COLLECTIVE_AXES = (("edp",), ("etp", "ep"), ("tp", "cp"), ("tp", *GRADIENT_AXES), GRADIENT_AXES, ("cp",), ("tp",))
"""Axes of each process group over which collectives run."""
GroupTable = Mapping[str, tuple[int, Callable[[int], "CrossingMask"]]]
"""For each group by name: its size, and a function that returns the `CrossingMask` of a stage."""


def build_group_table(context: ParallelContext, links: Links) -> GroupTable:
    """Return the size of each process group of a job, and which of its ranks send to another node.

    Args:
        context: parallel context of any rank.

    Returns:
        For each group, by the name that `megatron.data_parallel.traffic` gives it: its size, and a function. The function gets a
        stage and returns, for each rank of the stage, whether its traffic over the group leaves its node.
    """
    topology, last_stage = context.topology, context.topology.pp - 1
    fsdp_groups: dict[str, tuple[int, Callable[[int], CrossingMask]]] = {}
    for axes in (GRADIENT_AXES, EXPERT_AXES[-1:]):
        shard_name, replica_name = format_fsdp_groups(axes, context)
        shard_size, num_replicas = context.get_fsdp_shard_group(axes).size, context.get_fsdp_replica_group(axes).size
        fsdp_groups[shard_name] = shard_size, partial(links.shard_group_crossings, axes=axes, shard_size=shard_size)
        fsdp_groups[replica_name] = num_replicas, partial(links.find_replica_group_crossings, axes=axes, shard_size=shard_size)
    return {
        "world": (topology.world_size, links.find_world_crossings),
        **fsdp_groups,
        "pipeline ends": (2, lambda stage: links.find_stage_crossings(stage, last_stage - stage)),
        **{
            format_axes(axes, context): (topology.get_size(*axes), partial(links.find_ring_crossings, axes=axes))
            for axes in _COLLECTIVE_AXES
        },
    }


def find_shared_communicators(context: ParallelContext) -> dict[str, str]:
    """Map the name of each process group to the name of the first group with the same ranks.

    Groups with the same ranks share one communicator (see `make_context`).

    Args:
        context: parallel context of any rank.
    """
    ranks: dict[str, tuple[int, ...]] = {"world": context.world.ranks}
    for axes in _COLLECTIVE_AXES:
        ranks[format_axes(axes, context)] = context.group(*axes).ranks
    for axes in (GRADIENT_AXES, EXPERT_AXES[-1:]):
        shard_name, replica_name = format_fsdp_groups(axes, context)
        ranks |= {shard_name: context.get_fsdp_shard_group(axes).ranks, replica_name: context.get_fsdp_replica_group(axes).ranks}
    first: dict[tuple[int, ...], str] = {}
    shared = {name: first.setdefault(members, name) for name, members in ranks.items()}
    return {**shared, "pipeline ends": "world" if context.world.size == 2 else "pipeline ends"}


def build_rank_profiles(
    stages: Iterable[StagePlan],
    groups: GroupTable,
    shared_communicators: Mapping[str, str],
    links: Links,
    *,
    on_cuda: bool,
    overlap_allowances: Sequence[Allowance] = (),
) -> tuple[RankProfile, ...]:
    """Collect the ranks of a job into profiles. Each profile has the ranks whose memory and traffic are identical.

    Args:
        stages: memory and traffic of each pipeline stage.
        groups: result of `build_group_table`: the process groups of the job by name.
        shared_communicators: result of `find_shared_communicators`: which process groups use the same NCCL communicator.
        on_cuda: whether the ranks run on GPUs. Only then the memory of CUDA and NCCL is added.
        overlap_allowances: further CUDA memory on each rank, for matrix products that overlap with communication.
    """
    stages_by_key: dict[_ProfileKey, list[StagePlan]] = {}
    for stage in stages:
        contents = tuple((content, tuple(rank_ranges)) for content, rank_ranges in stage.contents.items())
        allowances = (*_estimate_stage_allowances(stage, groups, shared_communicators), *overlap_allowances) if on_cuda else ()
        stages_by_key.setdefault(
            (contents, (stage.activations, stage.offloaded_bytes), _sum_sends(stage.sends), allowances), []
        ).append(stage)
    return tuple(
        RankProfile(
            stages=tuple(stage.stage for stage in equal_stages),
            rank_ranges=tuple(rank_ranges),
            first_rank=links.get_first_rank(equal_stages[0].stage, rank_ranges[0].data.start, rank_ranges[0].tensor),
            parameters=parameters,
            memory=RankMemory(
                **memory.by_purpose, activations=activations, cuda=Bytes(sum(allowance.bytes for allowance in allowances))
            ),
            traffic=tuple(_build_traffic(equal_stages, rank_ranges, *total, groups, links) for total in totals),
            allowances=allowances,
            offloaded_bytes=offloaded_bytes,
        )
        for (_, (activations, offloaded_bytes), totals, allowances), equal_stages in stages_by_key.items()
        for (parameters, memory), rank_ranges in equal_stages[0].contents.items()
    )


def _estimate_stage_allowances(
    stage: StagePlan, groups: GroupTable, shared_communicators: Mapping[str, str]
) -> tuple[Allowance, ...]:
    """Estimate the memory of CUDA and NCCL on each rank of a stage. A process group that sends no tensors has no communicator and
    needs no memory."""
    collective_sends = [send for send in stage.sends if send.peer is None]
    collective_groups = {
        name: groups[send.group][0]
        for send in collective_sends
        for name in (send.ring_groups or (shared_communicators[send.group],))
    }
    return estimate_allowances(collective_groups, len({send.peer for send in stage.sends if send.peer is not None}))


def convert_transfer(transfer: Transfer, context: ParallelContext) -> StageSend:
    """Convert the bytes that a trace recorded for one collective or message type to a `StageSend` with the purpose "activations".

    Args:
        context: parallel context of any rank.
    """
    to_experts = (transfer.group, transfer.comm_type) == (format_axes(("etp", "ep"), context), "all-to-all")
    # The names of the groups of `ParallelContext.context_rings`.
    rings = ("cp_ring", "cp_ring_grad") if (transfer.group, transfer.comm_type) == ("cp", "send") else ()
    return StageSend(transfer.group, "activations", transfer.bytes, transfer.peer, to_experts, rings)


def _sum_sends(sends: Sequence[StageSend]) -> tuple[tuple[str, str, int], ...]:
    """Return (process group, purpose, bytes) for each process group and purpose. Messages to different stages are added up."""
    totals: dict[tuple[str, str], int] = {}
    for send in sends:
        totals[send.group, send.purpose] = totals.get((send.group, send.purpose), 0) + send.bytes
    return tuple((group, purpose, total) for (group, purpose), total in totals.items())


def _build_traffic(
    stages: Sequence[StagePlan],
    rank_ranges: Sequence[RankRange],
    group: str,
    purpose: str,
    bytes_per_rank: int,
    groups: GroupTable,
    links: Links,
) -> Traffic:
    """Return the bytes that a rank sends over one process group for one purpose, and the share of them that goes to other nodes.
    The share is a mean over the ranks of a profile.

    Args:
        stages: stages of the profile.
        rank_ranges: ranks of the profile within each of these stages.
        groups: result of `build_group_table`: the process groups of the job by name.
    """
    total, inter_node, size = 0, 0.0, 0
    for stage in stages:
        for send in stage.sends:
            if (send.group, send.purpose) == (group, purpose):
                crossing: NDArray[Any]
                if send.peer is not None:
                    size, crossing = 2, links.find_stage_crossings(stage.stage, send.peer)
                else:
                    size, get_crossings = groups[group]
                    if purpose == "matrices" or send.is_to_experts:
                        crossing = links.compute_inter_node_fractions(
                            stage.stage, ("etp", "ep") if send.is_to_experts else EXPERT_AXES
                        )
                    else:
                        crossing = get_crossings(stage.stage)
                inter_node += send.bytes * sum(
                    float(crossing[ranks.data.start : ranks.data.stop, ranks.tensor].sum()) for ranks in rank_ranges
                )
                total += send.bytes * sum(len(ranks.data) for ranks in rank_ranges)
    return Traffic(group, purpose, bytes_per_rank, size, inter_node / total if total else 0.0)


RankContent = tuple[int, StateMemory]
"""(number of parameters that a rank computes with, without padding; the model's state on the rank)"""


def group_ranks_by_content(
    model: Model, layout: StateLayout, context: ParallelContext, state: OptimizerState
) -> dict[RankContent, list[RankRange]]:
    """Group the ranks of a stage by the number of parameters with which they compute and by the memory of their state.

    Args:
        model: model of the rank of `context`, which may be any rank of the stage.
        layout: how the ranks of the stage share the state.
        state: computes the memory of the optimizer's state.
    """
    rank_ranges_by_content: dict[RankContent, list[RankRange]] = {}
    components = [_ComponentLayout(component, context, state) for component in layout.components]
    data_ranges = list(_split_data_ranks(components, context))
    memories: Sequence[StateMemory] = []
    for tensor in range(context.topology.tp):
        if tensor == 0 or any(component.varies_with_tensor_rank for component in components):
            memories = _compute_memories(components, layout, state, tensor, data_ranges)
        num_params = _count_local_params((entry.record for entry in model.params), context, tensor)
        for memory, data in zip(memories, data_ranges, strict=True):
            rank_ranges = rank_ranges_by_content.setdefault((num_params, memory), [])
            if rank_ranges and rank_ranges[-1].tensor == tensor and rank_ranges[-1].data.stop == data.start:
                data = range(rank_ranges.pop().data.start, data.stop)
            rank_ranges.append(RankRange(tensor, data))
    return rank_ranges_by_content


def count_stage_params(model: Model, context: ParallelContext) -> int:
    """Count the parameters of a stage over all its ranks, each once and without padding. A tied parameter counts only in its first
    chunk."""
    records = [entry.record for entry in model.params if entry.record.chunks[0] in model.chunks]
    num_expert_params = sum(math.prod(record.shape) for record in records if record.is_expert)
    records = [record for record in records if not record.is_expert]
    not_replicated = [record for record in records if not record.replicated_axes]
    return num_expert_params + sum(
        _count_local_params(not_replicated if tensor else records, context, tensor) for tensor in range(context.topology.tp)
    )


def _count_local_params(records: Iterable[ParamRecord], context: ParallelContext, tensor: int) -> int:
    """Count the elements of these parameters that one tensor rank holds, without padding.

    Args:
        tensor: tensor rank.
    """
    coordinates = {**context.coordinates, "tp": tensor}
    return sum(record.get_local_slice(context.axis_sizes, coordinates).numel for record in records)


def _list_bytes(memory: StateMemory) -> list[tuple[int, int, int]]:
    """Return (device bytes, host bytes, padding bytes) for each purpose of the state memory, to be put in a NumPy array."""
    return [(size.device, size.host, size.padding) for size in memory.by_purpose.values()]


class _ComponentLayout:
    """Distribution of one component of the state (such as a bucket) over the ranks of a stage. It yields the data ranks from which
    on the memory for the component may differ from that on the ranks before."""

    def __init__(self, component: StateComponent, context: ParallelContext, state: OptimizerState) -> None:
        group = component.group(context)
        self._is_expert = component.axes == EXPERT_AXES[-1:]
        self._expert_group_size = context.topology.etp * context.topology.ep
        """Consecutive ranks that are in different groups, for a component of experts."""
        includes_tensor_ranks = self._is_expert or component.axes == ("tp", *GRADIENT_AXES)
        self._tensor_size = context.topology.tp if includes_tensor_ranks else 1
        self.varies_with_tensor_rank = self._tensor_size > 1 and group.size > 1
        self._size = group.size
        self._starts = sorted(boundary for boundary in {0, *component.find_boundaries()} if boundary < group.size)
        self.rank_states = [component.compute_rank_state(start) for start in self._starts]
        self.memory_table = np.array([_list_bytes(memory + state.compute_memory(shards)) for memory, shards in self.rank_states])
        """Memory of each of `rank_states` including optimizer state: [state, purpose, (device, host, padding)]. Valid if the
        optimizer state of a component does not depend on other components."""

    def iter_boundaries(self, data_size: int) -> Iterator[int]:
        """Yield the data ranks at which the memory of the component may differ from that of the previous data rank, on any tensor
        rank.

        Args:
            data_size: number of data and context ranks.
        """
        if len(self._starts) == 1:
            return
        if self._is_expert:
            num_ranks = data_size * self._tensor_size // self._expert_group_size
            for start in (first + start for first in range(0, num_ranks, self._size) for start in self._starts):
                yield from (
                    -(-(start * self._expert_group_size - tensor) // self._tensor_size) for tensor in (0, self._tensor_size - 1)
                )
            return
        data_ranks_per_group = self._size // self._tensor_size
        for first in range(0, data_size, data_ranks_per_group):
            for start in self._starts:
                yield from (first + start // self._tensor_size, first - (-start // self._tensor_size))

    def compute_state_indices(self, tensor: int, data: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each of several data ranks, the index of its entry in `rank_states`. Ranks with equal state memory share an
        entry.

        Args:
            tensor: tensor rank.
            data: data ranks.
        """
        index = tensor + self._tensor_size * data if self._tensor_size > 1 else data
        if self._is_expert:
            index = index // self._expert_group_size
        return np.searchsorted(self._starts, index % self._size, side="right") - 1


def _split_data_ranks(components: Sequence[_ComponentLayout], context: ParallelContext) -> Iterator[range]:
    """Yield consecutive ranges of data ranks. Within a range, all ranks with the same tensor rank have equal state memory."""
    data_size = context.gradient_group.size
    boundaries = {0, data_size, *(boundary for component in components for boundary in component.iter_boundaries(data_size))}
    return (range(*pair) for pair in itertools.pairwise(sorted(boundary for boundary in boundaries if boundary <= data_size)))


def _compute_memories(
    components: Sequence[_ComponentLayout], layout: StateLayout, state: OptimizerState, tensor: int, data_ranges: Sequence[range]
) -> list[StateMemory]:
    """Return the state memory of a rank in each range of data ranks, at one tensor rank.

    Args:
        tensor: tensor rank.
        data_ranges: ranges of data ranks within which the memory is equal.
    """
    first_data_ranks = np.array([data_range.start for data_range in data_ranges])
    indices = [component.compute_state_indices(tensor, first_data_ranks) for component in components]
    if components and not state.has_independent_shards:
        rows = [tuple(row) for row in np.stack(indices, axis=1).tolist()]
        states_of_row = {
            row: [component.rank_states[index] for component, index in zip(components, row, strict=True)] for row in rows
        }
        memory_of_row = {
            row: layout.compute_memory(rank_states, state.compute_memory) for row, rank_states in states_of_row.items()
        }
        return [memory_of_row[row] for row in rows]
    total = np.array([_list_bytes(StateMemory(buffers=layout.buffers))] * len(data_ranges))
    for component, state_indices in zip(components, indices, strict=True):
        total += component.memory_table[state_indices]
    return [StateMemory(*(Bytes(*sizes) for sizes in memory)) for memory in total.tolist()]


CrossingMask = NDArray[np.bool_]
"""Whether the traffic of each rank of a stage goes to another node: [data, tensor]."""


class Links:
    """Distribution of the ranks over nodes. The methods named `..._crossings` return which ranks of a stage send to another node,
    as an array [data, tensor] of booleans with an element for each rank.

    Args:
        gpus_per_node: rank r is on node r // gpus_per_node.
    """

    def __init__(self, topology: Topology, gpus_per_node: int) -> None:
        self._topology, self._gpus_per_node = topology, gpus_per_node
        pp, dp, cp, tp = np.indices((topology.pp, topology.dp, topology.cp, topology.tp), sparse=True)
        rank_of: Any = topology.find_rank  # the arithmetic of `Topology.find_rank` also works on arrays
        self._ranks: NDArray[np.int64] = rank_of(tp=tp, cp=cp, dp=dp, pp=pp).reshape(topology.pp, -1, topology.tp)
        self._nodes = self._ranks // gpus_per_node

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self._topology.world_size

    def find_ring_crossings(self, stage: int, axes: Sequence[str]) -> CrossingMask:
        """Return, for each rank of a stage, whether the next rank in a ring along these axes is on another node, as an array [data,
        tensor]. In a ring collective, these ranks send over the network."""
        return self._find_ring_crossings_of_grid(stage, *self._get_grid(axes))

    def shard_group_crossings(self, stage: int, axes: Sequence[str], shard_size: int) -> CrossingMask:
        """Return, for each rank of a stage, whether the next rank in the ring of its shard group is on another node. A shard group
        has the ranks along `axes` that together hold one copy of the state (--fsdp-shard-size)."""
        return self._find_ring_crossings_of_grid(stage, self._get_replica_grid(axes, shard_size), [1])

    def find_replica_group_crossings(self, stage: int, axes: Sequence[str], shard_size: int) -> CrossingMask:
        """Return, for each rank of a stage, whether the next rank in the ring of its replica group is on another node. A replica
        group has the ranks along `axes` that hold the same shard, one in each copy of the state (--fsdp-shard-size)."""
        return self._find_ring_crossings_of_grid(stage, self._get_replica_grid(axes, shard_size), [0])

    def _get_replica_grid(self, axes: Sequence[str], shard_size: int) -> tuple[int, int, int]:
        """Return the shape (-1, sharing, other) in which to view the ranks of a stage. The first dimension are the copies of the
        state; -1 means that its size follows from the two others. The second dimension are the `shard_size` ranks along `axes` that
        share one copy. The third dimension are the ranks along all other axes."""
        return -1, shard_size, math.prod(self._get_grid(axes)[0]) // self._topology.get_size(*axes)

    def find_world_crossings(self, stage: int) -> CrossingMask:
        """Return, for each rank of a stage, whether the next rank in a ring over all ranks of the job is on another node."""
        next_nodes = (self._ranks[stage] + 1) % self._topology.world_size // self._gpus_per_node
        crossing: CrossingMask = self._nodes[stage] != next_nodes
        return crossing

    def find_stage_crossings(self, stage: int, peer: int) -> CrossingMask:
        """Return, for each rank of a stage, whether the rank with the same coordinates in the stage `peer` is on another node.
        Messages between the two ranks then use the network."""
        crossing: CrossingMask = self._nodes[stage] != self._nodes[peer]
        return crossing

    def compute_inter_node_fractions(self, stage: int, axes: Sequence[str] = EXPERT_AXES) -> NDArray[np.float64]:
        """Return, for each rank of a stage, the fraction of its all-to-all traffic that goes to other nodes, as an array [data,
        tensor].

        Args:
            axes: axes of the process group over which the all-to-all runs; by default all ranks of the stage.
        """
        groups, to_rank_grid = self._group_nodes(stage, *self._get_grid(axes))
        group_size = groups.shape[-1]
        group_index = np.arange(groups.size).reshape(groups.shape) // group_size
        _, node_index, counts = np.unique(group_index * (self._nodes.max() + 1) + groups, return_inverse=True, return_counts=True)
        return to_rank_grid((group_size - counts[node_index]) / max(group_size - 1, 1))

    def get_first_rank(self, stage: int, data: int, tensor: int) -> int:
        """Return the global rank with these coordinates: pipeline stage, data rank and tensor rank.

        Args:
            data: rank among the data and context ranks.
        """
        return int(self._ranks[stage, data, tensor])

    def _find_ring_crossings_of_grid(self, stage: int, shape: tuple[int, ...], group_dims: list[int]) -> CrossingMask:
        """Return, for each rank of a stage, whether the next rank in a ring is on another node.

        Args:
            shape: shape of the grid in which to view the ranks of the stage.
            group_dims: dimensions of the grid along which the ring runs; the last of them varies fastest.
        """
        rings, to_rank_grid = self._group_nodes(stage, shape, group_dims)
        return to_rank_grid(rings != np.roll(rings, -1, axis=-1))

    def _get_grid(self, axes: Sequence[str]) -> tuple[tuple[int, ...], list[int]]:
        """Return the shape of the rank grid of a stage that has these axes as dimensions, and the indices of the axes in this
        shape.
        The grid is that of the experts or that of all other layers."""
        order = ("edp", "ep", "etp") if set(axes) <= set(EXPERT_AXES) else ("dp", "cp", "tp")
        shape = tuple(self._topology.get_size(axis) for axis in order)
        return shape, [dim for dim, axis in enumerate(order) if axis in axes]

    def _group_nodes(
        self, stage: int, shape: tuple[int, ...], group_dims: list[int]
    ) -> tuple[NDArray[np.int64], Callable[[NDArray[Any]], NDArray[Any]]]:
        """Return the node of each rank, ordered by group.

        Args:
            shape: shape of the grid in which to view the ranks of the stage.
            group_dims: dimensions of the grid along which the ranks of a group lie.

        Returns:
            Node indices as an array [..., group size], and a function that converts an array of this shape to [data, tensor].
        """
        nodes = self._nodes[stage].reshape(shape)
        order = [*(axis for axis in range(nodes.ndim) if axis not in group_dims), *group_dims]
        permuted = nodes.transpose(order)
        groups = permuted.reshape(*permuted.shape[: nodes.ndim - len(group_dims)], -1)

        def to_rank_grid(values: NDArray[Any]) -> NDArray[Any]:
            return values.reshape(permuted.shape).transpose(np.argsort(order)).reshape(-1, self._topology.tp)

        return groups, to_rank_grid
