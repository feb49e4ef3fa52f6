"""Operations at which the host would wait for a GPU, seen on the meta device.

Tensors of the meta device stand for those of a GPU; those of the CPU are in host memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lab.planner.op_cache import run_op

_READS = ("_local_scalar_dense", "is_nonzero", "equal")
_COUNTS = ("nonzero", "argwhere", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount")
"""The size of the result depends on values, so the host must know them."""
_BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
_UPDATES = ("_fused_adamw_", "_fused_sgd_")
"""They have no form for the meta device, and return nothing."""
_WATCHED = {*_UPDATES, *_READS, *_COUNTS, *_BY_INDEX, "repeat_interleave"}
_MAKES = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
"""From numbers of the host: they are copied from memory that is not pinned, and the host waits until they are there."""
_PLAN = "/megatron_lab/planner/"
"""Puts the kernels of CUDA in the place of others."""
_SUBSCRIPTS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Give a list that fills, in order, with each operation at which the host waits, and the place in the project that asks for it.

    What is read comes out as ones, so that a step goes on.
    """
    found: list[str] = []
    with _Functions(found), _Operations(found):
        yield found


class _Functions(TorchFunctionMode):
    """What torch does with numbers of the host before operations see them."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _MAKES and _on_device(result) and not (args and isinstance(args[-1], torch.Tensor) and _on_device(args[-1])):
            _note(self._found, f"{func.__name__} on the device")
        if func in _SUBSCRIPTS and _on_device(args[0]) and any(isinstance(leaf, list) for leaf in _subscripts(args[1])):
            _note(self._found, "a list as index")
        return result


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs)
        if name in _WATCHED and any(isinstance(leaf, torch.Tensor) and _on_device(leaf) for leaf in tree_leaves((args, kwargs))):
            if name in _UPDATES:
                return None
            if name in _READS:
                _note(self._found, f"{name} reads a value")
                return 1.0 if name == "_local_scalar_dense" else True
            if name in _COUNTS:
                _note(self._found, f"{name}: its size depends on values")
            if name in _BY_INDEX:
                for index in (leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)):
                    if index.dtype in (torch.bool, torch.uint8):
                        _note(self._found, f"{name} by a mask")
                    elif not _on_device(index):
                        _note(self._found, f"{name} by indices in host memory")
            if name == "repeat_interleave" and kwargs.get("output_size") is None:
                _note(self._found, "repeat_interleave without output_size")
        return run_op(func, args, kwargs)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        if kwargs.get("non_blocking") or args[2:3] == (True,) or args[2:3] == [True]:
            return func(*args, **kwargs) if target is None or _on_device(target) else target
        to_device = _on_device(target) if target is not None else torch.device(kwargs.get("device") or source.device).type == "meta"
        if _on_device(source) and not to_device:
            _note(self._found, f"{name} to the host")
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype) if target is None else target.fill_(1)
        if to_device and not _on_device(source):
            _note(self._found, f"{name} to the device")
        return func(*args, **kwargs)


def _note(found: list[str], what: str) -> None:
    ours = [frame for frame in traceback.extract_stack() if "/megatron/" in frame.filename and _PLAN not in frame.filename]
    where = f" ({ours[-1].filename.rsplit('/megatron/')[-1]}:{ours[-1].lineno} in {ours[-1].name})" if ours else ""
    found.append(what + where)


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _subscripts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)
