"""Ranks of worlds that do not exist: their own groups without anybody else's, and other places of the grid by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron.parallel.context import ParallelContext, connect_fake, disconnect
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.other_places import elsewhere

WORLDS = [
    (Topology(tp=2, pp=3, dp=4), 2),
    (Topology(tp=2, pp=3, dp=4, pp_before_dp=True), 4),
    (Topology(tp=2, cp=2, pp=2, dp=2), 2),
    (Topology(dp=6), 3),
    (Topology(), None),
]
"""With the data ranks of a part."""
KEYS = (("tp",), ("cp",), ("dp",), ("pp",), GRADIENT_AXES, ("tp", *GRADIENT_AXES), ("fsdp_shard",), ("fsdp_replica",))


def places(context: ParallelContext) -> dict[tuple[str, ...], tuple[int, int]]:
    """Place and size of the groups of a rank."""
    return {key: (context._groups[key].rank, context._groups[key].size) for key in KEYS if key in context._groups}


def every_rank(_: int) -> list[list[dict[str, Any]]]:
    """Of every world and rank, its groups, and its places as seen from the world's first rank."""
    found: list[list[dict[str, Any]]] = []
    for topology, size in WORLDS:
        found.append([])
        for rank in range(topology.world_size):
            context = connect_fake(topology, rank, size)
            groups = {key: (g.ranks, g.rank, g.process_group is not None) for key, g in context._groups.items()}
            real = {key: dist.get_process_group_ranks(g.process_group) for key, g in context._groups.items() if g.process_group}
            at, first = context.coordinates, elsewhere(context, tensor=0, data=0, stage=0)
            there = elsewhere(first, tensor=at["tp"], data=at["cp"] + topology.cp * at["dp"], stage=at["pp"])
            others = {other.rank: places(other) for other in map(context.at_stage, range(topology.pp))}
            found[-1].append(
                {"groups": groups, "real": real, "there": (there.rank, places(there)), "first": first.rank, "others": others}
            )
            disconnect()
    return found


def test_a_rank_alone_has_the_groups_of_its_topology_and_no_others() -> None:
    (worlds,) = run_ranks(1, every_rank, init=False, timeout=60.0)
    for (topology, size), ranks in zip(WORLDS, worlds, strict=True):
        for rank, found in enumerate(ranks):
            for key, (members, index, connected) in found["groups"].items():
                axes = {("pp_up",): ("pp",), ("pp_down",): ("pp",)}.get(key, key)
                if axes[0] in ("tp", "cp", "dp", "pp"):
                    assert members == topology.group(rank, *axes)
                assert members[index] == rank and connected == (len(members) > 1)
                assert found["real"].get(key, [rank]) == list(members)
            if size is not None:
                parts, across = topology.shard_and_replica_groups(size)
                assert found["groups"]["fsdp_shard",][0] in parts and found["groups"]["fsdp_replica",][0] in across


def test_other_places_are_arithmetic() -> None:
    """From the first rank, every other one's place in its groups; and from every rank those of other stages."""
    (worlds,) = run_ranks(1, every_rank, init=False, timeout=60.0)
    for ranks in worlds:
        real = [
            {key: (index, len(members)) for key, (members, index, _) in found["groups"].items() if key in KEYS} for found in ranks
        ]
        for rank, found in enumerate(ranks):
            assert found["there"] == (rank, real[rank]) and found["first"] == 0
            assert rank in found["others"] and all(its == real[other] for other, its in found["others"].items())


def test_parts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 data-parallel ranks cannot be divided into shard groups of 4"):
        Topology(tp=2, dp=6).shard_and_replica_groups(4, 3)
