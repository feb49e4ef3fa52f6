"""Collectives as torch's dispatcher sees them, and what one rank sends in each, counted as in a ring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "send"]

_OPERATIONS: dict[str, Operation] = {
    "c10d::allreduce_": "all-reduce",
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
}


@dataclass(frozen=True)
class Call:
    """One collective of one rank."""

    operation: Operation
    group: dist.ProcessGroup
    bytes: int
    """Sent by one rank."""


@dataclass(frozen=True)
class Transfer:
    """What one rank sends over one group by one kind of operation."""

    over: str
    """The group, by its axes."""
    operation: Operation
    calls: int
    bytes: int
    peer: int | None = None
    """Pipeline stage that a message goes to."""


def call_of(func: Any, args: Any) -> Call | None:
    """The collective that an operation of the dispatcher is, if any.

    Raises:
        NotImplementedError: a collective that no layer of a model has used so far.
    """
    if func.namespace != "c10d":
        return None
    name = func.name()
    if name not in _OPERATIONS:
        raise NotImplementedError(f"what {name} sends is not known")
    operation = _OPERATIONS[name]
    group = next(_group(arg) for arg in args if isinstance(arg, torch.ScriptObject))
    # all-reduce: a list of one tensor; the others: output, input. The larger one is the whole.
    tensors = args[0] if isinstance(args[0], list) else args[:2]
    whole = max(tensor.nbytes for tensor in tensors)
    return Call(operation, group, ring_bytes(operation, whole, group.size()))


def ring_bytes(operation: Operation, whole: int, ranks: int) -> int:
    """Bytes that one of so many ranks sends.

    Args:
        whole: bytes of the whole tensor: what an all-gather gives, what a reduce-scatter takes.
    """
    rounds = 2 if operation == "all-reduce" else 1
    return rounds * (ranks - 1) * whole // ranks


def added(transfers: Iterable[Transfer]) -> list[Transfer]:
    """One entry for each group, kind of operation and peer."""
    totals: dict[tuple[str, Operation, int | None], tuple[int, int]] = {}
    for one in transfers:
        calls, num_bytes = totals.get((one.over, one.operation, one.peer), (0, 0))
        totals[one.over, one.operation, one.peer] = calls + one.calls, num_bytes + one.bytes
    return [Transfer(over, operation, *total, peer) for (over, operation, peer), total in totals.items()]


def _group(arg: torch.ScriptObject) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(arg)
