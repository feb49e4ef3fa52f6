"""Planned traffic of tensor and pipeline groups against the calls that real ranks make."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron.parallel.collectives as collectives
from megatron.parallel.overlap import RingOverlap, SymmetricMemoryOverlap
from megatron.pipeline_parallel.executor import ForwardFunction
from megatron.spec.operations import Schedule
from tests.proof.test_planner_activations_measured import EIGHT_BITS_WITHIN, LLAMA, PACKED
from tests.support.activation_runs import build_step, plan_rank, plan_ranks, settings
from tests.support.warm import run_forked_ranks

Heard = Counter[tuple[str, int | None, int, int]]
"""(operation, rank that a message goes to, bytes of the whole tensor, ranks) to the number of calls."""
Calls = dict[tuple[str, int | None], tuple[int, float]]
"""(operation, rank that a message goes to) to the number of calls, and the bytes that one rank sends."""

TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def _listen(found: Heard, tensor_group: dist.ProcessGroup) -> None:
    """Count what this process sends from now on."""

    def heard(name: str, module: Any, attribute: str, whole: int) -> None:
        function = getattr(module, attribute)

        def wrapper(*args: Any, **named: Any) -> Any:
            group = named["group"]
            within = {dist.get_rank(), args[1]} <= {*dist.get_process_group_ranks(tensor_group)} if name == "send" else True
            peer = None if within else args[1]
            found[name, peer, args[whole].nbytes, dist.get_world_size(group)] += 1
            return function(*args, **named)

        setattr(module, attribute, wrapper)

    heard("all-reduce", dist, "all_reduce", 0)
    heard("all-gather", collectives, "_all_gather", 0)
    heard("reduce-scatter", collectives, "_reduce_scatter", 1)
    heard("send", dist, "isend", 0)


def _calls_of_a_step(rank: int, world_size: int, changes: dict[str, Any]) -> Calls:
    step, batch = build_step(settings(world_size, **changes), world_size, rank)
    run = step.executor.run
    counted: Heard = Counter()

    def heard(schedule: Schedule, forward: ForwardFunction) -> None:
        found: Heard = Counter()
        tensor_group = step.context.group("tp").process_group
        assert tensor_group is not None
        _listen(found, tensor_group)
        run(schedule, forward)
        counted.update(found)  # what comes after the last operation belongs to the data ranks and to the loss

    step.executor.run = heard  # type: ignore[method-assign]
    step.compute_gradients(batch)
    dist.barrier()
    share = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0}
    calls: Calls = {}
    for (name, peer, size, ranks), times in counted.items():
        each = size if name == "send" else share[name] * (ranks - 1) / ranks * size
        before = calls.get((name, peer), (0, 0.0))
        calls[name, peer] = before[0] + times, before[1] + times * each
    return calls


@pytest.mark.parametrize(
    "changes",
    [
        *(
            pytest.param(changes, marks=pytest.mark.full("the cases that have the same and more"))
            for changes in (
                {},
                {"sequence_parallel": True, "bf16": True, **LLAMA},
                {"sequence_parallel": True, "pipeline_schedule": "zb-h1", "num_layers": 10},
                {"sequence_parallel": True, "tp_comm_overlap": True, **LLAMA},
                {"bf16": True, "fp8_format": "hybrid", "pipeline_schedule": "zb-v", **LLAMA},
            )
        ),
        {"pipeline_schedule": "zb-v", **PACKED},
        {"sequence_parallel": True, "recompute_activations": True, "recompute_modules": ("layernorm", "mlp")},
        {"bf16": True, "sequence_parallel": True, **EIGHT_BITS_WITHIN},
        {"sequence_parallel": True, "tp_comm_overlap": True, "pipeline_schedule": "zb-h1", "num_layers": 10},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "plain",
)
def test_planned_transfers_are_the_calls_of_real_ranks(changes: dict[str, Any]) -> None:
    """Ranks lie tensor first: rank = tensor place + 2 x stage."""
    changes = TP2_PP2 | {"hidden_size": 32, "seq_length": 64} | changes
    config = settings(4, **changes)
    for rank, (real, plan) in enumerate(zip(run_forked_ranks(4, _calls_of_a_step, 4, changes), plan_ranks(config, 4), strict=True)):
        transfers = plan.transfers
        assert {one.group for one in transfers} == {"tp", "pipeline"}
        assert real == {
            (one.comm_type, None if one.peer is None else rank % 2 + 2 * one.peer): (one.calls, one.bytes) for one in transfers
        }


def test_devices_do_not_change_what_is_sent() -> None:
    """The plan for CUDA sends what the plan for the CPU does, which is checked against real ranks."""
    config = settings(4, **TP2_PP2, sequence_parallel=True, bf16=True, **LLAMA)
    assert plan_rank(config, 4, 1, device_type="cuda").transfers == plan_rank(config, 4, 1).transfers
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("changes", [{}, {"pipeline_schedule": "zb-h1", "num_layers": 10}], ids=["1f1b", "zb-h1"])
def test_every_way_of_overlapping_sends_as_many_bytes(changes: dict[str, Any]) -> None:
    """Over four tensor ranks. What is read out of the peers' memory counts as the collective whose place it takes."""
    grid = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "sequence_parallel": True, "bf16": True}
    turns = plan_rank(settings(8, **grid, **changes), 8, device_type="cuda")
    ways = [
        plan_rank(settings(8, **grid, **changes, tp_comm_overlap=True), 8, device_type="cuda", overlap=way)
        for way in (SymmetricMemoryOverlap(), RingOverlap())
    ]
    sent = [Counter({one.comm_type: one.bytes for one in plan.transfers if one.group == "tp"}) for plan in (turns, *ways)]
    assert sent[1] == sent[0], "by the kinds of collectives"
    assert sent[2]["send"] > sent[0]["all-gather"] / 2 and sent[2].total() == sent[0].total()
    assert [one for one in ways[0].transfers if one.group == "tp"] == [one for one in turns.transfers if one.group == "tp"]
    peaks = [[span.peak_bytes for span in plan.traces[0].ops.values()] for plan in (turns, *ways)]
    assert peaks[1] == peaks[0], "what is gathered, and what is not yet scattered"
    assert all(ring <= other for ring, other in zip(peaks[2], peaks[0], strict=True)) and peaks[2] != peaks[0]
