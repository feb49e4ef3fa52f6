"""Who computed a microbatch wrong, as far as votes tell."""

from __future__ import annotations

import torch

from megatron.parallel.topology import Topology
from megatron_lab.audit.digests import DigestComparer
from megatron_lab.audit.votes import DisputeResolver, build_model_replicas, count_data_ranks_per_replica, get_extra_shifts


def test_blocks_hold_a_copy_of_the_model_each() -> None:
    """A data rank with its tensor, context and pipeline ranks; several where they share experts, also across tensor ranks."""
    topology = Topology(tp=2, dp=2, pp=2)
    assert build_model_replicas(topology) == [[0, 1, 4, 5], [2, 3, 6, 7]] and count_data_ranks_per_replica(topology) == 1
    assert build_model_replicas(Topology(dp=4, ep=2)) == [[0, 1], [2, 3]]
    assert count_data_ranks_per_replica(Topology(dp=4, ep=4)) == 4 and count_data_ranks_per_replica(Topology(tp=2, dp=4, ep=4)) == 4
    assert count_data_ranks_per_replica(Topology(tp=2, dp=4, ep=4, expert_tensor=1)) == 2
    odd = Topology(tp=3, cp=2, dp=4, ep=4, expert_tensor=1)
    assert count_data_ranks_per_replica(odd) == 2
    for topology in (odd, Topology(tp=2, dp=4, ep=2, pp=2, pp_before_dp=True)):
        for ranks in zip(*build_model_replicas(topology), strict=True):
            places = [{**topology.all_coordinates(rank), "dp": 0, "edp": 0} for rank in ranks]
            assert all(place == places[0] for place in places), "the same part of the model and of the experts"


def settled(topology: Topology, wrong: dict[tuple[int, int], int]) -> list[tuple[str, tuple[int, ...]]]:
    """The disputes where ranks compute what they should, but for some.

    Args:
        wrong: the result of a rank in a turn, where it is none that it should be.
    """
    blocks = build_model_replicas(topology)
    turns = [0, 1, *get_extra_shifts(len(blocks))]
    digests = [torch.zeros(len(turns), 3, 1, dtype=torch.int64) for _ in range(topology.world_size)]
    for number, ranks in enumerate(blocks):
        for rank in ranks:
            for turn in turns:
                digests[rank][turn] = 100 + (number - turn) % len(blocks)
                digests[rank][turn, 1] += wrong.get((rank, turn), 0)
    names = [["first", "second"]] * topology.world_size
    court = DisputeResolver(
        blocks,
        count_data_ranks_per_replica(topology),
        [f"n{r}" for r in range(topology.world_size)],
        names,
        digests,
        DigestComparer(),
    )
    return [(one.message, one.wrong_ranks) for one in court.find_disputes()]


def test_of_three_the_one_that_is_alone_is_wrong() -> None:
    topology = Topology(dp=3)
    assert settled(topology, {}) == []
    assert settled(topology, {(1, 0): 1}) == [
        (
            "the first microbatch of data rank 1 (rank 1 on node n1), computed again by data rank 2 (rank 2 on node n2), has "
            "a different result: 1 of 2 gradients (first in backward: second); data rank 0 agrees with data rank 2: "
            "data rank 1 is wrong",
            (1,),
        )
    ]
    ((words, wrong),) = settled(topology, {(1, 1): 1})
    assert "the first microbatch of data rank 0" in words and words.endswith(
        "data rank 2 agrees with data rank 0: data rank 1 is wrong"
    )
    assert wrong == (1,)
    stays = settled(topology, {(1, turn): 1 + turn for turn in range(3)})
    assert [wrong for _, wrong in stays] == [(1,), (1,)], "with its own microbatch, and with that before"
    ((words, wrong),) = settled(topology, {(1, 0): 1, (0, 2): 2})
    assert words.endswith("data rank 0 computes a third result: it cannot be decided which is wrong") and wrong == ()


def test_of_two_the_one_that_does_not_repeat_itself_is_wrong() -> None:
    topology = Topology(dp=2, tp=2)
    ((words, wrong),) = settled(topology, {(1, 0): 1})
    assert "of data rank 0 (rank 1 on node n1), computed again by data rank 1 (rank 3 on node n3)" in words, "the tensor rank"
    assert words.endswith("data rank 0 does not reproduce its result: it is wrong") and wrong == (1,)
    ((words, wrong),) = settled(topology, {(3, 1): 1})
    assert words.endswith("data rank 1 does not reproduce its result: it is wrong") and wrong == (3,)
    stays = settled(topology, {(3, turn): 1 for turn in range(4)})
    assert len(stays) == 2 and all("both reproduce their results" in words and not wrong for words, wrong in stays)
    ((words, wrong),) = settled(topology, {(1, 0): 1, (3, 1): 2})
    assert "neither reproduces its result" in words and wrong == ()


def test_one_alone_can_only_repeat_itself() -> None:
    topology = Topology(dp=2, ep=2)
    ((words, wrong),) = settled(topology, {(1, 0): 1})
    assert words.startswith("the first microbatch of data ranks 0 and 1 (rank 1 on node n1), computed again by itself")
    assert words.endswith("it does not reproduce its result: it is wrong") and wrong == (1,)
