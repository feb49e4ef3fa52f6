"""Settings as a user gives them, their plan, and the same settings as a rank of a real run would have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.config.cli import LoadedConfig, load
from megatron.config.config import Config
from megatron.data.tokenizer import predict_embedding_rows
from megatron.model.build import Model, build_model_from_config
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.overlap import Overlap
from megatron.parallel.topology import Topology
from megatron.spec.operations import OpType
from megatron.spec.schedules import SCHEDULES
from megatron.training.step import TrainStep
from megatron_lab.planner.chunk_trace import ChunkTrace, TraceCache
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.plan import Plan, RankProfile
from megatron_lab.planner.storages import MemorySpan
from tests.support.runs import arguments


def settings(world_size: int, *, gpus_per_node: int = 8, **changes: Any) -> LoadedConfig:
    """A tiny model on the CPU that divides its work over so many ranks."""
    request = {"dry_run": True, "world_size": world_size, "gpus_per_node": gpus_per_node}
    return load(arguments(train_iters=1, **{"device": "cpu", **request, **changes}), 1)


def plans_of(loaded: Sequence[LoadedConfig], *, traced: bool = True) -> list[Plan]:
    """Chunks that do the same are traced once.

    Args:
        traced: see `kinds_of`.
    """
    return [planner.plan() for planner in _planners(loaded, traced=traced)]


def kinds_of(loaded: Sequence[LoadedConfig], *, traced: bool = True) -> list[tuple[RankProfile, ...]]:
    """Return the kinds of ranks of jobs of at most two stages, as their plans have them, without the rest of the plans.

    Args:
        traced: False takes operations to hold and send nothing. The state of ranks depends on no trace, and traces take most of
            the time of a plan.
    """
    assert all(one.config.parallel.pipeline_model_parallel_size <= 2 for one in loaded)
    return [planner.compute_step_work().profiles for planner in _planners(loaded, traced=traced)]


def _planners(loaded: Sequence[LoadedConfig], *, traced: bool = True) -> Iterator[Planner]:
    traces: dict[object, TraceCache] = {}
    for one in loaded:
        assert one.dry_run is not None
        known = traces.setdefault(_what_is_traced(one.config), {}) if traced else _UntracedChunks()
        yield Planner(one.config, one.dry_run, predict_embedding_rows(one.config.data), trace_cache=known)


class _UntracedChunks(TraceCache):
    """Stand-ins for the traces of all chunks, in which operations take and send nothing."""

    def __contains__(self, kind: object) -> bool:
        return True

    def __missing__(self, kind: object) -> ChunkTrace:
        return ChunkTrace(dict.fromkeys(OpType, MemorySpan(0, 0)), "", frozenset())


def _what_is_traced(config: Config) -> object:
    """All settings but those that only say who holds what of the state, and which layers a chunk has."""
    parallel = config.parallel
    divided = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.sequence_parallel,
        parallel.tp_comm_overlap,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_size,
        parallel.moe_token_dispatcher_type,
    )
    splits = SCHEDULES[parallel.schedule].splits_backward
    return config.model, config.precision, config.training, config.data, config.memory, config.speed, divided, splits


def kind_of(kinds: Sequence[RankProfile], topology: Topology, rank: int) -> RankProfile:
    """Return the only one of these kinds that the rank belongs to."""
    at = topology.get_coordinates(rank)
    data = at["cp"] + topology.cp * at["dp"]
    (kind,) = [
        kind
        for kind in kinds
        if at["pp"] in kind.stages and any(places.tensor == at["tp"] and data in places.data for places in kind.rank_ranges)
    ]
    return kind


def real_context(config: Config, rank: int, world_size: int) -> ParallelContext:
    """Of a rank of a world of processes; all of them together."""
    topology = Topology.of(config.parallel, world_size)
    return make_context(topology, rank, torch.device("cpu"), fsdp_shard_size=config.parallel.fsdp_shard_size)


def real_model(config: Config, context: ParallelContext, overlap: Overlap | None = None) -> Model:
    """The model of a run on this rank, without memory."""
    return build_model_from_config(config, context, predict_embedding_rows(config.data), overlap=overlap)


def real_step(config: Config, context: ParallelContext) -> TrainStep:
    """The training step of a run on this rank: everything that it keeps is allocated."""
    return TrainStep.of(config, real_model(config, context), context)
