"""What one rank holds of a model's state and what it sends in a step, under any strategy. Pure arithmetic: `memory`, `traffic`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.bucket import main_grad_dtype
from megatron.data_parallel.fsdp_plan import is_fully_sharded, plan_units
from megatron.data_parallel.memory import Bytes, Memory, OptimizerState, bucket_memory, fsdp_memory
from megatron.data_parallel.passing import play_steps
from megatron.data_parallel.plan import plan_buckets
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


def rank_report(
    entries: Iterable[ParamEntry],
    modules: Mapping[int, Sequence[nn.Module]],
    context: ParallelContext,
    config: ParallelConfig,
    state: OptimizerState,
    *,
    dtype: torch.dtype,
    num_microbatches: int,
    writes: Iterable[str],
    granularity: Granularity = Granularity.ELEMENTS,
) -> Report:
    """What the strategy of the settings means for this rank.

    Args:
        entries: the rank's parameters, perhaps on the meta device.
        modules: those that hold them, in the order of the forward, by number of the chunk.
        state: what the optimizer keeps.
        dtype: of the parameters where they are used.
        num_microbatches: of a step.
        writes: names of parameters in the order in which the backward passes of a step write their gradients.
        granularity: what the optimizer must see in one piece.
    """
    entries, sharding = list(entries), config.sharding
    memory, sent, shards = Memory(), [], []
    if sharding == "optim_grads_params":
        sharding = "optim_grads"  # what is left
        inside = [entry for entry in entries if is_fully_sharded(entry, context)]
        entries = [entry for entry in entries if not is_fully_sharded(entry, context)]
        units = [plan_units(some, [e for e in inside if e.chunk == number]) for number, some in modules.items()]
        reshard = config.fsdp_reshard_after_forward
        found, some = fsdp_memory(units, context, reshard, dtype)
        memory += found
        shards.append(some)
        sent += fsdp_traffic([unit for some in units for unit in some], context, reshard, dtype, num_microbatches)
    plans = plan_buckets(entries, context, bucket_size=config.ddp_bucket_size, granularity=granularity)
    found, some = bucket_memory(plans, context, sharding, dtype)
    memory += found
    shards.append(some)
    reductions = [1] * len(plans)
    if sharding == "optim_grads":
        main = main_grad_dtype(dtype)
        passing, reductions = play_steps(plans, writes, main, overlap=config.overlap_grad_reduce)
        memory += Memory(buffers=Bytes(passing * main.itemsize))
    sent += bucket_traffic(plans, context, sharding, dtype, reductions)
    return Report(memory + state.memory(shards), tuple(joined(sent)))
