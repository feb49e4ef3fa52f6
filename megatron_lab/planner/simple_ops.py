"""Outputs of simple operations on the meta device, inferred from the arguments without calling torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides
from torch.utils._pytree import tree_map_only

from megatron.parallel.torch_private import softmax_backward_data

aten = torch.ops.aten


def infer_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the output of an operation on meta tensors, with the shape, strides and dtype that torch would give it.

    Returns None if the rules of this module do not cover the operation.

    Args:
        func: operation as `__torch_dispatch__` gets it, to be called with `args` and `kwargs`.
    """
    if func.namespace != "aten" or func.is_view or kwargs.get("memory_format") is not None:
        return None
    if func is aten.arange.start_step and kwargs.get("device") == torch.device("meta"):
        return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
    leaves = [leaf for arg in (*args, *kwargs.values()) for leaf in (arg if isinstance(arg, list) else [arg])]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or not all(type(t) in (Tensor, torch.nn.Parameter) and t.is_meta for t in tensors):
        return None
    if func._schema.is_mutable:
        return _return_mutated(func, args, kwargs)
    if func in _CONTIGUOUS_OPS:
        return _CONTIGUOUS_OPS[func](*args, **kwargs)
    if torch.Tag.pointwise in func.tags or func is aten.floor_divide.default:
        return _infer_pointwise(func, args, kwargs, tensors)
    return _ORDERED_OPS[func](*args, **kwargs) if func in _ORDERED_OPS and all(map(_has_ordered_strides, tensors)) else None


def _has_ordered_strides(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are stored in the order of its dimensions, possibly with gaps or broadcast
    dimensions. If this holds for all arguments of an operation in this module, the output is also stored in this order, without
    gaps."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride]
    return strides == sorted(strides, reverse=True)


def _return_mutated(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the argument into which an operation writes and that it returns.

    The argument is assumed to be large enough for the result. Returns None if the argument is an empty tensor, which torch would
    resize, or if the operation is not known to return it.
    """
    out_names = [argument.name for argument in func._schema.arguments if argument.is_out]
    if len(out_names) == 1:
        out: Tensor = kwargs[out_names[0]]
        return out if out.numel() else None
    return args[0] if torch.Tag.pointwise in func.tags and not out_names else None


def _infer_pointwise(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the output of a pointwise operation, without data. Its dtype is found by running the operation on CPU tensors with one
    element."""

    def build_scalar_like(tensor: Tensor) -> Tensor:
        return torch.ones((1,) * tensor.dim(), dtype=tensor.dtype)

    out = func(*tree_map_only(Tensor, build_scalar_like, args), **tree_map_only(Tensor, build_scalar_like, kwargs))
    if not isinstance(out, Tensor):
        return None
    broadcast = torch.broadcast_tensors(*tensors)
    if all(map(_has_ordered_strides, tensors)):
        return torch.empty(broadcast[0].shape, dtype=out.dtype, device="meta")
    return torch.empty_strided(broadcast[0].shape, compute_elementwise_output_strides(*broadcast), dtype=out.dtype, device="meta")


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(())


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any((t.dtype, t.dim()) != (first.dtype, first.dim()) for t in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return first.new_empty(shape)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any(t.dtype != first.dtype for t in tensors):
        return None
    shape = list(first.shape)
    shape.insert(dim % (first.dim() + 1), len(tensors))
    return first.new_empty(shape)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors without data for the three outputs of layer norm: the normalized input, and the mean and reciprocal standard
    deviation of each row in at least float32."""
    rows = (*x.shape[: -len(shape)], *(1 for _ in shape))
    stats_dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=stats_dtype), x.new_empty(rows, dtype=stats_dtype)


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
    """Return tensors without data for the output of dropout and its mask of one byte per element. Returns None if nothing would be
    dropped."""
    return (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)) if training and 0 < p < 1 else None


def _logsumexp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor | None:
    reduced_dims = {dim % x.dim() for dim in dims}
    return None if keepdim else x.new_empty([size for i, size in enumerate(x.shape) if i not in reduced_dims])


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)


_CONTIGUOUS_OPS: dict[Any, Callable[..., Any]] = {aten.addmm.default: _addmm, aten.dot.default: _dot}
"""Operations whose results have no gaps, whatever the strides of the arguments."""
_ORDERED_OPS: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_dropout.default: _dropout,
    aten.logsumexp.default: _logsumexp,
    softmax_backward_data: _softmax_backward,
}
