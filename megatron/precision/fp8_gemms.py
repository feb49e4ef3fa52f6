"""Matrix products of a linear layer in 8-bit floating point, with scaling factors per tensor, row or block.

Shapes: x [..., in], w [out, in], dy [..., out]; `n` tokens.

A matrix to quantize is [rows, k], where `k` is the dimension that the product sums over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.config.precision import Fp8
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import SELF_GROUP, Group
from megatron.parallel.torch_private import scaled_mm
from megatron.precision.gemms import GemmSplit

# ---- Quantized matrices: value = 8-bit element x scale. A scale is the largest magnitude (amax) of the elements that share it,
# divided by the largest value of the 8-bit type, so that no element is clamped.
#
# Every matrix is [rows, k]; products sum over the last dimension k. The granularity says which elements share a scale:
#
# =========== =========================== =====================
# granularity elements that share a scale shape of the scales
# =========== =========================== =====================
# tensor      the matrix                  [1, 1]
# row         a row                       [rows, 1]
# strip       128 elements of a row       [rows, k / 128]
# tile        a block of 128 x 128        [rows / 128, k / 128]
# =========== =========================== =====================
#
# Scales are float32, or float64 in a float64 model. They are not rounded to powers of two: H100 kernels accept any scale, and an
# exact scale loses less precision.

# ---- The two 8-bit types (Micikevicius et al. 2022), and casts to them.


@dataclass(frozen=True)
class Fp8Type:
    """8-bit floating-point type: e4m3 or e5m2, named by its numbers of exponent and mantissa bits."""

    name: str
    dtype: torch.dtype
    max_value: float
    """Largest finite value. Casts clamp larger values to it."""


E4M3 = Fp8Type("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Fp8Type("e5m2", torch.float8_e5m2, 57344.0)


def cast_into(out: torch.Tensor, values: torch.Tensor, fp8_type: Fp8Type) -> None:
    """Cast float32 or float64 values to an 8-bit type and write them to `out`. `values` is modified in place.

    Values are clamped to the range of the type and then rounded to nearest, ties to even. A float64 is first rounded to float32, as
    in torch. NaN stays NaN.
    """
    out.copy_(values.clamp_(-fp8_type.max_value, fp8_type.max_value).float())


ScaleGranularity = Literal["tensor", "row", "strip", "tile"]
BLOCK_SIZE = 128
"""Length of a strip, and side length of a tile."""
_QUANTIZE_CHUNK_ELEMENTS = 1 << 25
"""Elements of a matrix that are quantized at once, which bounds the float32 temporaries. A multiple of the rows of a tile."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """Matrix [rows, k] in 8 bits with contiguous rows, and the scaling factors by which its elements are multiplied. `granularity`
    says which elements share a scale."""

    values: torch.Tensor
    scale: torch.Tensor
    granularity: ScaleGranularity

    def dequantize(self) -> torch.Tensor:
        """Return the 8-bit elements multiplied by their scales, in the dtype of the scales."""
        values = self.values.to(self.scale.dtype)
        return _view_as_blocks(values, self.granularity).mul_(_align_scale(self.scale, self.granularity)).view_as(values)

    def slice_rows(self, start: int, end: int) -> QuantizedMatrix:
        """Return the rows [start, end) with their scales. The granularity must not be "tile"."""
        scale = self.scale if self.granularity == "tensor" else self.scale[start:end]
        return QuantizedMatrix(self.values[start:end], scale, self.granularity)


def compute_amax(x: torch.Tensor, granularity: ScaleGranularity) -> torch.Tensor:
    """Return the largest magnitude (amax) of the elements that share a scale, for each scale of x [rows, k].

    The returned tensor has the shape and dtype of the scales. If any of the elements is NaN, their amax is NaN.
    """
    dims = {"tensor": (0, 1), "row": (1,), "strip": (2,), "tile": (1, 3)}[granularity]
    amax: torch.Tensor = torch.linalg.vector_norm(
        _view_as_blocks(x, granularity), math.inf, dim=dims, keepdim=granularity in ("tensor", "row")
    )
    return amax.to(torch.promote_types(x.dtype, torch.float32))


def quantize(x: torch.Tensor, amax: torch.Tensor, granularity: ScaleGranularity, fp8_type: Fp8Type) -> QuantizedMatrix:
    """Quantize a matrix [rows, k] to 8 bits. The matrix may have any strides.

    Args:
        amax: for each scale, the largest magnitude of the elements that share it. This magnitude is mapped to the largest value of
            the 8-bit type. Where it is 0, the scale is 1.
    """
    scale = amax / fp8_type.max_value
    scale = scale.masked_fill_(scale == 0, 1.0)
    values = torch.empty(x.shape, dtype=fp8_type.dtype, device=x.device)
    # Quantize about _QUANTIZE_CHUNK_ELEMENTS at once, in multiples of the rows of a tile.
    chunk_rows = max(1, _QUANTIZE_CHUNK_ELEMENTS // (BLOCK_SIZE * x.shape[1])) * BLOCK_SIZE
    for start in range(0, len(x), chunk_rows):
        rows, scales = x[start : start + chunk_rows], scale
        if granularity in ("row", "strip"):
            scales = scale[start : start + chunk_rows]
        elif granularity == "tile":
            scales = scale[start // BLOCK_SIZE : (start + chunk_rows) // BLOCK_SIZE]
        # Both tensors have the same number of dimensions, so type promotion gives the quotients the dtype of the scales.
        quotients = _view_as_blocks(rows, granularity) / _align_scale(scales, granularity)
        cast_into(_view_as_blocks(values[start : start + chunk_rows], granularity), quotients, fp8_type)
    return QuantizedMatrix(values, scale, granularity)


def _view_as_blocks(x: torch.Tensor, granularity: ScaleGranularity) -> torch.Tensor:
    """Return a view of a matrix in which each dimension that scales divide into blocks is split into (number of blocks, block
    size). Elements with a common scale then differ only in their indices within the block."""
    if granularity == "strip":
        return x.unflatten(1, (-1, BLOCK_SIZE))
    return x.unflatten(1, (-1, BLOCK_SIZE)).unflatten(0, (-1, BLOCK_SIZE)) if granularity == "tile" else x


def _align_scale(scale: torch.Tensor, granularity: ScaleGranularity) -> torch.Tensor:
    """Return a view of the scales that broadcasts to the result of `_view_as_blocks`, so that each element is multiplied by its
    scale."""
    if granularity == "strip":
        return scale[:, :, None]
    return scale[:, None, :, None] if granularity == "tile" else scale


# ---- The product a b^T of quantized matrices. CUDA devices have native kernels. Other devices, and float64 models on every device,
# use an emulation that dequantizes both matrices and multiplies in float32 or float64.
#
# The native kernels are `scaled_mm` of `torch_private` (one scale per tensor or row) and `torch.nn.functional.scaled_mm` (blocks),
# implemented in aten/src/ATen/native/cuda/ScaledBlas.cpp. Both require a first operand with contiguous rows, a second operand with
# contiguous columns, and sizes that are multiples of 16. They accumulate exact 8-bit products in float32 (tensor cores keep fewer
# bits than that). The emulation also rounds each dequantized element, so both agree up to rounding, not bit for bit.

_MATMUL_CHUNK_ELEMENTS = 1 << 25
"""Elements of a product that are computed at once before they are added to the output.

The limit bounds the size of the temporary.
"""
_TILE_SCALE_ALIGNMENT = 4
"""Kernels expect the columns of tile scales to be padded to a multiple of this number."""


def scaled_matmul(
    a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, bias: torch.Tensor | None = None, *, use_fast_accum: bool = False
) -> torch.Tensor:
    """Return the matrix product a @ b^T + bias, for a [m, k] and b [n, k].

    Args:
        dtype: dtype of the returned product.
        bias: [n], in that dtype.
        use_fast_accum: allow accumulation in lower precision (`use_fast_accum` of torch: Hopper then accumulates in the tensor
            cores only).
    """
    if _has_native_kernel(a):
        return _native_scaled_matmul(a, b, dtype, bias, use_fast_accum=use_fast_accum)
    product = a.dequantize() @ b.dequantize().t()
    return (product if bias is None else product.add_(bias)).to(dtype)


def scaled_matmul_into(out: torch.Tensor, a: QuantizedMatrix, b: QuantizedMatrix, *, add: bool) -> None:
    """Write the matrix product a @ b^T to `out` [m, n], or add it if `add` is true, for a [m, k] and b [n, k]."""
    if not _has_native_kernel(a) and out.dtype == a.scale.dtype:
        left, right = a.dequantize(), b.dequantize().t()
        _ = out.addmm_(left, right) if add else torch.mm(left, right, out=out)
        return
    chunk_rows = max(1, _MATMUL_CHUNK_ELEMENTS // out.shape[1])
    for start in range(0, len(out), chunk_rows):
        out_rows = out[start : start + chunk_rows]
        product = scaled_matmul(a.slice_rows(start, start + chunk_rows), b, _select_weight_grad_dtype(a, out))
        _ = out_rows.add_(product) if add else out_rows.copy_(product)
        del product  # free its memory before the next chunk is computed


def _has_native_kernel(a: QuantizedMatrix) -> bool:
    """Return whether the device has a kernel for products of this matrix in 8 bits. Without a kernel the products are emulated.

    A float64 model, which only proofs of correctness use, is always emulated.
    """
    return a.values.is_cuda and a.scale.dtype == torch.float32


def _native_scaled_matmul(
    a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, bias: torch.Tensor | None, *, use_fast_accum: bool
) -> torch.Tensor:
    if a.granularity in ("tensor", "row"):
        return scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum
        )
    scaling_types: Any = F.ScalingType
    scaling_type_of = {"strip": scaling_types.BlockWise1x128, "tile": scaling_types.BlockWise128x128}
    product = F.scaled_mm(
        a.values,
        b.values.t(),
        _arrange_scale_for_kernel(a),
        scaling_type_of[a.granularity],
        _arrange_scale_for_kernel(b),
        scaling_type_of[b.granularity],
        output_dtype=dtype,
    )
    return product if bias is None else product.add_(bias)


def _arrange_scale_for_kernel(matrix: QuantizedMatrix) -> torch.Tensor:
    """Return the scales of a matrix with scales per strip (128 elements of a row) or tile (128 x 128), in the memory layout that
    kernels expect.

    Strip scales have the shape [rows, k / 128]. Tile scales have the shape [k / 128, rows / 128], where rows / 128 is padded to a
    multiple of 4. In both, the first dimension is contiguous.
    """
    scale = matrix.scale
    if matrix.granularity == "strip":
        return scale.t().contiguous().t()
    return F.pad(scale, (0, -scale.shape[1] % _TILE_SCALE_ALIGNMENT)).t()


def _select_weight_grad_dtype(a: QuantizedMatrix, out: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the weight gradient is computed: that of `out`, or bfloat16 if the kernel supports no other
    dtype."""
    if (
        a.granularity == "row"
        and _has_native_kernel(a)
        and a.values.device.type == "cuda"
        and not _supports_float32_rowwise(a.values.device)
    ):
        return torch.bfloat16
    return out.dtype


@functools.cache
def _supports_float32_rowwise(device: torch.device) -> bool:
    """Return whether the device can write 8-bit matrix products with one scale per row in float32.

    cuBLAS can. Torch's own kernel can in some versions only.
    """
    a, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device=device), torch.ones(16, 1, device=device)
    try:
        scaled_mm(a, a.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.float32)
    except (RuntimeError, ValueError):
        return False
    return True


class _Operand(NamedTuple):
    """Operand [rows, k] of an 8-bit matrix product that sums over k. Also says how tensor and context parallelism split its
    dimensions."""

    matrix: torch.Tensor
    fp8_type: Fp8Type
    granularity: ScaleGranularity
    is_k_split: bool
    """Whether the tensor-parallel group splits k."""
    is_rows_split: bool
    """Whether the tensor-parallel group splits the rows."""
    token_dim: Literal["k", "rows"] | None = None
    """Dimension of the tokens, which the context-parallel group splits; None for a weight."""

    @property
    def needs_tensor_reduce(self) -> bool:
        """Whether a tensor-parallel rank has only some of the elements that share a scale. Their largest magnitude (amax) must then
        be reduced over the tensor-parallel ranks.

        Blocks are never split across ranks: a check of the settings requires suitable sizes.
        """
        return (self.is_k_split and self.granularity in ("tensor", "row")) or (self.is_rows_split and self.granularity == "tensor")

    @property
    def needs_context_reduce(self) -> bool:
        """Whether a context-parallel rank has only some of the elements that share a scale. Their largest magnitude (amax) must
        then be reduced over the context-parallel ranks."""
        return (self.token_dim == "k" and self.granularity in ("tensor", "row")) or (
            self.token_dim == "rows" and self.granularity == "tensor"
        )


_GRANULARITIES: dict[str, tuple[ScaleGranularity, ScaleGranularity]] = {
    "tensorwise": ("tensor", "tensor"),
    "rowwise": ("row", "row"),
    "blockwise": ("strip", "tile"),
}
"""Scale granularities of each recipe: (of activations and gradients, of weights)."""


class Fp8Gemms:
    """Matrix products of a linear layer in 8 bits: an implementation of `LinearGemms`.

    Weights and inputs are e4m3. Output gradients are e4m3 too, or e5m2 with the hybrid format.

    Scales are computed from the current values; no state is carried from one product to the next. They are independent of the
    parallel layout: if ranks of the tensor- or context-parallel group have different elements that share a scale, they take the
    maximum over all of these elements.

    A matrix is quantized again for each product, because each product sums over another dimension, along which the scale of a row
    or a strip must be constant. So the weight gradient, which sums over tokens, needs scales per column. Transposing the quantized
    operands of the other two products would not give these scales.

    Args:
        group: tensor-parallel group.
        split: dimension that the tensor-parallel group splits: outputs or inputs of the weight, or the tokens.
        context_group: context-parallel group, which splits the tokens.
    """

    def __init__(self, fp8: Fp8, group: Group, split: GemmSplit, context_group: Group = SELF_GROUP) -> None:
        self.group, self.context_group = group, context_group
        self._token_granularity, self._weight_granularity = _GRANULARITIES[fp8.recipe]
        self._grad_type = E5M2 if fp8.format == "hybrid" else E4M3
        self._outputs_split, self._inputs_split, self._tokens_split = (
            group.size > 1 and split == split_name for split_name in ("outputs", "inputs", "tokens")
        )
        # Hopper's fast accumulation has fewer bits, so only outputs use it; gradients do not. Blockwise kernels lack the option.
        self._uses_fast_accum = fp8.recipe != "blockwise"

    def compute_output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output of the layer, x @ w^T + bias, computed in 8 bits: x [..., in] and w [out, in] to [..., out]."""
        is_out_split, is_in_split = self._outputs_split, self._inputs_split
        a, b = self._quantize(
            _Operand(
                x.flatten(0, -2), E4M3, self._token_granularity, is_in_split, is_rows_split=self._tokens_split, token_dim="rows"
            ),
            _Operand(weight, E4M3, self._weight_granularity, is_in_split, is_rows_split=is_out_split),
        )
        return scaled_matmul(a, b, x.dtype, bias, use_fast_accum=self._uses_fast_accum).view(*x.shape[:-1], -1)

    def compute_input_grad(self, grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the layer's input, dy @ w, computed in 8 bits: dy [..., out] and w [out, in] to [..., in]."""
        is_out_split, is_in_split = self._outputs_split, self._inputs_split
        a, b = self._quantize(
            _Operand(
                grad_output.flatten(0, -2),
                self._grad_type,
                self._token_granularity,
                is_out_split,
                is_rows_split=self._tokens_split,
                token_dim="rows",
            ),
            _Operand(weight.t(), E4M3, self._weight_granularity, is_out_split, is_rows_split=is_in_split),
        )
        return scaled_matmul(a, b, grad_output.dtype).view(*grad_output.shape[:-1], -1)

    def compute_weight_grad(self, grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        """Compute the weight gradient dy^T @ x in 8 bits, and write it to `into` [out, in], or add it if `add` is true.

        Args:
            grad_output: dy, [n, out] for `n` tokens.
            x: [n, in].
        """
        is_out_split, is_in_split = self._outputs_split, self._inputs_split
        a, b = self._quantize(
            _Operand(
                grad_output.t(),
                self._grad_type,
                self._token_granularity,
                self._tokens_split,
                is_rows_split=is_out_split,
                token_dim="k",
            ),
            _Operand(x.t(), E4M3, self._token_granularity, self._tokens_split, is_rows_split=is_in_split, token_dim="k"),
        )
        scaled_matmul_into(into, a, b, add=add)

    def _quantize(self, *operands: _Operand) -> list[QuantizedMatrix]:
        amaxes = [compute_amax(operand.matrix, operand.granularity) for operand in operands]
        amaxes = _reduce_amax(self.group, amaxes, [operand.needs_tensor_reduce for operand in operands])
        if self.context_group.size > 1:
            amaxes = _reduce_amax(self.context_group, amaxes, [operand.needs_context_reduce for operand in operands])
        return [
            quantize(operand.matrix, amax, operand.granularity, operand.fp8_type)
            for operand, amax in zip(operands, amaxes, strict=True)
        ]


def _reduce_amax(group: Group, amaxes: list[torch.Tensor], needs_reduce: Sequence[bool]) -> list[torch.Tensor]:
    """Return the amax tensors (largest magnitudes), of which the selected ones are replaced by their maximum over the ranks of
    `group`. One all-reduce serves all selected tensors.

    Args:
        needs_reduce: for each tensor, whether to reduce it.
    """
    if not any(needs_reduce):
        return amaxes
    to_reduce = [amax for amax, is_partial in zip(amaxes, needs_reduce, strict=True) if is_partial]
    reduced = all_reduce(torch.cat([amax.flatten() for amax in to_reduce]), group, dist.ReduceOp.MAX)
    chunks = iter(reduced.split([amax.numel() for amax in to_reduce]))
    return [next(chunks).view_as(amax) if is_partial else amax for amax, is_partial in zip(amaxes, needs_reduce, strict=True)]
