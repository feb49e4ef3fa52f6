"""Groups that carry tensors from the start of a run on are those for which a plan counts a communicator of NCCL.

On CUDA, NCCL makes a communicator where a group first carries a tensor. Python values and barriers go over gloo there, so their
calls do not count here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from megatron.config.cli import LoadedConfig
from megatron.parallel.topology import Topology
from megatron.training.step import TrainStep
from tests.proof.test_dry_run_traffic import EXPERTS, GRID, groups_of, random_batch
from tests.support.planned import kind_of, kinds_of, real_context, real_step, settings
from tests.support.shared_memory import GroupCall, recorded_calls
from tests.support.warm import run_warm_ranks

CASES: dict[str, dict[str, Any]] = {
    "sharded, own output layer": {
        **GRID,
        "sequence_parallel": True,
        "data_parallel_sharding_strategy": "optim",
        "untie_embeddings_and_output_weights": True,
    },
    "experts": {**EXPERTS, "expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context ranks in a ring": {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "cp_comm_type": ("p2p",)},
    "replicas": {"data_parallel_sharding_strategy": "optim_grads_params", "fsdp_shard_size": 2, "global_batch_size": 16},
}


@functools.cache
def cases() -> list[LoadedConfig]:
    """All of them on 8 ranks."""
    return [settings(8, **case) for case in CASES.values()]


_OF_PYTHON_VALUES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier")


@contextlib.contextmanager
def calls_with_tensors() -> Iterator[list[GroupCall]]:
    """Record this rank's calls but those that carry Python values."""
    with pytest.MonkeyPatch.context() as patch, recorded_calls() as calls:
        for name in _OF_PYTHON_VALUES:
            function = getattr(dist, name)

            def uncounted(*args: Any, function: Any = function, **kwargs: Any) -> Any:
                before = len(calls)
                try:
                    return function(*args, **kwargs)
                finally:
                    del calls[before:]

            patch.setattr(dist, name, uncounted)
        yield calls


def run_from_the_start(step: TrainStep, batch: Any) -> None:
    for iteration in (1, 2):
        step.run(batch, iteration=iteration, learning_rate=0.1, weight_decay=0.1)
    step.finish_param_gather()


UsedGroups = tuple[set[tuple[int, ...]], set[tuple[int, ...]], dict[str, tuple[int, ...]]]
"""Ranks of the groups of collectives and of messages, and of all groups by name."""


def used_groups(rank: int) -> list[UsedGroups]:
    """Return the communicators of a rank, in each case."""
    used = []
    for case in cases():
        context = real_context(case.config, rank, 8)
        with calls_with_tensors() as calls:
            step = real_step(case.config, context)
            run_from_the_start(step, random_batch(step, context, case))
        dist.barrier()
        collectives = {call.ranks for call in calls if call.what != "send"}
        used.append((collectives, {call.ranks for call in calls if call.what == "send"}, groups_of(context)))
    return used


def test_groups_that_carry_tensors_are_those_of_the_plan() -> None:
    ranks: list[list[UsedGroups]] = run_warm_ranks(8, used_groups)
    kinds_of_cases = kinds_of(cases())
    for index, (name, kinds) in enumerate(zip(CASES, kinds_of_cases, strict=True)):
        for rank in range(8):
            collectives, messages, groups = ranks[rank][index]
            topology = Topology.of(cases()[index].config.parallel, 8)
            sent = kind_of(kinds, topology, rank).traffic
            in_rings = "ring" in name
            planned = {traffic.over for traffic in sent}
            assert collectives == {groups[over] for over in planned - {"pipeline", *["cp"] * in_rings}}, (name, rank)
            assert messages == {
                topology.group(rank, "pp") if over == "pipeline" else groups[over]
                for over in planned & {"pipeline", *["cp"] * in_rings}
            }, (name, rank)
