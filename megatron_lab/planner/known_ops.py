"""Results of operations that a plan has run before. On the meta device many operations of torch are written in Python, and take a
hundred times as long as making a tensor; and layers run the same few of them on the same shapes again and again.

The first of these that runs makes torch import its compiler, which takes as long as all of a plan. So where results follow at once
from what an operation gets (`simple_ops.py`), torch is not asked at all.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from megatron_lab.planner.simple_ops import simple_result

_COMPILER = "torch._dynamo"
_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class MadeTensor(NamedTuple):
    """A tensor that an operation made."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes from its first to its last element."""
        if not self.shape.numel():
            return 0
        return (1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """Another such tensor, of the meta device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_known: dict[tuple[Any, ...], tuple[bool, tuple[MadeTensor, ...]]] = {}
"""For an operation and a description of what it got: whether it gives several tensors, and those."""


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation of torch on tensors without memory, or make tensors such as it made of the like before."""
    may_be_known = func.namespace == "aten" and not func.is_view and not func._schema.is_mutable
    key = key_of(func, args, kwargs, _is_plain) if may_be_known else None
    if key is None:
        return _result(func, args, kwargs)
    if (known := _known.get(key)) is None:
        out = _result(func, args, kwargs)
        if all(map(_is_plain, out if isinstance(out, tuple) else (out,))) and (result := made(out, args, kwargs)) is not None:
            _known[key] = result
        return out
    several, tensors = known
    found = tuple(one.tensor() for one in tensors)
    return found if several else found[0]


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    if (simple := simple_result(func, args, kwargs)) is not None:
        return simple
    without_compiler = _COMPILER not in sys.modules
    out = func(*args, **kwargs)
    if without_compiler and _COMPILER in sys.modules:
        gc.collect()  # errors within its import keep the frames of all callers in cycles, and with them tensors that nobody needs
    return out


def _is_plain(one: Any) -> bool:
    return type(one) is torch.Tensor and one.is_meta


def key_of(func: Any, args: Any, kwargs: Any, follows_from_its_shape: Callable[[torch.Tensor], bool]) -> tuple[Any, ...] | None:
    """Describe an operation and what it gets. None where the result may depend on more than shapes, strides, dtypes and numbers."""
    described = [func]
    for arg in (*args, *kwargs.items()):
        if (one := _described(arg, follows_from_its_shape)) is None:
            return None
        described.append(one)
    return tuple(described)


def _described(arg: Any, follows_from_its_shape: Callable[[torch.Tensor], bool]) -> Any:
    if isinstance(arg, torch.Tensor):
        # A number that stands for a tensor without dimensions counts less for the dtype than one that is such a tensor.
        return (arg.shape, arg.stride(), arg.dtype) if follows_from_its_shape(arg) and arg.dim() else None
    if isinstance(arg, list | tuple):
        each = tuple(_described(one, follows_from_its_shape) for one in arg)
        return None if None in each else each
    return (type(arg), arg) if isinstance(arg, _PLAIN) else None


def made(out: Any, args: Any, kwargs: Any) -> tuple[bool, tuple[MadeTensor, ...]] | None:
    """Whether an operation gave several tensors, and those. None where not each has a storage of its own that is as large as it
    is."""
    tensors = out if isinstance(out, tuple) else (out,)
    if any(one.storage_offset() for one in tensors):
        return None
    got = (arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, torch.Tensor))
    storages = [one.untyped_storage() for one in (*tensors, *got)]
    described = tuple(MadeTensor(one.shape, one.stride(), one.dtype) for one in tensors)
    own = {storage._cdata for storage in storages[: len(described)]}
    if len(own) < len(described) or own & {storage._cdata for storage in storages[len(described) :]}:
        return None
    exact = all(one.num_bytes == storage.nbytes() for one, storage in zip(described, storages, strict=False))
    return (isinstance(out, tuple), described) if exact else None
