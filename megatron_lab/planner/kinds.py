"""The distinct kinds of rank in a job. Stages that look alike are one kind; within a stage, a kind holds the same to the byte."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data_parallel.traffic import axes_in_words, parts_in_words
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES, Topology
from megatron_lab.planner.allowances import Allowance, allowances
from megatron_lab.planner.plan import Places, RankKind, RankMemory, Traffic
from megatron_lab.planner.state_layout import Bytes, StateLayout, StateMemory, StatePart
from megatron_lab.planner.state_size import OptimizerState
from megatron_lab.planner.storages import Transfer


@dataclass(frozen=True)
class Sending:
    """What one rank of a stage sends in a step."""

    over: str
    what: str
    bytes: int
    peer: int | None = None
    """The stage that receives it, if it is a message between stages."""
    to_experts: bool = False
    """Whether all ranks that exchange tokens with this one get as much of it."""
    rings: tuple[str, ...] = ()
    """Groups of the same ranks, with communicators of their own, that it goes over in place of the group `over`."""


@dataclass(frozen=True)
class StagePlan:
    """What the ranks of one pipeline stage hold and send."""

    stage: int
    contents: Mapping[RankContent, Sequence[Places]]
    activations: Bytes
    """Activations at the peak, the same on all ranks of the stage."""
    to_host: int
    """Bytes of them that a step moves to the host, and back."""
    sent: Sequence[Sending]
    """What one rank sends, the same on all ranks of the stage."""


_Look = tuple[object, tuple[Bytes, int], tuple[tuple[str, str, int], ...], tuple[Allowance, ...]]
"""What decides whether stages are alike: what their ranks hold, activations, what they send, what CUDA takes."""
_RINGS = (("edp",), ("etp", "ep"), ("tp", "cp"), ("tp", *GRADIENT_AXES), GRADIENT_AXES, ("cp",), ("tp",))
"""Axes of the groups of collectives."""
NamedGroups = Mapping[str, tuple[int, Callable[[int], "Crossing"]]]
"""For each group that ranks send over: how many take part, and which ranks of a stage send to another node."""


def named_groups(context: ParallelContext, links: Links) -> NamedGroups:
    """The groups of a job by their names in `traffic`.

    Args:
        context: that of any rank.
    """
    topology, last = context.topology, context.topology.pp - 1
    parts: dict[str, tuple[int, Callable[[int], Crossing]]] = {}
    for axes in (GRADIENT_AXES, EXPERT_AXES[-1:]):
        within, across = parts_in_words(axes, context)
        shard, replicas = context.fsdp_shard(axes).size, context.fsdp_replica(axes).size
        parts[within] = shard, partial(links.parts, axes=axes, shard_size=shard)
        parts[across] = replicas, partial(links.replicas, axes=axes, shard_size=shard)
    return {
        "world": (topology.world_size, links.world),
        **parts,
        "pipeline ends": (2, lambda stage: links.between(stage, last - stage)),
        **{axes_in_words(axes, context): (topology.size(*axes), partial(links.ring, axes=axes)) for axes in _RINGS},
    }


def shared_communicators(context: ParallelContext) -> dict[str, str]:
    """Map each group of `named_groups` to the first one that has the same ranks, and so the same communicator (`make_context`).

    Args:
        context: that of any rank.
    """
    ranks: dict[str, tuple[int, ...]] = {"world": context.world.ranks}
    for axes in _RINGS:
        ranks[axes_in_words(axes, context)] = context.group(*axes).ranks
    for axes in (GRADIENT_AXES, EXPERT_AXES[-1:]):
        within, across = parts_in_words(axes, context)
        ranks |= {within: context.fsdp_shard(axes).ranks, across: context.fsdp_replica(axes).ranks}
    first: dict[tuple[int, ...], str] = {}
    shared = {name: first.setdefault(members, name) for name, members in ranks.items()}
    return {**shared, "pipeline ends": "world" if context.world.size == 2 else "pipeline ends"}


def make_kinds(
    stages: Iterable[StagePlan],
    groups: NamedGroups,
    shared: Mapping[str, str],
    links: Links,
    *,
    on_cuda: bool,
    of_tensor_ranks: Sequence[Allowance] = (),
) -> tuple[RankKind, ...]:
    """Put every rank into one kind.

    Args:
        shared: see `shared_communicators`.
        of_tensor_ranks: what CUDA takes on each rank for products that overlap with communication.
    """
    alike: dict[_Look, list[StagePlan]] = {}
    for stage in stages:
        contents = tuple((held, tuple(places)) for held, places in stage.contents.items())
        taken = (*_allowances(stage, groups, shared), *of_tensor_ranks) if on_cuda else ()
        alike.setdefault((contents, (stage.activations, stage.to_host), _amounts(stage.sent), taken), []).append(stage)
    return tuple(
        RankKind(
            stages=tuple(stage.stage for stage in same),
            places=tuple(places),
            first_rank=links.first_rank(same[0].stage, places[0].data.start, places[0].tensor),
            parameters=parameters,
            memory=RankMemory(**memory.parts, activations=activations, cuda=Bytes(sum(one.bytes for one in taken))),
            sent=tuple(_traffic(same, places, *amount, groups, links) for amount in amounts),
            allowances=taken,
            to_host=to_host,
        )
        for (_, (activations, to_host), amounts, taken), same in alike.items()
        for (parameters, memory), places in same[0].contents.items()
    )


def _allowances(stage: StagePlan, groups: NamedGroups, shared: Mapping[str, str]) -> tuple[Allowance, ...]:
    """Estimate CUDA's memory on the ranks of a stage. A group that carries no tensors has no communicator."""
    collectives = [sending for sending in stage.sent if sending.peer is None]
    rings = {name: groups[sending.over][0] for sending in collectives for name in (sending.rings or (shared[sending.over],))}
    return allowances(rings, len({sending.peer for sending in stage.sent if sending.peer is not None}))


def sending_of(transfer: Transfer, context: ParallelContext) -> Sending:
    """Describe what operations on microbatches send."""
    to_experts = (transfer.over, transfer.operation) == (axes_in_words(("etp", "ep"), context), "all-to-all")
    rings = ("cp_ring", "cp_ring_grad") if (transfer.over, transfer.operation) == ("cp", "send") else ()  # `context_rings`
    return Sending(transfer.over, "activations", transfer.bytes, transfer.peer, to_experts, rings)


def _amounts(sent: Sequence[Sending]) -> tuple[tuple[str, str, int], ...]:
    """(group, purpose, bytes) of each entry, without the stage that it goes to."""
    totals: dict[tuple[str, str], int] = {}
    for one in sent:
        totals[one.over, one.what] = totals.get((one.over, one.what), 0) + one.bytes
    return tuple((over, what, total) for (over, what), total in totals.items())


def _traffic(
    stages: Sequence[StagePlan], places: Sequence[Places], over: str, what: str, each: int, groups: NamedGroups, links: Links
) -> Traffic:
    """What is sent over one group for one purpose, with the share that leaves a node, over all ranks of a kind."""
    total, leaving, size = 0, 0.0, 0
    for stage in stages:
        for one in stage.sent:
            if (one.over, one.what) == (over, what):
                crossing: NDArray[Any]
                if one.peer is not None:
                    size, crossing = 2, links.between(stage.stage, one.peer)
                else:
                    size, crosses = groups[over]
                    if what == "matrices" or one.to_experts:
                        crossing = links.pairs(stage.stage, ("etp", "ep") if one.to_experts else EXPERT_AXES)
                    else:
                        crossing = crosses(stage.stage)
                leaving += one.bytes * sum(float(crossing[at.data.start : at.data.stop, at.tensor].sum()) for at in places)
                total += one.bytes * sum(len(at.data) for at in places)
    return Traffic(over, what, each, size, leaving / total if total else 0.0)


RankContent = tuple[int, StateMemory]
"""(elements of the model that a rank computes with, without padding; what it keeps of the model's state)."""


def places_by_content(
    model: Model, layout: StateLayout, context: ParallelContext, state: OptimizerState
) -> dict[RankContent, list[Places]]:
    """Group the ranks of a stage by what they hold.

    Args:
        model: that of any rank of the stage, the one whose context is given.
        layout: how the stage's state is cut.
    """
    found: dict[RankContent, list[Places]] = {}
    parts = [_PlacedPart(part, context, state) for part in layout.parts]
    ranges = list(_alike(parts, context))
    memories: Sequence[StateMemory] = []
    for tensor in range(context.topology.tp):
        if tensor == 0 or any(part.over_tensor for part in parts):
            memories = _memories(parts, layout, state, tensor, ranges)
        parameters = _num_held((entry.record for entry in model.params), context, tensor)
        for memory, data in zip(memories, ranges, strict=True):
            places = found.setdefault((parameters, memory), [])
            if places and places[-1].tensor == tensor and places[-1].data.stop == data.start:
                data = range(places.pop().data.start, data.stop)
            places.append(Places(tensor, data))
    return found


def parameters_of_stage(model: Model, context: ParallelContext) -> int:
    """Elements that the ranks of a stage hold together, each once and without padding. A tied one counts in its first chunk."""
    counted = [entry.record for entry in model.params if entry.record.chunks[0] in model.chunks]
    of_experts = sum(math.prod(record.shape) for record in counted if record.of_experts)
    counted = [record for record in counted if not record.of_experts]
    split = [record for record in counted if not record.replicated_axes]
    return of_experts + sum(_num_held(split if tensor else counted, context, tensor) for tensor in range(context.topology.tp))


def _num_held(records: Iterable[ParamRecord], context: ParallelContext, tensor: int) -> int:
    """Elements that a tensor rank holds of these parameters, without padding."""
    at = {**context.coordinates, "tp": tensor}
    return sum(record.held_box(context.axis_sizes, at).numel for record in records)


def _numbers(memory: StateMemory) -> list[tuple[int, int, int]]:
    """(device, host, padding) of each part."""
    return [(part.device, part.host, part.padding) for part in memory.parts.values()]


class _PlacedPart:
    """A part of the state, with the places where what is kept of it changes."""

    def __init__(self, part: StatePart, context: ParallelContext, state: OptimizerState) -> None:
        group = part.group(context)
        self._of_experts = part.axes == EXPERT_AXES[-1:]
        self._apart = context.topology.etp * context.topology.ep
        """Neighbouring ranks that are not in one group, if it is one of experts."""
        wide = self._of_experts or part.axes == ("tp", *GRADIENT_AXES)
        self._tensor_size = context.topology.tp if wide else 1
        self.over_tensor = self._tensor_size > 1 and group.size > 1
        self._size = group.size
        self._starts = sorted(cut for cut in {0, *part.cuts()} if cut < group.size)
        self.kept = [part.kept(start) for start in self._starts]
        self.alone = np.array([_numbers(memory + state.memory(shards)) for memory, shards in self.kept])
        """Memory for each of `kept` with its optimizer state, [kept, part, (device, host, padding)], for use where that state does
        not depend on other parts."""

    def cuts(self, data_size: int) -> Iterator[int]:
        """Data ranks at which what is kept may change, on any tensor rank."""
        if len(self._starts) == 1:
            return
        if self._of_experts:
            copies = data_size * self._tensor_size // self._apart
            for start in (first + start for first in range(0, copies, self._size) for start in self._starts):
                yield from (-(-(start * self._apart - tensor) // self._tensor_size) for tensor in (0, self._tensor_size - 1))
            return
        ranks = self._size // self._tensor_size
        for first in range(0, data_size, ranks):
            for start in self._starts:
                yield from (first + start // self._tensor_size, first - (-start // self._tensor_size))

    def numbers(self, tensor: int, data: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each data rank, the index into `kept` of what it keeps."""
        index = tensor + self._tensor_size * data if self._tensor_size > 1 else data
        if self._of_experts:
            index = index // self._apart
        return np.searchsorted(self._starts, index % self._size, side="right") - 1


def _alike(parts: Sequence[_PlacedPart], context: ParallelContext) -> Iterator[range]:
    """Runs of data ranks that keep the same of every part, on every tensor rank."""
    data = context.gradient_group.size
    cuts = {0, data, *(cut for part in parts for cut in part.cuts(data))}
    return (range(*pair) for pair in itertools.pairwise(sorted(cut for cut in cuts if cut <= data)))


def _memories(
    parts: Sequence[_PlacedPart], layout: StateLayout, state: OptimizerState, tensor: int, ranges: Sequence[range]
) -> list[StateMemory]:
    """What a rank keeps of all parts, for each run of data ranks."""
    data = np.array([some.start for some in ranges])
    numbers = [part.numbers(tensor, data) for part in parts]
    if parts and not state.apart:
        rows = [tuple(row) for row in np.stack(numbers, axis=1).tolist()]
        kept = {row: [part.kept[number] for part, number in zip(parts, row, strict=True)] for row in rows}
        known = {row: layout.memory(of_parts, state.memory) for row, of_parts in kept.items()}
        return [known[row] for row in rows]
    total = np.array([_numbers(StateMemory(buffers=layout.buffers))] * len(ranges))
    for part, mine in zip(parts, numbers, strict=True):
        total += part.alone[mine]
    return [StateMemory(*(Bytes(*part) for part in memory)) for memory in total.tolist()]


Crossing = NDArray[np.bool_]
"""Whether what a rank sends goes to another node, for each rank of a stage: [data, tensor]."""


class Links:
    """Which node each rank is on, and which sends leave it.

    Args:
        gpus_per_node: rank r is on node r // gpus_per_node.
    """

    def __init__(self, topology: Topology, gpus_per_node: int) -> None:
        self._topology, self._gpus_per_node = topology, gpus_per_node
        pp, dp, cp, tp = np.indices((topology.pp, topology.dp, topology.cp, topology.tp), sparse=True)
        number: Any = topology.rank  # the topology's arithmetic for one rank works on arrays too
        self._ranks: NDArray[np.int64] = number(tp=tp, cp=cp, dp=dp, pp=pp).reshape(topology.pp, -1, topology.tp)
        self._nodes = self._ranks // gpus_per_node

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self._topology.world_size

    def ring(self, stage: int, axes: Sequence[str]) -> Crossing:
        """Sends around rings over some axes of one of the grids."""
        return self._rings(stage, *self._grid(axes))

    def parts(self, stage: int, axes: Sequence[str], shard_size: int) -> Crossing:
        """Sends around the ranks along some axes that share one copy of what they hold (--fsdp-shard-size)."""
        return self._rings(stage, self._in_parts(axes, shard_size), [1])

    def replicas(self, stage: int, axes: Sequence[str], shard_size: int) -> Crossing:
        """Sends around groups that take one rank from each copy."""
        return self._rings(stage, self._in_parts(axes, shard_size), [0])

    def _in_parts(self, axes: Sequence[str], shard_size: int) -> tuple[int, int, int]:
        """The shape of a stage's grid: copies, the ranks along the axes that share one, and neighbours that do not."""
        return -1, shard_size, math.prod(self._grid(axes)[0]) // self._topology.size(*axes)

    def world(self, stage: int) -> Crossing:
        """Sends around all ranks."""
        following = (self._ranks[stage] + 1) % self._topology.world_size // self._gpus_per_node
        crossing: Crossing = self._nodes[stage] != following
        return crossing

    def between(self, stage: int, peer: int) -> Crossing:
        """Messages from a stage to the same place of another stage."""
        crossing: Crossing = self._nodes[stage] != self._nodes[peer]
        return crossing

    def pairs(self, stage: int, axes: Sequence[str] = EXPERT_AXES) -> NDArray[np.float64]:
        """Share of what a rank sends to all others along some axes alike (by default to all of its stage) that leaves its node:
        [data, tensor]."""
        groups, turned_back = self._groups(stage, *self._grid(axes))
        size = groups.shape[-1]
        number = np.arange(groups.size).reshape(groups.shape) // size  # of the group
        _, which, counts = np.unique(number * (self._nodes.max() + 1) + groups, return_inverse=True, return_counts=True)
        return turned_back((size - counts[which]) / max(size - 1, 1))

    def first_rank(self, stage: int, data: int, tensor: int) -> int:
        """Number of the rank at these coordinates."""
        return int(self._ranks[stage, data, tensor])

    def _rings(self, stage: int, shape: tuple[int, ...], inside: list[int]) -> Crossing:
        """Whether the next one in the ring over the axes `inside` of this shape, the last of which counts fastest, is on another
        node."""
        rings, turned_back = self._groups(stage, shape, inside)
        return turned_back(rings != np.roll(rings, -1, axis=-1))

    def _grid(self, axes: Sequence[str]) -> tuple[tuple[int, ...], list[int]]:
        """The shape of a stage's grid that has these axes, and their places in it."""
        order = ("edp", "ep", "etp") if set(axes) <= set(EXPERT_AXES) else ("dp", "cp", "tp")
        shape = tuple(self._topology.size(axis) for axis in order)
        return shape, [place for place, axis in enumerate(order) if axis in axes]

    def _groups(
        self, stage: int, shape: tuple[int, ...], inside: list[int]
    ) -> tuple[NDArray[np.int64], Callable[[NDArray[Any]], NDArray[Any]]]:
        """The nodes of each group over the axes `inside` of this shape, [..., ranks of it]; and what turns something of that shape
        into [data, tensor]."""
        nodes = self._nodes[stage].reshape(shape)
        order = [*(axis for axis in range(nodes.ndim) if axis not in inside), *inside]
        turned = nodes.transpose(order)
        groups = turned.reshape(*turned.shape[: nodes.ndim - len(inside)], -1)

        def turned_back(found: NDArray[Any]) -> NDArray[Any]:
            return found.reshape(turned.shape).transpose(np.argsort(order)).reshape(-1, self._topology.tp)

        return groups, turned_back
