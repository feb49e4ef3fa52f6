"""Memory of CUDA kernels that the meta device does not show: temporary buffers, and the tensors that fused kernels save.

A plan for GPUs is made on machines without a GPU. There the meta device would run the unfused form of an operation, which saves
more memory. So `CudaKernels` replaces such operations by those that a GPU of compute capability 8.0 or newer runs. It follows the
conditions of torch (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, layer_norm_kernel.cu, Dropout.cpp).

Temporary memory of a kernel is listed only if it is not negligible beside activations. Sources: the kernels of torch 2.13
(aten/src/ATen/native: ReduceOps.cpp, cuda/Indexing.cu, transformers/cuda/flash_attn/flash_api.cpp;
torch/distributed/_symmetric_memory), and for CPUs the events of the allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megatron.attention.backends import select_kernel
from megatron.parallel.torch_private import (
    resolve_process_group,
    sdp_attention_math,
    sdp_cudnn_attention,
    sdp_efficient_attention,
    sdp_flash_attention,
)
from megatron.spec.attention_backends import AttentionCall

_INTS_PER_ID = 6
"""Number of 8-byte integers that CUDA allocates per row when rows are added by index: the index, its position, both again in
sorted order, and as many for the sort itself."""
_FLASH_BLOCK, _FLASH_CHANNELS = 128, 32
"""Flash attention rounds the sequence length and the head size up to multiples of these."""


def count_temporary_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that an operation allocates and frees while it runs, in addition to its output.

    Args:
        func: operation as `__torch_dispatch__` gets it, called with `args` and `kwargs`.
    """
    kernel = _TEMPORARY_MEMORY.get(func.name())
    return 0 if kernel is None else kernel(*args, **kwargs)


def _count_sum_bytes(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> int:
    """Count the temporary bytes of a sum of `x` whose result has a wider dtype than `x`. A CPU first copies `x` to the wider dtype;
    CUDA converts 16-bit elements while it adds them."""
    return 0 if dtype in (None, x.dtype) or x.device.type != "cpu" else x.numel() * dtype.itemsize  # type: ignore[union-attr]


def _count_index_put_bytes(into: torch.Tensor, ids: list[torch.Tensor], *_: Any) -> int:
    """Count the temporary bytes of adding rows to a tensor at given row indices. CUDA sorts the indices, and adds the rows in this
    order."""
    return _INTS_PER_ID * ids[0].nbytes


def _count_flash_backward_bytes(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count the temporary bytes of flash attention's backward for q and k of shape [batch, heads, tokens, channels]."""
    batch, _heads, seq_length, _size = q.shape
    return _count_flash_grad_bytes(q, k, batch * -(-seq_length // _FLASH_BLOCK) * _FLASH_BLOCK)


def _count_varlen_backward_bytes(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *args: Any, **__: Any) -> int:
    """Count the temporary bytes of flash attention's backward for packed documents, with q of shape [tokens, heads, channels]."""
    cu_seqlens = next(arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32)
    return _count_flash_grad_bytes(q, k, q.shape[0] + (len(cu_seqlens) - 1) * _FLASH_BLOCK)


def _count_flash_grad_bytes(q: torch.Tensor, k: torch.Tensor, rows: int) -> int:
    """Count the bytes of the temporary gradients in the backward of flash attention: the gradient of q in float32. With
    grouped-query attention, also the gradients of k and v for each query head.

    Args:
        rows: number of tokens, with the length of every sequence rounded up to a multiple of the kernel's block.
    """
    heads, head_size = q.shape[1], q.shape[-1]
    dq_bytes = rows * heads * -(-head_size // _FLASH_CHANNELS) * _FLASH_CHANNELS * torch.float32.itemsize
    return dq_bytes + (0 if heads == k.shape[1] else 2 * q.nbytes)


def resolve_group(name: Any) -> dist.ProcessGroup:
    """Return the process group that torch registered under this name."""
    return resolve_process_group(name)


def count_gathered_bytes(x: torch.Tensor, matrices: list[torch.Tensor], dim: int, group: str) -> int:
    """Return the bytes of `x` gathered from all ranks, the input of a matrix product that is fused with its all-gather."""
    return x.nbytes * resolve_group(group).size()


def count_scattered_bytes(x: torch.Tensor, matrix: torch.Tensor, *_: Any) -> int:
    """Return the bytes of the output of a matrix product before the reduce-scatter that is fused with it. The output has the rows
    of all ranks."""
    return x.nbytes // x.shape[-1] * matrix.shape[-1]


def _count_unreturned_gather_bytes(*args: Any, return_A: bool = True) -> int:
    """Return the temporary bytes of a matrix product that is fused with the all-gather of its input. The gathered input is
    temporary only if the operation does not return it."""
    return 0 if return_A else count_gathered_bytes(*args)


_TEMPORARY_MEMORY: dict[str, Callable[..., int]] = {
    "aten::sum": _count_sum_bytes,
    "aten::sum.dim_IntList": _count_sum_bytes,
    "aten::sum.IntList_out": _count_sum_bytes,
    "aten::_index_put_impl_": _count_index_put_bytes,
    "aten::_scaled_dot_product_flash_attention_backward": _count_flash_backward_bytes,
    # An estimate: cuDNN's backward also sums the gradient of q in float32, and creates those of k and v for every query head
    # (github.com/NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h: dQ_accum, dK_fullhead, dV_fullhead).
    "aten::_scaled_dot_product_cudnn_attention_backward": _count_flash_backward_bytes,
    "torch_attn::_varlen_attn_backward": _count_varlen_backward_bytes,
    "aten::_flash_attention_backward": _count_varlen_backward_bytes,
    "symm_mem::fused_all_gather_matmul": _count_unreturned_gather_bytes,
    "symm_mem::fused_matmul_reduce_scatter": count_scattered_bytes,
}


class CudaKernels(TorchFunctionMode):
    """Mode for tensors on the meta device: they report that they are on CUDA, and attention, dropout and RMSNorm save the tensors
    that CUDA's fused kernels save."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function. `is_cuda` returns True. Functions with a fused CUDA kernel are replaced by operations that save the
        same tensors as this kernel. All others run unchanged."""
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
    kernel = select_kernel(
        AttentionCall(8 * q.itemsize, head_size, enable_gqa, is_on_cuda=True, dropout=dropout_p, value_head_size=v.shape[-1])
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
    """Apply dropout as CUDA's fused kernel does, which saves a mask of one byte per element."""
    assert training and not inplace, "as the model calls it"
    return torch.native_dropout(x, p, True)[0]


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves for its backward what torch's `_fused_rms_norm` saves: the input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        dtype = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=dtype))
        return x * 1  # one kernel that reads and writes x, as the fused kernel does

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
