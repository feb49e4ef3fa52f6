"""The distinct kinds of rank of a job: stages that look alike are one, and on them ranks that hold the same to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.data_parallel.state_layout import Bytes, StateMemory
from megatron.data_parallel.traffic import axes_in_words
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import GRADIENT_AXES
from megatron.planner.activations.peak import Activations
from megatron.planner.links import Crossing, Links
from megatron.planner.places import Held
from megatron.planner.plan import Kind, Places, RankMemory, Traffic


@dataclass(frozen=True)
class Sending:
    """What one rank of a stage sends in a step."""

    over: str
    what: str
    bytes: int
    peer: int | None = None
    """Stage that it goes to, where it is a message between stages."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage."""

    stage: int
    contents: Mapping[Held, Sequence[Places]]
    activations: Activations
    """At the peak, the same on all ranks of the stage."""
    sent: tuple[Sending, ...]
    """Likewise."""


class Groups:
    """The groups that ranks send over, by the words of `traffic`: how large, and where they leave a node.

    Args:
        context: of any rank.
    """

    def __init__(self, context: ParallelContext, links: Links) -> None:
        topology, shard = context.topology, context.fsdp_shard.size
        data = axes_in_words(GRADIENT_AXES, context)
        replicas = topology.size(*GRADIENT_AXES) // shard
        self._last = topology.pp - 1
        self._links = links
        self._known: dict[str, tuple[int, Callable[[int], Crossing]]] = {
            "world": (topology.world_size, links.world),
            f"{shard} ranks of {data}": (shard, lambda stage: links.parts(stage, shard)),
            f"{replicas} replicas in {data}": (replicas, lambda stage: links.replicas(stage, shard)),
            "pipeline ends": (2, lambda stage: links.between(stage, self._last - stage)),
        }
        for axes in (("tp", *GRADIENT_AXES), GRADIENT_AXES, ("tp",)):
            self._known[axes_in_words(axes, context)] = (topology.size(*axes), self._ring(axes))

    def size(self, one: Sending) -> int:
        """Ranks that take part."""
        return 2 if one.peer is not None else self._known[one.over][0]

    def crossing(self, one: Sending, stage: int) -> Crossing:
        """Which ranks of a stage send it to another node."""
        if one.peer is not None:
            return self._links.between(stage, one.peer)
        return self._known[one.over][1](stage)

    def _ring(self, axes: tuple[str, ...]) -> Callable[[int], Crossing]:
        return lambda stage: self._links.ring(stage, *axes)


def make_kinds(stages: Iterable[StagePlan], groups: Groups, links: Links) -> tuple[Kind, ...]:
    """Every rank in one kind."""
    alike: dict[object, list[StagePlan]] = {}
    for stage in stages:
        contents = tuple((held, tuple(places)) for held, places in stage.contents.items())
        alike.setdefault((contents, stage.activations.total, _amounts(stage.sent)), []).append(stage)
    return tuple(
        _kind(same, parameters, memory, tuple(places), groups, links)
        for same in alike.values()
        for (parameters, memory), places in same[0].contents.items()
    )


def _amounts(sent: Sequence[Sending]) -> tuple[tuple[str, str, int], ...]:
    """By group and purpose, whatever stage it goes to."""
    totals: dict[tuple[str, str], int] = {}
    for one in sent:
        totals[one.over, one.what] = totals.get((one.over, one.what), 0) + one.bytes
    return tuple((over, what, total) for (over, what), total in totals.items())


def _kind(
    stages: Sequence[StagePlan], parameters: int, memory: StateMemory, places: tuple[Places, ...], groups: Groups, links: Links
) -> Kind:
    return Kind(
        stages=tuple(stage.stage for stage in stages),
        places=places,
        first_rank=links.first_rank(stages[0].stage, places[0].data.start, places[0].tensor),
        parameters=parameters,
        memory=RankMemory(
            memory.parameters, memory.gradients, memory.mains, memory.moments, memory.buffers, Bytes(stages[0].activations.total)
        ),
        sent=tuple(_traffic(stages, places, *amount, groups) for amount in _amounts(stages[0].sent)),
    )


def _traffic(stages: Sequence[StagePlan], places: Sequence[Places], over: str, what: str, each: int, groups: Groups) -> Traffic:
    """Of one group and purpose, over all ranks of a kind."""
    total = leaving = size = 0
    for stage in stages:
        for one in stage.sent:
            if (one.over, one.what) == (over, what):
                crossing = groups.crossing(one, stage.stage)
                leaving += one.bytes * sum(int(crossing[at.data.start : at.data.stop, at.tensor].sum()) for at in places)
                total += one.bytes * sum(len(at.data) for at in places)
                size = groups.size(one)
    return Traffic(over, what, each, size, leaving / total if total else 0.0)
