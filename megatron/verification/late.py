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
    """Communication under way, for `torch.distributed.Work`. The first `wait` puts what has come into its place.

    Args:
        work: which sends `moved` or fills `arrived`.
        arrived, place: what comes, and where it belongs.
        sent, moved: what goes, and a copy of it as it was.
        changed: called if `sent` is no longer the same.
    """

    def __init__(
        self,
        work: dist.Work,
        *,
        arrived: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
        sent: torch.Tensor | None = None,
        moved: torch.Tensor | None = None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self._work, self._arrived, self._place = work, arrived, place
        self._sent, self._moved, self._changed = sent, moved, changed
        self._done = False

    @torch.no_grad()
    def wait(self) -> bool:
        """Wait, and deliver."""
        self._work.wait()
        if not self._done:
            self._done = True
            if self._sent is not None and self._moved is not None and not _same_bits(self._sent, self._moved):
                assert self._changed is not None
                self._changed()
            if self._place is not None and self._arrived is not None:
                self._place.detach().copy_(self._arrived)
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
        return LateWork(_begun(dist.all_reduce(moved, op, group=group, async_op=True)), arrived=moved, place=tensor)

    @staticmethod
    def irecv(tensor: torch.Tensor, source: int, *, group: Any) -> LateWork:
        """The buffer holds zeros meanwhile."""
        arrived = torch.empty_like(tensor)
        tensor.detach().zero_()
        return LateWork(_begun(dist.irecv(arrived, source, group=group)), arrived=arrived, place=tensor)

    def isend(self, tensor: torch.Tensor, destination: int, *, group: Any) -> LateWork:
        """Sends what the tensor holds now."""
        moved = tensor.detach().clone()
        note = f"a message of shape {list(tensor.shape)} to rank {destination}"
        work = _begun(dist.isend(moved, destination, group=group))
        return LateWork(work, sent=tensor, moved=moved, changed=lambda: self._notes.append(note))


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
    """Of a collective with an output apart from its input, or one of which the other is a part."""

    def begin_late(out: torch.Tensor, tensor: torch.Tensor, *, group: Any, async_op: bool) -> LateWork:
        assert async_op
        arrived, moved = torch.empty_like(out), tensor.detach().clone()
        if out.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            out.detach().zero_()  # it may be new memory, in which anything can be
        work = _begun(begin(arrived, moved, group=group, async_op=True))
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        note = f"the input of {what} of {tensor.numel():,} elements over ranks {ranks}"
        return LateWork(work, arrived=arrived, place=out, sent=tensor, moved=moved, changed=lambda: notes.append(note))

    return begin_late


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
