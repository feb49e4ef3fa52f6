"""Follows the memory of tensors that have none: which storages operations make, and when the last reference to each is gone.

Storages are counted, not tensors: a view costs nothing, and what several graphs save counts once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.planner.activations.collective_calls import Call, call_of
from megatron.planner.activations.kernel_memory import bytes_inside


@dataclass(frozen=True)
class Span:
    """A stretch of work."""

    peak: int
    """Bytes above those that were alive when it began, at most."""
    change: int
    """Bytes alive at its end less those at its begin."""
    calls: tuple[Call, ...] = ()
    """Collectives, in their order."""


class StorageLedger(TorchDispatchMode):
    """While it is entered, counts bytes from the operation that makes a storage to the storage's end."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.kernels: set[str] = set()
        """Names of operations that ran."""
        self._known: set[int] = set()
        self._begin = self._peak = 0
        self._calls: list[Call] = []
        self._sum: tuple[int, int] | None = None

    def cut(self) -> Span:
        """What happened since the last cut."""
        self._look()
        span = Span(self._peak - self._begin, self.alive - self._begin, tuple(self._calls))
        self._begin = self._peak = self.alive
        self._calls = []
        return span

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        self._look()
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # asks for a tensor's device
            return out
        self.kernels.add(func.name())
        call = call_of(func, args)
        if call is not None:
            self._calls.append(call)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor.untyped_storage())
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            # Autograd adds in place to a gradient that nobody else holds, but not while a mode like this one looks on.
            self._sum = (args[0].untyped_storage()._cdata, self.alive)
        else:
            self._peak = max(self._peak, self.alive + bytes_inside(func, args, kwargs or {}))
        return out

    def _look(self) -> None:
        """Between two operations: what the one before let go is gone by now."""
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


def joined(spans: list[Span]) -> Span:
    """Spans one after the other, as one."""
    peak = alive = 0
    calls: list[Call] = []
    for span in spans:
        peak = max(peak, alive + span.peak)
        alive += span.change
        calls += span.calls
    return Span(peak, alive, tuple(calls))
