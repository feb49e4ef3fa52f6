"""Which kernel computes attention, and what it keeps: for the layers that call it, and for a plan on a machine without the device.

The conditions are those of torch (aten/src/ATen/native/transformers: sdp_utils_cpp.cpp, cuda/sdp_utils.cpp).
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

AttentionKernel = Literal["flash", "memory-efficient", "math"]
"""The first two keep a number for each row; math multiplies, keeps the probabilities and, with dropout, its mask."""

LARGEST_FLASH_HEAD = 256
"""Channels."""


def attention_kernel(dtype: torch.dtype, head_size: int, *, grouped: bool, flash: bool = True) -> AttentionKernel:
    """The kernel that `scaled_dot_product_attention` chooses on CUDA for a causal mask without further mask.

    Args:
        grouped: fewer key-value heads than query heads.
        flash: the GPU has flash attention.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if half and flash and head_size <= LARGEST_FLASH_HEAD:
        return "flash"  # or cuDNN's, which keeps the same
    if dtype != torch.float64 and not grouped and head_size % (8 if half else 4) == 0:
        return "memory-efficient"
    return "math"


def keeps_probabilities(q: torch.Tensor, *, grouped: bool, dropout: float) -> bool:
    """Whether attention of these queries [..., d] keeps its probabilities. On CPU flash attention takes all but dropout."""
    if not q.is_cuda:
        return dropout > 0.0
    return attention_kernel(q.dtype, q.shape[-1], grouped=grouped, flash=flash_runs_on(q.device)) == "math"


@functools.cache
def flash_runs_on(device: torch.device) -> bool:
    """Whether this GPU has flash attention."""
    if device.type == "meta":  # in a plan, for GPUs that this machine need not have
        return True
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
