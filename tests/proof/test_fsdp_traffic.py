"""What fully sharded parameters send and when, and what a rank holds meanwhile."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.memory import MemoryConfig
from megatron.config.parallel import FsdpReshard
from megatron.data_parallel.buckets import BucketedParams
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import Topology
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.covering import full_but
from tests.support.fsdp_world import MICROBATCHES, NUM_UNITS, UNTIED, Trace, build, in_world, inputs, numel, shard, step
from tests.support.held import held_by
from tests.support.layout import Layout, Recipe, build_step, microbatches
from tests.support.reference_runs import random_batches


def traced(
    context: ParallelContext, reshard: FsdpReshard, memory: MemoryConfig | None = None, **policy: bool
) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Collectives of a step with the begin of each unit's computations among them; and the elements of each unit's shards."""
    model = build(context, dtype=torch.bfloat16, memory=memory)
    provider = shard(model, context, reshard, **policy)
    trace = Trace(context.get_fsdp_shard_group().size)
    chunk = model.chunks[0]

    def watch(module: nn.Module, number: int) -> None:
        def on_input(module: nn.Module, args: Any) -> None:
            trace.events.append(("forward", number, None))

        def on_output(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            out.register_hook(lambda grad: trace.events.append(("backward", number, None)))

        module.register_forward_pre_hook(on_input)
        module.register_forward_hook(on_output)

    for number, module in enumerate(module for module in chunk.get_units() if module is not chunk.final_norm):
        watch(module, number)
    with trace:
        step(model, provider, inputs(context))
    return trace.events, [sum(s.weights.numel() for s in group.shards) for group in provider.groups]


POLICIES: dict[str, dict[str, Any]] = {"each": {}, "once": {"reduce_once": True}, "host": {"params_cpu": True}}


SENDS = [("always", "each"), ("never", "each"), ("always", "once"), ("never", "once"), ("always", "host")]
QUICK = {
    "all": [("never", "each"), ("always", "once")],
    "hybrid": [("never", "once"), ("always", "host")],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each setting with all ranks and with replicas, or alone; with --full each case."""
    if "policy" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        cases = [(replicas, *send) for replicas, some in QUICK.items() for send in (SENDS if full else some)]
        metafunc.parametrize(("replicas", "reshard", "policy"), cases)


def test_what_a_step_sends(replicas: str, reshard: FsdpReshard, policy: str) -> None:
    """In elements of the model, times (N - 1) / N: 3M, or M + 1; reduced once, 2M + 1 or 2. Over the replicas, each part once."""
    reductions, size = 1 if policy == "once" else MICROBATCHES, 2
    ranks = {"all": size, "hybrid": 2 * size}[replicas]
    for events, parts in in_world(Topology(dp=ranks), partial(traced, reshard=reshard, **POLICIES[policy]), size):
        gathered = [(n, dtype) for kind, n, dtype in events if kind == "gather"]
        scattered = [(n, dtype) for kind, n, dtype in events if kind == "scatter"]
        reduced = [n for kind, n, _ in events if kind == "reduce"]
        elements = size * sum(parts)
        assert sum(n for n, _ in gathered) == elements * (2 * MICROBATCHES if reshard == "always" else 1)
        assert sum(n for n, _ in scattered) == elements * reductions
        assert {dtype for _, dtype in gathered} == {torch.bfloat16} and {dtype for _, dtype in scattered} == {torch.float32}
        assert sorted(reduced) == (sorted(parts) if ranks > size else [])


@pytest.mark.parametrize(
    ("size", "reshard"),
    full_but([(2, "always"), (1, "never")], itertools.product((1, 2), ("always", "never")), "each of the two with another"),
)
def test_layers_that_run_again_are_gathered_no_more_often(size: int, reshard: FsdpReshard) -> None:
    """What a layer's second forward gathers, its backward finds."""
    memory = MemoryConfig("full", recompute_num_layers=size)
    for events, parts in in_world(Topology(dp=2), partial(traced, reshard=reshard, memory=memory)):
        sent = {kind: sum(n for k, n, _ in events if k.endswith(kind)) for kind in ("gather", "scatter")}
        whole = 2 * sum(parts)
        assert sent == {"gather": whole * (2 * MICROBATCHES if reshard == "always" else 1), "scatter": whole * MICROBATCHES}


def traced_with_experts(context: ParallelContext, memory: MemoryConfig) -> tuple[Counter[tuple[str, int]], list[int]]:
    """How often a step has collectives of which sizes; elements of each unit."""
    shape = replace(UNTIED, experts=ExpertsShape((False, True, True), 4, 2, 8))
    model = build(context, shape, memory=memory)
    provider = shard(model, context)
    with Trace(context.get_fsdp_shard_group().size) as trace:
        step(model, provider, inputs(context))
    parts = [sum(s.weights.numel() for s in group.shards) for group in provider.groups]
    return Counter((kind.removeprefix("blocking "), n) for kind, n, _ in trace.events if kind != "reduce"), parts


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(MemoryConfig(), marks=pytest.mark.full("experts run again")),
        pytest.param(MemoryConfig("full"), marks=pytest.mark.full("test_layers_that_run_again_are_gathered_no_more_often")),
        MemoryConfig("selective", recompute_modules=("mlp",)),
    ],
    ids=["kept", "run again", "experts run again"],
)
def test_experts_are_gathered_by_themselves_as_often(memory: MemoryConfig) -> None:
    """Apart from the rest of their layer, and no more often where they run again."""
    for found, parts in in_world(Topology(dp=2), partial(traced_with_experts, memory=memory)):
        assert len(parts) == NUM_UNITS + 2
        wanted: Counter[tuple[str, int]] = Counter()
        for part in parts:
            wanted += Counter({("gather", 2 * part): 2 * MICROBATCHES, ("scatter", 2 * part): MICROBATCHES})
        assert found == wanted


def traced_with_depths(context: ParallelContext, memory: MemoryConfig) -> tuple[Counter[tuple[str, int]], list[int], int]:
    """How often a step has collectives of which sizes; elements of each unit, and of the bucket of the word embedding."""
    shape = replace(UNTIED, mtp_depths=2, mtp_factor=0.5)
    batches = random_batches(shape, 1, 2 * MICROBATCHES * context.topology.dp, 2, seed=2)
    layout = Layout(dp=2, sharding="optim_grads_params", micro_batch_size=2, memory=memory)
    trainer = build_step(context, Recipe(shape, build_random_weights(shape, seed=1), batches), layout)
    buckets, units = trainer.providers
    assert isinstance(buckets, BucketedParams)
    with Trace(context.get_fsdp_shard_group().size) as trace:
        trainer.compute_gradients(microbatches(batches[0], context, 2))
    parts = [sum(s.weights.numel() for s in group.shards) for group in units.groups]
    (bucket,) = buckets.buckets
    return Counter((kind.removeprefix("blocking "), n) for kind, n, _ in trace.events if kind != "reduce"), parts, bucket.plan.size


@pytest.mark.parametrize(
    "memory",
    [pytest.param(MemoryConfig(), marks=pytest.mark.full("run again")), MemoryConfig("full")],
    ids=["kept", "run again"],
)
def test_what_all_depths_use_is_gathered_once(memory: MemoryConfig) -> None:
    """The final norm and the output layer, around the depths; and their gradients are reduced once in a microbatch."""
    for found, parts, bucket in in_world(Topology(dp=2), partial(traced_with_depths, memory=memory)):
        assert len(parts) == NUM_UNITS - 1 + 2, "the embedding lies in a bucket, since depths look tokens up too"
        wanted = Counter({("scatter", bucket): MICROBATCHES})
        for part in parts:
            wanted += Counter({("gather", 2 * part): 2 * MICROBATCHES, ("scatter", 2 * part): MICROBATCHES})
        assert found == wanted


def test_the_next_unit_is_fetched_ahead() -> None:
    """When a unit begins to compute, the gather of the next one is under way, and of no further one."""
    events, _ = in_world(Topology(dp=2), partial(traced, reshard="always"))[0]
    order = [(kind, number) for kind, number, _ in events if kind in ("forward", "backward")]
    forwards = [("forward", number) for number in range(NUM_UNITS)]
    assert order == [*forwards, *(("backward", number) for _, number in reversed(forwards))] * MICROBATCHES
    gathers = expected = 0
    for kind, number, _ in events:
        if kind == "gather":
            gathers += 1
        elif kind in ("forward", "backward"):
            first, last = (0, NUM_UNITS - 1) if kind == "forward" else (NUM_UNITS - 1, 0)
            expected += {first: 2, last: 0}.get(number, 1)
            assert gathers == expected, f"{kind} of unit {number}"


def holdings(context: ParallelContext, reshard: FsdpReshard) -> tuple[list[int], list[int], list[int]]:
    """Bytes of parameters, gradients and buffers after a step; elements that are gathered in front of each module's forward and
    backward; elements of each unit."""
    model = build(context, dtype=torch.bfloat16)
    provider = shard(model, context, reshard)
    own = sum(s.weights.nbytes for group in provider.groups for s in group.shards)
    gathered: list[int] = []

    def look(*_: Any) -> None:
        gathered.append((sum(t.nbytes for t in held_by(provider).parameters) - own) // torch.bfloat16.itemsize)

    def look_in_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(look)

    for module in model.chunks[0].get_units():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look_in_backward)
    step(model, provider, inputs(context))
    held = held_by(provider)
    units = [context.get_fsdp_shard_group().size * sum(s.weights.numel() for s in group.shards) for group in provider.groups]
    return [sum(t.nbytes for t in tensors) for tensors in (held.parameters, held.gradients, held.buffers)], gathered, units


def test_each_rank_holds_its_part_and_the_units_in_use() -> None:
    for (parameters, gradients, buffers), gathered, units in in_world(Topology(dp=2), partial(holdings, reshard="always")):
        part = 4 * sum(units) // 2
        assert (parameters, gradients, buffers) == (part, part, 0)
        assert min(gathered) > 0 and max(gathered) <= max(a + b for a, b in pairwise(units))


def test_under_never_all_units_stay_gathered_until_the_last_backward() -> None:
    for (parameters, _, _), gathered, units in in_world(Topology(dp=2), partial(holdings, reshard="never")):
        assert parameters == 4 * sum(units) // 2
        modules = NUM_UNITS + 1  # the final norm looks too
        assert set(gathered[modules:-modules]) == {sum(units)} and gathered[-1] == units[0]


def evaluated(context: ParallelContext) -> dict[str, tuple[int, int, bool]]:
    """By policy: parameters that a forward leaves gathered, and that publishing does; whether the published ones are used then."""
    halved = build(context, materialized=True)
    for entry in halved.params:
        entry.param.detach().mul_(0.5)
    found: dict[str, tuple[int, int, bool]] = {}
    policies: tuple[FsdpReshard, ...] = ("always", "never")
    for reshard in policies:
        model = build(context)
        provider = shard(model, context, reshard)
        whole = len(held_by(provider).parameters)
        microbatch = inputs(context)[0]
        with torch.no_grad():
            model.chunks[0](microbatch)
            left = len(held_by(provider).parameters) - whole
            for group in provider.groups:
                for s in group.shards:
                    s.weights.mul_(0.5)
                group.gather_params()
            still = len(held_by(provider).parameters) - whole
            same = model.chunks[0](microbatch).item() == halved.chunks[0](microbatch).item()
            provider.finish_evaluation()
            assert len(held_by(provider).parameters) == whole, "an evaluation leaves nothing gathered"
        found[reshard] = (left, still, bool(same))
    return found


def test_published_weights_are_used_whatever_a_forward_left_gathered() -> None:
    for found in in_world(Topology(dp=2), evaluated):
        assert found["always"] == (0, 0, True)
        assert found["never"][0] > 0 and found["never"][1:] == (0, True)


def elements(context: ParallelContext) -> tuple[int, int]:
    """Elements of this rank's shards, and of the whole model."""
    model = build(context)
    return sum(s.weights.numel() for group in shard(model, context).groups for s in group.shards), numel(model)


def test_the_model_of_these_tests_is_sharded_as_a_whole() -> None:
    (first, whole), (second, _) = in_world(Topology(dp=2), elements)
    assert first == second == whole // 2
