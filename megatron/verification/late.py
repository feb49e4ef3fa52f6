"""A network that delivers as late as it may: what was begun is in place when it is waited for, and not before.

On local processes every collective is through before anybody looks, so a forgotten wait does no harm there: it does on a cluster.
With late delivery it does here too, and always in the same way: who reads too early finds what was there before, and what is
written while a reduction is under way is lost to it. What is sent must stay as it is until its sender has waited, and is noted if
it does not.
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
    """Communication under way, for `torch.distributed.Work`. The first `wait` delivers what has come."""

    def __init__(self, work: dist.Work | None, deliver: Callable[[], object]) -> None:
        assert work is not None, "this rank is not in the group"
        self._work, self._deliver, self._done = work, deliver, False

    @torch.no_grad()
    def wait(self) -> bool:
        """Wait, and deliver."""
        self._work.wait()
        if not self._done:
            self._done = True
            self._deliver()
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited."""
        return self._done


class LateDist:
    """torch.distributed, with the functions below in the place of its own."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, async_op: bool) -> LateWork:
        """Sums what the tensor holds now. What is added to it meanwhile is lost, so that the sum tells."""
        assert async_op
        moved = tensor.detach().clone()
        return LateWork(dist.all_reduce(moved, op, group=group, async_op=True), lambda: tensor.detach().copy_(moved))

    @staticmethod
    def irecv(tensor: torch.Tensor, source: int, *, group: Any) -> LateWork:
        """The buffer holds zeros meanwhile."""
        arrived = torch.empty_like(tensor)
        tensor.detach().zero_()
        return LateWork(dist.irecv(arrived, source, group=group), lambda: tensor.detach().copy_(arrived))

    def isend(self, tensor: torch.Tensor, destination: int, *, group: Any) -> LateWork:
        """Sends what the tensor holds now."""
        moved = tensor.detach().clone()
        note = f"a message of shape {list(tensor.shape)} to rank {destination}"
        work = dist.isend(moved, destination, group=group)
        return LateWork(work, lambda: _note_changes(tensor, moved, note, self._notes))


@contextmanager
def late_delivery() -> Iterator[list[str]]:
    """All collectives and messages that the framework begins in this process are late; those of FSDP are torch's own, and stay as
    they are.

    Yields:
        what was written to while it was on its way, in words; it grows.
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
    """A collective with an output apart from its input, or one of which the other is a part, made late."""

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
    """Note what was sent if it is no longer, bit for bit, what it was."""
    if not torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (sent, moved))):
        notes.append(note)
