"""A network that delivers as late as it may: what was begun is in place when it is waited for, and not before.

On local processes every collective is through before anybody looks, so a forgotten wait does no harm there: it does on a cluster.
With late delivery it does here too, and always in the same way: who reads too early finds what was there before, and what is
written while a reduction is under way is lost to it.
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
        work: which fills `arrived`.
        place: where it belongs.
    """

    def __init__(self, work: dist.Work, arrived: torch.Tensor, place: torch.Tensor) -> None:
        self._work, self._arrived, self._place = work, arrived, place
        self._done = False

    def wait(self) -> bool:
        """Wait, and deliver."""
        self._work.wait()
        if not self._done:
            self._done = True
            with torch.no_grad():
                self._place.detach().copy_(self._arrived)
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited."""
        return self._done


class LateDist:
    """torch.distributed, with the functions below in the place of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, async_op: bool) -> LateWork:
        """Sums what the tensor holds now."""
        assert async_op
        moved = tensor.detach().clone()
        return LateWork(_begun(dist.all_reduce(moved, op, group=group, async_op=True)), moved, tensor)

    @staticmethod
    def irecv(tensor: torch.Tensor, source: int, *, group: Any) -> LateWork | None:
        """The buffer holds zeros meanwhile."""
        arrived = torch.empty_like(tensor)
        tensor.detach().zero_()
        work = dist.irecv(arrived, source, group=group)
        return None if work is None else LateWork(work, arrived, tensor)


@contextmanager
def late_delivery() -> Iterator[None]:
    """All collectives and messages that the framework begins in this process are late; those of FSDP are torch's own, and stay as
    they are."""
    gather, scatter = collectives._all_gather, collectives._reduce_scatter
    network: Any = LateDist()
    collectives.dist = p2p.dist = network
    collectives._all_gather, collectives._reduce_scatter = _late(gather), _late(scatter)
    try:
        yield
    finally:
        collectives.dist = p2p.dist = dist
        collectives._all_gather, collectives._reduce_scatter = gather, scatter


def _late(begin: Callable[..., Any]) -> Callable[..., LateWork]:
    """Of a collective with an output apart from its input, which may be a part of it."""

    def begin_late(out: torch.Tensor, tensor: torch.Tensor, *, group: Any, async_op: bool) -> LateWork:
        assert async_op
        arrived = torch.empty_like(out)
        return LateWork(_begun(begin(arrived, tensor.detach().clone(), group=group, async_op=True)), arrived, out)

    return begin_late


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
