"""Gradients of fully sharded parameters: where they lie, who counts them, and that none is missing or wrong in silence."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch

from megatron.parallel.accumulate import GradSink, get_grad_sink
from megatron.parallel.collectives import Pending
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry
from megatron.parallel.topology import Topology
from tests.support.covering import full_but
from tests.support.fsdp_world import MICROBATCHES, NUM_UNITS, Trace, backward, build, in_world, inputs, numel, shard, step
from tests.support.lone_rank import lone_rank


def two_steps(context: ParallelContext, **policy: Any) -> tuple[bool, list[tuple[int, bool]]]:
    """Whether the second of two equal steps gave the same in the same memory; and of each group, how often it was announced in that
    step, and whether its gradients were final then."""
    model = build(context)
    provider = shard(model, context, **policy)
    batch = inputs(context)
    shards = [s for group in provider.groups for s in group.shards]
    step(model, provider, batch)
    provider.finish_gradients()
    first = [(s.grad.data_ptr(), s.grad.clone()) for s in shards]
    announced: list[list[torch.Tensor]] = [[] for _ in provider.groups]
    begun = 0

    def listen(number: int, pending: Pending) -> None:
        assert begun == len(batch), "not before the last backward"
        announced[number].append(pending.wait().clone())

    for number, group in enumerate(provider.groups):
        group.on_reduced.append(partial(listen, number))
    provider.start_step(len(batch))
    assert not any(s.grad.any() for s in shards)
    for microbatch in batch:
        loss = model.chunks[0](microbatch)
        begun += 1
        backward(provider, loss)
    provider.finish_gradients()
    same = all(s.grad.data_ptr() == at and torch.equal(s.grad, grad) for s, (at, grad) in zip(shards, first, strict=True))
    final = [torch.cat([s.grad for s in group.shards]) for group in provider.groups]
    heard = [(len(a), all(torch.equal(g, whole) for g in a)) for a, whole in zip(announced, final, strict=True)]
    return same, heard


POLICIES: dict[str, dict[str, Any]] = {"": {}, "once": {"reduce_once": True}, "host": {"params_cpu": True}}


@pytest.mark.parametrize(
    ("size", "name"),
    full_but([(2, ""), (4, "once"), (2, "host")], itertools.product((4, 2), POLICIES), "each policy and each size with another"),
)
def test_a_step_begins_anew_in_the_same_memory_and_says_when_a_unit_is_reduced(size: int, name: str) -> None:
    """But for what comes to host memory: there nobody has to know."""
    policy = POLICIES[name]
    for same, heard in in_world(Topology(dp=4), partial(two_steps, **policy), size):
        assert same and heard == [(0 if "params_cpu" in policy else 1, True)] * NUM_UNITS


def sums_that_cancel(context: ParallelContext, reduce_once: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of vectors, which come as ready sums: of a step in which rank 0's two microbatches are equal but for the sign and
    very large, and of one in which they are zero."""
    model = build(context)
    provider = shard(model, context, reduce_once=reduce_once)
    batch = inputs(context)[:1] * 2
    found = []
    for factors in ((2.0**40, -(2.0**40)), (0.0, 0.0)):
        step(model, provider, batch, factors=factors if context.rank == 0 else (1.0, 1.0))
        provider.finish_gradients()
        found.append([s.grad.clone() for group in provider.groups for s in group.shards if s.record.param_type == "vector"])
    return found[0], found[1]


@pytest.mark.parametrize("once", [True, False])
def test_reduced_once_microbatches_are_added_before_ranks(once: bool) -> None:
    """So that large gradients of a rank cancel exactly. Added over the ranks first, they swallow the others."""
    for cancelled, alone in in_world(Topology(dp=2), partial(sums_that_cancel, reduce_once=once)):
        for found, expected in zip(cancelled, alone, strict=True):
            assert expected.all() and torch.equal(found, expected if once else torch.zeros_like(expected))


def counted(context: ParallelContext) -> int:
    """Elements that this rank counts."""
    return sum(len(s.norm_range) for group in shard(build(context), context).groups for s in group.shards)


def test_each_element_counts_once_in_the_world() -> None:
    assert sum(in_world(Topology(tp=2, dp=4), counted, 2)) == numel(build(lone_rank()))


def poisoned(context: ParallelContext) -> tuple[set[str], set[str], list[int], bool]:
    """Rank 1's second loss is not a number. Names after a step that sums; names that a step that inspects finds, what that one
    sums, and whether it leaves the gradients as they were."""
    model = build(context)
    provider = shard(model, context)
    factors = (1.0, math.nan if context.rank == 1 else 1.0)
    step(model, provider, inputs(context), factors=factors)
    provider.finish_gradients()
    summed = provider.find_nonfinite_params()
    step(model, provider, inputs(context))
    provider.finish_gradients()
    before = [shard.grad.clone() for group in provider.groups for shard in group.shards]
    own: set[str] = set()

    def look(entry: ParamEntry, grad: torch.Tensor) -> None:
        assert grad.shape == entry.record.shape
        if not torch.isfinite(grad).all():
            own.add(entry.record.name)

    with Trace(context.get_fsdp_shard_group().size) as trace:
        step(model, provider, inputs(context), factors=factors, inspect=look)
    after = [shard.grad for group in provider.groups for shard in group.shards]
    return summed, own, trace.sizes("scatter"), all(map(torch.equal, before, after))


def test_a_step_that_inspects_tells_whose_gradients_are_not_finite() -> None:
    names = {entry.record.name for entry in build(lone_rank()).params}
    first, second = in_world(Topology(dp=2), poisoned)
    assert first == (names, set(), [], True)
    assert second == (names, names, [], True)


NAME = "layers.1.mlp.up.weight"


def complaint(context: ParallelContext, fault: str) -> str:
    """What a step says in which something is wrong."""
    model = build(context)
    provider = shard(model, context)
    sinks: dict[str, GradSink] = {}

    def find(*_: object) -> None:
        sink = get_grad_sink(model.params[NAME].param)
        assert sink is not None
        sinks[fault] = sink

    model.chunks[0].layers[1].register_forward_pre_hook(find)
    batch = inputs(context)
    provider.start_step(MICROBATCHES)
    try:
        for number in range(MICROBATCHES - (fault == "lacking")):
            loss = model.chunks[0](batch[number])
            if fault == "lost":
                sinks[fault].on_write = lambda: None
            elif fault == "twice" and number == 1:
                provider.before_backward(0)
                sinks[fault].add(torch.zeros(48, 16))
                sinks[fault].add(torch.zeros(48, 16))
            backward(provider, loss)
        provider.finish_gradients()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fault", ["lost", "lacking", "twice"])
def test_an_incomplete_gradient_is_an_error_that_names_it(fault: str) -> None:
    names = [entry.record.name for entry in build(lone_rank()).params]
    words = {
        "lost": f"no gradient reached {NAME}",
        "lacking": "; ".join(f"{name} lacks 1 gradients" for name in names),
        "twice": f"1 gradients too many reached {NAME}",
    }
    for rank, message in enumerate(in_world(Topology(dp=2), partial(complaint, fault=fault))):
        error = "internal error: the backward passes of this step gave parameters a wrong number of gradients"
        assert message == f"rank {rank}: {error}: {words[fault]}. Please report this"
