"""Over which links a group sends, against listing every group of the world and looking at its ranks one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron_lab.planner.rank_profiles import CrossingMask, Links
from tests.support.planned import kind_of, plans_of, settings

WORLDS = [
    Topology(tp=2, pp=2, dp=4),
    Topology(tp=2, pp=2, dp=4, pp_before_dp=True),
    Topology(tp=4, pp=3, dp=2),
    Topology(tp=2, cp=2, pp=2, dp=2),
    Topology(tp=2, cp=2, pp=2, dp=2, pp_before_dp=True),
    Topology(dp=12),
    Topology(pp=5, dp=3, pp_before_dp=True),
]
NODES = [1, 2, 3, 4, 8, 64]
"""Ranks of a node; they need not divide anything."""


def leaving(groups: Iterable[tuple[int, ...]], per_node: int) -> set[int]:
    """Ranks whose next one in the ring sits on another node."""
    found = set()
    for ranks in groups:
        for here, following in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
            if here // per_node != following // per_node:
                found.add(here)
    return found


def told(topology: Topology, crossings: Iterable[CrossingMask]) -> set[int]:
    """Ranks by the places of every stage."""
    found = set()
    for stage, crossing in enumerate(crossings):
        assert crossing.shape == (topology.get_size(*GRADIENT_AXES), topology.tp)
        for data, tensor in np.argwhere(crossing):
            dp, cp = divmod(int(data), topology.cp)
            found.add(topology.find_rank(tp=int(tensor), cp=cp, dp=dp, pp=stage))
    return found


@pytest.mark.parametrize("per_node", NODES)
@pytest.mark.parametrize("topology", WORLDS, ids=str)
def test_rings_leave_nodes_where_a_list_of_their_ranks_says(topology: Topology, per_node: int) -> None:
    links, stages = Links(topology, per_node), range(topology.pp)
    for axes in (("tp",), ("dp",), GRADIENT_AXES, ("tp", *GRADIENT_AXES)):
        assert told(topology, (links.find_ring_crossings(stage, axes) for stage in stages)) == leaving(
            topology.get_groups(*axes), per_node
        ), axes
    whole = tuple(range(topology.world_size))
    assert told(topology, map(links.find_world_crossings, stages)) == leaving([whole], per_node)
    for stage, peer in itertools.product(stages, stages):
        pairs = [(ranks[stage], ranks[peer]) for ranks in topology.get_groups("pp")]
        expected = {first for first, second in pairs if first // per_node != second // per_node}
        assert (
            told(topology, [np.zeros_like(links.find_world_crossings(0))] * stage + [links.find_stage_crossings(stage, peer)])
            == expected
        )
    for rank in range(topology.world_size):
        at = topology.get_coordinates(rank)
        assert links.get_first_rank(at["pp"], at["cp"] + topology.cp * at["dp"], at["tp"]) == rank


@pytest.mark.parametrize(("topology", "size"), [(WORLDS[0], 2), (WORLDS[1], 4), (WORLDS[5], 3), (WORLDS[3], 2)], ids=str)
def test_parts_of_data_ranks_and_the_groups_across(topology: Topology, size: int) -> None:
    for per_node in NODES:
        links, stages = Links(topology, per_node), range(topology.pp)
        parts, across = topology.shard_and_replica_groups(size)
        assert told(topology, (links.shard_group_crossings(stage, GRADIENT_AXES, size) for stage in stages)) == leaving(
            parts, per_node
        )
        assert told(topology, (links.find_replica_group_crossings(stage, GRADIENT_AXES, size) for stage in stages)) == leaving(
            across, per_node
        )


@pytest.mark.parametrize(
    ("topology", "size"),
    [(Topology(tp=2, pp=2, dp=8, ep=2, expert_tensor=1), 4), (Topology(cp=2, dp=4, ep=2, pp_before_dp=True, pp=2), 4)],
    ids=str,
)
def test_parts_of_the_ranks_with_the_same_experts(topology: Topology, size: int) -> None:
    """Those of neighbours which have one copy of the rest of the model."""
    copies, edp = topology.get_expert_shard_size(size), ("edp",)
    assert copies == size * topology.tp // (topology.etp * topology.ep) and 1 < copies < topology.edp
    parts, across = topology.shard_and_replica_groups(copies, axes=edp)
    whole, _ = topology.shard_and_replica_groups(size)
    stages = range(topology.pp)
    for part in parts:
        holders = {next(i for i, ranks in enumerate(whole) if rank in ranks) for rank in part}
        assert len(holders) <= topology.tp and len({topology.all_coordinates(rank)["ep"] for rank in part}) == 1
    for per_node in NODES:
        links = Links(topology, per_node)
        assert told(topology, (links.shard_group_crossings(stage, edp, copies) for stage in stages)) == leaving(parts, per_node)
        assert told(topology, (links.find_replica_group_crossings(stage, edp, copies) for stage in stages)) == leaving(
            across, per_node
        )


@pytest.mark.parametrize(
    "topology",
    [Topology(tp=2, pp=2, dp=4, ep=4), Topology(dp=12, ep=3), Topology(cp=2, pp=3, dp=2, ep=2, pp_before_dp=True)],
    ids=str,
)
def test_tokens_leave_nodes_where_pairs_of_ranks_do(topology: Topology) -> None:
    """Of all that a rank sends to the others that have experts for it."""
    for per_node in NODES:
        links = Links(topology, per_node)
        for ranks in topology.get_groups("etp", "ep"):
            for rank in ranks:
                at = topology.get_coordinates(rank)
                away = [other for other in ranks if other // per_node != rank // per_node]
                found = links.compute_inter_node_fractions(at["pp"], ("etp", "ep"))[at["cp"] + topology.cp * at["dp"], at["tp"]]
                assert found == len(away) / (len(ranks) - 1), (per_node, rank)


def test_a_plan_sends_tokens_to_the_experts_of_other_nodes() -> None:
    """Exchanged, to three others alike, two of which are on the other node; gathered, around a ring, which leaves a node once."""
    base = {"num_experts": 4, "disable_bias_linear": True, "expert_model_parallel_size": 4, "global_batch_size": 8}
    one, other = (settings(4, gpus_per_node=2, **base, moe_token_dispatcher_type=kind) for kind in ("alltoall", "allgather"))
    shares = [
        {t.between_nodes for kind in plan.profiles for t in kind.traffic if t.over == "ep"} for plan in plans_of([one, other])
    ]
    assert shares == [{2 / 3}, {1 / 2}]


@pytest.mark.parametrize("mapping", [False, True])
def test_a_plan_tells_which_share_of_a_kind_sends_to_other_nodes(mapping: bool) -> None:
    """Of 12 ranks on nodes of 3, which divide neither tensor groups nor stages."""
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": mapping}
    one = settings(12, gpus_per_node=3, global_batch_size=12, **sizes, sequence_parallel=True)
    (plan,) = plans_of([one])
    topology = Topology.of(one.config.parallel, 12)
    groups = {
        "tp": topology.get_groups("tp"),
        "dp": topology.get_groups("dp"),
        "tp x dp": topology.get_groups("tp", *GRADIENT_AXES),
        "pipeline": topology.get_groups("pp"),
        "pipeline ends": topology.get_groups("pp"),
        "world": [tuple(range(12))],
    }
    shares = set()
    for kind in plan.profiles:
        ranks = [rank for rank in range(12) if kind_of(plan.profiles, topology, rank) is kind]
        assert kind.first_rank in ranks and len(ranks) == kind.num_ranks
        assert {traffic.over for traffic in kind.traffic} == set(groups)
        for traffic in kind.traffic:
            crossing = leaving(groups[traffic.over], 3).intersection(ranks)
            assert traffic.between_nodes == len(crossing) / len(ranks), traffic
            shares.add(traffic.between_nodes)
        assert kind.intra_node_bytes + kind.inter_node_bytes == pytest.approx(sum(traffic.bytes for traffic in kind.traffic))
    assert any(0 < share < 1 for share in shares)
