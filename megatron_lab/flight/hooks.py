"""Counts the calls of torch's process groups in the rank's record, whoever makes them: layers, stages, `fully_shard`, gathers of
Python values.

Wrapped are the methods of torch's classes that every call goes through. That costs about a microsecond a call, and no wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_lab.flight.record import CALLS, FlightRecord

_METHODS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "receive",
    **dict.fromkeys(("gather", "scatter", "reduce", "allreduce_coalesced", "allgather_into_tensor_coalesced"), "collective"),
}
"""Methods of a process group; some have other names from torch 2.13 on."""


@contextmanager
def counted_calls(record: FlightRecord) -> Iterator[None]:
    """Count calls and waits of this process in a record."""
    group, work = dist.ProcessGroup, dist.Work
    before: list[tuple[type, str, Any]] = [(work, "wait", work.wait)]
    before += [(group, name, getattr(group, name)) for name in _METHODS if hasattr(group, name)]
    channels = _Channels(record)
    try:
        work.wait = _waiting(record, work.wait)  # type: ignore[method-assign]
        for kind, name, method in before[1:]:
            setattr(kind, name, _calling(channels, CALLS.index(_METHODS[name]), method))
        yield
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)


class _Channels:
    """The channels by process group, and by the other end of a message."""

    def __init__(self, record: FlightRecord) -> None:
        self.record = record
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._groups: list[dist.ProcessGroup] = []  # kept, so that no other gets the id() of one of them

    def call(self, group: dist.ProcessGroup, kind: int, peer: int) -> None:
        """Count a call; `peer` is the other end's place in the group, or -1 in a collective."""
        key = (id(group), kind if peer >= 0 else -1, peer)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._enter(group, kind, peer)
        self.record.call(number, kind)

    def _enter(self, group: dist.ProcessGroup, kind: int, peer: int) -> int:
        self._groups.append(group)
        ranks = dist.get_process_group_ranks(group)
        name = group.group_desc if group.group_desc not in ("", "undefined", "default_pg") else "of all ranks"
        if peer < 0:
            return self.record.channel(name, tuple(ranks))
        ends = (self.record.rank, ranks[peer])
        return self.record.channel(name, ends if CALLS[kind] == "send" else ends[::-1], directed=True)


def _calling(channels: _Channels, kind: int, method: Callable[..., Any]) -> Callable[..., Any]:
    directed = CALLS[kind] in ("send", "receive")

    def call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        channels.call(self, kind, args[1] if directed else -1)
        return method(self, *args, **kwargs)

    return call


def _waiting(record: FlightRecord, method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        record.wait(True)
        try:
            return method(self, *args, **kwargs)
        finally:
            record.wait(False)

    return wait
