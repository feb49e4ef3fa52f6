"""Matrix products in the dtype that the device computes fast.

On CPUs, products in float16 reach about 1 GFLOP/s (measured on one thread, against 95 GFLOP/s in float32). Products in bfloat16
take 1.6 to 1.9 times as long as in float32 on an Intel processor without AMX tiles. In these cases products are computed in float32
and rounded once, which is also how a tensor core computes.

Shapes: [out, in] a weight, `n` rows (tokens), `k` the dimension that a product sums over, [v, h] a table of which rows are looked
up.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron.parallel.torch_private import index_put_impl_, is_amx_tile_supported, is_avx512_bf16_supported

_BLOCK_ELEMENTS = 1 << 25
"""Maximum number of elements of a matrix or product that is converted to another dtype at once."""
_FEW_ROWS = 32
"""Number of input rows below which converting the weight to float32 takes longer than the product in bfloat16."""


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32" for `torch.float32`.

    Works for all dtypes, including those that checkpoints do not support.
    """
    return str(dtype).removeprefix("torch.")


def is_slow_half(tensor: torch.Tensor) -> bool:
    """Return whether operations in the dtype of a tensor are slow on the tensor's device: float16 on a CPU."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def should_widen(x: torch.Tensor) -> bool:
    """Return whether to compute matrix products of x [..., k] in float32, because the device is slower in the dtype of x."""
    if x.device.type != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return x.dtype == torch.float16 or (x.numel() >= _FEW_ROWS * x.shape[-1] and not has_fast_bfloat16())


@functools.cache
def has_fast_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 faster than float32.

    The answer depends only on the processor model. If speed were measured instead, two starts of a run could choose differently and
    have different results. On x86, bfloat16 is fast with AMX tiles. It is also fast with AVX512-BF16 if that has twice the rate of
    float32, which is not so on Intel processors.
    """
    if platform.machine().lower() not in ("x86_64", "amd64") or is_amx_tile_supported():
        return True
    cpu = Path("/proc/cpuinfo")
    return is_avx512_bf16_supported() and not (cpu.is_file() and "GenuineIntel" in cpu.read_text())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight^T + bias: x [..., in] and weight [out, in] to [..., out]."""
    return _compute_rounded_product(x, weight.t(), bias) if should_widen(x) else F.linear(x, weight, bias)


def matmul_into(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Write x @ matrix + bias to `out`: x [n, k] and matrix [k, m] to [n, m]. For use outside of autograd."""
    if should_widen(x):
        return _write_rounded_product(out, x, matrix, bias)
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)


def compute_input_product(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a linear layer's input, grad_output @ weight: [..., out] and [out, in] to [..., in]."""
    return _compute_rounded_product(grad_output, weight, None) if should_widen(grad_output) else grad_output @ weight


def _compute_rounded_product(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(*x.shape[:-1], matrix.shape[1])
    _write_rounded_product(out.view(-1, matrix.shape[1]), x.flatten(0, -2), matrix, bias)
    return out


def _write_rounded_product(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Write x @ matrix + bias to `out`, computed in float32 and rounded once. The matrix is converted to float32 block by block to
    limit the memory."""
    x, block_size = x.float(), max(1, _BLOCK_ELEMENTS // matrix.shape[0])
    for start in range(0, matrix.shape[1], block_size):
        columns = slice(start, start + block_size)
        block = matrix[:, columns].float()
        out[:, columns] = x @ block if bias is None else torch.addmm(bias[columns].float(), x, block)
        del block  # free it before the next block is converted
    return out


def compute_weight_product(grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
    """Write or add the weight gradient grad_output^T @ x to `into`, with as few copies as the dtypes allow.

    Args:
        grad_output: gradient of the output, [n, out] for `n` tokens.
        x: input, [n, in].
        into: [out, in], in the dtype of `x` or float32.
        add: add to `into` instead of overwriting it.
    """
    grad_columns = grad_output.t()
    if should_widen(x):
        x = x.float()
        block_size = max(1, _BLOCK_ELEMENTS // len(x))
        for out_block, grad_block in zip(into.split(block_size), grad_columns.split(block_size), strict=True):
            _write_product(grad_block.float(), x, out_block, add=add)
    elif into.dtype == x.dtype:
        _write_product(grad_columns, x, into, add=add)
    elif into.dtype == torch.float32 and has_float32_output(x.device, x.dtype):
        # Tensor cores accumulate in float32 anyway, so this avoids a rounding and a second tensor.
        if add:
            torch.addmm(into, grad_columns, x, out_dtype=torch.float32, out=into)
        else:
            torch.mm(grad_columns, x, out_dtype=torch.float32, out=into)
    else:
        block_size = max(1, _BLOCK_ELEMENTS // into.shape[1])
        for out_block, grad_block in zip(into.split(block_size), grad_columns.split(block_size), strict=True):
            _write_product(grad_block, x, out_block, add=add)


def _write_product(rows: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Write the matrix product rows @ x to `out`, or add the product to `out`. A separate tensor is allocated for the product only
    if `out` has another dtype."""
    if out.dtype != x.dtype:
        product = rows @ x
        _ = out.add_(product) if add else out.copy_(product)
    elif add:
        out.addmm_(rows, x)
    else:
        torch.mm(rows, x, out=out)


@functools.cache
def has_float32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device can write or add matrix products of this dtype directly to float32 memory.

    CUDA can since torch 2.10; ROCm and CPUs cannot. The function tries such a product once per device and dtype, without waiting
    for its result.
    """
    if device.type in ("cpu", "meta"):
        return device.type == "meta"  # the planner uses the meta device in place of CUDA
    x = torch.zeros(16, 16, device=device, dtype=dtype)
    out = torch.empty(16, 16, device=device)
    try:
        torch.mm(x, x, out_dtype=torch.float32, out=out)
        torch.addmm(out, x, x, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def add_rows(table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows [n, h] to the rows of `table` [v, h] at the indices `ids` [n], which may repeat.

    No second tensor [v, h] is allocated, and results are deterministic. On CPUs, index_add_ adds the rows one after the other. On
    CUDA, index_add_ uses atomics in arbitrary order. Therefore index_put_ is used there: it sorts the ids with a stable sort and
    adds the rows of each id one after the other (aten/src/ATen/native/cuda/Indexing.cu). Its bounds check would make the host wait,
    and is skipped because the lookup has already read these rows.
    """
    if table.is_cuda:
        index_put_impl_(table, [ids], rows, True, True)  # accumulate=True, unsafe=True: no bounds check
    else:
        table.index_add_(0, ids, rows)
