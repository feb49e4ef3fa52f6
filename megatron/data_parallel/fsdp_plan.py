"""Which parameters `fully_shard` takes, which are gathered together, and which part of each a rank keeps. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from megatron.config.parallel import FsdpReshard, ParallelConfig
from megatron.parallel.boxes import FlatPiece
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import DividedParam, ParamEntry
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES


@dataclass(frozen=True)
class FsdpPolicy:
    """What `fully_shard` keeps, when and where. See the settings of the same names."""

    reshard: FsdpReshard = "always"
    reduce_once: bool = False
    params_cpu: bool = False

    @classmethod
    def of(cls, config: ParallelConfig) -> FsdpPolicy:
        """That of the settings."""
        return cls(config.fsdp_reshard_after_forward, config.fsdp_reduce_once, config.fsdp_params_cpu)


def is_fully_sharded(entry: ParamEntry, context: ParallelContext) -> bool:
    """Whether `fully_shard` takes the parameter. It does not take:

    - tied parameters: one that two modules share would silently become two when they are wrapped separately;
    - those whose gradient is also partial over the tensor ranks (under sequence parallelism norms, learned positions and some
      biases), because FSDP reduces over the data ranks alone, or those with the same experts;
    - experts of which the ranks that share a copy of the model have one copy;
    - any parameter, if there is only one data rank.
    """
    axes = entry.record.partial_over
    if context.fsdp_shard().size == 1 or entry.record.tied or axes not in (GRADIENT_AXES, EXPERT_AXES[-1:]):
        return False
    return context.fsdp_shard(axes).size > 1


@dataclass(frozen=True)
class UnitPlan:
    """Modules whose parameters are gathered, freed and reduced together."""

    modules: tuple[nn.Module, ...]
    entries: tuple[ParamEntry, ...]
    encloses: int = 0
    """How many of the next units lie inside it, and run while it is gathered."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which their gradients are summed: all lie in one grid of ranks."""
        return self.entries[0].record.partial_over


def plan_units(modules: Sequence[nn.Module], entries: Sequence[ParamEntry]) -> list[UnitPlan]:
    """Plan the units of one chunk, in the order of its forward.

    A module that holds only vectors (the final norm) joins the one after it: a message of its own would be latency alone.

    Args:
        modules: modules of the chunk, in the order of the forward; some may lie inside one before them.
        entries: the parameters that are sharded.
    """
    inside = own_modules(modules)
    found = [[e for e in entries if e.holders[0][0] in members] for members in inside]
    assert sum(map(len, found)) == len(entries), "a parameter outside of all units"
    units: list[UnitPlan] = []
    joins = False
    for module, held in zip(modules, found, strict=True):
        if not held:
            continue
        before = units.pop() if joins else UnitPlan((), ())
        units.append(UnitPlan((*before.modules, module), (*before.entries, *held)))
        joins = all(entry.record.kind == "vector" for entry in units[-1].entries) and not _encloses(module, modules)
    return [replace(unit, encloses=sum(_encloses(unit.modules[0], other.modules) for other in units)) for unit in units]


def own_modules(modules: Sequence[nn.Module]) -> list[set[nn.Module]]:
    """All modules inside each of these, without those that are inside another one which lies within it."""
    inside = [set(module.modules()) for module in modules]
    return [
        members.difference(*(others for module, others in zip(modules, inside, strict=True) if others < members))
        for members in inside
    ]


def _encloses(module: nn.Module, others: Sequence[nn.Module]) -> bool:
    """Whether one of the others lies inside a module."""
    inside = set(module.modules()) - {module}
    return any(other in inside for other in others)


Unit = TypeVar("Unit")


def in_backward(units: Sequence[Unit], encloses: Sequence[int]) -> list[Unit]:
    """Units in the order in which backward enters them, each that encloses others before these.

    Args:
        units: in the order of the forward.
        encloses: how many of the next units lie inside each.
    """
    order: list[Unit] = []
    for unit, inside in zip(reversed(units), reversed(encloses), strict=True):
        order.insert(len(order) - inside, unit)
    return order


def divided(entry: ParamEntry) -> tuple[int, int]:
    """How a rank's parameter is seen where it is divided: (rows, elements of a row).

    A matrix or table has its outputs or entries for rows, all leading dimensions flattened; of vectors each element is a row.
    """
    length = 1 if entry.record.kind == "vector" else entry.param.shape[-1]
    return entry.param.numel() // length, length


def own_piece(entry: ParamEntry, group: Group) -> FlatPiece:
    """The part of a local parameter that this rank keeps. As in `torch.chunk`, the last ranks may have fewer rows, or none."""
    rows, length = divided(entry)
    most = -(-rows // group.size)
    return FlatPiece(min(group.index * most, rows) * length, min((group.index + 1) * most, rows) * length)


def divided_param(entry: ParamEntry, group: Group, main_dtype: torch.dtype) -> DividedParam:
    """A parameter as the ranks of a group divide it."""
    ends = {own_piece(entry, replace(group, index=index)).stop for index in range(group.size)}
    cuts = tuple(sorted(ends - {entry.param.numel()}))
    return DividedParam(entry.record, main_dtype, cuts, entry.record.partial_over, group.size)


def padded_part(entry: ParamEntry, ranks: int) -> int:
    """Elements of a parameter that each of `ranks` ranks has room for: as many as the first rank keeps."""
    rows, length = divided(entry)
    return -(-rows // ranks) * length
