"""What torch's CUDA kernels keep for backward, on tensors of the meta device.

A plan for GPUs is made on machines without one, and of a fused operation the meta device runs the slow form, which keeps more. So
where the layers call such an operation, the one that a GPU of compute capability 8.0 or newer would run takes its place, by the
conditions of torch (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, layer_norm_kernel.cu, Dropout.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

AttentionKernel = Literal["flash", "memory-efficient", "math"]

_LARGEST_FLASH_HEAD = 256


class CudaKernels(TorchFunctionMode):
    """While it is entered, tensors of the meta device say that they are on CUDA, and fused operations are those of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if func in _KERNELS:
            return _KERNELS[func](*args, **kwargs)
        return func(*args, **kwargs)


def attention_kernel(dtype: torch.dtype, head_size: int, *, grouped: bool) -> AttentionKernel:
    """The kernel that `scaled_dot_product_attention` chooses for a causal mask without further mask.

    Args:
        grouped: fewer key-value heads than query heads.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if half and head_size <= _LARGEST_FLASH_HEAD:
        return "flash"  # or cuDNN's, which keeps the same
    if dtype != torch.float64 and not grouped and head_size % (8 if half else 4) == 0:
        return "memory-efficient"
    return "math"


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> torch.Tensor:
    aten, head_size = torch.ops.aten, q.shape[-1]
    kernel = attention_kernel(q.dtype, head_size, grouped=enable_gqa)
    if kernel == "flash":
        if head_size % 8:
            q, k, v = (F.pad(x, (0, 8 - head_size % 8)) for x in (q, k, v))
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0][..., :head_size]
    if kernel == "memory-efficient":
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, is_causal)[0]
    return aten._scaled_dot_product_attention_math(q, k, v, None, dropout_p, is_causal, enable_gqa=enable_gqa)[0]


def _dropout(x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
    """Keeps a mask of one byte an element."""
    assert training and not inplace, "as the model calls it"
    return torch.native_dropout(x, p, True)[0]


class _RMSNorm(torch.autograd.Function):
    """The memory of `_fused_rms_norm`: keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor, eps: float) -> torch.Tensor:
    assert tuple(weight.shape) == shape, "one weight for each channel"
    return _RMSNorm.apply(x, weight)


_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
}
