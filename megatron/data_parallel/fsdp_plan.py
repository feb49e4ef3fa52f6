"""Plan of `fully_shard`: which parameters it shards, which units are gathered together, and each rank's shard. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from megatron.config.parallel import FsdpReshard, ParallelConfig
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamEntry, ParamPartition
from megatron.parallel.tensor_slice import FlatRange
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES


@dataclass(frozen=True)
class FsdpPolicy:
    """Memory and communication options of `fully_shard`. Each field has the value of the flag --fsdp-... of the same name."""

    reshard: FsdpReshard = "always"
    reduce_once: bool = False
    params_cpu: bool = False

    @classmethod
    def from_config(cls, config: ParallelConfig) -> FsdpPolicy:
        """Build the options from the --fsdp-... settings."""
        return cls(config.fsdp_reshard_after_forward, config.fsdp_reduce_once, config.fsdp_params_cpu)


def is_fully_sharded(entry: ParamEntry, context: ParallelContext) -> bool:
    """Return whether `fully_shard` shards the parameter. Not sharded are:

    - tied parameters: a parameter that two modules share would silently become two when they are wrapped separately;
    - parameters whose gradient is also partial over the tensor ranks: under sequence parallelism, norms, learned positions and some
      biases. FSDP reduces gradients only over the data ranks, or for experts over the data ranks with the same experts;
    - experts, if only one of the ranks that share a copy of the model holds each expert: no other rank could store a part of the
      expert;
    - any parameter, if there is only one data rank.
    """
    axes = entry.record.partial_axes
    if context.get_fsdp_shard_group().size == 1 or entry.record.tied or axes not in (GRADIENT_AXES, EXPERT_AXES[-1:]):
        return False
    return context.get_fsdp_shard_group(axes).size > 1


@dataclass(frozen=True)
class UnitPlan:
    """Plan of a unit: modules whose parameters are gathered, freed and reduced together."""

    modules: tuple[nn.Module, ...]
    entries: tuple[ParamEntry, ...]
    num_nested: int = 0
    """How many of the units that directly follow this unit in the list are nested in it. They run while this unit's parameters are
    gathered."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the rank grid over which the gradients of the unit are summed, equal for all its parameters."""
        return self.entries[0].record.partial_axes


def plan_units(modules: Sequence[nn.Module], entries: Sequence[ParamEntry]) -> list[UnitPlan]:
    """Divide the modules of one model chunk into units, in forward order. The parameters of a unit are gathered and freed together.

    A module that holds only vectors (the final norm) joins the unit after it, because a separate small message would be pure
    latency.

    Args:
        modules: modules of the chunk, in forward order. A module may be nested in an earlier one.
        entries: the fully sharded parameters.
    """
    exclusive_modules = find_exclusive_modules(modules)
    entries_per_module = [[e for e in entries if e.owners[0][0] in members] for members in exclusive_modules]
    assert sum(map(len, entries_per_module)) == len(entries), "a parameter outside of all units"
    units: list[UnitPlan] = []
    joins_previous = False
    for module, module_entries in zip(modules, entries_per_module, strict=True):
        if not module_entries:
            continue
        previous = units.pop() if joins_previous else UnitPlan((), ())
        units.append(UnitPlan((*previous.modules, module), (*previous.entries, *module_entries)))
        joins_previous = all(entry.record.param_type == "vector" for entry in units[-1].entries) and not _contains_any(
            module, modules
        )
    return [replace(unit, num_nested=sum(_contains_any(unit.modules[0], inner.modules) for inner in units)) for unit in units]


def find_exclusive_modules(modules: Sequence[nn.Module]) -> list[set[nn.Module]]:
    """Return for each module in `modules` a set with the module and its submodules, except those inside a nested module that is
    also in `modules`."""
    all_submodules = [set(module.modules()) for module in modules]
    return [
        submodules.difference(*(inner for module, inner in zip(modules, all_submodules, strict=True) if inner < submodules))
        for submodules in all_submodules
    ]


def _contains_any(module: nn.Module, candidates: Sequence[nn.Module]) -> bool:
    """Return whether any of the candidates is a submodule of `module`."""
    submodules = set(module.modules()) - {module}
    return any(candidate in submodules for candidate in candidates)


Unit = TypeVar("Unit")


def order_for_backward(units: Sequence[Unit], num_nested: Sequence[int]) -> list[Unit]:
    """Return units in the order in which backward enters them. A unit precedes the units that are nested in it.

    Args:
        units: units in forward order.
        num_nested: for each unit, how many of the units that directly follow it are nested in it.
    """
    order: list[Unit] = []
    for unit, nested_count in zip(reversed(units), reversed(num_nested), strict=True):
        order.insert(len(order) - nested_count, unit)
    return order


def compute_sharded_view_shape(entry: ParamEntry) -> tuple[int, int]:
    """Return the 2-D shape (rows, elements per row) of the view in which FSDP shards a rank's local parameter by rows.

    A row of a matrix is the weights of one output; leading dimensions are flattened. A row of a lookup table is one entry. Each
    element of a vector is a row.
    """
    row_length = 1 if entry.record.param_type == "vector" else entry.param.shape[-1]
    return entry.param.numel() // row_length, row_length


def compute_owned_range(entry: ParamEntry, group: Group) -> FlatRange:
    """Return which elements of a local parameter this rank owns under `fully_shard`, which gives each rank consecutive rows of the
    parameter. As in `torch.chunk`, the last ranks may own fewer rows.

    Args:
        group: ranks that shard the parameter.
    """
    num_rows, row_length = compute_sharded_view_shape(entry)
    rows_per_rank = -(-num_rows // group.size)
    return FlatRange(
        min(group.rank * rows_per_rank, num_rows) * row_length, min((group.rank + 1) * rows_per_rank, num_rows) * row_length
    )


def build_param_partition(entry: ParamEntry, group: Group, main_dtype: torch.dtype) -> ParamPartition:
    """Return which ranks of a group own which elements of a local parameter.

    Args:
        group: ranks that shard the parameter.
        main_dtype: dtype of the main parameters.
    """
    ends = {compute_owned_range(entry, replace(group, rank=index)).stop for index in range(group.size)}
    boundaries = tuple(sorted(ends - {entry.param.numel()}))
    return ParamPartition(entry.record, main_dtype, boundaries, entry.record.partial_axes, group.size)


def compute_padded_shard_numel(entry: ParamEntry, num_ranks: int) -> int:
    """Return the number of elements that each of `num_ranks` ranks allocates for a parameter: the size of the first rank's shard,
    which is the largest."""
    num_rows, row_length = compute_sharded_view_shape(entry)
    return -(-num_rows // num_ranks) * row_length
