"""Ledger of memory and communication of operations on meta or fake tensors (shapes without data).

The ledger tracks each storage from the operation that creates it until its last reference is gone, and records collectives. It
counts storages, not tensors: a view adds no bytes, and a tensor that several autograd graphs save counts once.
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

from megatron_lab.planner.device_work import DeviceWork, WorkCounter, sum_work
from megatron_lab.planner.kernel_memory import count_gathered_bytes, count_scattered_bytes, count_temporary_bytes, resolve_group
from megatron_lab.planner.op_cache import run_op

CommType = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

_COLLECTIVES: dict[str, tuple[CommType, int, Callable[..., int]]] = {
    "c10d::allreduce_": ("all-reduce", 2, lambda tensors, *_: tensors[0].nbytes),
    "c10d::_allgather_base_": ("all-gather", 1, lambda out, *_: out.nbytes),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, lambda out, tensor, *_: tensor.nbytes),
    "c10d::alltoall_base_": ("all-to-all", 1, lambda out, tensor, *_: tensor.nbytes),
    "symm_mem::fused_all_gather_matmul": ("all-gather", 1, count_gathered_bytes),
    "symm_mem::fused_matmul_reduce_scatter": ("reduce-scatter", 1, count_scattered_bytes),
}
"""For each collective: its type, the number of rounds in which the full tensor passes around the ring, and a function that
returns the bytes of the full tensor."""
_DEVICE_OP, _ADD_OP = torch.ops.prim.device.default, torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank sends over one process group with one communication type."""

    group: str
    """Name of the process group over which the bytes are sent: its axes, such as "tp"."""
    comm_type: CommType
    calls: int
    bytes: int
    peer: int | None = None
    """Receiving pipeline stage, if the transfer is a message between stages."""

    def repeat(self, times: int) -> Transfer:
        """Return the sum of `times` transfers equal to this one."""
        return replace(self, calls=times * self.calls, bytes=times * self.bytes)


def merge_transfers(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Add up transfers with equal process group, communication type and receiving stage."""
    totals: dict[tuple[str, CommType, int | None], tuple[int, int]] = {}
    for transfer in transfers:
        calls, num_bytes = totals.get((transfer.group, transfer.comm_type, transfer.peer), (0, 0))
        totals[transfer.group, transfer.comm_type, transfer.peer] = calls + transfer.calls, num_bytes + transfer.bytes
    return tuple(Transfer(group, comm_type, *total, peer) for (group, comm_type, peer), total in totals.items())


@dataclass(frozen=True)
class MemorySpan:
    """Memory, communication and device work of consecutive operations, between two calls of `StorageLedger.take_span`."""

    peak_bytes: int
    """Largest number of live bytes during the operations, minus the live bytes at their start. A byte is live while its storage
    exists."""
    net_bytes: int
    """Live bytes after the operations minus the live bytes before them."""
    transfers: tuple[Transfer, ...] = ()
    """Bytes that the operations send over the tensor, context and expert groups."""
    work: DeviceWork = field(default_factory=DeviceWork)
    """Work of a device for these operations: matrix products, attention, memory traffic and kernels."""


def join_spans(spans: Iterable[MemorySpan]) -> MemorySpan:
    """Return the memory, communication and work of consecutive spans together."""
    peak_bytes = net_bytes = 0
    transfers: list[Transfer] = []
    spans = list(spans)
    for span in spans:
        peak_bytes = max(peak_bytes, net_bytes + span.peak_bytes)
        net_bytes += span.net_bytes
        transfers += span.transfers
    return MemorySpan(peak_bytes, net_bytes, merge_transfers(transfers), sum_work(span.work for span in spans))


class StorageLedger(TorchDispatchMode):
    """Mode that tracks the memory of operations: it counts the bytes of each storage from the operation that creates it until it is
    freed. It also records device work and communication.

    Args:
        groups: each process group over which collectives may run, with the name of its axes.
    """

    def __init__(self, groups: Iterable[tuple[dist.ProcessGroup | None, str]] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.op_names: set[str] = set()
        """Names of all operations that ran."""
        self._groups = list(groups)
        self._storages: set[int] = set()
        self._start_bytes = self._peak_bytes = 0
        self._transfers: list[Transfer] = []
        self._work = WorkCounter()
        self._pending_add: tuple[int, int] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch would import its compiler, which takes long and is not needed, because nothing is compiled
        in this mode."""
        return False

    def take_span(self) -> MemorySpan:
        """Return memory, communication and device work of the operations since the last call of this method, and start to record
        the next span."""
        self._update_peak()
        span = MemorySpan(
            self._peak_bytes - self._start_bytes, self.live_bytes - self._start_bytes, tuple(self._transfers), self._work.take()
        )
        self._start_bytes = self._peak_bytes = self.live_bytes
        self._transfers = []
        return span

    @contextlib.contextmanager
    def repeat(self, times: int) -> Iterator[None]:
        """Count each operation in this context `times` times. So a plan runs only one iteration of a loop of equal iterations.

        The operations must leave the live memory unchanged.
        """
        transfers, work, live_bytes = self._transfers, self._work.take(), self.live_bytes
        self._transfers = []
        yield
        assert self.live_bytes == live_bytes, "an iteration of a repeated loop changed the live memory, so iterations are not equal"
        self._transfers = [*transfers, *(transfer.repeat(times) for transfer in self._transfers)]
        self._work.reset(sum_work([work, self._work.take().repeat(times)]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on meta or fake tensors, and record its storages, temporary memory, device work and communication."""
        self._update_peak()
        if func is _DEVICE_OP:
            return args[0].device
        out = run_op(func, args, kwargs or {})
        self.op_names.add(func.name())
        self._work.record(func, args, kwargs or {}, out)
        if func.namespace in ("c10d", "symm_mem") and func.name() != "c10d::recv_":
            self._transfers.append(self._build_transfer(func.name(), args))
        for tensor in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add_storage(tensor.untyped_storage())
        if func is _ADD_OP and not torch.is_grad_enabled():
            # Without a dispatch mode, autograd adds in place to a gradient that has no other reference. So the new tensor counts
            # only if the first summand is still alive when the next operation starts.
            self._pending_add = (args[0].untyped_storage()._cdata, self.live_bytes)
        else:
            self._peak_bytes = max(self._peak_bytes, self.live_bytes + count_temporary_bytes(func, args, kwargs or {}))
        return out

    def _update_peak(self) -> None:
        """Update the peak of live bytes. This method is called before each operation starts, because the tensors that the previous
        operation released are freed by then."""
        if self._pending_add is not None:
            summand, live_bytes = self._pending_add
            self._pending_add = None
            if summand in self._storages:
                self._peak_bytes = max(self._peak_bytes, live_bytes)
        self._peak_bytes = max(self._peak_bytes, self.live_bytes)

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages.add(key)
            self.live_bytes += storage.nbytes()
            weakref.finalize(storage, self._remove_storage, key, storage.nbytes())

    def _remove_storage(self, key: int, num_bytes: int) -> None:
        self._storages.discard(key)
        self.live_bytes -= num_bytes

    def _build_transfer(self, name: str, args: Any) -> Transfer:
        """Return the bytes that this rank sends in a message or collective, with their process group.

        A ring collective over n ranks has one round, an all-reduce two. In each round, a rank sends (n - 1)/n of the bytes of the
        full tensor.

        Raises:
            NotImplementedError: the number of bytes that this collective sends is not defined, because no layer has used it so far.
        """
        if name not in (*_COLLECTIVES, "c10d::send"):
            raise NotImplementedError(
                f"internal error: the planner cannot count the bytes that the collective {name} sends. Add it to _COLLECTIVES in "
                "megatron_lab/planner/storages.py."
            )
        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        group = resolve_group(args[-1]) if boxed is None else dist.ProcessGroup.unbox(boxed)
        axis = next((group_axis for candidate, group_axis in self._groups if candidate == group), None)
        assert axis is not None, "a layer communicates outside of the groups of the ledger"
        if name == "c10d::send":
            return Transfer(axis, "send", 1, args[0][0].nbytes)
        comm_type, num_rounds, count_bytes = _COLLECTIVES[name]
        return Transfer(axis, comm_type, 1, num_rounds * (group.size() - 1) * count_bytes(*args) // group.size())
