"""Results of operations that a plan has run before. On the meta device many operations of torch are written in Python, and take a
hundred times as long as making a tensor; and layers run the same few of them on the same shapes again and again.

The first of these that runs makes torch import its compiler, which takes as long as all of a plan. So where results follow at once
from what an operation gets (`simple_ops.py`), torch is not asked at all.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import torch

from megatron.planner.simple_ops import simple_result

_COMPILER = "torch._dynamo"
_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _Made(NamedTuple):
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


_known: dict[tuple[Any, ...], tuple[bool, tuple[_Made, ...]]] = {}
"""For an operation and a description of what it got: whether it gives several tensors, and those."""


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation of torch on tensors without memory, or make tensors such as it made of the like before."""
    key = _key(func, args, kwargs)
    if key is None:
        return _result(func, args, kwargs)
    if (known := _known.get(key)) is None:
        out = _result(func, args, kwargs)
        if (made := _made(out, args)) is not None:
            _known[key] = isinstance(out, tuple), made
        return out
    several, made = known
    tensors = tuple(torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta") for one in made)
    return tensors if several else tensors[0]


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    if (simple := simple_result(func, args, kwargs)) is not None:
        return simple
    without_compiler = _COMPILER not in sys.modules
    out = func(*args, **kwargs)
    if without_compiler and _COMPILER in sys.modules:
        gc.collect()  # errors within its import keep the frames of all callers in cycles, and with them tensors that nobody needs
    return out


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """None where the result may be more than a new tensor of the meta device, or depend on more than shapes."""
    if func.namespace != "aten" or func.is_view or func._schema.is_mutable:
        return None
    described = [func]
    for arg in (*args, *kwargs.items()):
        if (one := _described(arg)) is None:
            return None
        described.append(one)
    return tuple(described)


def _described(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        # A number that stands for a tensor without dimensions counts less for the dtype than one that is such a tensor.
        return (arg.shape, arg.stride(), arg.dtype) if type(arg) is torch.Tensor and arg.is_meta and arg.dim() else None
    if isinstance(arg, list | tuple):
        each = tuple(map(_described, arg))
        return None if None in each else each
    return (type(arg), arg) if isinstance(arg, _PLAIN) else None


def _made(out: Any, args: Any) -> tuple[_Made, ...] | None:
    """None where these are not tensors of the meta device, each with a storage of its own that is as large as itself."""
    tensors = out if isinstance(out, tuple) else (out,)
    if not all(type(one) is torch.Tensor and one.is_meta and not one.storage_offset() for one in tensors):
        return None
    storages = [one.untyped_storage() for one in (*tensors, *(arg for arg in args if isinstance(arg, torch.Tensor)))]
    made = tuple(_Made(one.shape, one.stride(), one.dtype) for one in tensors)
    own = {storage._cdata for storage in storages[: len(made)]}
    if len(own) < len(made) or own & {storage._cdata for storage in storages[len(made) :]}:
        return None
    exact = all(one.num_bytes == storage.nbytes() for one, storage in zip(made, storages, strict=False))
    return made if exact else None
