"""Memory of the model's state on one rank, by arithmetic. Nothing is allocated; parameters may be on the meta device.

The state of a model in 16 bits with Adam takes the following bytes per parameter on each of N data ranks (Rajbhandari et al. 2019,
section 5; here gradients are float32):

================== ========== ========= =========== ======= ========
strategy           parameters gradients main params moments total
================== ========== ========= =========== ======= ========
no_shard           2          4         4           8       18
optim              2          4         4/N         8/N     6 + 12/N
optim_grads        2          4/N       4/N         8/N     2 + 16/N
optim_grads_params 4/N        4/N       none        8/N     16/N
================== ========== ========= =========== ======= ========

Under optim_grads_params the sharded parameters are themselves the main parameters. Padding and temporary buffers are added to this:
under optim_grads the gradients of a bucket until they are reduced, under optim_grads_params the gathered parameters and the
gradients of a unit while it computes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from megatron.config.imports import import_object
from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.data_parallel.bucket import main_grad_dtype, select_reduce_dtype
from megatron.data_parallel.bucket_plan import BucketPlan, plan_buckets
from megatron.data_parallel.fsdp_plan import (
    FsdpPolicy,
    UnitPlan,
    build_param_partition,
    compute_owned_range,
    compute_padded_shard_numel,
    compute_sharded_view_shape,
    is_fully_sharded,
    order_for_backward,
    plan_units,
)
from megatron.data_parallel.traffic import GroupTraffic, count_bucket_traffic, count_fsdp_traffic, merge_traffic
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamEntry, ParamPartition, ParamRecord
from megatron.parallel.topology import GRADIENT_AXES


@dataclass(frozen=True)
class Bytes:
    """Bytes that one purpose takes on a rank, on its device and in host memory."""

    device: int = 0
    host: int = 0
    padding: int = 0
    """Part of `total` that holds padding instead of elements of a parameter."""

    @property
    def total(self) -> int:
        """Bytes on the device + bytes in host memory."""
        return self.device + self.host

    @property
    def on_host(self) -> Bytes:
        """Copy of this object in which all bytes count as host memory."""
        return Bytes(0, self.total, self.padding)

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.padding + other.padding)


@dataclass(frozen=True)
class StateMemory:
    """Memory of a model's state (parameters, gradients, optimizer state, temporary buffers) on one rank, by purpose."""

    parameters: Bytes = Bytes()
    gradients: Bytes = Bytes()
    main_params: Bytes = Bytes()
    """Main parameters, if they are stored separately from the model's parameters."""
    moments: Bytes = Bytes()
    averages: Bytes = Bytes()
    """Exponential moving average of the main parameters."""
    buffers: Bytes = Bytes()
    """Peak of temporary buffers for gathered parameters, and for gradients before their reduction."""

    @property
    def by_purpose(self) -> dict[str, Bytes]:
        """Bytes of each field, by its name (such as "gradients"), in the order of the fields."""
        return vars(self)

    @property
    def total(self) -> Bytes:
        """Bytes of all purposes together."""
        return sum(self.by_purpose.values(), Bytes())

    def __add__(self, other: StateMemory) -> StateMemory:
        return StateMemory(*map(operator.add, self.by_purpose.values(), other.by_purpose.values()))


class ShardSize(NamedTuple):
    """Size of a shard (part of a parameter) that the optimizer of a rank updates."""

    record: ParamRecord
    numel: int
    dtype: torch.dtype
    """Dtype of the model's parameter to which the shard belongs."""
    on_host: bool = False
    """Whether the shard of the parameter and its gradient are in host memory."""

    @property
    def main_dtype(self) -> torch.dtype:
        """Dtype of the main parameter and of its gradient."""
        return main_grad_dtype(self.dtype)


RankState = tuple[StateMemory, Sequence[ShardSize]]
"""(memory of the parameters and gradients on a rank, shards that the rank updates)"""


@dataclass(frozen=True)
class BucketState:
    """Part of the state: the parameters of one bucket, their gradients, and the shards that the optimizer updates. Each rank of the
    process group updates a different slice of the bucket, except with the sharding strategy no_shard."""

    plan: BucketPlan
    sharding: ShardingStrategy
    dtype: torch.dtype
    """Dtype of the bucket's parameters."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the rank grid over which the gradients of the bucket are summed."""
        return self.plan.axes

    def group(self, context: ParallelContext) -> Group:
        """Return the process group over which the gradients of the bucket are reduced."""
        return context.group(*self.axes)

    def compute_rank_state(self, rank: int) -> RankState:
        """Return the memory of parameters and gradients on one rank, and the shards that its optimizer updates.

        Args:
            rank: rank within the process group of the bucket.
        """
        plan, main = self.plan, main_grad_dtype(self.dtype)
        local_shards = [
            ShardSize(p.entry.record, flat_range.stop - flat_range.start, self.dtype)
            for p, flat_range in plan.get_params_in_slice(rank)
        ]
        full_params = [ShardSize(p.entry.record, p.numel, self.dtype) for p in plan.params]
        gradients = (
            _count_buffer_bytes(plan.slice_size, local_shards, main)
            if self.sharding == "optim_grads"
            else _count_buffer_bytes(plan.size, full_params, main)
        )
        return StateMemory(
            _count_buffer_bytes(plan.size, full_params, self.dtype), gradients
        ), full_params if self.sharding == "no_shard" else local_shards

    def get_param_partitions(self) -> list[ParamPartition]:
        """Return, for each parameter of the bucket, which rank of the process group updates which elements."""
        return self.plan.get_param_partitions(main_grad_dtype(self.dtype), sharded=self.sharding != "no_shard")

    def find_boundaries(self) -> set[int]:
        """Return the ranks of the process group whose shards may have other sizes than those of the rank before. These are the
        ranks that hold the first or last element of a parameter, and the rank after each of them.

        All ranks from one of these ranks up to the next have shards of equal sizes, so the state of one rank stands for all of
        them. The set may contain the size of the group, which is not a rank. It is empty under no_shard, where all ranks update
        whole parameters.
        """
        if self.sharding == "no_shard":
            return set()
        offsets = [offset for param in self.plan.params for offset in (param.offset, param.offset + param.numel - 1)]
        return {offset // self.plan.slice_size + step for offset in offsets for step in (0, 1)}


@dataclass(frozen=True)
class FsdpState:
    """Part of the state: all parameters under `fully_shard` with the same shard group (ranks that together hold one copy), in all
    model chunks of the stage."""

    entries: Sequence[ParamEntry]
    axes: tuple[str, ...]
    """Axes of the rank grid over which the gradients of these parameters are summed."""
    shard_group: Group
    on_host: bool
    dtype: torch.dtype
    """Dtype in which parameters are gathered before they are used."""

    def group(self, context: ParallelContext) -> Group:
        """Return the process group over which the parameters are sharded."""
        return context.get_fsdp_shard_group(self.axes)

    def compute_rank_state(self, rank: int) -> RankState:
        """Return the memory of parameter and gradient shards on one rank, and the shards that its optimizer updates. The parameter
        shards are also the main parameters.

        In host memory a gradient shard exists twice: in the buffer that receives it, and in the gradient itself.

        Args:
            rank: rank within the shard group.
        """
        group, main = replace(self.shard_group, rank=rank), main_grad_dtype(self.dtype)
        owned_ranges = [(entry, compute_owned_range(entry, group)) for entry in self.entries]
        shards = [ShardSize(entry.record, owned.stop - owned.start, main, self.on_host) for entry, owned in owned_ranges]
        padded_numel = sum(compute_padded_shard_numel(entry, group.size) for entry in self.entries)
        parameters, gradients = (
            _count_buffer_bytes(padded_numel, shards, main),
            Bytes(sum(shard.numel for shard in shards) * main.itemsize),
        )
        if not self.on_host:
            return StateMemory(parameters, gradients), shards
        return StateMemory(parameters.on_host, gradients.on_host, buffers=Bytes(0, gradients.total)), shards

    def get_param_partitions(self) -> list[ParamPartition]:
        """Return, for each parameter, which rank of the shard group holds which elements."""
        return [build_param_partition(entry, self.shard_group, main_grad_dtype(self.dtype)) for entry in self.entries]

    def find_boundaries(self) -> set[int]:
        """Return the ranks of the shard group whose shards may have other sizes than those of the rank before. For each parameter,
        these are the first rank without a full shard of the parameter's rows, and the rank after it."""
        row_counts = {compute_sharded_view_shape(entry)[0] for entry in self.entries}
        num_full_ranks = {rows // -(-rows // self.shard_group.size) for rows in row_counts}
        return {rank + step for rank in num_full_ranks for step in (0, 1)}


def compute_fsdp_buffer_bytes(
    chunks: Sequence[Sequence[UnitPlan]],
    recompute_groups: Sequence[Sequence[range]],
    context: ParallelContext,
    policy: FsdpPolicy,
    *,
    accumulates: bool,
    dtype: torch.dtype,
) -> int:
    """Return the peak bytes of temporary buffers under FSDP (`fully_shard`) in a step. A unit is a set of modules whose parameters
    are gathered, freed and reduced together.

    The peak is at the end of a unit's backward. Then these buffers exist:

    - the gathered parameters of this unit and of the next unit in backward order (of all units if they stay gathered; also of units
      that were recomputed together with this unit)
    - the gradients of the unit, torch's copy of these gradients for the reduction, and the local shard of the reduced gradients
    - gathered parameters and gradients of units that enclose this unit

    With replica groups, the gradient shards of all units wait until the end of the step to be summed over the replicas. If
    gradients are reduced once per step, unsharded gradients wait instead: those of all units that the last backward of the step has
    not finished.

    Args:
        chunks: units of each model chunk, in forward order.
        recompute_groups: for each model chunk, index ranges of units that are recomputed together in backward. The last range is
            recomputed ahead of the backward.
        policy: options of `fully_shard` (--fsdp-... flags).
        accumulates: whether unsharded gradients accumulate over several microbatches until the last one.
        dtype: dtype in which parameters are gathered.
    """
    main, keeps_gathered = main_grad_dtype(dtype), policy.reshard == "never"
    peak_bytes = gathered_numel = waiting_grads = replica_shards = 0
    for units, groups in zip(chunks, recompute_groups, strict=True):
        shard_group_sizes = [context.get_fsdp_shard_group(unit.axes).size for unit in units]
        shard_numels = [
            sum(compute_padded_shard_numel(e, size) for e in unit.entries)
            for unit, size in zip(units, shard_group_sizes, strict=True)
        ]
        sizes = [size * shard_numel for size, shard_numel in zip(shard_group_sizes, shard_numels, strict=True)]
        grads = [sum(entry.param.numel() for entry in unit.entries) for unit in units]
        order = order_for_backward(range(len(units)), [unit.num_nested for unit in units])
        next_unit = dict(pairwise([*order, order[-1]])) if order else {}
        for index, unit in enumerate(units):
            enclosing = [i for i in range(index) if index <= i + units[i].num_nested]
            last_nested = index + min(unit.num_nested, 1)  # of nested units, the first in forward order finishes its backward last
            gathered_units = {index, next_unit[last_nested], *enclosing}
            gathered_units |= {i for group in groups if _is_recomputed(group, groups, index) for i in group}
            gathered_now = 0 if keeps_gathered else sum(sizes[i] for i in gathered_units if i <= index)
            waiting_grads = waiting_grads + grads[index] if accumulates else grads[index] + sum(grads[i] for i in enclosing)
            peak_bytes = max(
                peak_bytes, gathered_now * dtype.itemsize + (waiting_grads + sizes[index] + shard_numels[index]) * main.itemsize
            )
            if context.get_fsdp_replica_group(unit.axes).size > 1 and not accumulates:
                replica_shards += shard_numels[index]
        gathered_numel += sum(sizes)
    return peak_bytes + replica_shards * main.itemsize + (gathered_numel * dtype.itemsize if keeps_gathered else 0)


def _is_recomputed(group: range, groups: Sequence[range], index: int) -> bool:
    """Return whether units that are recomputed together are already recomputed when the backward reaches the unit `index`.

    Args:
        group: index range of these units.
        groups: index ranges of all units that are recomputed together. The last range is recomputed ahead of the backward.
    """
    return index in group or (group is groups[-1] and index >= group.start)


@dataclass(frozen=True)
class FrozenState:
    """Part of the state: parameters that the optimizer does not update. Every rank holds them unsharded, without gradients."""

    entries: Sequence[ParamEntry]
    axes: tuple[str, ...] = GRADIENT_AXES

    def group(self, context: ParallelContext) -> Group:
        """Return the process group whose ranks hold the same frozen parameters."""
        return context.group(*self.axes)

    def compute_rank_state(self, rank: int) -> RankState:
        """Return the memory of the frozen parameters on a rank, and an empty list of shards to update. The memory is equal on all
        ranks of the process group."""
        return StateMemory(Bytes(sum(entry.param.nbytes for entry in self.entries))), []

    def get_param_partitions(self) -> list[ParamPartition]:
        """Return an empty list: no rank updates these parameters."""
        return []

    def find_boundaries(self) -> set[int]:
        """Return an empty set: the memory of frozen parameters is equal on all ranks, so it changes at no rank."""
        return set()


StateComponent = BucketState | FsdpState | FrozenState


def _count_buffer_bytes(size: int, shards: Iterable[ShardSize], dtype: torch.dtype) -> Bytes:
    """Return the bytes of a buffer of `size` elements that holds these shards. Elements outside the shards are padding."""
    return Bytes(size * dtype.itemsize, padding=(size - sum(shard.numel for shard in shards)) * dtype.itemsize)


@dataclass(frozen=True)
class StateReport:
    """Memory of the model's state on one rank, and the bytes that the rank sends in a step for the state (gradients, parameters and
    so on)."""

    memory: StateMemory
    traffic: tuple[GroupTraffic, ...]
    """Bytes that the rank sends in a step for the model's state, by process group and purpose."""


@dataclass(frozen=True)
class StateLayout:
    """Distribution of the model's state over the ranks of a pipeline stage. The state consists of components (buckets, parameters
    under FSDP, frozen parameters); each rank holds every component in part or in full."""

    components: Sequence[StateComponent]
    buffers: Bytes
    """Size of the temporary buffers on every rank. They hold gradients of buckets before their reduction, and parameters that
    `fully_shard` gathers."""
    traffic: tuple[GroupTraffic, ...]
    """Bytes that every rank sends in a step for the model's state, by process group and purpose."""

    def get_param_partitions(self) -> list[ParamPartition]:
        """Return, for each parameter that the optimizer updates, which rank updates which elements."""
        return [param for component in self.components for param in component.get_param_partitions()]

    def compute_rank_states(self, context: ParallelContext) -> list[RankState]:
        """Return, for each component of the state, its memory (parameters and gradients) on the rank of `context`, and the shards
        of the component that the optimizer of this rank updates."""
        return [component.compute_rank_state(component.group(context).rank) for component in self.components]

    def compute_memory(
        self, rank_states: Iterable[RankState], compute_optimizer_memory: Callable[[Iterable[ShardSize]], StateMemory]
    ) -> StateMemory:
        """Return the memory of the state on a rank, including the optimizer's state and temporary buffers.

        Args:
            rank_states: result of `compute_rank_states`: memory and shards of the rank for each component.
            compute_optimizer_memory: returns the memory of the optimizer's state for shards.
        """
        rank_states = list(rank_states)
        model_state = sum((memory for memory, _ in rank_states), StateMemory(buffers=self.buffers))
        return model_state + compute_optimizer_memory(shard for _, shards in rank_states for shard in shards)


def build_state_layout(
    entries: Iterable[ParamEntry],
    modules: Mapping[int, Sequence[nn.Module]],
    recompute_groups: Mapping[int, Sequence[Sequence[nn.Module]]],
    context: ParallelContext,
    config: ParallelConfig,
    *,
    dtype: torch.dtype,
    num_microbatches: int,
    grad_writes: Iterable[str],
) -> StateLayout:
    """Compute how the sharding strategy in the settings divides the state of a pipeline stage among its ranks.

    Args:
        entries: parameters of a rank of the stage, possibly on the meta device.
        modules: modules that hold the parameters, in forward order, by chunk index.
        recompute_groups: groups of these modules that are recomputed together in backward, by chunk index.
        dtype: dtype in which the model uses the parameters.
        num_microbatches: microbatches of one data rank in a step.
        grad_writes: names of parameters in the order in which the backwards of a step write their gradients.
    """
    entries, sharding, policy = list(entries), config.sharding, FsdpPolicy.from_config(config)
    components: list[StateComponent] = []
    traffic: list[GroupTraffic] = []
    buffers = Bytes()
    if sharding == "optim_grads_params":
        sharding = "optim_grads"  # for parameters that are not under `fully_shard`
        fsdp_entries = [entry for entry in entries if is_fully_sharded(entry, context)]
        entries = [entry for entry in entries if not is_fully_sharded(entry, context)]
        units = [
            plan_units(chunk_modules, [e for e in fsdp_entries if e.chunk == chunk_index])
            for chunk_index, chunk_modules in modules.items()
        ]
        unit_ranges = [
            _find_unit_ranges(chunk_units, recompute_groups[chunk_index])
            for chunk_units, chunk_index in zip(units, modules, strict=True)
        ]
        accumulates = policy.reduce_once and num_microbatches > 1
        buffers = Bytes(compute_fsdp_buffer_bytes(units, unit_ranges, context, policy, accumulates=accumulates, dtype=dtype))
        for axes in dict.fromkeys(entry.record.partial_axes for entry in fsdp_entries):
            axes_entries = [entry for entry in fsdp_entries if entry.record.partial_axes == axes]
            components.append(FsdpState(axes_entries, axes, context.get_fsdp_shard_group(axes), policy.params_cpu, dtype))
        traffic += count_fsdp_traffic(
            [unit for chunk_units in units for unit in chunk_units], context, policy, dtype, num_microbatches
        )
    if frozen := [entry for entry in entries if entry.record.frozen]:
        components.append(FrozenState(frozen))
    plans = plan_buckets([e for e in entries if not e.record.frozen], context, bucket_size=config.ddp_bucket_size)
    num_reductions, main = [1] * len(plans), main_grad_dtype(dtype)
    reduce_dtypes = [select_reduce_dtype(plan, context, in_bf16=config.grad_reduce_in_bf16) for plan in plans]
    if sharding == "optim_grads":
        buffer_use = import_object("megatron_lab.planner.transient_buffers:simulate_steps")(
            plans, grad_writes, main, overlap=config.overlap_grad_reduce, reduce_dtypes=reduce_dtypes
        )
        num_reductions = buffer_use.num_reductions
        buffers += Bytes(buffer_use.grad_numel * main.itemsize)
    else:
        buffer_use = import_object("megatron_lab.planner.transient_buffers:simulate_reductions")(
            plans, list(grad_writes), num_microbatches, overlap=config.overlap_grad_reduce, reduce_dtypes=reduce_dtypes
        )
    buffers += Bytes(buffer_use.reduce_numel * torch.bfloat16.itemsize)
    components += [BucketState(plan, sharding, plan.params[0].entry.param.dtype) for plan in plans]
    traffic += count_bucket_traffic(plans, context, sharding, dtype, num_reductions, in_bf16=config.grad_reduce_in_bf16)
    return StateLayout(components, buffers, tuple(merge_traffic(traffic)))


def _find_unit_ranges(units: Sequence[UnitPlan], groups: Sequence[Sequence[nn.Module]]) -> list[range]:
    """Return, for each group of modules that are recomputed together, the index range of the FSDP units that contain these
    modules."""
    indices_of_groups = [[i for i, unit in enumerate(units) if set(unit.modules) & set(group)] for group in groups]
    return [range(indices[0], indices[-1] + 1) for indices in indices_of_groups if indices]
