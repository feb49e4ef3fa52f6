"""Operations on fake CPU tensors (shapes without data), with a cache of their outputs.

`FakeTensorMode` of torch knows which kernels a CPU runs and the shapes of their outputs. But to run an operation in this mode takes
ten times as long as to create its output, and the layers run the same few operations on the same shapes. So the shape, strides and
dtype of each output are cached by operation and arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_lab.planner.op_cache import NewTensor, build_op_key, describe_new_tensors

aten = torch.ops.aten


class _ViewOfFirstArgument(NamedTuple):
    """Cached description of an operation's output that is a view of the operation's first argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Offset of the view, in elements from the first element of the argument."""


class _MutatedArgument(NamedTuple):
    """Cached description of an operation's output that is one of its arguments, into which the operation writes."""

    name: str | None
    """Name of the keyword argument that the operation returns; None if it returns its first positional argument."""


class _NewTensors(NamedTuple):
    """Cached description of an operation's output that is one or several tensors with new storages."""

    is_tuple: bool
    tensors: tuple[NewTensor, ...]
    device: torch.device


_Result = _ViewOfFirstArgument | _MutatedArgument | _NewTensors

_VIEW_OPS = frozenset((aten.view.default, aten.select.int, aten.unsqueeze.default, aten.permute.default, aten.transpose.int))
"""Operations that return a view whose shape, strides and offset depend only on the shape and strides of the first argument, and
on numbers."""
_cache: dict[tuple[Any, ...], _Result] = {}
"""Cached output of each operation that ran, by operation and arguments (`build_op_key`)."""


class CpuKernels(FakeTensorMode):
    """Mode in which CPU tensors are fake: they have shapes but no data.

    If an operation ran before on arguments of equal shapes, strides and dtypes, its output is created from a cache, without running
    the operation again.
    """

    @property
    def avoid_device_init(self) -> bool:
        """Return False.

        With True, torch would permanently register a fake GPU if it is built with CUDA but no GPU exists. Autograd would then start
        a thread for this GPU, and no process that is forked later could run a backward.
        """
        return False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch would import its compiler, which takes long and is not needed (as in `StorageLedger`)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the output of an operation as fake tensors: created from the cache if possible, otherwise by running the
        operation in
        `FakeTensorMode`."""
        kwargs = kwargs or {}
        key = build_op_key(func, args, kwargs, _has_no_values) if func.namespace == "aten" else None
        if key is not None and func is aten.as_strided.default:
            key = (*key, args[0].storage_offset())  # the offset of as_strided counts from the start of the storage
        if (cached := _cache.get(key) if key is not None else None) is not None:
            return self._create_result(cached, args, kwargs)
        if key is not None and func in _VIEW_OPS:
            cached = _cache[key] = _describe_view(func, args, kwargs)
            return self._create_result(cached, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None and (result := _describe_result(func, out, args, kwargs)) is not None:
            _cache[key] = result
        return out

    def _create_result(self, cached: _Result, args: Any, kwargs: Any) -> Any:
        if isinstance(cached, _MutatedArgument):
            return args[0] if cached.name is None else kwargs[cached.name]
        if isinstance(cached, _ViewOfFirstArgument):
            base = args[0]
            view = torch.empty(0, dtype=base.dtype, device="meta")
            view.set_(base.untyped_storage(), base.storage_offset() + cached.offset, cached.shape, cached.stride)
            return FakeTensor(self, view, base.fake_device)
        tensors = tuple(FakeTensor(self, new.create(), cached.device) for new in cached.tensors)
        return tensors if cached.is_tuple else tensors[0]


def _has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake CPU tensor without known values. The output of an operation on it depends only on its
    shape, strides and dtype, so it can be cached."""
    return type(tensor) is FakeTensor and tensor.constant is None and tensor.fake_device.type == "cpu"


def _describe_view(func: Any, args: Any, kwargs: Any) -> _ViewOfFirstArgument:
    """Return shape, strides and offset of the view that an operation returns, as a cache entry. The meta device computes them,
    because it is far faster than `FakeTensorMode`."""
    base = args[0]
    view = func(torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta"), *args[1:], **kwargs)
    return _ViewOfFirstArgument(view.shape, view.stride(), view.storage_offset())


def _describe_result(func: Any, out: Any, args: Any, kwargs: Any) -> _Result | None:
    """Return a cache entry from which the output of an operation can later be created without running the operation.

    Returns None if this is not possible, for example if the operation changes the shape of its argument or returns a tensor with
    values.
    """
    if torch.Tag.inplace_view in func.tags:
        return None  # the operation changes the shape or the storage of its argument
    if func._schema.is_mutable:
        if args and out is args[0]:
            return _MutatedArgument(None)
        return next((_MutatedArgument(name) for name, arg in kwargs.items() if arg is out), None)
    tensors = out if isinstance(out, tuple) else (out,)
    if not tensors or not all(isinstance(t, Tensor) and _has_no_values(t) for t in tensors):
        return None
    base = args[0] if args else None
    if isinstance(out, Tensor) and isinstance(base, Tensor) and out.untyped_storage()._cdata == base.untyped_storage()._cdata:
        offset = int(out.storage_offset() - base.storage_offset())
        return _ViewOfFirstArgument(out.shape, out.stride(), offset) if out.dtype == base.dtype else None
    new = describe_new_tensors(out, args, kwargs)
    return None if new is None else _NewTensors(*new, tensors[0].fake_device)
