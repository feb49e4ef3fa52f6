"""Cache of the outputs of operations on the meta device.

Many operations of torch on the meta device are written in Python, and take a hundred times as long as the creation of a tensor. The
layers run the same few operations on the same shapes many times. So the shape, strides and dtype of each output are cached by
operation and arguments.

The first of these Python operations makes torch import its compiler, which takes as long as a full plan. So torch is not called at
all if the output follows directly from the arguments (`simple_ops.py`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from megatron_lab.planner.simple_ops import infer_result

_COMPILER = "torch._dynamo"
_KEY_TYPES = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class NewTensor(NamedTuple):
    """Shape, strides and dtype of a tensor with new storage that an operation returned."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last element of the tensor, including gaps between elements."""
        if not self.shape.numel():
            return 0
        return (1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize

    def create(self) -> torch.Tensor:
        """Create a tensor without data that has this shape, strides and dtype, on the meta device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_cache: dict[tuple[Any, ...], tuple[bool, tuple[NewTensor, ...]]] = {}
"""Cached output of each operation that ran, by operation and arguments (`build_op_key`): whether the output is a tuple, and its
tensors."""


def run_op(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on meta tensors, or create its output from the cache.

    Args:
        func: operation as `__torch_dispatch__` gets it, to be called with `args` and `kwargs`.
    """
    is_cacheable = func.namespace == "aten" and not func.is_view and not func._schema.is_mutable
    key = build_op_key(func, args, kwargs, _is_meta_tensor) if is_cacheable else None
    if key is None:
        return _compute_result(func, args, kwargs)
    if (cached := _cache.get(key)) is None:
        out = _compute_result(func, args, kwargs)
        if (
            all(map(_is_meta_tensor, out if isinstance(out, tuple) else (out,)))
            and (result := describe_new_tensors(out, args, kwargs)) is not None
        ):
            _cache[key] = result
        return out
    is_tuple, tensors = cached
    outputs = tuple(tensor.create() for tensor in tensors)
    return outputs if is_tuple else outputs[0]


def _compute_result(func: Any, args: Any, kwargs: Any) -> Any:
    if (simple := infer_result(func, args, kwargs)) is not None:
        return simple
    without_compiler = _COMPILER not in sys.modules
    out = func(*args, **kwargs)
    if without_compiler and _COMPILER in sys.modules:
        gc.collect()  # exceptions during the import of the compiler leave reference cycles that hold the callers' tensors
    return out


def _is_meta_tensor(value: Any) -> bool:
    return type(value) is torch.Tensor and value.is_meta


def build_op_key(func: Any, args: Any, kwargs: Any, has_no_values: Callable[[torch.Tensor], bool]) -> tuple[Any, ...] | None:
    """Return a cache key of an operation and its arguments. Equal keys mean that the outputs have equal shapes, strides and dtypes.

    Returns None if the output may depend on more than the shapes, strides, dtypes and numbers among the arguments.

    Args:
        has_no_values: returns whether a tensor has no values on which the output could depend.
    """
    key = [func]
    for arg in (*args, *kwargs.items()):
        if (arg_key := _build_arg_key(arg, has_no_values)) is None:
            return None
        key.append(arg_key)
    return tuple(key)


def _build_arg_key(arg: Any, has_no_values: Callable[[torch.Tensor], bool]) -> Any:
    if isinstance(arg, torch.Tensor):
        # Type promotion treats tensors without dimensions differently if they wrap a Python number, which the key does not show.
        return (arg.shape, arg.stride(), arg.dtype) if has_no_values(arg) and arg.dim() else None
    if isinstance(arg, list | tuple):
        keys = tuple(_build_arg_key(item, has_no_values) for item in arg)
        return None if None in keys else keys
    return (type(arg), arg) if isinstance(arg, _KEY_TYPES) else None


def describe_new_tensors(out: Any, args: Any, kwargs: Any) -> tuple[bool, tuple[NewTensor, ...]] | None:
    """Return what is needed to create the output of an operation again: whether it is a tuple, and shape, strides and dtype of each
    tensor.

    Returns None unless each tensor has a new storage of exactly its size that it shares with no other tensor. Other outputs (such
    as views) cannot be created this way.
    """
    tensors = out if isinstance(out, tuple) else (out,)
    if any(t.storage_offset() for t in tensors):
        return None
    inputs = (arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, torch.Tensor))
    storages = [t.untyped_storage() for t in (*tensors, *inputs)]
    new_tensors = tuple(NewTensor(t.shape, t.stride(), t.dtype) for t in tensors)
    output_storages = {storage._cdata for storage in storages[: len(new_tensors)]}
    if len(output_storages) < len(new_tensors) or output_storages & {storage._cdata for storage in storages[len(new_tensors) :]}:
        return None
    fill_storages = all(new.num_bytes == storage.nbytes() for new, storage in zip(new_tensors, storages, strict=False))
    return (isinstance(out, tuple), new_tensors) if fill_storages else None
