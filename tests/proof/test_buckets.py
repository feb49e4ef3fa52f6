"""Buckets: memory, when gradients are reduced, that nothing is reduced unfinished, and what reaches which rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.data_parallel import bucket as bucket_module
from megatron.data_parallel.bucket import Bucket, FullGradBucket, ShardedGradBucket
from megatron.data_parallel.buckets import BucketedParams
from megatron.parallel.collectives import Pending, start_all_reduce, start_reduce_scatter
from megatron.parallel.context import Group, ParallelContext, make_context
from megatron.parallel.params import ParamEntry
from megatron.parallel.tensor_slice import FlatRange
from megatron.parallel.topology import Topology
from tests.support.bucket_examples import MODEL, WORD, buckets_of, build, gradient, own_gradients, sink, write_all
from tests.support.held import held_by
from tests.support.lone_rank import CPU, lone_rank
from tests.support.warm import run_forked_ranks, run_warm_ranks

# ---- memory


@pytest.mark.parametrize("materialized", [False, True])
def test_parameters_keep_their_values_or_get_initial_ones(materialized: bool) -> None:
    expected = {entry.record.name: entry.param.detach() for entry in build(lone_rank()).params}
    model = build(lone_rank(), materialized=materialized)
    held = held_by(buckets_of(model, lone_rank(), 3000))
    storages = {buffer.untyped_storage().data_ptr() for buffer in held.parameters}
    for entry in model.params:
        assert torch.equal(entry.param.detach(), expected[entry.record.name])
        assert entry.param.untyped_storage().data_ptr() in storages
        assert all(getattr(module, attribute) is entry.param for module, attribute in entry.owners)


def test_16_bit_gradients_are_summed_in_float32() -> None:
    for dtype, main in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        held = held_by(buckets_of(build(lone_rank(), dtype=dtype), lone_rank()))
        assert {buffer.dtype for buffer in held.parameters} == {dtype} and {buffer.dtype for buffer in held.gradients} == {main}


def test_shards_are_views_of_parameters_and_gradients() -> None:
    model = build(lone_rank(), dtype=torch.bfloat16)
    for group in buckets_of(model, lone_rank()).groups:
        for shard in group.shards:
            entry = model.params[shard.record.name]
            main_grad = sink(entry).main_grad
            assert main_grad is not None and shard.grad.data_ptr() == main_grad.data_ptr()
            assert shard.weights.data_ptr() == entry.param.data_ptr()
            assert shard.flat_range == FlatRange(0, entry.param.numel()) and shard.norm_range == range(entry.param.numel())
            assert shard.weights.shape == shard.grad.shape == (entry.param.numel(),)


def test_groups_come_in_the_order_of_the_forward() -> None:
    model = build(lone_rank())
    order = [entry.record.name for entry in model.params]
    first = [min(order.index(s.record.name) for s in group.shards) for group in buckets_of(model, lone_rank()).groups]
    assert first == sorted(first) and len(first) > 3


# ---- when


class Reductions:
    """Notes which buckets are reduced."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.buffers: list[int] = []
        patch.setattr(bucket_module, "start_all_reduce", self)

    def __call__(self, tensor: torch.Tensor, group: Group) -> Pending:
        self.buffers.append(tensor.data_ptr())
        return start_all_reduce(tensor, group)


def whole(bucket: Bucket) -> FullGradBucket:
    assert isinstance(bucket, FullGradBucket)
    return bucket


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bucket_is_reduced_after_its_last_write(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap at once, else at the end; a tied parameter is written twice a microbatch."""
    model = build(lone_rank())
    buckets = buckets_of(model, lone_rank(), 3000, overlap_grad_reduce=overlap)
    reductions = Reductions(monkeypatch)
    for microbatches in (3, 1):
        reductions.buffers.clear()
        buckets.start_step(microbatches)
        for m in range(microbatches - 1):
            write_all(model, m)
        assert not reductions.buffers
        for number, bucket in enumerate(buckets.buckets):
            for placed in bucket.plan.params:
                for _ in range(placed.entry.uses_per_microbatch):
                    assert len(reductions.buffers) == (number if overlap else 0)
                    sink(placed.entry).add(gradient(placed.entry, 9))
            assert len(reductions.buffers) == (number + 1 if overlap else 0)
        buckets.finish_gradients()
        assert sorted(reductions.buffers) == sorted(whole(bucket).grads.data_ptr() for bucket in buckets.buckets), "each once"


def test_a_step_that_inspects_leaves_each_rank_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(lone_rank())
    buckets = buckets_of(model, lone_rank(), 3000, overlap_grad_reduce=True)
    reductions = Reductions(monkeypatch)
    seen: list[torch.Tensor] = []
    buckets.start_step(1, inspect=lambda entry, grad: seen.append(grad))
    write_all(model, 0)
    entries = reversed(list(model.params))
    wanted = [gradient(entry, use, 0) for entry in entries for use in range(entry.uses_per_microbatch)]
    assert not reductions.buffers and all(map(torch.equal, seen, wanted)) and len(seen) == len(wanted)
    assert not any(bucket.owned_grads.any() for bucket in buckets.buckets), "the shards' gradients stay as they are"
    buckets.start_step(1)
    write_all(model, 0)
    assert len(reductions.buffers) == len(buckets.buckets)
    buckets.finish_gradients()


def test_a_step_begins_anew() -> None:
    model = build(lone_rank())
    buckets = buckets_of(model, lone_rank())
    for key in (1, 2):
        buckets.start_step(1)
        write_all(model, key)
        buckets.finish_gradients()
    for entry in model.params:
        expected = sum(gradient(entry, use, 2) for use in range(entry.uses_per_microbatch))
        found = sink(entry).main_grad
        assert found is not None and torch.equal(found, expected), "nothing of the first step is left"  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["final_norm.bias", WORD, "layers.2.mlp.up.weight"])
def test_a_parameter_without_a_gradient_is_named(overlap: bool, name: str) -> None:
    for microbatches in (1, 2):
        model = build(lone_rank())
        buckets = buckets_of(model, lone_rank(), 3000, overlap_grad_reduce=overlap)
        buckets.start_step(microbatches)
        for m in range(microbatches):
            write_all(model, m, skip=name)
        with pytest.raises(RuntimeError, match=f"rank 0: .*no gradient reached {name}[.] Please report this$"):
            buckets.finish_gradients()


def test_a_gradient_too_many_is_refused() -> None:
    model = build(lone_rank())
    buckets_of(model, lone_rank()).start_step(1)
    write_all(model, 0)
    accumulated = model.params["layers.0.mlp.up.weight"]
    with pytest.raises(RuntimeError, match="1 gradients too many reached layers.0.mlp.up.weight"):
        sink(accumulated).add(gradient(accumulated, 0))


def test_a_parameter_that_misses_one_microbatch_is_named() -> None:
    model = build(lone_rank())
    buckets = buckets_of(model, lone_rank(), None)
    buckets.start_step(2)
    write_all(model, 0)
    write_all(model, 1, skip="layers.1.mlp.up.weight")
    with pytest.raises(RuntimeError, match="layers.1.mlp.up.weight lacks 1 gradients"):
        buckets.finish_gradients()


def test_a_missing_and_a_doubled_gradient_do_not_cancel() -> None:
    """Silent: the stale gradient of the step before is used."""
    model = build(lone_rank())
    buckets = buckets_of(model, lone_rank(), None)
    buckets.start_step(1)
    write_all(model, 0)
    buckets.finish_gradients()
    buckets.start_step(1)
    write_all(model, 1, skip="layers.1.mlp.up.weight")
    with pytest.raises(RuntimeError, match="layers.1.mlp.up.weight"):
        sink(model.params["layers.2.mlp.up.weight"]).add(gradient(model.params["layers.2.mlp.up.weight"], 5))


# ---- over ranks

SHARDINGS = ["no_shard", "optim", "optim_grads"]
Case = tuple[str, int | None, bool, int]
"""Strategy, bucket size, overlap, order in which parameters are written."""
IN_EITHER_ORDER = {("no_shard", 2000), ("optim", 2000), ("optim_grads", 1)}
"""Strategies and bucket sizes with which the normal run tries the second order too."""
SHALLOW = replace(MODEL, num_layers=2)


def cases_of(full: bool) -> list[Case]:
    """Return the cases of the normal run, or all."""
    return [
        (sharding, size, overlap, order)
        for sharding in SHARDINGS
        for size in (1, 2000, None)
        for overlap in (False, True)
        for order in (0, 1)
        if full or not order or (sharding, size) in IN_EITHER_ORDER
    ]


MICROBATCHES = 3


def reduced(context: ParallelContext, sharding: str, size: int | None, overlap: bool, order: int) -> dict[str, torch.Tensor]:
    """This rank's part of the gradients after some microbatches; every rank writes its parameters in the same shuffled order, some
    gradients a microbatch ahead of the others."""
    model = build(context, SHALLOW)
    buckets = buckets_of(model, context, size, sharding=sharding, overlap_grad_reduce=overlap)
    for step in range(2):  # the second begins with used buffers
        buckets.start_step(MICROBATCHES)
        writes = [
            (m + (0 if entry.record.splits else -1), entry, use, m)
            for m in range(MICROBATCHES)
            for entry in model.params
            for use in range(entry.uses_per_microbatch)
        ]
        random.Random(order).shuffle(writes)
        for _, entry, use, m in sorted(writes, key=lambda write: write[0]):
            sink(entry).add(gradient(entry, use, m, context.rank, step))
        buckets.finish_gradients()
    return own_gradients(buckets)


def on_ranks(rank: int, cases: list[Case]) -> dict[Case, dict[str, torch.Tensor]]:
    data = make_context(Topology(dp=3), rank, CPU)
    found = {case: reduced(data, *case) for case in cases}
    dist.barrier()
    return found


Reduced = list[dict[Case, dict[str, torch.Tensor]]]
"""What each rank has, by case."""


@pytest.fixture(scope="module")
def three(full: bool) -> Reduced:
    return run_warm_ranks(3, on_ranks, cases_of(full), timeout=240.0)


def expected_sum(entry: ParamEntry, ranks: int) -> torch.Tensor:
    """Add up what all ranks have, in float64."""
    keys = [(use, m, rank, 1) for rank in range(ranks) for m in range(MICROBATCHES) for use in range(entry.uses_per_microbatch)]
    return torch.stack([gradient(entry, *key).double() for key in keys]).sum(0)


def test_every_part_is_the_sum_over_ranks_and_microbatches(three: Reduced) -> None:
    params = build(lone_rank(), SHALLOW).params
    sums = {entry.record.name: expected_sum(entry, 3).view(-1) for entry in params}
    for case in three[0]:
        seen = dict.fromkeys((entry.record.name for entry in params), 0)
        for found in three:
            for key, part in found[case].items():
                name, start = key.split("@")
                expected = sums[name][int(start) : int(start) + part.numel()]
                torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-5)
                seen[name] += part.numel()
        copies = 3 if case[0] == "no_shard" else 1
        assert seen == {entry.record.name: copies * entry.param.numel() for entry in params}


def test_overlap_changes_no_bit_and_nor_does_optim(three: Reduced) -> None:
    for found in three:
        for sharding, size, overlap, order in found:
            assert_same(found[sharding, size, overlap, order], found[sharding, size, False, order])
            if sharding == "optim":
                every = found["no_shard", size, False, order]
                for key, part in found[sharding, size, overlap, order].items():
                    name, start = key.split("@")
                    assert torch.equal(part, every[f"{name}@0"][int(start) : int(start) + part.numel()])


def assert_same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert all(torch.equal(some[key], others[key]) for key in some)


def test_only_a_slice_of_the_gradient_stays() -> None:
    """Between microbatches, too: what a microbatch gives lies in a few buffers that are used again and again."""

    def on_rank(rank: int) -> None:
        context = make_context(Topology(dp=2), rank, CPU)
        for overlap in (False, True):
            model = build(context)
            buckets = buckets_of(model, context, 1000, sharding="optim_grads", overlap_grad_reduce=overlap)
            assert not held_by(buckets).buffers
            largest = 0
            for step in range(2):
                buckets.start_step(4)
                for m in range(4):
                    write_all(model, m, step)
                    assert all(sink(entry).main_grad is None for entry in model.params)
                    largest = max(largest, len(held_by(buckets).buffers))
                buckets.finish_gradients()
            assert len(buckets.buckets) > 10 and largest <= (5 if overlap else 2), "four in flight, one being written"
            gradients = sum(grad.numel() for grad in held_by(buckets).gradients)
            assert gradients == sum(bucket.plan.slice_size for bucket in buckets.buckets)
        dist.barrier()

    run_forked_ranks(2, on_rank, timeout=60.0)


def test_a_bad_gradient_is_named_where_it_arose() -> None:
    """After the sums whoever holds the slice knows; a step that inspects tells the rank."""

    def on_rank(rank: int) -> list[set[str]]:
        context = make_context(Topology(dp=2), rank, CPU)
        seen = []
        for sharding in SHARDINGS:
            model = build(context)
            buckets = buckets_of(model, context, 3000, sharding=sharding)
            entry = model.params["layers.1.mlp.down.weight"]
            own: set[str] = set()

            def look(entry: ParamEntry, grad: torch.Tensor, own: set[str] = own) -> None:
                if not torch.isfinite(grad).all():
                    own.add(entry.record.name)

            for inspect in (None, look):
                buckets.start_step(2, inspect=inspect)
                for m in range(2):
                    for other in model.params:
                        for use in range(other.uses_per_microbatch):
                            bad = other is entry and rank == 1 and m == 0
                            sink(other).add(gradient(other, use) * (torch.inf if bad else 1.0))
                if inspect is None:
                    buckets.finish_gradients()
                    seen.append(buckets.find_nonfinite_params())
            seen.append(own)
        dist.barrier()
        return seen

    first, second = run_forked_ranks(2, on_rank, timeout=60.0)
    name = "layers.1.mlp.down.weight"
    assert first[0] == second[0] == {name}, "every rank has the whole sum"
    for summed in (2, 4):
        assert first[summed] | second[summed] == {name}
    assert all(first[own] == set() and second[own] == {name} for own in (1, 3, 5))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_tied_parameter_is_summed_over_both_stages(sharding: str) -> None:
    """Each stage writes it once a microbatch; both end with what embedding and output give together, slice by slice."""

    def on_rank(rank: int) -> dict[str, torch.Tensor]:
        context = make_context(Topology(pp=2, dp=2), rank, CPU)
        model = build(context)
        buckets = buckets_of(model, context, 2000, sharding=sharding, overlap_grad_reduce=True)
        buckets.start_step(1)
        write_all(model, 0, rank)
        buckets.finish_gradients()
        dist.barrier()
        return own_gradients(buckets)

    ranks = run_forked_ranks(4, on_rank, timeout=60.0)
    for data_rank in range(2):  # ranks 0 and 1 are the first stage
        first, second = ranks[data_rank], ranks[2 + data_rank]
        tied = [key for key in first if key.startswith(WORD)]
        assert tied and all(torch.equal(first[key], second[key]) for key in tied)
    entries = [build(lone_rank(Topology(pp=2, dp=2), rank)).params for rank in (0, 2)]
    both = torch.stack([gradient(entries[rank // 2][WORD], 0, 0, rank) for rank in range(4)]).sum(0).view(-1)
    parts = {int(key.split("@")[1]): part for rank in (0, 1) for key, part in ranks[rank].items() if key.startswith(WORD)}
    torch.testing.assert_close(torch.cat([parts[start] for start in sorted(parts)]), both)
    own = entries[1]["final_norm.weight"]
    alone = torch.stack([gradient(own, 0, 0, rank) for rank in (2, 3)]).sum(0)
    found = {key: part for rank in (2, 3) for key, part in ranks[rank].items() if key.startswith("final_norm.weight")}
    torch.testing.assert_close(torch.cat([found[key] for key in sorted(found)]), alone, msg="only what is tied is joined")


def test_reduce_scatter_is_the_all_reduce_bit_for_bit() -> None:
    """On gloo, in place too: what makes optim equal to no_shard."""

    def on_rank(rank: int) -> bool:
        group = make_context(Topology(dp=4), rank, CPU).group("dp")
        same = True
        for trial, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
            numbers = torch.randn(4 * 192, generator=torch.Generator().manual_seed(rank + 10 * trial)).to(dtype)
            summed = start_all_reduce(numbers.clone(), group).wait()
            scattered = start_reduce_scatter(numbers, group, out=numbers[rank * 192 : (rank + 1) * 192]).wait()
            same &= torch.equal(scattered, summed[rank * 192 : (rank + 1) * 192])
        dist.barrier()
        return same

    assert all(run_forked_ranks(4, on_rank, timeout=60.0))


# ---- parameters


@pytest.mark.parametrize("overlap", [False, True])
def test_new_weights_reach_every_rank_before_they_are_used(overlap: bool) -> None:
    def on_rank(rank: int) -> int:
        context = make_context(Topology(dp=2), rank, CPU)
        model = build(context)
        buckets = buckets_of(model, context, 2000, sharding="optim", overlap_param_gather=overlap)
        for group in buckets.groups:
            for shard in group.shards:
                shard.weights.fill_(1.0 + rank)
            group.gather_params()
        waited = []

        def noting(bucket: Bucket) -> None:
            waited.append(bucket)
            finish(bucket)

        finish = Bucket.finish_param_gather
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bucket, "finish_param_gather", noting)
            for unit in model.chunks[0].get_units():
                for hook in unit._forward_pre_hooks.values():
                    hook(unit, ())
                if overlap:
                    for _, param in unit.named_parameters():
                        assert bool((param >= 1.0).all()), "the other rank's weights are there"
        buckets.finish_param_gather()
        for placed in (placed for bucket in buckets.buckets for placed in bucket.plan.params):
            assert set(placed.entry.param.unique().tolist()) <= {1.0, 2.0}
        dist.barrier()
        return len(waited)

    assert all((count > 0) == overlap for count in run_forked_ranks(2, on_rank, timeout=60.0))


def test_in_a_group_of_one_every_strategy_is_the_same() -> None:
    for sharding in SHARDINGS:
        buckets: BucketedParams = buckets_of(build(lone_rank()), lone_rank(), sharding=sharding)
        assert not any(bucket.sharded or isinstance(bucket, ShardedGradBucket) for bucket in buckets.buckets)
