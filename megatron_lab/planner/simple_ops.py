"""Results of operations on tensors of the meta device that follow from what they get, so that torch need not be asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides
from torch.utils._pytree import tree_map_only

from megatron.parallel.torch_private import softmax_backward_data

aten = torch.ops.aten


def simple_result(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation of torch, with the shapes, strides and dtypes that torch gives it. None where that is not so
    simple."""
    if func.namespace != "aten" or func.is_view or kwargs.get("memory_format") is not None:
        return None
    if func is aten.arange.start_step and kwargs.get("device") == torch.device("meta"):
        return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
    leaves = [one for arg in (*args, *kwargs.values()) for one in (arg if isinstance(arg, list) else [arg])]
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    if not tensors or not all(type(one) in (Tensor, torch.nn.Parameter) and one.is_meta for one in tensors):
        return None
    if func._schema.is_mutable:
        return _written(func, args, kwargs)
    if func in _FILLED:
        return _FILLED[func](*args, **kwargs)
    if torch.Tag.pointwise in func.tags or func is aten.floor_divide.default:
        return _pointwise(func, args, kwargs, tensors)
    return _ORDERED[func](*args, **kwargs) if func in _ORDERED and all(map(_in_order, tensors)) else None


def _in_order(tensor: Tensor) -> bool:
    """Whether its elements lie in the order of its dimensions, perhaps with gaps or used again. Then those of a result do, without
    gaps."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride]
    return strides == sorted(strides, reverse=True)


def _written(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What an operation writes into and gives back. It is taken to be large enough unless it is empty."""
    written = [one.name for one in func._schema.arguments if one.is_out]
    if len(written) == 1:
        out: Tensor = kwargs[written[0]]
        return out if out.numel() else None
    return args[0] if torch.Tag.pointwise in func.tags and not written else None


def _pointwise(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Tensor | None:
    """Each number follows from those at its place. The dtype is that of the CPU's result for tensors of one number."""

    def small(tensor: Tensor) -> Tensor:
        return torch.ones((1,) * tensor.dim(), dtype=tensor.dtype)

    out = func(*tree_map_only(Tensor, small, args), **tree_map_only(Tensor, small, kwargs))
    if not isinstance(out, Tensor):
        return None
    alike = torch.broadcast_tensors(*tensors)
    if all(map(_in_order, tensors)):
        return torch.empty(alike[0].shape, dtype=out.dtype, device="meta")
    return torch.empty_strided(alike[0].shape, compute_elementwise_output_strides(*alike), dtype=out.dtype, device="meta")


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(())


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any((one.dtype, one.dim()) != (first.dtype, first.dim()) for one in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(one.shape[dim] for one in tensors)
    return first.new_empty(shape)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any(one.dtype != first.dtype for one in tensors):
        return None
    shape = list(first.shape)
    shape.insert(dim % (first.dim() + 1), len(tensors))
    return first.new_empty(shape)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result; mean and reciprocal deviation of each row, in float32 at least."""
    rows = (*x.shape[: -len(shape)], *(1 for _ in shape))
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=wide), x.new_empty(rows, dtype=wide)


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor] | None:
    if weight is None or bias is None or not all(mask):
        return None
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _dropout(x: Tensor, p: float, training: bool | None) -> tuple[Tensor, Tensor] | None:
    """The result, and a mask of one byte an element."""
    return (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)) if training and 0 < p < 1 else None


def _logsumexp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor | None:
    gone = {dim % x.dim() for dim in dims}
    return None if keepdim else x.new_empty([size for place, size in enumerate(x.shape) if place not in gone])


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)


_FILLED: dict[Any, Callable[..., Any]] = {aten.addmm.default: _addmm, aten.dot.default: _dot}
"""Those whose results have no gaps whatever the order of what they get."""
_ORDERED: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_dropout.default: _dropout,
    aten.logsumexp.default: _logsumexp,
    softmax_backward_data: _softmax_backward,
}
