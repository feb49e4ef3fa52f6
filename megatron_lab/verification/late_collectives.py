"""Collectives that deliver their results as late as possible: the output tensor changes only when the caller waits for the
collective.

On local processes a collective usually ends before its result is read, so a missing wait has no effect; on a cluster it corrupts
data. With late delivery a missing wait has the same effect in every local run. Code that reads too early sees the old content, and
values that it writes during a reduction are lost. A tensor must not change between the start of its transfer and the wait; changes
are recorded.
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
    """Handle of a collective or message whose result appears in the output tensor when `wait` is first called. It replaces
    `torch.distributed.Work`."""

    def __init__(self, work: dist.Work | None, deliver: Callable[[], object]) -> None:
        assert work is not None, "this rank is not in the group"
        self._work, self._deliver, self._done = work, deliver, False

    @torch.no_grad()
    def wait(self) -> bool:
        """Wait for the communication. The first call writes the result to the output tensor."""
        self._work.wait()
        if not self._done:
            self._done = True
            self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` was called, because only `wait` writes the result to the output tensor."""
        return self._done


class LateDist:
    """Replacement of the module `torch.distributed`. With its `all_reduce` and `irecv`, the result appears only at the wait. Its
    `isend` records whether the tensor was overwritten before the wait. All other names are those of torch."""

    def __init__(self, overwritten: list[str]) -> None:
        self._overwritten = overwritten

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, async_op: bool) -> LateWork:
        """Sum over the ranks the values that the tensors have now. Values that are added to the tensor before the wait are lost, so
        that a missing wait changes the result."""
        assert async_op
        snapshot = tensor.detach().clone()
        return LateWork(dist.all_reduce(snapshot, op, group=group, async_op=True), lambda: tensor.detach().copy_(snapshot))

    @staticmethod
    def irecv(tensor: torch.Tensor, source: int, *, group: Any) -> LateWork:
        """Receive a message. Until the wait, the tensor holds zeros."""
        arrived = torch.empty_like(tensor)
        tensor.detach().zero_()
        return LateWork(dist.irecv(arrived, source, group=group), lambda: tensor.detach().copy_(arrived))

    def isend(self, tensor: torch.Tensor, destination: int, *, group: Any) -> LateWork:
        """Send the values that the tensor has now. The wait records whether the tensor was overwritten in the meantime."""
        snapshot = tensor.detach().clone()
        description = f"a message of shape {list(tensor.shape)} to rank {destination}"
        work = dist.isend(snapshot, destination, group=group)
        return LateWork(work, lambda: _record_if_changed(tensor, snapshot, description, self._overwritten))


@contextmanager
def late_delivery() -> Iterator[list[str]]:
    """Delay, in a `with` block, the results of all collectives and messages of the framework in this process until the wait. FSDP
    calls torch's collectives directly, so they are not delayed.

    Yields:
        A list to which a description is added for each tensor that was overwritten while it was being sent.
    """
    gather, scatter = collectives._all_gather, collectives._reduce_scatter
    overwritten: list[str] = []
    network: Any = LateDist(overwritten)
    collectives.dist = p2p.dist = network
    collectives._all_gather, collectives._reduce_scatter = (
        _delay_collective("a gather", gather, overwritten),
        _delay_collective("a reduce-scatter", scatter, overwritten),
    )
    try:
        yield overwritten
    finally:
        collectives.dist = p2p.dist = dist
        collectives._all_gather, collectives._reduce_scatter = gather, scatter


def _delay_collective(name: str, start_collective: Callable[..., Any], overwritten: list[str]) -> Callable[..., LateWork]:
    """Return a function that starts an all-gather or reduce-scatter whose result appears in the output tensor only when the caller
    calls `wait`, so that code without this wait computes wrong values.

    Input and output may be separate tensors, or one may be a slice of the other.

    Args:
        name: name of the collective in the descriptions, with its article ("a reduce-scatter").
        start_collective: function that starts the real collective.
        overwritten: list to which `wait` adds a description if the input tensor was changed between the start and the wait.
    """

    def start_late(out: torch.Tensor, tensor: torch.Tensor, *, group: Any, async_op: bool) -> LateWork:
        assert async_op
        arrived, snapshot = torch.empty_like(out), tensor.detach().clone()
        if out.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            out.detach().zero_()  # the memory may be uninitialized
        work = start_collective(arrived, snapshot, group=group, async_op=True)
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        description = f"the input of {name} of {tensor.numel():,} elements over ranks {ranks}"

        def deliver() -> None:
            _record_if_changed(tensor, snapshot, description, overwritten)
            out.detach().copy_(arrived)

        return LateWork(work, deliver)

    return start_late


def _record_if_changed(tensor: torch.Tensor, snapshot: torch.Tensor, description: str, overwritten: list[str]) -> None:
    """Add `description` to `overwritten` if a tensor differs in any bit from its snapshot, which was taken when the communication
    started."""
    if not torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (tensor, snapshot))):
        overwritten.append(description)
