"""What a plan says of activations, and what torch's allocator says while real ranks train: for the same settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo  # fully_shard imports it: here once, not in every forked rank
import torch.distributed as dist

import megatron.data_parallel.fsdp  # noqa: F401  # as well
from megatron.attention.backends import backend_in_use, use_backend
from megatron.config.cli import load
from megatron.config.config import Config
from megatron.data.samples import DocumentRules
from megatron.data.tokenizer import predict_embedding_rows
from megatron.memory.host_buffers import HostBufferPool
from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.overlap import Overlap
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import find_recomputed_chunks
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron.training.inputs import BatchBuilder, needs_samples
from megatron.training.step import TrainStep
from megatron_lab.planner.advice import count_microbatches
from megatron_lab.planner.chunk_trace import ChunkTrace, trace_chunks
from megatron_lab.planner.peak import Activations, build_receive_plans, compute_peak_activations, sum_transfers
from megatron_lab.planner.state_report import build_state_report
from megatron_lab.planner.storages import Transfer
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.planned import real_context, real_model
from tests.support.runs import arguments
from tests.support.windows import Windows


@dataclass(frozen=True)
class Planned:
    """Of one rank."""

    activations: Activations
    transfers: tuple[Transfer, ...]
    traces: dict[int, ChunkTrace]
    buffers: int
    """What passes through of the model's state, by the report of the sharding strategy."""

    @property
    def beside_inputs(self) -> int:
        """What a step adds to what was there before it."""
        return self.activations.device_bytes - self.activations.input_bytes + self.buffers


def settings(world_size: int, **changes: Any) -> Config:
    """Settings of a run in which activations outweigh the rest; flags by the names of their fields."""
    defaults = {
        "num_layers": 4,
        "hidden_size": 64,
        "seq_length": 256,
        "micro_batch_size": 4,
        "global_batch_size": 16,
        "vocab_size": 500,
        "train_iters": 1,
    }
    return load(arguments(**defaults | changes), world_size).config


def plan_ranks(config: Config, world_size: int, *, expert_imbalance: float = 1.0) -> list[Planned]:
    """What the planner says of each rank. It says the same of all data and tensor ranks of a stage, so one of them is planned."""
    topology = Topology.of(config.parallel, world_size)
    places = [(at["pp"], at["cp"]) for at in map(topology.get_coordinates, range(world_size))]
    found = {
        place: plan_rank(config, world_size, places.index(place), expert_imbalance=expert_imbalance)
        for place in dict.fromkeys(places)
    }
    return [found[place] for place in places]


def plan_rank(
    config: Config,
    world_size: int,
    rank: int = 0,
    *,
    device_type: str = "cpu",
    overlap: Overlap | None = None,
    expert_imbalance: float = 1.0,
) -> Planned:
    """What the planner says of a rank."""
    topology = Topology.of(config.parallel, world_size)
    context = connect_fake(topology, rank, config.parallel.fsdp_shard_size)
    try:
        model = real_model(config, context, overlap)
        chunks, recomputed = len(model.layer_table) // topology.pp, find_recomputed_chunks(model.layer_table)
        count = count_microbatches(config, world_size)
        schedule = build_schedule(config.parallel.schedule, topology.pp, count, chunks, recomputed_chunks=recomputed)
        size, splits = config.training.micro_batch_size, SCHEDULES[config.parallel.schedule].splits_backward
        with backend_in_use(config.speed.attention_backend):
            traces = trace_chunks(
                model,
                config.data,
                size,
                context,
                splits_backward=splits,
                device_type=device_type,
                expert_imbalance=expert_imbalance,
            )
        receives = build_receive_plans(schedule, overlap=config.parallel.overlap_p2p_communication, device_type=device_type)
        return Planned(
            compute_peak_activations(traces, model, config, context, schedule, receives, device_type=device_type),
            sum_transfers(traces, model, size, context, schedule),
            traces,
            build_state_report(model, context, config.parallel, config.optimizer, schedule).memory.buffers.device,
        )
    finally:
        disconnect()


class Measured(NamedTuple):
    """Of one rank."""

    device: int
    """Bytes that its allocator gave out at the peak of the first step, beside what was there before it."""
    host_bytes: int
    """Bytes of buffers for activations in host memory, which the allocator does not see here."""


def measure(
    config: Config, world_size: int, backend: str = "gloo", prepare: Callable[[Model], None] = lambda model: None
) -> list[Measured]:
    """What each rank took.

    Args:
        backend: of the process groups. Gloo copies nothing that stages send, but its threads may be the last to hold what a
            collective takes, and then this thread's profiler does not see it freed. Shared memory copies, all on this thread.
        prepare: what is done to the model of each rank before its first step.
    """

    def rank_run(rank: int) -> Measured:
        HostBufferPool.allocate = lambda self, size: torch.from_numpy(np.empty(size, dtype=np.uint8))  # type: ignore[method-assign]
        step, batch = build_step(config, world_size, rank, prepare)
        peak = int(np.cumsum(_allocations(lambda: step.compute_gradients(batch))).max())
        return Measured(peak, step.executor.host.num_bytes)

    found: list[Measured] = run_ranks(world_size, rank_run, backend=backend)
    return found


def _allocations(function: Callable[[], Any]) -> list[int]:
    """Call a function. Returns the bytes that the allocator gave out (negative: took back) meanwhile, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.autograd._enable_record_function(False)  # no events of operations, which are four times as many and not looked at
        try:
            result = function()
        finally:
            torch.autograd._enable_record_function(True)
    _together()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    del result  # not while its memory is counted
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def build_step(
    config: Config, world_size: int, rank: int, prepare: Callable[[Model], None] = lambda model: None
) -> tuple[TrainStep, list[ModelInputs]]:
    """A rank that is ready for its first step, and the step's inputs; all ranks together."""
    context = real_context(config, rank, world_size)
    use_backend(config.speed.attention_backend)
    model = real_model(config, context)
    step = TrainStep.of(config, model, context)
    step.prepare(count_microbatches(config, world_size))
    prepare(model)
    data, length, count = config.data, config.model.seq_length, config.training.global_batch_size
    eod = predict_embedding_rows(data) - 1
    assert count is not None
    rules = DocumentRules(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    maker = BatchBuilder.for_model(config.model, context, 1, config.training.micro_batch_size, rules)
    rows = np.random.default_rng(0).integers(0, eod, (count, length + 1))
    rows[:, length // 3 - 1] = eod
    reads = needs_samples(context, [chunk.stage for chunk in model.layer_table], rules)
    source = Windows(rows) if reads else None
    steps = maker.iter_batches(source, global_batch_size_at=lambda _: count, consumed_samples=0, total_samples=count, num_workers=0)
    batch = next(steps)
    _together()
    return step, batch


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()
