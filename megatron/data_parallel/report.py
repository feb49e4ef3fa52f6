"""What one rank holds of a model's state and what it sends in a step, under any strategy. Pure arithmetic: `memory`, `traffic`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.bucket import main_grad_dtype
from megatron.data_parallel.fsdp_plan import is_fully_sharded, plan_units
from megatron.data_parallel.memory import Bytes, Memory, OptimizerState, Shards
from megatron.data_parallel.passing import play_steps
from megatron.data_parallel.plan import plan_buckets
from megatron.data_parallel.state_parts import BucketPart, StatePart, UnitsPart
from megatron.data_parallel.traffic import Sent, bucket_traffic, fsdp_traffic, joined
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry
from megatron.parallel.shards import Granularity


@dataclass(frozen=True)
class Report:
    """Of one rank."""

    memory: Memory
    sent: tuple[Sent, ...]
    """In a step, by group and kind."""


@dataclass(frozen=True)
class StateLayout:
    """How the state of a pipeline stage is cut: the same for all of its ranks, of which each keeps some pieces."""

    parts: Sequence[StatePart]
    buffers: Bytes
    """Gradients of buckets that pass through, on every rank."""
    sent: tuple[Sent, ...]
    """By every rank, in a step."""

    def memory(self, context: ParallelContext, state: OptimizerState) -> Memory:
        """Of a rank, by its places in its data groups."""
        return self.memory_of([part.memory(part.group(context).index) for part in self.parts], state)

    def memory_of(self, kept: Iterable[tuple[Memory, Shards]], state: OptimizerState) -> Memory:
        """With what is kept of each part."""
        kept = list(kept)
        state_of_optimizer = state.memory([shards for _, shards in kept])
        return sum((memory for memory, _ in kept), Memory(buffers=self.buffers)) + state_of_optimizer


def state_layout(
    entries: Iterable[ParamEntry],
    modules: Mapping[int, Sequence[nn.Module]],
    context: ParallelContext,
    config: ParallelConfig,
    *,
    dtype: torch.dtype,
    num_microbatches: int,
    writes: Iterable[str],
    granularity: Granularity = Granularity.ELEMENTS,
) -> StateLayout:
    """What the strategy of the settings means for a pipeline stage.

    Args:
        entries: the parameters of a rank of the stage, perhaps on the meta device.
        modules: those that hold them, in the order of the forward, by number of the chunk.
        dtype: of the parameters where they are used.
        num_microbatches: of a step.
        writes: names of parameters in the order in which the backward passes of a step write their gradients.
        granularity: what the optimizer must see in one piece.
    """
    entries, sharding, reshard = list(entries), config.sharding, config.fsdp_reshard_after_forward
    parts: list[StatePart] = []
    sent: list[Sent] = []
    if sharding == "optim_grads_params":
        sharding = "optim_grads"  # what is left
        inside = [entry for entry in entries if is_fully_sharded(entry, context)]
        entries = [entry for entry in entries if not is_fully_sharded(entry, context)]
        units = [plan_units(some, [e for e in inside if e.chunk == number]) for number, some in modules.items()]
        parts.append(UnitsPart(units, context.fsdp_shard, context.fsdp_replica.size, reshard, dtype))
        sent += fsdp_traffic([unit for some in units for unit in some], context, reshard, dtype, num_microbatches)
    plans = plan_buckets(entries, context, bucket_size=config.ddp_bucket_size, granularity=granularity)
    reductions, buffers = [1] * len(plans), Bytes()
    if sharding == "optim_grads":
        main = main_grad_dtype(dtype)
        passing, reductions = play_steps(plans, writes, main, overlap=config.overlap_grad_reduce)
        buffers = Bytes(passing * main.itemsize)
    parts += [BucketPart(plan, sharding, dtype) for plan in plans]
    sent += bucket_traffic(plans, context, sharding, dtype, reductions)
    return StateLayout(parts, buffers, tuple(joined(sent)))
