"""Which parameters `fully_shard` takes, what is gathered together, and which part of it a rank keeps. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megatron.parallel.boxes import DimPiece
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamEntry


def is_fully_sharded(entry: ParamEntry, context: ParallelContext) -> bool:
    """Whether `fully_shard` takes the parameter. Not so:

    - tied parameters: one that two modules share, wrapped apart, would silently be two;
    - those whose gradient is a partial sum over the tensor ranks too (under sequence parallelism norms, learned positions and some
      biases): FSDP reduces over the data ranks alone;
    - any, where there is nobody to share with.
    """
    tied = len(entry.record.chunks) > 1 or len(entry.holders) > 1
    return context.fsdp_shard.size > 1 and not tied and "tp" not in entry.record.partial_over


@dataclass(frozen=True)
class UnitPlan:
    """Modules whose parameters are gathered, freed and reduced together."""

    modules: tuple[nn.Module, ...]
    entries: tuple[ParamEntry, ...]


def plan_units(modules: Sequence[nn.Module], entries: Sequence[ParamEntry]) -> list[UnitPlan]:
    """Units of one chunk, in the order of its forward.

    A module that holds only vectors (the final norm) joins the one after it: a message of its own would be latency alone.

    Args:
        modules: of the chunk, in the order of the forward; none inside another.
        entries: the parameters that are sharded.
    """
    inside = [set(module.modules()) for module in modules]
    found = [[e for e in entries if e.holders[0][0] in members] for members in inside]
    assert sum(map(len, found)) == len(entries), "a parameter outside of all units"
    units: list[UnitPlan] = []
    joins = False
    for module, held in zip(modules, found, strict=True):
        if not held:
            continue
        before = units.pop() if joins else UnitPlan((), ())
        units.append(UnitPlan((*before.modules, module), (*before.entries, *held)))
        joins = all(len(entry.record.shape) == 1 for entry in units[-1].entries)
    return units


def own_piece(entry: ParamEntry, group: Group) -> DimPiece:
    """What the rank keeps of its part of a parameter: like `torch.chunk`, rows for the last ranks may be fewer, or none."""
    dim = entry.record.fsdp_dim
    size = entry.param.shape[dim]
    most = -(-size // group.size)
    return DimPiece(dim, min(group.index * most, size), min((group.index + 1) * most, size))


def padded_part(entry: ParamEntry, ranks: int) -> int:
    """Elements of a parameter that each of so many ranks has room for: those of the first rank."""
    length = entry.param.shape[entry.record.fsdp_dim]
    return entry.param.numel() // length * -(-length // ranks)
