"""Matrix products in the form that the device computes fast.

On CPU, float16 products run at about 1 GFLOP/s (measured, one thread, against 95 in float32), and bfloat16 products take 1.6 to 1.9
times as long as float32 ones on an Intel processor without tiles (AMX). So there they are computed in float32 and rounded once,
which is also what a tensor core computes.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron.parallel.torch_private import index_put_impl_, is_amx_tile_supported, is_avx512_bf16_supported

_BLOCK_ELEMENTS = 1 << 25
"""A matrix or product that is made in other bits on the way is made in blocks of so many elements."""
_FEW_ROWS = 32
"""With fewer, widening the weight takes longer than a product in bfloat16."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`; also for dtypes that checkpoints do not hold."""
    return str(dtype).removeprefix("torch.")


def slow_half(tensor: torch.Tensor) -> bool:
    """Whether this device is slow in the tensor's dtype whatever it computes."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def widens(x: torch.Tensor) -> bool:
    """Whether products of x [..., k] should be computed in float32."""
    if x.device.type != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return x.dtype == torch.float16 or (x.numel() >= _FEW_ROWS * x.shape[-1] and not fast_bfloat16())


@functools.cache
def fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32, told by what it is: a measurement might differ from one start
    to the next, and with it the bits. x86 does so by tiles, or by AVX512-BF16 where that runs at twice the rate (not Intel's)."""
    if platform.machine().lower() not in ("x86_64", "amd64") or is_amx_tile_supported():
        return True
    cpu = Path("/proc/cpuinfo")
    return is_avx512_bf16_supported() and not (cpu.is_file() and "GenuineIntel" in cpu.read_text())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T + bias: [..., in] and [out, in] to [..., out]."""
    return _rounded(x, weight.t(), bias) if widens(x) else F.linear(x, weight, bias)


def product_into(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Write x matrix + bias to `out`: [n, k] and [k, m] to [n, m]. Outside of autograd."""
    if widens(x):
        return _round_into(out, x, matrix, bias)
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)


def input_product(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gradient of a linear layer's input: [..., out] and [out, in] to [..., in]."""
    return _rounded(grad_output, weight, None) if widens(grad_output) else grad_output @ weight


def _rounded(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(*x.shape[:-1], matrix.shape[1])
    _round_into(out.view(-1, matrix.shape[1]), x.flatten(0, -2), matrix, bias)
    return out


def _round_into(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Write x matrix + bias to `out`, computed in float32. Never is more of the matrix widened than a block."""
    x, size = x.float(), max(1, _BLOCK_ELEMENTS // matrix.shape[0])
    for place in range(0, matrix.shape[1], size):
        columns = slice(place, place + size)
        part = matrix[:, columns].float()
        out[:, columns] = x @ part if bias is None else torch.addmm(bias[columns].float(), x, part)
        del part  # before the next one
    return out


def weight_product(grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
    """Write or add grad_output^T x to `into`, with as few copies as the dtypes allow.

    Args:
        grad_output: [n, out].
        x: [n, in].
        into: [out, in], of the same dtype or float32.
        add: add to `into` instead of overwriting it.
    """
    columns = grad_output.t()
    if widens(x):
        x = x.float()
        size = max(1, _BLOCK_ELEMENTS // len(x))
        for part, some in zip(into.split(size), columns.split(size), strict=True):
            _product(some.float(), x, part, add=add)
    elif into.dtype == x.dtype:
        _product(columns, x, into, add=add)
    elif into.dtype == torch.float32 and writes_wide_products(x.device, x.dtype):
        # A tensor core accumulates in float32 anyway: so nothing is lost to rounding, and there is no second tensor.
        if add:
            torch.addmm(into, columns, x, out_dtype=torch.float32, out=into)
        else:
            torch.mm(columns, x, out_dtype=torch.float32, out=into)
    else:
        size = max(1, _BLOCK_ELEMENTS // into.shape[1])
        for part, some in zip(into.split(size), columns.split(size), strict=True):
            _product(some, x, part, add=add)


def _product(rows: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
    """Write or add rows x to `into`; only where that has another dtype the product exists beside it."""
    if into.dtype != x.dtype:
        product = rows @ x
        _ = into.add_(product) if add else into.copy_(product)
    elif add:
        into.addmm_(rows, x)
    else:
        torch.mm(rows, x, out=into)


@functools.cache
def writes_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype can be written and added to float32 memory: on CUDA from torch 2.10 on, not on ROCm nor on
    CPU. It is tried, once for each device, without waiting for the result."""
    if device.type in ("cpu", "meta"):
        return device.type == "meta"  # in a plan for CUDA
    few = torch.zeros(16, 16, device=device, dtype=dtype)
    into = torch.empty(16, 16, device=device)
    try:
        torch.mm(few, few, out_dtype=torch.float32, out=into)
        torch.addmm(into, few, few, out_dtype=torch.float32, out=into)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def add_rows(into: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows [n, h] to the rows of `into` [v, h] that `ids` [n] name, some perhaps several times, without a second [v, h].

    The same bits in every run: the CPU's index_add_ adds one row after the other. On CUDA that one adds atomically, in any order;
    there index_put_ sorts the ids (stably) and adds the rows of one id one after the other (aten/src/ATen/native/cuda/Indexing.cu).
    Its check of the ids would make the host wait. It is left out: the lookup has read these rows already.
    """
    if into.is_cuda:
        index_put_impl_(into, [ids], rows, True, True)  # accumulate, without the check
    else:
        into.index_add_(0, ids, rows)
