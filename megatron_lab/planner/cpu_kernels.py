"""Run operations on CPU tensors that have no memory, and reuse the results of operations that ran before on tensors alike.

`FakeTensorMode` knows which kernels the CPU runs and what they return, but takes ten times as long for an operation as creating the
result does; and layers run the same few operations on the same shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_lab.planner.known_ops import MadeTensor, key_of, made

aten = torch.ops.aten


class _ViewOfFirst(NamedTuple):
    """A tensor in the storage of the first argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    further: int
    """Offset of the view, in elements behind the first element of the argument."""


class _Written(NamedTuple):
    """The argument that the operation wrote into: the first, or the keyword argument of this name."""

    name: str | None


class _NewTensors(NamedTuple):
    """Tensors with storages of their own, and whether they are a tuple."""

    several: bool
    tensors: tuple[MadeTensor, ...]
    device: torch.device


_Result = _ViewOfFirst | _Written | _NewTensors

_REARRANGED = frozenset((aten.view.default, aten.select.int, aten.unsqueeze.default, aten.permute.default, aten.transpose.int))
"""Views that all layers take, of the shape and the strides of the first argument alone."""
_known: dict[tuple[Any, ...], _Result] = {}
"""Results of operations that ran, by a description of their arguments."""


class CpuKernels(FakeTensorMode):
    """Mode in which CPU tensors have no memory, and an operation that ran before on tensors alike is not run again: its result is
    created from the description of the first result."""

    @property
    def avoid_device_init(self) -> bool:
        """No: where CUDA is built in and no GPU is there, torch would put one in its place for good, for which autograd starts a
        thread; and then no process forked from this one could run a backward."""
        return False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: see `StorageLedger`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        key = key_of(func, args, kwargs, _follows_from_its_shape) if func.namespace == "aten" else None
        if key is not None and func is aten.as_strided.default:
            key = (*key, args[0].storage_offset())  # it counts from the beginning of the storage
        if (known := _known.get(key) if key is not None else None) is not None:
            return self._again(known, args, kwargs)
        if key is not None and func in _REARRANGED:
            known = _known[key] = _view(func, args, kwargs)
            return self._again(known, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None and (result := _result(func, out, args, kwargs)) is not None:
            _known[key] = result
        return out

    def _again(self, known: _Result, args: Any, kwargs: Any) -> Any:
        if isinstance(known, _Written):
            return args[0] if known.name is None else kwargs[known.name]
        if isinstance(known, _ViewOfFirst):
            base = args[0]
            view = torch.empty(0, dtype=base.dtype, device="meta")
            view.set_(base.untyped_storage(), base.storage_offset() + known.further, known.shape, known.stride)
            return FakeTensor(self, view, base.fake_device)
        found = tuple(FakeTensor(self, one.tensor(), known.device) for one in known.tensors)
        return found if known.several else found[0]


def _follows_from_its_shape(tensor: Tensor) -> bool:
    """Return whether only the shape of a tensor is known, not its numbers."""
    return type(tensor) is FakeTensor and tensor.constant is None and tensor.fake_device.type == "cpu"


def _view(func: Any, args: Any, kwargs: Any) -> _ViewOfFirst:
    """Return the description of a view. The same view of a tensor on the meta device costs far less than `FakeTensorMode`."""
    base = args[0]
    view = func(torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta"), *args[1:], **kwargs)
    return _ViewOfFirst(view.shape, view.stride(), view.storage_offset())


def _result(func: Any, out: Any, args: Any, kwargs: Any) -> _Result | None:
    """Return a description of a result, or None for a result that cannot be created from a description."""
    if torch.Tag.inplace_view in func.tags:
        return None  # changes the shape or the storage of its argument
    if func._schema.is_mutable:
        if args and out is args[0]:
            return _Written(None)
        return next((_Written(name) for name, arg in kwargs.items() if arg is out), None)
    tensors = out if isinstance(out, tuple) else (out,)
    if not tensors or not all(isinstance(one, Tensor) and _follows_from_its_shape(one) for one in tensors):
        return None
    base = args[0] if args else None
    if isinstance(out, Tensor) and isinstance(base, Tensor) and out.untyped_storage()._cdata == base.untyped_storage()._cdata:
        further = int(out.storage_offset() - base.storage_offset())
        return _ViewOfFirst(out.shape, out.stride(), further) if out.dtype == base.dtype else None
    new = made(out, args, kwargs)
    return None if new is None else _NewTensors(*new, tensors[0].fake_device)
