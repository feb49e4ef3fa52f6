"""Counts what operations on tensors without memory would take and send: the storages that they make, until the last reference to
each is gone, and the collectives that they call.

Storages are counted, not tensors: a view costs nothing, and what several graphs save counts once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lab.planner.kernel_memory import bytes_inside, gathered_bytes, resolved, scattered_bytes
from megatron_lab.planner.known_ops import run
from megatron_lab.planner.work import DeviceWork, WorkCounter, summed

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

_OPERATIONS: dict[str, tuple[Operation, int, Callable[..., int]]] = {
    "c10d::allreduce_": ("all-reduce", 2, lambda tensors, *_: tensors[0].nbytes),
    "c10d::_allgather_base_": ("all-gather", 1, lambda out, *_: out.nbytes),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, lambda out, tensor, *_: tensor.nbytes),
    "c10d::alltoall_base_": ("all-to-all", 1, lambda out, tensor, *_: tensor.nbytes),
    "symm_mem::fused_all_gather_matmul": ("all-gather", 1, gathered_bytes),
    "symm_mem::fused_matmul_reduce_scatter": ("reduce-scatter", 1, scattered_bytes),
}
"""For each collective, how often the whole tensor goes round the ring, and the bytes of that."""
_DEVICE, _SUM = torch.ops.prim.device.default, torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Transfer:
    """What one rank sends over one group by one kind of operation."""

    over: str
    """The group, named by its axes."""
    operation: Operation
    calls: int
    bytes: int
    peer: int | None = None
    """The pipeline stage that receives it, if it is a message."""

    def repeated(self, times: int) -> Transfer:
        """So many of the same."""
        return replace(self, calls=times * self.calls, bytes=times * self.bytes)


def added(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Sum up: one entry for each group, kind of operation and peer."""
    totals: dict[tuple[str, Operation, int | None], tuple[int, int]] = {}
    for one in transfers:
        calls, num_bytes = totals.get((one.over, one.operation, one.peer), (0, 0))
        totals[one.over, one.operation, one.peer] = calls + one.calls, num_bytes + one.bytes
    return tuple(Transfer(over, operation, *total, peer) for (over, operation, peer), total in totals.items())


@dataclass(frozen=True)
class MemorySpan:
    """What happened on a rank between two cuts of a ledger."""

    peak: int
    """The most bytes above those that were alive when it began."""
    change: int
    """Bytes alive at its end less those alive when it began."""
    sent: tuple[Transfer, ...] = ()
    """What it sent over the tensor and the context group."""
    work: DeviceWork = field(default_factory=DeviceWork)
    """What the device did."""


def joined(spans: Iterable[MemorySpan]) -> MemorySpan:
    """Consecutive spans as one."""
    peak = alive = 0
    sent: list[Transfer] = []
    spans = list(spans)
    for span in spans:
        peak = max(peak, alive + span.peak)
        alive += span.change
        sent += span.sent
    return MemorySpan(peak, alive, added(sent), summed(span.work for span in spans))


class StorageLedger(TorchDispatchMode):
    """While it is entered, counts the bytes of each storage from the operation that makes it until it is freed.

    Args:
        groups: the only groups over which collectives may be called, each with its axis.
    """

    def __init__(self, groups: Iterable[tuple[dist.ProcessGroup | None, str]] = ()) -> None:
        super().__init__()
        self.alive = 0
        self.kernels: set[str] = set()
        """Names of operations that ran."""
        self._groups = list(groups)
        self._known: set[int] = set()
        self._begin = self._peak = 0
        self._sent: list[Transfer] = []
        self._work = WorkCounter()
        self._sum: tuple[int, int] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled while it is entered, and to skip it torch would import its whole compiler."""
        return False

    def cut(self) -> MemorySpan:
        """What happened since the last cut."""
        self._look()
        span = MemorySpan(self._peak - self._begin, self.alive - self._begin, tuple(self._sent), self._work.take())
        self._begin = self._peak = self.alive
        self._sent = []
        return span

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """What happens while it is entered counts so many times. It must leave as much memory as it found."""
        sent, work, alive = self._sent, self._work.take(), self.alive
        self._sent = []
        yield
        assert self.alive == alive, "a turn of a loop keeps memory, so the next one does not begin as it did"
        self._sent = [*sent, *(one.repeated(times) for one in self._sent)]
        self._work.begin_with(summed([work, self._work.take().repeated(times)]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        self._look()
        if func is _DEVICE:
            return args[0].device
        out = run(func, args, kwargs or {})
        self.kernels.add(func.name())
        self._work.note(func, args, kwargs or {}, out)
        if func.namespace in ("c10d", "symm_mem") and func.name() != "c10d::recv_":
            self._sent.append(self._transfer(func.name(), args))
        for tensor in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor.untyped_storage())
        if func is _SUM and not torch.is_grad_enabled():
            # Autograd adds in place to a gradient that nobody else holds, but not while a mode like this one looks on.
            self._sum = (args[0].untyped_storage()._cdata, self.alive)
        else:
            self._peak = max(self._peak, self.alive + bytes_inside(func, args, kwargs or {}))
        return out

    def _look(self) -> None:
        """Between two operations: what the one before dropped is freed by now."""
        if self._sum is not None:
            summand, alive = self._sum
            self._sum = None
            if summand in self._known:
                self._peak = max(self._peak, alive)
        self._peak = max(self._peak, self.alive)

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.alive += storage.nbytes()
            weakref.finalize(storage, self._leave, key, storage.nbytes())

    def _leave(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.alive -= num_bytes

    def _transfer(self, name: str, args: Any) -> Transfer:
        """What this rank sends: a message, or in a collective of a ring of n ranks (n - 1)/n of the whole tensor each time it goes
        round.

        Raises:
            NotImplementedError: no layer of a model has used this collective so far.
        """
        if name not in (*_OPERATIONS, "c10d::send"):
            raise NotImplementedError(f"what {name} sends is not known")
        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        group = resolved(args[-1]) if boxed is None else dist.ProcessGroup.unbox(boxed)
        over = next((axis for known, axis in self._groups if known == group), None)
        assert over is not None, "a layer communicates outside of its tensor and context groups"
        if name == "c10d::send":
            return Transfer(over, "send", 1, args[0][0].nbytes)
        operation, rounds, whole = _OPERATIONS[name]
        return Transfer(over, operation, 1, rounds * (group.size() - 1) * whole(*args) // group.size())
