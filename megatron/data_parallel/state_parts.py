"""What of a stage's state is divided as one thing: a bucket, or all that `fully_shard` takes. Which part of it a rank
keeps follows from the rank's place in the group that divides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron.config.parallel import FsdpReshard, ShardingStrategy
from megatron.data_parallel.fsdp_plan import UnitPlan
from megatron.data_parallel.memory import Memory, Shards, bucket_memory, fsdp_memory
from megatron.data_parallel.plan import BucketPlan
from megatron.parallel.context import Group, ParallelContext


class StatePart(Protocol):
    """See the module."""

    def group(self, context: ParallelContext) -> Group:
        """The ranks that divide it."""

    def memory(self, index: int) -> tuple[Memory, Shards]:
        """What the rank at a place of the group keeps, and the shards that it updates."""

    def cuts(self) -> set[int]:
        """Places from which on ranks may keep pieces of other sizes than those before."""


@dataclass(frozen=True)
class BucketPart:
    """A bucket."""

    plan: BucketPlan
    sharding: ShardingStrategy
    dtype: torch.dtype

    def group(self, context: ParallelContext) -> Group:
        """See `StatePart`."""
        return context.group(*self.plan.axes)

    def memory(self, index: int) -> tuple[Memory, Shards]:
        """See `StatePart`."""
        return bucket_memory(self.plan, index, self.sharding, self.dtype)

    def cuts(self) -> set[int]:
        """Around the slices that hold the begin or the end of a parameter."""
        if self.sharding == "no_shard":
            return set()
        ends = [place for placed in self.plan.params for place in (placed.start, placed.start + placed.numel - 1)]
        return {end // self.plan.slice_size + after for end in ends for after in (0, 1)}


@dataclass(frozen=True)
class UnitsPart:
    """The parameters under `fully_shard`, with the units at work, of all chunks."""

    chunks: Sequence[Sequence[UnitPlan]]
    shard: Group
    replicas: int
    reshard: FsdpReshard
    dtype: torch.dtype

    def group(self, context: ParallelContext) -> Group:
        """See `StatePart`."""
        return context.fsdp_shard

    def memory(self, index: int) -> tuple[Memory, Shards]:
        """See `StatePart`."""
        return fsdp_memory(self.chunks, replace(self.shard, index=index), self.replicas, self.reshard, self.dtype)

    def cuts(self) -> set[int]:
        """Where a parameter's rows are all given away."""
        entries = [entry for units in self.chunks for unit in units for entry in unit.entries]
        lengths = {entry.param.shape[entry.record.fsdp_dim] for entry in entries}
        full = {length // -(-length // self.shard.size) for length in lengths}
        return {place + after for place in full for after in (0, 1)}
