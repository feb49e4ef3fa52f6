"""What lies where in which bucket, and who counts it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.data_parallel.bucket_plan import BucketPlan, get_default_bucket_size, plan_buckets
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron.spec.counts import count_parameters
from tests.support.bucket_examples import MODEL, UNTIED, VOCAB, WORD, buckets_of, build
from tests.support.lone_rank import lone_rank

TOPOLOGIES = [
    Topology(),
    Topology(tp=4),
    Topology(pp=4),
    Topology(dp=3),
    Topology(dp=20),
    Topology(tp=2, pp=2, dp=2),
    Topology(tp=2, pp=2, dp=2, pp_before_dp=True),
]


def plans(
    context: ParallelContext,
    size: int | None = 1000,
    *,
    sequence_parallel: bool = False,
) -> list[BucketPlan]:
    model = build(context, materialized=False, sequence_parallel=sequence_parallel)
    return plan_buckets(model.params, context, bucket_size=size)


@pytest.mark.parametrize("ranks", [1, 2, 3, 100])
@pytest.mark.parametrize("size", [1, 500, 3000, None])
def test_every_parameter_lies_in_one_bucket_aligned_and_apart(size: int | None, ranks: int) -> None:
    context = lone_rank(Topology(dp=ranks))
    found = plans(context, size)
    names = [placed.entry.record.name for plan in found for placed in plan.params]
    entries = list(reversed(list(build(context, materialized=False).params)))
    for vectors in (True, False):
        order = [entry.record.name for entry in entries if (len(entry.record.shape) == 1) == vectors]
        mine = [name for name in names if name in order]
        assert mine == order, "about the order in which backward completes them"
    assert len(names) == len(set(names)) == len(build(context, materialized=False).params)
    for plan in found:
        taken = torch.zeros(plan.size)
        for placed in plan.params:
            assert placed.offset % 64 == 0
            taken[placed.offset : placed.offset + placed.numel] += 1
        assert taken.max() <= 1 and taken.sum() == sum(placed.numel for placed in plan.params)
        assert plan.slice_size % 64 == 0 and plan.num_slices == ranks
        if size is not None:
            assert sum(placed.numel for placed in plan.params) <= size or len(plan.params) == 1


def test_buckets_are_no_fuller_than_they_have_to_be() -> None:
    numels = [[p.numel for p in plan.params] for plan in plans(lone_rank(), 3000) if len(plan.params[0].entry.record.shape) > 1]
    assert len(numels) > 3 and all(sum(held) + following[0] > 3000 for held, following in itertools.pairwise(numels))
    assert len(plans(lone_rank(), 1)) == len(build(lone_rank()).params), "larger than the size, each alone"


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 100])
def test_slices_are_equal_and_hold_every_element_once(ranks: int) -> None:
    for plan in plans(lone_rank(Topology(dp=ranks)), 3000):
        taken = {placed.entry.record.name: torch.zeros(placed.numel) for placed in plan.params}
        for index in range(ranks):
            for placed, piece in plan.get_params_in_slice(index):
                taken[placed.entry.record.name][piece.start : piece.stop] += 1
                start = placed.offset + piece.start
                assert index * plan.slice_size <= start < start + piece.stop - piece.start <= (index + 1) * plan.slice_size
        assert all(torch.equal(times, torch.ones_like(times)) for times in taken.values())


def test_flat_slices_waste_less_than_their_alignment() -> None:
    for ranks in (2, 8, 64):
        for plan in plans(lone_rank(Topology(dp=ranks)), None):
            assert plan.size - sum(placed.numel for placed in plan.params) < 64 * (len(plan.params) + ranks)


def test_the_default_size_grows_with_the_data_ranks() -> None:
    found = [get_default_bucket_size(ranks) for ranks in (1, 40, 41, 160, 1024)]
    assert found == [40_000_000, 40_000_000, 41_000_000, 160_000_000, 160_000_000]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bucket_holds_gradients_of_one_kind(sequence_parallel: bool) -> None:
    """By the ranks that hold partial sums, and tied parameters apart from the rest."""
    topology = Topology(tp=2, pp=2, dp=2)
    for rank in range(8):
        context = lone_rank(topology, rank)
        kinds = set()
        for plan in plans(context, 10**6, sequence_parallel=sequence_parallel):
            ranks = context.group(*plan.axes).ranks
            kinds.add((ranks, plan.tied))
            for placed in plan.params:
                assert ranks == context.group(*placed.entry.record.partial_axes).ranks
                assert plan.tied == (placed.entry.record.name == WORD)
        partial = {(context.group("tp", *GRADIENT_AXES).ranks, False)} if sequence_parallel else set()
        assert kinds == {(context.group("dp").ranks, False), (context.group("dp").ranks, True)} | partial


def test_what_is_tied_on_one_rank_is_not_tied_apart() -> None:
    assert not any(plan.tied for plan in plans(lone_rank()))
    assert build(lone_rank()).params[WORD].uses_per_microbatch == 2


def test_tied_parameters_are_cut_alike_on_both_stages() -> None:
    found = []
    for rank in (0, 3 * 3):  # the same data rank of the first and the last stage
        (plan,) = [plan for plan in plans(lone_rank(Topology(pp=4, dp=3), rank)) if plan.tied]
        found.append([plan.get_params_in_slice(index)[0][1] for index in range(3)])
    assert found[0] == found[1]


def test_vectors_and_matrices_lie_apart() -> None:
    found = plans(lone_rank(), None)
    assert [{len(placed.entry.record.shape) == 1 for placed in plan.params} for plan in found] == [{True}, {False}]


# ---- who counts


@pytest.mark.parametrize("config", [MODEL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"tp{t.tp}-pp{t.pp}-dp{t.dp}")
def test_each_element_counts_once_in_the_world(topology: Topology, config: ModelConfig) -> None:
    totals: Counter[str] = Counter()
    for rank in range(topology.world_size):
        context = lone_rank(topology, rank)
        model = build(context, config, sequence_parallel=True, materialized=False)
        for sharding in ("no_shard", "optim", "optim_grads"):
            for group in buckets_of(model, context, 1000, sharding=sharding).groups:  # of 17 slices at most
                totals[sharding] += sum(placed.slice.numel for shard in group.shards for placed in shard.get_norm_slices(context))
    assert len(totals) == 3 and {*totals.values()} == {count_parameters(config, VOCAB)}


def test_what_a_rank_counts_does_not_depend_on_sharding() -> None:
    """So that the norm is the same, bit for bit."""
    topology = Topology(tp=2, pp=2, dp=3)
    for rank in range(topology.world_size):
        context = lone_rank(topology, rank)
        counted = []
        for sharding in ("no_shard", "optim", "optim_grads"):
            model = build(context, sequence_parallel=True, materialized=False)
            shards = [s for group in buckets_of(model, context, sharding=sharding).groups for s in group.shards]
            counted.append([(s.record.name, s.get_norm_slices(context), s.norm_grad.numel()) for s in shards if s.norm_range])
        assert counted[0] == counted[1] == counted[2]
