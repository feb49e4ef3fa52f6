"""--grad-reduce-in-bf16: what arrives is the sum of the ranks' float32 sums, each rounded once; bytes and memory as planned."""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.parallel import ShardingStrategy
from megatron.parallel.context import make_context
from megatron.parallel.params import ParamEntry
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron.spec.schedules import build_schedule
from megatron_lab.planner.state_report import build_state_report
from megatron_lab.verification.reference.shape import build_random_weights
from tests.proof.test_sharding_memory import kept
from tests.proof.test_sharding_traffic import KINDS
from tests.support.bucket_examples import UNTIED, buckets_of, build, gradient, own_gradients, write_all
from tests.support.covering import full_but
from tests.support.layout import (
    Layout,
    Recipe,
    build_step,
    context_of,
    microbatches,
    model_on_meta,
    optimizer_config,
    parallel_config,
)
from tests.support.lone_rank import CPU
from tests.support.reference_runs import gpt2_like, random_batches
from tests.support.shared_memory import recorded_calls
from tests.support.warm import run_warm_ranks

STRATEGIES: tuple[ShardingStrategy, ...] = ("no_shard", "optim", "optim_grads")
MICROBATCHES = 3
Found = dict[str, torch.Tensor]


def reduced(rank: int, topology: Topology, sharding: str, **settings: Any) -> Found:
    """This rank's part of a step's gradients, which are made of rank, number of the microbatch and of the use."""
    context = make_context(topology, rank, CPU)
    model = build(context, UNTIED, torch.bfloat16, sequence_parallel=topology.tp > 1)
    buckets = buckets_of(model, context, 700, sharding=sharding, **settings)
    for step in range(2):  # buffers of the first are used again
        buckets.start_step(MICROBATCHES)
        for number in range(MICROBATCHES):
            write_all(model, rank, number, step)
        buckets.finish_gradients()
    return own_gradients(buckets)


def expected(name: str, sharding: str) -> torch.Tensor:
    """On two data ranks, flat: of a strategy that sums before it sends, or after each microbatch."""
    entry = whole_params()[name]
    own = [[gradient(entry, 0, rank, number, 1) for number in range(MICROBATCHES)] for rank in range(2)]

    def sent(parts: list[torch.Tensor]) -> torch.Tensor:
        rounded = [part.to(torch.bfloat16).float() for part in parts]
        return (rounded[0] + rounded[1]).to(torch.bfloat16).float()

    if sharding == "optim_grads":
        arrived = [sent([own[rank][number] for rank in range(2)]) for number in range(MICROBATCHES)]
        return torch.stack(arrived).cumsum(0)[-1].flatten()
    sums = []
    for rank in range(2):
        whole = own[rank][0].clone()
        for more in own[rank][1:]:
            whole += more
        sums.append(whole)
    return sent(sums).flatten()


@functools.cache
def whole_params() -> dict[str, ParamEntry]:
    """Those of the model in one process."""
    return {entry.record.name: entry for entry in build(make_context(Topology(), 0, CPU), UNTIED).params}


def reduced_in_each_way(rank: int) -> dict[tuple[str, bool], Found]:
    """Return this rank's part by strategy, with overlap and without."""
    return {
        (sharding, overlap): reduced(rank, Topology(dp=2), sharding, grad_reduce_in_bf16=True, overlap_grad_reduce=overlap)
        for sharding, overlap in itertools.product(STRATEGIES, (False, True))
    }


def test_each_rank_rounds_its_sum_once() -> None:
    """In every strategy, with overlap and without: the same bits, and those of arithmetic."""
    ranks = run_warm_ranks(2, reduced_in_each_way)
    sums = {(name, sharding): expected(name, sharding) for name in whole_params() for sharding in STRATEGIES}
    compared = 0
    for sharding in STRATEGIES:
        for found in ranks:
            assert found[sharding, False].keys() == found[sharding, True].keys()
            for place, part in found[sharding, True].items():
                assert torch.equal(part, found[sharding, False][place])
                name, _, start = place.partition("@")
                whole = sums[name, sharding]
                assert torch.equal(part, whole[int(start) : int(start) + part.numel()]), (sharding, place)
                compared += part.numel()
    assert compared > 3 * sum(entry.param.numel() for entry in whole_params().values())


def reduced_over_tensor_ranks(rank: int) -> tuple[Found, Found]:
    """Return this rank's part with --grad-reduce-in-bf16 and without."""
    return tuple(reduced(rank, Topology(tp=2), "no_shard", grad_reduce_in_bf16=narrow) for narrow in (True, False))  # type: ignore[return-value]


def test_sums_that_no_data_rank_shares_stay_exact() -> None:
    """Those of two tensor ranks over their parts of the sequence, and those of one rank."""
    for found, wanted in run_warm_ranks(2, reduced_over_tensor_ranks):
        assert all(torch.equal(found[place], wanted[place]) for place in wanted) and wanted


Counted = tuple[dict[str, int], dict[str, int], dict[Any, Fraction], dict[Any, Fraction]]
"""Bytes that a rank keeps, those that are planned, those of gradients that it sends over each group, and those planned."""


SEQUENCES = 4
"""Of a global batch; a microbatch has one."""


@functools.cache
def recipe() -> Recipe:
    """Tied, with two layers a stage."""
    shape = gpt2_like(num_layers=4, hidden=32, ffn=176, heads=4, kv_heads=4, head_size=8, vocab=176, seq=4, tied=True)
    return Recipe(shape, build_random_weights(shape, seed=1), random_batches(shape, 1, SEQUENCES, 1, seed=2))


def counted_on_rank(rank: int, sharding: ShardingStrategy) -> list[Counted]:
    """Count in a second step: without overlap and with it, each with --grad-reduce-in-bf16 and without."""
    found = []
    for overlap, narrow in itertools.product((False, True), (True, False)):
        layout = Layout(
            dp=2, pp=2, sharding=sharding, bucket_size=3300, micro_batch_size=1, overlap=overlap, dtype=torch.bfloat16,
            grad_reduce_in_bf16=narrow,
        )  # fmt: skip
        context, r = context_of(layout, rank), recipe()
        step, inputs = build_step(context, r, layout), microbatches(r.batches[0], context, 1)
        step.run(inputs, iteration=1, learning_rate=0.1, weight_decay=0.1)
        with recorded_calls() as calls:
            step.run(inputs, iteration=2, learning_rate=0.1, weight_decay=0.1)
        model, schedule = model_on_meta(context, r, layout), build_schedule("1f1b", 2, len(inputs), 1)
        report = build_state_report(model, context, parallel_config(layout), optimizer_config(r, layout), schedule)
        groups = {"dp": context.group(*GRADIENT_AXES).ranks, "pipeline ends": context.pipeline_ends.ranks}
        sent: dict[Any, Fraction] = {}
        for call in calls:
            if call.what != "send" and KINDS.get(call.what) == "gradients" and call.elements > 100:
                sent[call.ranks] = sent.get(call.ranks, Fraction()) + call.sent * call.itemsize
        told = {groups[one.over]: Fraction(one.bytes) for one in report.traffic if one.kind == "gradients"}
        planned = {kind: part.total for kind, part in report.memory.by_purpose.items()}
        found.append((kept(step), planned, sent, told))
        dist.barrier()
    return found


@pytest.mark.parametrize("sharding", full_but(("optim_grads",), STRATEGIES, "optim_grads, whose buckets have shards and sums"))
def test_memory_and_bytes_are_those_of_the_plan(sharding: ShardingStrategy) -> None:
    """To the byte, with a tie and two stages; gradients over data ranks are half as many bytes as in float32."""
    assert SEQUENCES // 2 > 1, "several microbatches"
    for found in run_warm_ranks(4, counted_on_rank, sharding):
        for held, planned, sent, told in found:
            assert held == {kind: planned[kind] for kind in held}
            assert sent == told
        for (held, _, narrow, _), (wide, _, whole, _) in (found[:2], found[2:]):
            (data,) = [ranks for ranks in whole if ranks in narrow and whole[ranks] == 2 * narrow[ranks]]
            assert len(data) == 2 and all(narrow[ranks] == whole[ranks] for ranks in whole if ranks != data)
            assert held["gradients"] == wide["gradients"] and held["buffers"] > 0
