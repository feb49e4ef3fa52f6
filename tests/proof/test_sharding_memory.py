"""What each strategy keeps, counted on the real tensors of a process: per parameter and data rank, and at moments within a step."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.data_parallel.buckets import BucketedParams
from megatron.spec.schedules import build_schedule
from megatron.training.step import TrainStep
from megatron_lab.planner.state_report import build_state_report
from megatron_lab.verification.local_ranks import run_ranks
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.held import held_by, num_bytes
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
from tests.support.reference_runs import gpt2_like, llama_like, random_batches
from tests.support.warm import run_forked_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SEQUENCES = 8
"""Of a global batch; a microbatch has one."""


@functools.cache
def recipe(tied: bool, num_layers: int = 2) -> Recipe:
    """About a million parameters, so that padding is small, and few tokens."""
    width = 384 // num_layers
    sizes: dict[str, Any] = dict(num_layers=num_layers, hidden=width, ffn=512, heads=4, head_size=width // 4, vocab=512, seq=4)
    shape = gpt2_like(kv_heads=4, tied=True, **sizes) if tied else llama_like(kv_heads=2, tied=False, **sizes)
    return Recipe(shape, build_random_weights(shape, seed=1), random_batches(shape, 1, SEQUENCES, 1, seed=2))


def layout(dp: int, sharding: str, **settings: Any) -> Layout:
    basis: dict[str, Any] = dict(bucket_size=None, micro_batch_size=1, overlap=False, dtype=torch.bfloat16)
    return Layout(dp=dp, sharding=sharding, **{**basis, **settings})  # type: ignore[arg-type]


def live_bytes() -> int:
    """Of all tensors that this process can reach."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not issubclass(type(thing), DTensor)]
    return num_bytes(tensor for tensor in found if tensor.device.type == "cpu")


def kept(step: TrainStep) -> dict[str, int]:
    """Bytes of what providers and optimizer keep now, by what it is for."""
    now = [held_by(provider) for provider in step.providers]
    shards = step.optimizer.shards
    weights = {shard.weights.untyped_storage().data_ptr() for shard in shards}
    return {
        "parameters": num_bytes(tensor for held in now for tensor in held.parameters),
        "gradients": num_bytes(tensor for held in now for tensor in held.gradients),
        "main_params": num_bytes(
            shard.main_param for shard in shards if shard.main_param.untyped_storage().data_ptr() not in weights
        ),
        "moments": num_bytes(moment for shard in shards for moment in shard.moments.values()),
        "buffers": num_bytes(tensor for held in now for tensor in held.buffers),
    }


@dataclass
class Counted:
    """Of one rank, in bytes but for the first."""

    parameters: int
    """Number of the whole model's."""
    kept: dict[str, int]
    planned: dict[str, int]
    padding: int
    """Stated: bytes that belong to no parameter."""
    slack: int
    """Stated: elements of buckets that belong to none. Slices are equal, so some ranks have more of them than others, and less of
    the model."""
    everything: int
    """What the process has more than before it had a model."""


def count(rank: int, layout: Layout, tied: bool) -> Counted:
    """Between two steps."""
    context, r = context_of(layout, rank), recipe(tied)
    inputs = microbatches(r.batches[0], context, 1)
    before = live_bytes()
    step = build_step(context, r, layout)
    step.run(inputs, iteration=1, learning_rate=0.1, weight_decay=0.1)
    found = kept(step)
    everything = live_bytes() - before
    schedule = build_schedule("1f1b", 1, len(inputs), 1)
    model = model_on_meta(context, r, layout)
    memory = build_state_report(model, context, parallel_config(layout), optimizer_config(r, layout), schedule).memory
    dist.barrier()
    return Counted(
        parameters=sum(weights.numel() for weights in r.weights.values()),
        kept=found,
        planned={kind: getattr(memory, kind).total for kind in found},
        padding=sum(getattr(memory, kind).padding for kind in found),
        slack=memory.parameters.padding // model.dtype.itemsize,
        everything=everything,
    )


@functools.cache
def counts(dp: int, tied: bool) -> dict[str, list[Counted]]:
    """Of each rank, by strategy."""

    def rank_run(rank: int) -> list[Counted]:
        return [count(rank, layout(dp, sharding), tied) for sharding in STRATEGIES]

    ranks = run_forked_ranks(dp, rank_run)
    return {sharding: [found[i] for found in ranks] for i, sharding in enumerate(STRATEGIES)}


def formula(sharding: str, ranks: int) -> dict[str, float]:
    """Bytes for each parameter: in 16 bits, with float32 gradients and main parameters, and Adam."""
    everything = {"parameters": 2.0, "gradients": 4.0, "main_params": 4.0, "moments": 8.0}
    if sharding == "optim_grads_params":
        everything |= {"parameters": 4.0, "main_params": 0.0}
    sharded = STRATEGIES.index(sharding)
    kinds = (("main_params", "moments"), ("gradients",), ("parameters",))
    divided = [kind for level in kinds[:sharded] for kind in level]
    return {kind: each / ranks if kind in divided else each for kind, each in everything.items()}


FOUR = pytest.mark.full("the same on four data ranks, and on two with a tied table")
TWO = pytest.param(2, marks=FOUR)


@pytest.mark.parametrize("sharding", STRATEGIES)
@pytest.mark.parametrize("dp", [TWO, 4])
def test_each_rank_keeps_what_the_formula_says(dp: int, sharding: str) -> None:
    for counted in counts(dp, False)[sharding]:
        for kind, each in formula(sharding, dp).items():
            assert counted.kept[kind] == pytest.approx(each * counted.parameters, rel=0.01), kind
        kept = sum(found for kind, found in counted.kept.items() if kind != "buffers")
        wanted = sum(formula(sharding, dp).values()) * counted.parameters
        assert abs(kept - wanted) <= counted.padding + 18 * counted.slack < 0.001 * wanted


@pytest.mark.parametrize("sharding", STRATEGIES)
@pytest.mark.parametrize(("dp", "tied"), [pytest.param(2, False, marks=FOUR), (4, False), (2, True)])
def test_the_report_tells_what_is_kept(dp: int, tied: bool, sharding: str) -> None:
    """Byte by byte. Of what only passes through it tells the most, most of which is gone between steps."""
    for counted in counts(dp, tied)[sharding]:
        found, planned = dict(counted.kept), dict(counted.planned)
        passing, at_most = found.pop("buffers"), planned.pop("buffers")
        assert found == planned
        assert passing <= at_most


@pytest.mark.parametrize("sharding", STRATEGIES)
@pytest.mark.parametrize(("dp", "tied"), [pytest.param(2, False, marks=FOUR), (4, False), (2, True)])
def test_nothing_else_is_kept(dp: int, tied: bool, sharding: str) -> None:
    """All tensors of the process, but for a little: counts of steps, messages."""
    for counted in counts(dp, tied)[sharding]:
        assert counted.everything == pytest.approx(sum(counted.kept.values()), rel=0.01)


@dataclass
class Seen:
    """Of one rank: what is kept in front of each use of a unit, in the order of the uses, and afterwards."""

    during: list[dict[str, int]]
    after: dict[str, int]
    others: list[int]
    """Bytes of what the process has beside, in front of each microbatch but the first: its activations are gone then."""
    largest: int
    """The most of a bucket or unit, in elements."""


def watch(rank: int, layout: Layout, steps: int, num_layers: int) -> Seen:
    """What happens in some steps of training, or in an evaluation if there are none."""
    context, r = context_of(layout, rank), recipe(False, num_layers)
    inputs = microbatches(r.batches[0], context, 1)
    before = live_bytes()
    step = build_step(context, r, layout)
    (chunk,) = step.model.chunks.values()
    units = chunk.get_units()
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
    for provider in step.providers:
        if isinstance(provider, BucketedParams):
            sizes = [bucket.plan.size for bucket in provider.buckets]
    found = Seen([], {}, [], max(sizes))

    def look(unit: torch.nn.Module, _: Any) -> None:
        found.during.append(kept(step))
        if unit is units[0] and len(found.during) > 1:
            found.others.append(live_bytes() - before - sum(found.during[-1].values()))

    for unit in units:
        unit.register_forward_pre_hook(look)
    for iteration in range(1, steps + 1):
        step.run(inputs, iteration=iteration, learning_rate=0.1, weight_decay=0.1)
    if not steps:
        step.evaluate(inputs)
    found.after |= kept(step)
    dist.barrier()
    return found


def seen(cases: Sequence[tuple[Layout, int]], num_layers: int = 2) -> list[list[Seen]]:
    """For each layout and number of steps, what two ranks see."""

    def rank_run(rank: int) -> list[Seen]:
        return [watch(rank, layout, steps, num_layers) for layout, steps in cases]

    # Through gloo: what another group keeps of what is on its way would be seen as well.
    ranks: list[list[Seen]] = run_ranks(2, rank_run)
    assert all(found.during and found.others for of_rank in ranks for found in of_rank)
    return [list(of_case) for of_case in zip(*ranks, strict=True)]


FULLY_SHARDED: dict[tuple[str, int], dict[str, Any]] = {
    ("freed", 1): {},
    ("freed", 0): {},
    ("once", 1): {"reduce_once": True},
    ("never", 2): {"fsdp_reshard": "never"},
    ("never", 0): {"fsdp_reshard": "never"},
}
"""Settings, by a word for them and the number of steps."""


@functools.cache
def seen_fully_sharded() -> dict[tuple[str, int], list[Seen]]:
    """What ranks see in each of these, one after the other."""
    cases = [(layout(2, "optim_grads_params", **settings), steps) for (_, steps), settings in FULLY_SHARDED.items()]
    return dict(zip(FULLY_SHARDED, seen(cases), strict=True))


@pytest.mark.parametrize(
    ("overlap", "bucket_size", "at_most"),
    [pytest.param(False, 20_000, 1.5, marks=pytest.mark.full("with overlap")), (True, 100_000, 5)],
)
def test_gradients_only_pass_through_a_few_buffers(overlap: bool, bucket_size: int, at_most: float) -> None:
    """optim_grads: beside its slice a rank has what is written, and with overlap four buckets that are reduced, but never all."""
    case = layout(2, "optim_grads", bucket_size=bucket_size, overlap=overlap)
    for found in seen([(case, 2)], num_layers=8)[0]:
        assert all(moment["gradients"] == found.after["gradients"] for moment in found.during)
        whole = 2 * found.after["gradients"]
        most = max(moment["buffers"] for moment in (*found.during, found.after))
        assert 0 < most <= at_most * 4 * found.largest < 0.75 * whole
        assert all(abs(others) < 0.01 * whole for others in found.others)


@pytest.mark.parametrize("steps", [1, 0])
def test_two_units_are_gathered_at_a_time(steps: int) -> None:
    """optim_grads_params: the one that computes and the next one; afterwards none, be it training or evaluation."""
    for found in seen_fully_sharded()["freed", steps]:
        assert found.after["parameters"] == found.after["gradients"]  # both float32, nothing is gathered
        gathered = [moment["parameters"] - found.after["parameters"] for moment in found.during]
        assert min(gathered) > 0 and max(gathered) <= 2 * 2 * found.largest
        assert max(gathered) < 0.9 * found.after["parameters"], "all of them, in 16 bits on two ranks, are as much"
        # What is on its way: parameters of the unit that is fetched ahead, gradients of the one whose backward was the last.
        assert all(0 < others < (2 + 4) * found.largest + 1000 for others in found.others)


def test_gradients_that_are_reduced_once_stay_whole_until_the_last_microbatch() -> None:
    """All of the rank's, in float32, from the first backward on; after the step none. The plan has room for them."""
    for found in seen_fully_sharded()["once", 1]:
        whole = 2 * found.after["gradients"]
        units = len(found.during) // (SEQUENCES // 2)
        assert all(moment["buffers"] == 0 for moment in (*found.during[:units], found.after))
        assert all(moment["buffers"] == whole for moment in found.during[units:])


def test_units_that_are_not_freed_stay_until_the_step_is_through() -> None:
    """--fsdp-reshard-after-forward never: all are gathered from the first forward to the last backward, and none afterwards."""
    ranks = seen_fully_sharded()
    for found, steps in [*((found, 2) for found in ranks["never", 2]), *((found, 1) for found in ranks["never", 0])]:
        gathered = [moment["parameters"] - found.after["parameters"] for moment in found.during]
        each = len(gathered) // steps
        assert found.after["parameters"] == found.after["gradients"]
        for first in range(0, len(gathered), each):
            assert 0 < gathered[first] < 0.5 * found.after["parameters"]
            assert gathered[first + each - 1] == pytest.approx(found.after["parameters"], rel=0.01)
