"""Handles: tensors by which the operations of a compiled graph find Python objects, such as a layer or the seeds of its dropout.

A Python object in a graph is a constant, so each layer would need a compilation of its own. A tensor is an input, and equal layers
share one. A handle therefore is a tensor without a value, and its address in memory names the object:

- It lies on the device of the operation's other tensors. The compiler takes every tensor of the host for unaligned, and with it all
  that an operation makes of it: the kernels that follow would then load and store 2 bytes at a time instead of 16.
- Nobody reads its value: on a GPU the host would wait for it. The address is known to the host.
- No two living tensors have one address. An object is found as long as it lives, and only by its latest handle at an address.

Operations that take a handle, or act outside of their tensors (gradients, random numbers, communication), are registered with
`OUTSIDE_CUDA_GRAPHS`. A CUDA graph replays kernels and no Python: gradients would not be announced and weight gradients not be
deferred, masks would repeat, and it may copy inputs to other addresses.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

OUTSIDE_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,)
"""Tags of an operation that must never be recorded into a CUDA graph."""

T = TypeVar("T")


class Handles(Generic[T]):
    """The handles of objects of one kind. They do not keep the objects alive.

    Args:
        kind: name of an object in messages.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._objects)

    def create(self, target: T, device: torch.device) -> torch.Tensor:
        """Return a new handle of an object: int64, 0-d, without a value.

        The object, or whoever uses the handle, holds it: its address is free for other tensors as soon as it dies. An integer is
        never offloaded to host memory, as activations are, so a handle that backward keeps does not move. One on the meta device
        has no address: it stands in a graph, and finds nothing.
        """
        handle = torch.empty((), dtype=torch.int64, device=device)
        if not handle.is_meta:
            self._objects[handle.data_ptr()] = target
        return handle

    def find(self, handle: torch.Tensor) -> T:
        """Return the object of a handle.

        Raises:
            RuntimeError: the object is dead, or the tensor is a copy of its handle.
        """
        target = self._objects.get(handle.data_ptr())
        if target is None:
            raise RuntimeError(
                f"A compiled operation got a handle that names no {self._kind}: the {self._kind} no longer exists, or the handle "
                "was copied (by a CUDA graph, or by saved-tensor hooks that move integers). Run without --compile, and report this."
            )
        return target
