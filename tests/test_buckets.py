"""Gradient buckets: what lies where, when it is reduced, and that nothing is reduced unfinished."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.data_parallel import buckets as buckets_module
from megatron.data_parallel.buckets import GradBuckets, default_bucket_size
from megatron.data_parallel.shards import bucket_shards
from megatron.metrics.flops import count_parameters
from megatron.model.build import Model, build_model
from megatron.parallel.accumulate import GradSink
from megatron.parallel.collectives import Pending, start_all_reduce
from megatron.parallel.context import Group, ParallelContext, make_context
from megatron.parallel.params import ParamEntry
from megatron.parallel.random import stable_seed
from megatron.parallel.topology import Topology
from tests.distributed import run_ranks
from tests.lone_rank import CPU, lone_rank

VOCAB = 61
MODEL = ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=4, seq_length=8, make_vocab_size_divisible_by=1)
UNTIED = replace(MODEL, untie_embeddings_and_output_weights=True)
WORD = "embedding.word.weight"


def build(
    context: ParallelContext, config: ModelConfig = MODEL, dtype: torch.dtype = torch.float32, sequence_parallel: bool = False
) -> Model:
    return build_model(config, context, dtype=dtype, vocab_size=VOCAB, sequence_parallel=sequence_parallel, seed=1)


def settings(size: int | None = 1000, overlap: bool = False) -> ParallelConfig:
    return ParallelConfig(ddp_bucket_size=size, overlap_grad_reduce=overlap)


def sink(entry: ParamEntry) -> GradSink:
    found = entry.param.grad_sink  # type: ignore[attr-defined]
    assert isinstance(found, GradSink)
    return found


def gradient(entry: ParamEntry, *key: int) -> torch.Tensor:
    """Made-up numbers for a parameter and a purpose."""
    generator = torch.Generator().manual_seed(stable_seed(entry.record.name, *key))
    return torch.randn(entry.param.shape, generator=generator)


def write_all(model: Model, *key: int, skip: str = "") -> None:
    """One microbatch's gradients."""
    for entry in reversed(list(model.params)):
        for use in range(entry.uses_per_microbatch):
            if entry.record.name != skip:
                sink(entry).add(gradient(entry, use, *key))


# ---- what lies where


@pytest.mark.parametrize("size", [1, 500, 3000, None])
def test_every_parameter_lies_in_one_bucket_aligned_and_apart(size: int | None) -> None:
    model = build(lone_rank())
    buckets = GradBuckets(model.params, lone_rank(), settings(size))
    packed = [entry for bucket in buckets.buckets for entry in bucket.entries]
    assert packed == list(reversed(list(model.params))), "about the order in which backward completes them"
    for bucket in buckets.buckets:
        taken = torch.zeros_like(bucket.buffer)
        for entry, view in zip(bucket.entries, bucket.views, strict=True):
            assert view.shape == entry.param.shape and view.is_contiguous() and view is sink(entry).main_grad
            assert view.storage_offset() % 64 == 0
            assert view.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr()
            taken.view(-1)[view.storage_offset() : view.storage_offset() + view.numel()] += 1
        assert taken.max() <= 1 and not bucket.buffer[taken == 0].any(), "apart, and zeros between"
        if size is not None:
            assert sum(entry.param.numel() for entry in bucket.entries) <= size or len(bucket.entries) == 1
    if size == 1:
        assert len(buckets.buckets) == len(model.params), "larger than the size, each alone"
    elif size is None:
        assert len(buckets.buckets) == 1
    else:
        sizes = [sum(entry.param.numel() for entry in bucket.entries) for bucket in buckets.buckets]
        next_ones = [bucket.entries[0].param.numel() for bucket in buckets.buckets[1:]]
        assert all(held + more > size for held, more in zip(sizes, next_ones, strict=False)), "no fuller than it had to be"


def test_the_default_size_grows_with_the_data_ranks() -> None:
    assert [default_bucket_size(ranks) for ranks in (1, 40, 41, 256)] == [40_000_000, 40_000_000, 41_000_000, 256_000_000]


def test_16_bit_gradients_are_summed_in_float32() -> None:
    for dtype, main in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        model = build(lone_rank(), dtype=dtype)
        found = GradBuckets(model.params, lone_rank(), settings())
        assert {bucket.buffer.dtype for bucket in found.buckets} == {main}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bucket_holds_gradients_of_one_kind(sequence_parallel: bool) -> None:
    """By the ranks that hold partial sums, and tied parameters apart from the rest."""
    topology = Topology(tp=2, pp=2, dp=2)
    for rank in range(8):
        context = lone_rank(topology, rank)
        model = build(context, sequence_parallel=sequence_parallel)
        buckets = GradBuckets(model.params, context, settings(10**6))
        kinds = set()
        for bucket in buckets.buckets:
            kinds.add((bucket.group.ranks, bucket.tied))
            for entry in bucket.entries:
                assert bucket.group.ranks == context.group(*entry.record.partial_over).ranks
                assert bucket.tied == (entry.record.name == WORD)
        partial = {(context.group("tp", "cp", "dp").ranks, False)} if sequence_parallel else set()
        assert kinds == {(context.group("dp").ranks, False), (context.group("dp").ranks, True)} | partial


def test_what_is_tied_on_one_rank_is_not_tied_apart() -> None:
    model = build(lone_rank())
    assert not any(bucket.tied for bucket in GradBuckets(model.params, lone_rank(), settings()).buckets)
    assert model.params[WORD].uses_per_microbatch == 2


# ---- who counts


@pytest.mark.parametrize("config", [MODEL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "topology",
    [
        Topology(),
        Topology(tp=4),
        Topology(pp=4),
        Topology(dp=3),
        Topology(tp=2, pp=2, dp=2),
        Topology(tp=2, pp=2, dp=2, pp_before_dp=True),
    ],
    ids=lambda t: f"tp{t.tp}-pp{t.pp}-dp{t.dp}",
)
def test_each_element_counts_once_in_the_world(topology: Topology, config: ModelConfig) -> None:
    total = 0
    for rank in range(topology.world_size):
        context = lone_rank(topology, rank)
        shards = bucket_shards(GradBuckets(build(context, config, sequence_parallel=True).params, context, settings()))
        boxes = [s.record.held_box(context.axis_sizes, context.coordinates) for s in shards if s.counted]
        total += sum(box.numel for box in boxes)
    assert total == count_parameters(config, VOCAB)


def test_shards_of_16_bit_parameters_have_float32_mains() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = build(lone_rank(), dtype=dtype)
        for shard in bucket_shards(GradBuckets(model.params, lone_rank(), settings())):
            entry = model.params[shard.record.name]
            assert shard.param is entry.param and shard.main.dtype == shard.grad.dtype == torch.float32
            assert shard.main.shape == shard.grad.shape == (entry.param.numel(),) == (shard.piece.stop - shard.piece.start,)
            assert torch.equal(shard.main, entry.param.detach().float().view(-1))
            assert (shard.main.data_ptr() == entry.param.data_ptr()) == (dtype == torch.float32)
            assert shard.grad.data_ptr() == sink(entry).main_grad.data_ptr()


# ---- when


class Reductions:
    """Notes which buckets are reduced."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.buffers: list[int] = []
        patch.setattr(buckets_module, "start_all_reduce", self)

    def __call__(self, tensor: torch.Tensor, group: Group) -> Pending:
        self.buffers.append(tensor.data_ptr())
        return start_all_reduce(tensor, group)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bucket_is_reduced_after_its_last_write(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap at once, else at the end; a tied parameter is written twice a microbatch."""
    model = build(lone_rank())
    buckets = GradBuckets(model.params, lone_rank(), settings(3000, overlap))
    reductions = Reductions(monkeypatch)
    for microbatches in (3, 1):
        reductions.buffers.clear()
        buckets.start_step(microbatches)
        for m in range(microbatches - 1):
            write_all(model, m)
        assert not reductions.buffers
        for number, bucket in enumerate(buckets.buckets):
            for entry in bucket.entries:
                for _ in range(entry.uses_per_microbatch):
                    assert len(reductions.buffers) == (number if overlap else 0)
                    sink(entry).add(gradient(entry, 9))
            assert len(reductions.buffers) == (number + 1 if overlap else 0)
        buckets.finish()
        assert sorted(reductions.buffers) == sorted(bucket.buffer.data_ptr() for bucket in buckets.buckets), "each once"


def test_a_step_that_does_not_reduce_leaves_each_rank_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(lone_rank())
    buckets = GradBuckets(model.params, lone_rank(), settings(3000, overlap=True))
    reductions = Reductions(monkeypatch)
    buckets.start_step(1, reduces=False)
    write_all(model, 0)
    assert not reductions.buffers
    buckets.start_step(1)
    write_all(model, 0)
    assert len(reductions.buffers) == len(buckets.buckets)
    buckets.finish()


def test_a_step_begins_anew() -> None:
    model = build(lone_rank())
    buckets = GradBuckets(model.params, lone_rank(), settings())
    for key in (1, 2):
        buckets.start_step(1)
        write_all(model, key)
        buckets.finish()
    for entry, found in buckets.gradients():
        expected = sum(gradient(entry, use, 2) for use in range(entry.uses_per_microbatch))
        assert torch.equal(found, expected), "nothing of the first step is left"  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["final_norm.bias", WORD, "layers.2.mlp.up.weight"])
def test_a_parameter_without_a_gradient_is_named(overlap: bool, name: str) -> None:
    for microbatches in (1, 2):
        model = build(lone_rank())
        buckets = GradBuckets(model.params, lone_rank(), settings(3000, overlap))
        buckets.start_step(microbatches)
        for m in range(microbatches):
            write_all(model, m, skip=name)
        with pytest.raises(RuntimeError, match=f"rank 0: .*no gradient reached {name}$"):
            buckets.finish()


def test_a_gradient_too_many_is_refused() -> None:
    model = build(lone_rank())
    buckets = GradBuckets(model.params, lone_rank(), settings())
    buckets.start_step(1)
    write_all(model, 0)
    accumulated = model.params["layers.0.mlp.up.weight"]
    with pytest.raises(RuntimeError, match="too many"):
        sink(accumulated).add(gradient(accumulated, 0))


# ---- over two ranks

CASES = [(size, overlap, order) for size in (1, 2000, None) for overlap in (False, True) for order in (0, 1)]
"""Bucket size, overlap, order in which parameters are written."""


def reduced(context: ParallelContext, size: int | None, overlap: bool, order: int) -> dict[str, torch.Tensor]:
    """Gradients after two microbatches; every rank writes its parameters in the same shuffled order."""
    model = build(context)
    buckets = GradBuckets(model.params, context, settings(size, overlap))
    buckets.start_step(2)
    for m in range(2):
        entries = list(model.params)
        random.Random(order + m).shuffle(entries)
        for entry in entries:
            for use in range(entry.uses_per_microbatch):
                sink(entry).add(gradient(entry, use, m, context.rank))
    buckets.finish()
    return {entry.record.name: found.clone() for entry, found in buckets.gradients()}


def on_two_ranks(rank: int) -> dict[Any, dict[str, torch.Tensor]]:
    data, stages = (make_context(topology, rank, CPU) for topology in (Topology(dp=2), Topology(pp=2)))
    found: dict[Any, dict[str, torch.Tensor]] = {case: reduced(data, *case) for case in CASES}
    found["stages"] = reduced(stages, 2000, True, 0)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[Any, dict[str, torch.Tensor]]]:
    return run_ranks(2, on_two_ranks, timeout=60.0)


def expected_sum(entry: ParamEntry, rank: int) -> torch.Tensor:
    """What one rank adds up, in its order."""
    total = torch.zeros(entry.param.shape)
    for m in range(2):
        for use in range(entry.uses_per_microbatch):
            total += gradient(entry, use, m, rank)
    return total


def test_overlap_and_order_and_size_change_no_bit(two: list[dict[Any, dict[str, torch.Tensor]]]) -> None:
    for entry in build(lone_rank()).params:
        expected = expected_sum(entry, 0) + expected_sum(entry, 1)
        for case in CASES:
            for rank in range(2):
                assert torch.equal(two[rank][case][entry.record.name], expected), (entry.record.name, case)


def test_a_tied_parameter_is_summed_over_both_stages(two: list[dict[Any, dict[str, torch.Tensor]]]) -> None:
    """Each stage writes it once a microbatch; both end with what embedding and output give together."""
    first, second = two[0]["stages"], two[1]["stages"]
    assert first.keys() & second.keys() == {WORD}
    stages = [build(lone_rank(Topology(pp=2), rank)).params for rank in range(2)]
    both = expected_sum(stages[0][WORD], 0) + expected_sum(stages[1][WORD], 1)
    assert torch.equal(first[WORD], both) and torch.equal(second[WORD], both)
    for rank, found in enumerate((first, second)):
        for entry in stages[rank]:
            if entry.record.name != WORD:
                assert torch.equal(found[entry.record.name], expected_sum(entry, rank)), "only what is tied is joined"


def test_a_parameter_that_misses_one_microbatch_is_named() -> None:
    model = build(lone_rank())
    buckets = GradBuckets(model.params, lone_rank(), settings(None))
    buckets.start_step(2)
    write_all(model, 0)
    write_all(model, 1, skip="layers.1.mlp.up.weight")
    with pytest.raises(RuntimeError, match="layers.1.mlp.up.weight"):
        buckets.finish()


def test_a_missing_and_a_doubled_gradient_do_not_cancel() -> None:
    """Silent: the stale gradient of the step before is used."""
    model = build(lone_rank())
    buckets = GradBuckets(model.params, lone_rank(), settings(None))
    buckets.start_step(1)
    write_all(model, 0)
    buckets.finish()
    buckets.start_step(1)
    write_all(model, 1, skip="layers.1.mlp.up.weight")
    with pytest.raises(RuntimeError, match="layers.1.mlp.up.weight"):
        sink(model.params["layers.2.mlp.up.weight"]).add(gradient(model.params["layers.2.mlp.up.weight"], 5))
