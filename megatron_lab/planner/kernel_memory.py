"""Memory of kernels that the meta device does not show: what they allocate while they run, and what CUDA's fused ones keep.

A plan for GPUs is made on machines without one. There the meta device runs the slow form of a fused operation, which keeps more. So
where the layers call such an operation, we put the one in its place that a GPU of compute capability 8.0 or newer would run, by the
conditions of torch (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, layer_norm_kernel.cu, Dropout.cpp).

Memory within a kernel is listed only where it counts beside activations. Sources: the kernels of torch 2.13 (aten/src/ATen/native:
ReduceOps.cpp, cuda/Indexing.cu, transformers/cuda/flash_attn/flash_api.cpp; torch/distributed/_symmetric_memory), and on CPU its
allocator's events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megatron.attention.backends import attention_kernel
from megatron.parallel.torch_private import (
    resolve_process_group,
    sdp_attention_math,
    sdp_cudnn_attention,
    sdp_efficient_attention,
    sdp_flash_attention,
)
from megatron.spec.attention_backends import AttentionCall

_NUMBERS_PER_ID = 6
"""Numbers of 8 bytes that CUDA has for each row while rows are added: its id and place, both sorted, and as much for the sort."""
_FLASH_BLOCK, _FLASH_CHANNELS = 128, 32
"""Flash attention rounds a sequence and a head up to multiples of these."""


def bytes_inside(func: Any, args: Any, kwargs: Any) -> int:
    """Bytes that an operation allocates and frees again, beside its result."""
    kernel = _OWN_MEMORY.get(func.name())
    return 0 if kernel is None else kernel(*args, **kwargs)


def _widened(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> int:
    """A sum in a wider dtype copies its input into it on CPU; CUDA widens 16 bits on the way."""
    return 0 if dtype in (None, x.dtype) or x.device.type != "cpu" else x.numel() * dtype.itemsize  # type: ignore[union-attr]


def _sorted_ids(into: torch.Tensor, ids: list[torch.Tensor], *_: Any) -> int:
    """Rows are added in the order of their ids, on CUDA."""
    return _NUMBERS_PER_ID * ids[0].nbytes


def _flash_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> int:
    """For [batch, heads, tokens, channels]."""
    batch, _heads, length, _size = q.shape
    return _flash_gradients(q, k, batch * -(-length // _FLASH_BLOCK) * _FLASH_BLOCK)


def _varied_flash_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any, **__: Any) -> int:
    """For documents laid end to end, [tokens, heads, channels]."""
    bounds = next(one for one in rest if isinstance(one, torch.Tensor) and one.dtype == torch.int32)
    return _flash_gradients(q, k, q.shape[0] + (len(bounds) - 1) * _FLASH_BLOCK)


def _flash_gradients(q: torch.Tensor, k: torch.Tensor, rows: int) -> int:
    """Flash attention's backward makes the gradient of q in float32, and of k and v for every query head that shares them.

    Args:
        rows: tokens, with every sequence rounded up.
    """
    heads, size = q.shape[1], q.shape[-1]
    wide = rows * heads * -(-size // _FLASH_CHANNELS) * _FLASH_CHANNELS * torch.float32.itemsize
    return wide + (0 if heads == k.shape[1] else 2 * q.nbytes)


def resolved(name: Any) -> dist.ProcessGroup:
    """The group of this name."""
    return resolve_process_group(name)


def gathered_bytes(x: torch.Tensor, matrices: list[torch.Tensor], dim: int, group: str) -> int:
    """What a product along with a gather gathers."""
    return x.nbytes * resolved(group).size()


def scattered_bytes(x: torch.Tensor, matrix: torch.Tensor, *_: Any) -> int:
    """What a product along with a reduce-scatter sums: the parts for all ranks, which are there at once."""
    return x.nbytes // x.shape[-1] * matrix.shape[-1]


def _gathered(*args: Any, return_A: bool = True) -> int:
    """A gathered input that is not asked for is there while it is multiplied."""
    return 0 if return_A else gathered_bytes(*args)


_OWN_MEMORY: dict[str, Callable[..., int]] = {
    "aten::sum": _widened,
    "aten::sum.dim_IntList": _widened,
    "aten::sum.IntList_out": _widened,
    "aten::_index_put_impl_": _sorted_ids,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    # An estimate: cuDNN's backward too adds the gradient of queries in float32, and makes those of keys and values for every query
    # head (github.com/NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h: dQ_accum, dK_fullhead, dV_fullhead).
    "aten::_scaled_dot_product_cudnn_attention_backward": _flash_backward,
    "torch_attn::_varlen_attn_backward": _varied_flash_backward,
    "aten::_flash_attention_backward": _varied_flash_backward,
    "symm_mem::fused_all_gather_matmul": _gathered,
    "symm_mem::fused_matmul_reduce_scatter": scattered_bytes,
}


class CudaKernels(TorchFunctionMode):
    """While it is entered, tensors of the meta device say that they are on CUDA, and fused operations are those of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if func in _CUDA_KERNELS:
            return _CUDA_KERNELS[func](*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> torch.Tensor:
    head_size = q.shape[-1]
    kernel = attention_kernel(
        AttentionCall(8 * q.itemsize, head_size, enable_gqa, on_cuda=True, dropout=dropout_p, value_size=v.shape[-1])
    )
    if kernel == "flash":
        if head_size % 8:
            q, k, v = (F.pad(x, (0, 8 - head_size % 8)) for x in (q, k, v))
        return sdp_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0][..., :head_size]
    if kernel == "cudnn":
        return sdp_cudnn_attention(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]
    if kernel == "efficient":
        return sdp_efficient_attention(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]
    return sdp_attention_math(q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _dropout(x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
    """Dropout that keeps a mask of one byte an element."""
    assert training and not inplace, "as the model calls it"
    return torch.native_dropout(x, p, True)[0]


class _RMSNorm(torch.autograd.Function):
    """Takes the memory of `_fused_rms_norm`, which keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=wide))
        return x * 1  # one kernel that reads and writes, as the fused one

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.add(grad, x), None if weight is None else torch.empty_like(weight)


def _rms_norm(x: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    assert weight is None or tuple(weight.shape) == shape, "one weight for each channel"
    return _RMSNorm.apply(x, weight)


_CUDA_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
}
