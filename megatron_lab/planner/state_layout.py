"""The memory that a model's state takes on one rank, by arithmetic: nothing is allocated; parameters may be on the meta device.

For a model in 16 bits with Adam, on each of N data ranks, bytes for each parameter (Rajbhandari et al. 2019, section 5; here
gradients are float32):

================== ========== ========= =========== ======= ========
strategy           parameters gradients main params moments together
================== ========== ========= =========== ======= ========
no_shard           2          4         4           8       18
optim              2          4         4/N         8/N     6 + 12/N
optim_grads        2          4/N       4/N         8/N     2 + 16/N
optim_grads_params 4/N        4/N       themselves  8/N     16/N
================== ========== ========= =========== ======= ========

Added to this are padding and what only passes through: under optim_grads the gradients of a bucket until they are reduced, under
optim_grads_params the parameters and gradients of a unit while it computes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from megatron.config.imports import named
from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.data_parallel.bucket import main_grad_dtype, travel_dtype
from megatron.data_parallel.bucket_plan import BucketPlan, plan_buckets
from megatron.data_parallel.fsdp_plan import (
    FsdpPolicy,
    UnitPlan,
    divided,
    divided_param,
    in_backward,
    is_fully_sharded,
    own_piece,
    padded_part,
    plan_units,
)
from megatron.data_parallel.traffic import Sent, bucket_traffic, fsdp_traffic, joined
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import DividedParam, ParamEntry, ParamRecord
from megatron.parallel.topology import GRADIENT_AXES


@dataclass(frozen=True)
class Bytes:
    """Bytes that one kind of state takes on a rank, on its device and in host memory."""

    device: int = 0
    host: int = 0
    padding: int = 0
    """The part of both together that belongs to no parameter."""

    @property
    def total(self) -> int:
        """Bytes on the device and in host memory together."""
        return self.device + self.host

    @property
    def on_host(self) -> Bytes:
        """As many, all of them in host memory."""
        return Bytes(0, self.total, self.padding)

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.padding + other.padding)


@dataclass(frozen=True)
class StateMemory:
    """The state of a model on one rank."""

    parameters: Bytes = Bytes()
    gradients: Bytes = Bytes()
    main_params: Bytes = Bytes()
    """Main parameters that are not the parameters themselves."""
    moments: Bytes = Bytes()
    averages: Bytes = Bytes()
    """The exponential moving average of the main parameters."""
    buffers: Bytes = Bytes()
    """The most that passes through without being kept: gathered parameters, gradients before their reduction."""

    @property
    def parts(self) -> dict[str, Bytes]:
        """Each part by its name, in the order above."""
        return vars(self)

    @property
    def total(self) -> Bytes:
        """All together."""
        return sum(self.parts.values(), Bytes())

    def __add__(self, other: StateMemory) -> StateMemory:
        return StateMemory(*map(operator.add, self.parts.values(), other.parts.values()))


class ShardSize(NamedTuple):
    """A shard that the optimizer gets, by its size."""

    record: ParamRecord
    numel: int
    dtype: torch.dtype
    """Dtype of the weights."""
    on_host: bool = False
    """Whether weights and gradient are in host memory."""

    @property
    def main_dtype(self) -> torch.dtype:
        """Dtype of the main parameter, and of the gradient."""
        return main_grad_dtype(self.dtype)


Kept = tuple[StateMemory, Sequence[ShardSize]]
"""The parameters and gradients that a rank keeps, and the shards that it updates."""


@dataclass(frozen=True)
class BucketPart:
    """A bucket that a group divides: a rank's place in the group decides which part of it the rank keeps."""

    plan: BucketPlan
    sharding: ShardingStrategy
    dtype: torch.dtype
    """Dtype of the parameters."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which their gradients are summed."""
        return self.plan.axes

    def group(self, context: ParallelContext) -> Group:
        """The ranks that divide it."""
        return context.group(*self.axes)

    def kept(self, index: int) -> Kept:
        """What the rank at place `index` of the group keeps."""
        plan, main = self.plan, main_grad_dtype(self.dtype)
        own = [ShardSize(placed.entry.record, piece.stop - piece.start, self.dtype) for placed, piece in plan.pieces(index)]
        whole = [ShardSize(placed.entry.record, placed.numel, self.dtype) for placed in plan.params]
        gradients = _padded(plan.slice_size, own, main) if self.sharding == "optim_grads" else _padded(plan.size, whole, main)
        return StateMemory(_padded(plan.size, whole, self.dtype), gradients), whole if self.sharding == "no_shard" else own

    def params(self) -> list[DividedParam]:
        """The parameters, as ranks divide them."""
        return self.plan.divided(main_grad_dtype(self.dtype), sharded=self.sharding != "no_shard")

    def cuts(self) -> set[int]:
        """Places at which the sizes of the pieces may change: around the begin and the end of a parameter."""
        if self.sharding == "no_shard":
            return set()
        ends = [place for placed in self.plan.params for place in (placed.start, placed.start + placed.numel - 1)]
        return {end // self.plan.slice_size + after for end in ends for after in (0, 1)}


@dataclass(frozen=True)
class UnitsPart:
    """All parameters under `fully_shard` that one group of ranks divides, of all chunks."""

    entries: Sequence[ParamEntry]
    axes: tuple[str, ...]
    """Over which their gradients are summed."""
    shard: Group
    on_host: bool
    dtype: torch.dtype
    """Dtype in which parameters are gathered."""

    def group(self, context: ParallelContext) -> Group:
        """The ranks that divide it."""
        return context.fsdp_shard(self.axes)

    def kept(self, index: int) -> Kept:
        """Sharded parameters (which are their own main parameters) and gradients; and its shards.

        In host memory a part of a gradient is there twice: where it arrives, and where it is kept.
        """
        group, main = replace(self.shard, index=index), main_grad_dtype(self.dtype)
        pieces = [(entry, own_piece(entry, group)) for entry in self.entries]
        shards = [ShardSize(entry.record, piece.stop - piece.start, main, self.on_host) for entry, piece in pieces]
        room = sum(padded_part(entry, group.size) for entry in self.entries)
        parameters, gradients = _padded(room, shards, main), Bytes(sum(shard.numel for shard in shards) * main.itemsize)
        if not self.on_host:
            return StateMemory(parameters, gradients), shards
        return StateMemory(parameters.on_host, gradients.on_host, buffers=Bytes(0, gradients.total)), shards

    def params(self) -> list[DividedParam]:
        """The parameters, as ranks divide them."""
        return [divided_param(entry, self.shard, main_grad_dtype(self.dtype)) for entry in self.entries]

    def cuts(self) -> set[int]:
        """Places at which the sizes of the pieces may change: where all rows of a parameter have been given away."""
        counts = {divided(entry)[0] for entry in self.entries}
        full = {rows // -(-rows // self.shard.size) for rows in counts}
        return {place + after for place in full for after in (0, 1)}


def units_at_work(
    chunks: Sequence[Sequence[UnitPlan]],
    recomputed: Sequence[Sequence[range]],
    context: ParallelContext,
    policy: FsdpPolicy,
    *,
    accumulates: bool,
    dtype: torch.dtype,
) -> int:
    """Bytes of the most that passes through while the units of `fully_shard` compute.

    That is when a backward leaves a unit: its gathered parameters and those of the unit that comes next (or of all units, if they
    are kept; or of units that have run again with it), its gradients, torch's copy of gradients that is reduced, and this rank's
    part of the sum. Units that enclose it are there too, with their gradients.
    With replicas, such parts of all units wait for the end of the step, to be summed over the replicas. Gradients that are reduced
    once wait in their stead: as a whole, those of all units that the last backward of a step has not left.

    Args:
        chunks: the units of each chunk, in the order of the forward.
        recomputed: for each chunk, the places of units that run again together in backward; the last of these groups does so ahead
            of it.
        accumulates: whether whole gradients wait for the last of several microbatches.
        dtype: dtype in which parameters are gathered.
    """
    main, keeps = main_grad_dtype(dtype), policy.reshard == "never"
    at_work = gathered = waiting = parts_of_replicas = 0
    for units, groups in zip(chunks, recomputed, strict=True):
        ranks = [context.fsdp_shard(unit.axes).size for unit in units]
        parts = [sum(padded_part(e, size) for e in unit.entries) for unit, size in zip(units, ranks, strict=True)]
        sizes = [size * part for size, part in zip(ranks, parts, strict=True)]
        grads = [sum(entry.param.numel() for entry in unit.entries) for unit in units]
        order = in_backward(range(len(units)), [unit.encloses for unit in units])
        following = dict(pairwise([*order, order[-1]])) if order else {}
        for place, unit in enumerate(units):
            around = [one for one in range(place) if place <= one + units[one].encloses]
            entered = place + min(unit.encloses, 1)  # the last of those in it, which is the first of them in the forward
            present = {place, following[entered], *around}
            present |= {one for group in groups if _runs(group, groups, place) for one in group}
            beside = 0 if keeps else sum(sizes[one] for one in present if one <= place)
            waiting = waiting + grads[place] if accumulates else grads[place] + sum(grads[one] for one in around)
            at_work = max(at_work, beside * dtype.itemsize + (waiting + sizes[place] + parts[place]) * main.itemsize)
            if context.fsdp_replica(unit.axes).size > 1 and not accumulates:
                parts_of_replicas += parts[place]
        gathered += sum(sizes)
    return at_work + parts_of_replicas * main.itemsize + (gathered * dtype.itemsize if keeps else 0)


def _runs(group: range, groups: Sequence[range], place: int) -> bool:
    """Whether a group of units has run again when backward is in the unit at this place."""
    return place in group or (group is groups[-1] and place >= group.start)


@dataclass(frozen=True)
class FrozenPart:
    """Parameters that no step changes; every rank keeps all of its own, and nothing beside them."""

    entries: Sequence[ParamEntry]
    axes: tuple[str, ...] = GRADIENT_AXES

    def group(self, context: ParallelContext) -> Group:
        """The ranks that keep the same."""
        return context.group(*self.axes)

    def kept(self, index: int) -> Kept:
        """What each of them keeps."""
        return StateMemory(Bytes(sum(entry.param.nbytes for entry in self.entries))), []

    def params(self) -> list[DividedParam]:
        """None that a rank updates."""
        return []

    def cuts(self) -> set[int]:
        """None: all keep the same."""
        return set()


StatePart = BucketPart | UnitsPart | FrozenPart


def _padded(size: int, held: Iterable[ShardSize], dtype: torch.dtype) -> Bytes:
    """Bytes of a buffer of `size` elements that holds these shards."""
    return Bytes(size * dtype.itemsize, padding=(size - sum(shard.numel for shard in held)) * dtype.itemsize)


@dataclass(frozen=True)
class StateReport:
    """The state that one rank keeps, and what it sends in a step."""

    memory: StateMemory
    sent: tuple[Sent, ...]
    """What it sends in a step, by group and kind."""


@dataclass(frozen=True)
class StateLayout:
    """How the state of a pipeline stage is cut. All its ranks share this; each keeps some of the pieces."""

    parts: Sequence[StatePart]
    buffers: Bytes
    """What passes through on every rank: gradients of buckets, and `fully_shard`'s units at work."""
    sent: tuple[Sent, ...]
    """What every rank sends in a step."""

    def params(self) -> list[DividedParam]:
        """All parameters of the stage, as its ranks divide them."""
        return [param for part in self.parts for param in part.params()]

    def kept(self, context: ParallelContext) -> list[Kept]:
        """What a rank keeps of each part, by its places in its data groups."""
        return [part.kept(part.group(context).index) for part in self.parts]

    def memory(self, kept: Iterable[Kept], of_shards: Callable[[Iterable[ShardSize]], StateMemory]) -> StateMemory:
        """The memory of a rank that keeps these.

        Args:
            of_shards: gives the memory that the optimizer takes for shards.
        """
        kept = list(kept)
        own = sum((memory for memory, _ in kept), StateMemory(buffers=self.buffers))
        return own + of_shards(shard for _, shards in kept for shard in shards)


def state_layout(
    entries: Iterable[ParamEntry],
    modules: Mapping[int, Sequence[nn.Module]],
    recomputed: Mapping[int, Sequence[Sequence[nn.Module]]],
    context: ParallelContext,
    config: ParallelConfig,
    *,
    dtype: torch.dtype,
    num_microbatches: int,
    writes: Iterable[str],
) -> StateLayout:
    """Compute how the settings' sharding strategy cuts the state of a pipeline stage.

    Args:
        entries: the parameters of a rank of the stage, perhaps on the meta device.
        modules: those that hold them, in the order of the forward, by chunk index.
        recomputed: groups of these that run again together in backward, by chunk index.
        dtype: dtype of the parameters where they are used.
        num_microbatches: microbatches of one data rank in a step.
        writes: names of parameters in the order in which the backwards of a step write their gradients.
    """
    entries, sharding, policy = list(entries), config.sharding, FsdpPolicy.of(config)
    parts: list[StatePart] = []
    sent: list[Sent] = []
    buffers = Bytes()
    if sharding == "optim_grads_params":
        sharding = "optim_grads"  # what is left
        inside = [entry for entry in entries if is_fully_sharded(entry, context)]
        entries = [entry for entry in entries if not is_fully_sharded(entry, context)]
        units = [plan_units(some, [e for e in inside if e.chunk == number]) for number, some in modules.items()]
        again = [_places(some, recomputed[number]) for some, number in zip(units, modules, strict=True)]
        accumulates = policy.reduce_once and num_microbatches > 1
        buffers = Bytes(units_at_work(units, again, context, policy, accumulates=accumulates, dtype=dtype))
        for axes in dict.fromkeys(entry.record.partial_over for entry in inside):
            of_grid = [entry for entry in inside if entry.record.partial_over == axes]
            parts.append(UnitsPart(of_grid, axes, context.fsdp_shard(axes), policy.params_cpu, dtype))
        sent += fsdp_traffic([unit for some in units for unit in some], context, policy, dtype, num_microbatches)
    if frozen := [entry for entry in entries if entry.record.frozen]:
        parts.append(FrozenPart(frozen))
    plans = plan_buckets([e for e in entries if not e.record.frozen], context, bucket_size=config.ddp_bucket_size)
    reductions, main = [1] * len(plans), main_grad_dtype(dtype)
    narrow = [travel_dtype(plan, context, in_bf16=config.grad_reduce_in_bf16) for plan in plans]
    if sharding == "optim_grads":
        played = named("megatron_lab.planner.passing:play_steps")(
            plans, writes, main, overlap=config.overlap_grad_reduce, narrow=narrow
        )
        reductions = played.reductions
        buffers += Bytes(played.elements * main.itemsize)
    else:
        played = named("megatron_lab.planner.passing:play_reductions")(
            plans, list(writes), num_microbatches, overlap=config.overlap_grad_reduce, narrow=narrow
        )
    buffers += Bytes(played.narrow_elements * torch.bfloat16.itemsize)
    parts += [BucketPart(plan, sharding, plan.params[0].entry.param.dtype) for plan in plans]
    sent += bucket_traffic(plans, context, sharding, dtype, reductions, in_bf16=config.grad_reduce_in_bf16)
    return StateLayout(parts, buffers, tuple(joined(sent)))


def _places(units: Sequence[UnitPlan], groups: Sequence[Sequence[nn.Module]]) -> list[range]:
    """The places of the units of each group."""
    found = [[place for place, unit in enumerate(units) if set(unit.modules) & set(group)] for group in groups]
    return [range(places[0], places[-1] + 1) for places in found if places]
