"""The product a b^T of matrices in 8 bits: by the device's own kernels on CUDA; elsewhere, and for a float64 model everywhere, by
an emulation, which decodes both and multiplies in float32 or float64.

On CUDA: `scaled_mm` of `torch_private` with one scale a tensor or a row, `torch.nn.functional.scaled_mm` with blocks
(aten/src/ATen/native/cuda/ScaledBlas.cpp). Both take a first operand with contiguous rows and a second one with contiguous
columns, with sizes that are multiples of 16. They sum exact products of 8 bits in float32 (a tensor core keeps fewer digits than
that), while an emulated number is rounded once more when it is decoded; so the two agree to rounding, not bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from megatron.parallel.torch_private import scaled_mm
from megatron.precision.scaling import Quantised

_BLOCK_ELEMENTS = 1 << 25
"""A product that is added to others is made in blocks of rows of so many elements."""
_PADDED_STRIPS = 4
"""The scales of tiles lie in columns of a multiple of so many."""


def scaled_product(
    a: Quantised, b: Quantised, dtype: torch.dtype, bias: torch.Tensor | None = None, *, fast: bool = False
) -> torch.Tensor:
    """a b^T + bias: [m, k] and [n, k] to [m, n].

    Args:
        dtype: of the result.
        bias: [n], in that dtype.
        fast: let the device sum in fewer digits (`use_fast_accum`: Hopper adds up in its tensor cores alone).
    """
    if _has_kernels(a):
        return _on_device(a, b, dtype, bias, fast=fast)
    product = a.decoded() @ b.decoded().t()
    return (product if bias is None else product.add_(bias)).to(dtype)


def scaled_product_into(into: torch.Tensor, a: Quantised, b: Quantised, *, add: bool) -> None:
    """Write or add a b^T, [m, k] and [n, k], to `into` [m, n]."""
    if not _has_kernels(a) and into.dtype == a.scale.dtype:
        left, right = a.decoded(), b.decoded().t()
        _ = into.addmm_(left, right) if add else torch.mm(left, right, out=into)
        return
    size = max(1, _BLOCK_ELEMENTS // into.shape[1])
    for first in range(0, len(into), size):
        part = into[first : first + size]
        product = scaled_product(a.rows(first, first + size), b, _gradient_dtype(a, into))
        _ = part.add_(product) if add else part.copy_(product)
        del product  # before the next one


def _has_kernels(a: Quantised) -> bool:
    """Whether the device's kernels take it. A model in float64 is for proofs and is emulated everywhere."""
    return a.values.is_cuda and a.scale.dtype == torch.float32


def _on_device(a: Quantised, b: Quantised, dtype: torch.dtype, bias: torch.Tensor | None, *, fast: bool) -> torch.Tensor:
    if a.grain in ("tensor", "row"):
        return scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), bias=bias, out_dtype=dtype, use_fast_accum=fast
        )
    types: Any = F.ScalingType
    kinds = {"strip": types.BlockWise1x128, "tile": types.BlockWise128x128}
    product = F.scaled_mm(
        a.values,
        b.values.t(),
        _as_kernels_read(a),
        kinds[a.grain],
        _as_kernels_read(b),
        kinds[b.grain],
        output_dtype=dtype,
    )
    return product if bias is None else product.add_(bias)


def _as_kernels_read(matrix: Quantised) -> torch.Tensor:
    """Scales of blocks in the order of memory that the kernels want: of strips [rows, k / 128], of tiles [k / 128, rows / 128] with
    rows added up to a multiple of 4; in both the first dimension is contiguous."""
    scale = matrix.scale
    if matrix.grain == "strip":
        return scale.t().contiguous().t()
    return F.pad(scale, (0, -scale.shape[1] % _PADDED_STRIPS)).t()


def _gradient_dtype(a: Quantised, into: torch.Tensor) -> torch.dtype:
    """In what a weight gradient is made: as its destination, where the kernel can."""
    if a.grain == "row" and _has_kernels(a) and a.values.device.type == "cuda" and not _rows_give_float32(a.values.device):
        return torch.bfloat16
    return into.dtype


@functools.cache
def _rows_give_float32(device: torch.device) -> bool:
    """Whether a product with one scale a row can be made in float32: by cuBLAS, but not by all versions of torch's own kernel."""
    a, one = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device=device), torch.ones(16, 1, device=device)
    try:
        scaled_mm(a, a.t(), scale_a=one, scale_b=one.t(), out_dtype=torch.float32)
    except (RuntimeError, ValueError):
        return False
    return True
