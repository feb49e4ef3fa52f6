"""A network that delivers as late as it may: a result is in place once it is waited for, and not before.

On local processes every collective ends before anybody looks. So a missing wait does no harm here, but it does on a cluster. With
late delivery it does here too, always in the same way: code that reads too early finds the old content, and what it writes during a
reduction is lost. What is sent must stay as it is until its sender has waited; it is recorded if it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel import collectives
from megatron.pipeline_parallel import p2p


class LateWork:
    """Communication that has started, in place of `torch.distributed.Work`. The first `wait` delivers what has arrived."""

    def __init__(self, work: dist.Work | None, deliver: Callable[[], object]) -> None:
        assert work is not None, "this rank is not in the group"
        self._work, self._deliver, self._done = work, deliver, False

    @torch.no_grad()
    def wait(self) -> bool:
        """Deliver the result, if that is not done."""
        self._work.wait()
        if not self._done:
            self._done = True
            self._deliver()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` was called."""
        return self._done


class LateDist:
    """torch.distributed, with some of its functions replaced by those below."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, async_op: bool) -> LateWork:
        """Sum what the tensors hold now. What is added meanwhile is lost, which shows in the sum."""
        assert async_op
        moved = tensor.detach().clone()
        return LateWork(dist.all_reduce(moved, op, group=group, async_op=True), lambda: tensor.detach().copy_(moved))

    @staticmethod
    def irecv(tensor: torch.Tensor, source: int, *, group: Any) -> LateWork:
        """Receive; the buffer holds zeros until it is waited for."""
        arrived = torch.empty_like(tensor)
        tensor.detach().zero_()
        return LateWork(dist.irecv(arrived, source, group=group), lambda: tensor.detach().copy_(arrived))

    def isend(self, tensor: torch.Tensor, destination: int, *, group: Any) -> LateWork:
        """Send what the tensor holds now."""
        moved = tensor.detach().clone()
        note = f"a message of shape {list(tensor.shape)} to rank {destination}"
        work = dist.isend(moved, destination, group=group)
        return LateWork(work, lambda: _note_changes(tensor, moved, note, self._notes))


@contextmanager
def late_delivery() -> Iterator[list[str]]:
    """Make all collectives and messages of the framework in this process late. Those of FSDP are torch's own, and stay as they are.

    Yields:
        a list, which grows by what was written to while it was being sent, in words.
    """
    gather, scatter = collectives._all_gather, collectives._reduce_scatter
    notes: list[str] = []
    network: Any = LateDist(notes)
    collectives.dist = p2p.dist = network
    collectives._all_gather, collectives._reduce_scatter = (
        _late("a gather", gather, notes),
        _late("a reduce-scatter", scatter, notes),
    )
    try:
        yield notes
    finally:
        collectives.dist = p2p.dist = dist
        collectives._all_gather, collectives._reduce_scatter = gather, scatter


def _late(what: str, begin: Callable[..., Any], notes: list[str]) -> Callable[..., LateWork]:
    """The late form of a collective whose output is separate from its input, or a part of it, or contains it."""

    def begin_late(out: torch.Tensor, tensor: torch.Tensor, *, group: Any, async_op: bool) -> LateWork:
        assert async_op
        arrived, moved = torch.empty_like(out), tensor.detach().clone()
        if out.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            out.detach().zero_()  # it may be new memory, in which anything can be
        work = begin(arrived, moved, group=group, async_op=True)
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        note = f"the input of {what} of {tensor.numel():,} elements over ranks {ranks}"

        def deliver() -> None:
            _note_changes(tensor, moved, note, notes)
            out.detach().copy_(arrived)

        return LateWork(work, deliver)

    return begin_late


def _note_changes(sent: torch.Tensor, moved: torch.Tensor, note: str, notes: list[str]) -> None:
    """Record what was sent if it has changed in any bit."""
    if not torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (sent, moved))):
        notes.append(note)
