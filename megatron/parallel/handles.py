"""Handles: tensors that stand for Python objects, such as layers or dropout seeds, in the operations of a compiled graph.

A Python object in a graph is a constant, so every layer would need its own compilation. A tensor is an input of the graph, so
layers of the same structure share one compiled graph. A handle is therefore a tensor whose address in memory identifies the object.
The value of a handle is undefined.

- A handle is on the device of the operation's other tensors. For a tensor on the host, the compiler would assume that all results
  of the operation are unaligned: following kernels would then load and store 2 bytes at a time instead of 16.
- The value of a handle is never read, because on a GPU the host would have to wait for it. The address is known to the host.
- Two living tensors never have the same address. When a handle is freed, a new handle may get its address. The address then
  identifies the object of the new handle.

Operations that take a handle, or have effects besides their output tensors (gradients, random numbers, communication), are
registered with the tags `OUTSIDE_CUDA_GRAPHS`. A CUDA graph would replay the kernels of such an operation without its Python code.
Then dropout masks would repeat, ready gradients would not be counted, and weight gradients would not be deferred. A CUDA graph may
also copy inputs to other addresses.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

OUTSIDE_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,)
"""Tags for operations that must never be recorded in a CUDA graph."""

T = TypeVar("T")


class Handles(Generic[T]):
    """Registry that finds the Python object for which a handle (a tensor in a compiled graph) stands. The registry holds only weak
    references to the objects.

    Args:
        object_name: what the objects are, for error messages.
    """

    def __init__(self, object_name: str) -> None:
        self._object_name = object_name
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._objects)

    def create(self, target: T, device: torch.device) -> torch.Tensor:
        """Return a new handle for an object: an int64 tensor of shape [] whose address in memory identifies the object. The value
        of the tensor is undefined.

        The caller must keep the handle alive, for example in the object, because other tensors may get its address after it is
        freed. A handle that is saved for backward keeps its address: tensors of integers are never offloaded to host memory. A
        handle on the meta device has no address. It can be used in a graph, but `find` cannot find its object.

        Args:
            device: device of the handle: that of the operation's other tensors.
        """
        handle = torch.empty((), dtype=torch.int64, device=device)
        if not handle.is_meta:
            self._objects[handle.data_ptr()] = target
        return handle

    def find(self, handle: torch.Tensor) -> T:
        """Return the object for which a handle was created.

        Raises:
            RuntimeError: the object no longer exists, or the tensor is a copy of its handle.
        """
        target = self._objects.get(handle.data_ptr())
        if target is None:
            raise RuntimeError(
                f"A compiled operation got a handle that names no {self._object_name}: the {self._object_name} no longer exists, "
                "or the handle was copied (by a CUDA graph, or by saved-tensor hooks that move integers). Run without --compile, "
                "and report this."
            )
        return target
