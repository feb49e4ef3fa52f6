"""Memory that kernels take for themselves while they run: what no tensor of the program shows.

Only what counts beside activations is listed. Sources: the kernels of torch 2.13 (aten/src/ATen/native: ReduceOps.cpp,
cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu, transformers/cuda/flash_attn/flash_api.cpp), and on CPU its allocator's events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_FEW_TOKENS = 3072
"""Up to so many, the gradient of an embedding is summed row by row on CUDA."""
_ROWS_PER_THREAD = 10
_FLASH_BLOCK, _FLASH_CHANNELS = 128, 32
"""Flash attention rounds a sequence and a head up to multiples of these."""


def bytes_inside(func: Any, args: Any, kwargs: Any) -> int:
    """Bytes that an operation allocates and frees again, beside its result."""
    kernel = _KERNELS.get(func.name())
    return 0 if kernel is None else kernel(*args, **kwargs)


def _exponentials(x: torch.Tensor, *_: Any, **__: Any) -> int:
    """logsumexp makes exp(x - maximum)."""
    return x.nbytes


def _widened(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> int:
    """A sum in a wider dtype copies its input into it on CPU; CUDA widens 16 bits on the way."""
    return 0 if dtype in (None, x.dtype) or x.device.type != "cpu" else x.numel() * dtype.itemsize  # type: ignore[union-attr]


def _partial_rows(grad: torch.Tensor, ids: torch.Tensor, num_rows: int, *_: Any) -> int:
    """The gradient of an embedding is summed in parts, of one row each, on CUDA."""
    tokens = ids.numel()
    if tokens <= _FEW_TOKENS or grad.device.type == "cpu":
        return 0
    return (tokens // _ROWS_PER_THREAD + min(tokens, num_rows)) * grad.shape[-1] * torch.float32.itemsize


def _flash_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> int:
    """The gradient of the queries in float32, and those of keys and values for every query head where these share them."""
    batch, heads, length, size = q.shape
    return _wide_queries(batch * -(-length // _FLASH_BLOCK) * _FLASH_BLOCK, heads, size) + _expanded(q, heads, k.shape[1])


def _varied_flash_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any, **__: Any) -> int:
    """The same for documents one behind the other, [tokens, heads, channels]."""
    tokens, heads, size = q.shape
    bounds = next(one for one in rest if isinstance(one, torch.Tensor) and one.dtype == torch.int32)
    return _wide_queries(tokens + (len(bounds) - 1) * _FLASH_BLOCK, heads, size) + _expanded(q, heads, k.shape[1])


def _wide_queries(rows: int, heads: int, size: int) -> int:
    return rows * heads * -(-size // _FLASH_CHANNELS) * _FLASH_CHANNELS * torch.float32.itemsize


def _expanded(q: torch.Tensor, heads: int, kv_heads: int) -> int:
    return 0 if heads == kv_heads else 2 * q.nbytes


_KERNELS: dict[str, Callable[..., int]] = {
    "aten::logsumexp": _exponentials,
    "aten::logsumexp.out": _exponentials,
    "aten::sum": _widened,
    "aten::sum.dim_IntList": _widened,
    "aten::embedding_dense_backward": _partial_rows,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "torch_attn::_varlen_attn_backward": _varied_flash_backward,
}
