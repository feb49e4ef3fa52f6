"""Counts all calls of torch's process groups (collectives and messages) in the flight record of this rank, the file that the hang
watcher reads. The calls come from layers, pipeline stages, `fully_shard`, and gathers of Python objects.

The hooks wrap the methods of torch's classes through which every call passes. A wrapped call takes about a microsecond longer and
never waits.
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
"""Type of call by method of a process group. Some methods have other names from torch 2.13 on."""


@contextmanager
def count_calls(record: FlightRecord) -> Iterator[None]:
    """Count all communication calls of this process, and the time that it waits for them, in `record` while the context is
    active."""
    group, work = dist.ProcessGroup, dist.Work
    originals: list[tuple[type, str, Any]] = [(work, "wait", work.wait)]
    originals += [(group, name, getattr(group, name)) for name in _METHODS if hasattr(group, name)]
    channels = _Channels(record)
    try:
        work.wait = _wrap_wait(record, work.wait)  # type: ignore[method-assign]
        for cls, name, method in originals[1:]:
            setattr(cls, name, _wrap_call(channels, CALLS.index(_METHODS[name]), method))
        yield
    finally:
        for cls, name, method in originals:
            setattr(cls, name, method)


class _Channels:
    """Counts communication calls in the flight record of this rank, separately for each channel.

    A channel is a process group with its collectives, or one direction between two ranks. The first call on a channel adds it to
    the record.
    """

    def __init__(self, record: FlightRecord) -> None:
        self.record = record
        self._indices: dict[tuple[int, int, int], int] = {}
        self._groups: list[dist.ProcessGroup] = []  # referenced so that their id() is not reused

    def count_call(self, group: dist.ProcessGroup, call_type: int, peer: int) -> None:
        """Count a communication call in the flight record of this rank.

        Args:
            group: process group on which the call is made.
            call_type: type of the call, as an index into `CALLS`.
            peer: rank of the other end of a message, within the process group; -1 for a collective.
        """
        key = (id(group), call_type if peer >= 0 else -1, peer)
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = self._add_channel(group, call_type, peer)
        self.record.count_call(index, call_type)

    def _add_channel(self, group: dist.ProcessGroup, call_type: int, peer: int) -> int:
        self._groups.append(group)
        ranks = dist.get_process_group_ranks(group)
        name = group.group_desc if group.group_desc not in ("", "undefined", "default_pg") else "of all ranks"
        if peer < 0:
            return self.record.add_channel(name, tuple(ranks))
        endpoints = (self.record.rank, ranks[peer])
        return self.record.add_channel(name, endpoints if CALLS[call_type] == "send" else endpoints[::-1], directed=True)


def _wrap_call(channels: _Channels, call_type: int, method: Callable[..., Any]) -> Callable[..., Any]:
    is_directed = CALLS[call_type] in ("send", "receive")

    def call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        channels.count_call(self, call_type, args[1] if is_directed else -1)
        return method(self, *args, **kwargs)

    return call


def _wrap_wait(record: FlightRecord, method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        record.set_waiting(True)
        try:
            return method(self, *args, **kwargs)
        finally:
            record.set_waiting(False)

    return wait
