"""The provider of shards whose parameters are sharded too (ZeRO-3, Rajbhandari et al. 2019, section 5.3), on torch's `fully_shard`.

A unit (a block; the embedding; the final norm with the output layer) is gathered in front of its use, while the unit before it
computes, and freed behind it. With N ranks to shard among and M microbatches, a step sends and receives, in elements of the model:

====== ===================== =================== ============================================================
policy gathered              reduce-scattered    memory for gathered parameters
====== ===================== =================== ============================================================
always 2 M (N - 1) / N       M (N - 1) / N       two units: the one that computes and the one fetched ahead
never  (N - 1) / N           M (N - 1) / N       all units of the rank, from their first use in a step to their last
====== ===================== =================== ============================================================

With replicas (hybrid sharding, Zhao et al. 2023, section 3.2.2) each rank's part of the gradient is summed over them once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from megatron.config.parallel import FsdpReshard
from megatron.data_parallel.bucket import Fill
from megatron.data_parallel.completeness import complain
from megatron.data_parallel.fsdp_plan import plan_units
from megatron.data_parallel.fsdp_unit import FsdpUnit
from megatron.data_parallel.provider import Held, Inspect
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry
from megatron.parallel.shards import ShardGroup


class HasUnits(Protocol):
    """A module that is gathered and freed in units."""

    def units(self) -> list[nn.Module]:
        """Its parts that hold parameters, in the order of the forward."""


@dataclass
class _Root:
    """A chunk, its units in the order of the forward, and how far its step is."""

    module: FSDPModule
    units: list[FsdpUnit]
    rounds: int = 0
    """Backward passes that were begun in this step."""
    at_end: bool = True
    """Whether FSDP takes the next backward for the last of a step."""


class FullyShardedParams:
    """Parameters under `fully_shard` (a `Provider`).

    Args:
        entries: the parameters, on the meta device or with values; those that `is_fully_sharded` names.
        chunks: the modules of this rank that hold them, by number of the chunk. What else they hold is left alone.
        dtype: in which parameters are gathered and used.
        fill: initial values of parameters on the meta device.
        reshard: when gathered parameters are freed.
    """

    def __init__(
        self,
        entries: Iterable[ParamEntry],
        chunks: Mapping[int, HasUnits],
        context: ParallelContext,
        *,
        dtype: torch.dtype,
        fill: Fill,
        reshard: FsdpReshard = "always",
    ) -> None:
        self._reshards = reshard == "always"
        self._rank, self._microbatches = context.rank, 0
        self._roots: dict[int, _Root] = {}
        mesh = _mesh(context)
        entries = list(entries)
        for number, chunk in chunks.items():
            inside = [entry for entry in entries if entry.chunk == number]
            if not inside:
                continue
            module = cast(nn.Module, chunk)
            outside = set(module.parameters()) - {entry.param for entry in inside}
            units = [
                FsdpUnit(plan, mesh, context, dtype=dtype, fill=fill, reshard_after_forward=self._reshards, outside=outside)
                for plan in plan_units(chunk.units(), inside)
            ]
            _prefetch(units)
            root = fully_shard(module, mesh=mesh, ignored_params=outside)
            if context.device.type == "cpu":
                root._set_unshard_async_op(True)  # there are no streams there on which to gather ahead
            self._roots[number] = _Root(root, units)
        self._units = [unit for root in self._roots.values() for unit in root.units]
        self.groups: list[ShardGroup] = [unit.group for unit in self._units]

    def start_step(self, num_microbatches: int, *, inspect: Inspect | None = None) -> None:
        """See `Provider`."""
        self._microbatches = num_microbatches
        for root in self._roots.values():
            root.rounds = 0
        for unit in self._units:
            unit.start_step(num_microbatches, inspect=inspect)

    def before_backward(self, chunk: int) -> None:
        """See `Provider`."""
        root = self._roots.get(chunk)
        if root is None:
            return
        root.rounds += 1
        for unit in root.units:
            unit.before_backward()
        at_end = root.rounds == self._microbatches
        if at_end != root.at_end:
            root.at_end = at_end
            root.module.set_is_last_backward(at_end)
            root.module.set_requires_all_reduce(at_end)
            root.module.set_reshard_after_backward(at_end or self._reshards)

    def finish_gradients(self) -> None:
        """See `Provider`. FSDP has waited for its reductions at the end of each chunk's last backward."""
        counts = [count for unit in self._units for count in unit.counts()]
        if any(found != wanted for _, found, wanted in counts):
            complain(self._rank, counts)

    def nonfinite(self) -> set[str]:
        """See `Provider`."""
        return set().union(*(unit.nonfinite() for unit in self._units))

    def finish_publishing(self) -> None:
        """Nothing: parameters are gathered in front of their use."""

    def finish_evaluation(self) -> None:
        """See `Provider`."""
        for unit in self._units:
            unit.reshard()

    def held(self) -> Held:
        """See `Provider`."""
        held = Held([shard.weights for group in self.groups for shard in group.shards], [unit.grads for unit in self._units])
        for unit in self._units:
            held.parameters += unit.gathered()
            held.buffers += unit.passing()
        return held


def _mesh(context: ParallelContext) -> DeviceMesh:
    """The data ranks as FSDP sees them."""
    shard, replica = context.fsdp_shard, context.fsdp_replica
    assert shard.process_group is not None, "nobody to shard with"
    if replica.process_group is None:
        return DeviceMesh.from_group(shard.process_group, context.device.type)
    ranks = torch.tensor(context.gradient_group.ranks).view(replica.size, shard.size)
    groups = [replica.process_group, shard.process_group]
    return DeviceMesh.from_group(groups, context.device.type, mesh=ranks, mesh_dim_names=("replica", "shard"))


def _prefetch(units: list[FsdpUnit]) -> None:
    """Each unit fetches the next one ahead, in forward and in backward."""
    for before, after in pairwise(units):
        before.module.set_modules_to_forward_prefetch([after.module])
        after.module.set_modules_to_backward_prefetch([before.module])
    # Without a list FSDP would guess from the order of the forwards, and fetch for another microbatch. Itself is there already.
    units[0].module.set_modules_to_backward_prefetch([units[0].module])
