"""The products of a linear layer in 8 bits.

Shapes: x [..., in], w [out, in], dy [..., out]; `n` tokens.
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
from megatron.precision.products import Split

# ---- Matrices in 8 bits with scales: value = number in 8 bits x scale. A scale is the largest magnitude of those that share it
# over the largest number of the format, so that none is cut.
#
# Every matrix is [rows, k] with the dimension k that a product sums over last. Who shares a scale, its grain, is
#
# ======= ======================== =====================
# grain   shares a scale           shape of the scales
# ======= ======================== =====================
# tensor  the matrix               [1, 1]
# row     a row                    [rows, 1]
# strip   128 numbers of a row     [rows, k / 128]
# tile    a square of 128 x 128    [rows / 128, k / 128]
# ======= ======================== =====================
#
# Scales are float32, float64 for a model in float64. They are not rounded to powers of two: products of H100 take any, and a scale
# that fits loses less.

# ---- The two formats of 8 bits (Micikevicius et al. 2022), and the rounding of numbers to them.


@dataclass(frozen=True)
class Format:
    """A format of 8 bits: sign, exponent, mantissa."""

    name: str
    dtype: torch.dtype
    largest: float
    """The largest number; what is above it is cut to it."""


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)


def rounded_into(out: torch.Tensor, numbers: torch.Tensor, format_: Format) -> None:
    """Write numbers, in float32 or float64, to `out` in a format of 8 bits: cut to its range, then to the nearest, ties to even.

    A float64 is rounded to float32 first, as torch does it. What is not a number stays so. `numbers` are changed.
    """
    out.copy_(numbers.clamp_(-format_.largest, format_.largest).float())


Grain = Literal["tensor", "row", "strip", "tile"]
BLOCK = 128
"""Length of a strip, side of a tile."""
_ELEMENTS_AT_ONCE = 1 << 25
"""Numbers that are in float32 at once while a matrix is quantised; a multiple of a tile's rows."""


@dataclass(frozen=True)
class Quantised:
    """A matrix [rows, k] in 8 bits, rows contiguous."""

    values: torch.Tensor
    scale: torch.Tensor
    grain: Grain

    def decoded(self) -> torch.Tensor:
        """The numbers that it stands for, in the dtype of its scales."""
        values = self.values.to(self.scale.dtype)
        return _in_blocks(values, self.grain).mul_(_beside_blocks(self.scale, self.grain)).view_as(values)

    def rows(self, first: int, end: int) -> Quantised:
        """Some of its rows, of any grain but tile."""
        scale = self.scale if self.grain == "tensor" else self.scale[first:end]
        return Quantised(self.values[first:end], scale, self.grain)


def magnitudes(x: torch.Tensor, grain: Grain) -> torch.Tensor:
    """The largest magnitude among those of x [rows, k] that share a scale, in the shape and dtype of the scales. One that is not a
    number makes the whole so."""
    dims = {"tensor": (0, 1), "row": (1,), "strip": (2,), "tile": (1, 3)}[grain]
    found: torch.Tensor = torch.linalg.vector_norm(_in_blocks(x, grain), math.inf, dim=dims, keepdim=grain in ("tensor", "row"))
    return found.to(torch.promote_types(x.dtype, torch.float32))


def quantised(x: torch.Tensor, largest: torch.Tensor, grain: Grain, format_: Format) -> Quantised:
    """Round a matrix [rows, k], of any strides.

    Args:
        largest: the magnitudes that stand for the largest numbers of the format. Where it is 0, the scale is 1.
    """
    scale = largest / format_.largest
    scale = scale.masked_fill_(scale == 0, 1.0)
    values = torch.empty(x.shape, dtype=format_.dtype, device=x.device)
    # As many rows at once as are so many numbers, and whole tiles.
    size = max(1, _ELEMENTS_AT_ONCE // (BLOCK * x.shape[1])) * BLOCK
    for first in range(0, len(x), size):
        part, scales = x[first : first + size], scale
        if grain in ("row", "strip"):
            scales = scale[first : first + size]
        elif grain == "tile":
            scales = scale[first // BLOCK : (first + size) // BLOCK]
        # A scale has as many dimensions as x, so the quotient has its dtype.
        numbers = _in_blocks(part, grain) / _beside_blocks(scales, grain)
        rounded_into(_in_blocks(values[first : first + size], grain), numbers, format_)
    return Quantised(values, scale, grain)


def _in_blocks(x: torch.Tensor, grain: Grain) -> torch.Tensor:
    """A view with one dimension for the blocks of each split dimension."""
    if grain == "strip":
        return x.unflatten(1, (-1, BLOCK))
    return x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)) if grain == "tile" else x


def _beside_blocks(scale: torch.Tensor, grain: Grain) -> torch.Tensor:
    """Scales in a shape that goes with `_in_blocks`."""
    if grain == "strip":
        return scale[:, :, None]
    return scale[:, None, :, None] if grain == "tile" else scale


# ---- The product a b^T of matrices in 8 bits: by the device's own kernels on CUDA; elsewhere, and for a float64 model
# everywhere, by
# an emulation, which decodes both and multiplies in float32 or float64.
#
# On CUDA: `scaled_mm` of `torch_private` with one scale a tensor or a row, `torch.nn.functional.scaled_mm` with blocks
# (aten/src/ATen/native/cuda/ScaledBlas.cpp). Both take a first operand with contiguous rows and a second one with contiguous
# columns, with sizes that are multiples of 16. They sum exact products of 8 bits in float32 (a tensor core keeps fewer digits than
# that), while an emulated number is rounded once more when it is decoded; so the two agree to rounding, not bit for bit.

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


class _Factor(NamedTuple):
    """A matrix [rows, k] of a product that sums over k."""

    matrix: torch.Tensor
    format: Format
    grain: Grain
    k_split: bool
    """Whether the tensor group divides k."""
    rows_split: bool
    """Whether it divides the rows."""
    tokens: Literal["k", "rows"] | None = None
    """The dimension of the tokens, which context ranks divide."""

    @property
    def shares_scales(self) -> bool:
        """Whether a tensor rank sees only some of the numbers that have a scale in common. (Blocks lie on one rank: a rule asks
        for sizes that make it so.)"""
        return (self.k_split and self.grain in ("tensor", "row")) or (self.rows_split and self.grain == "tensor")

    @property
    def shares_scales_of_tokens(self) -> bool:
        """Whether a context rank does."""
        return (self.tokens == "k" and self.grain in ("tensor", "row")) or (self.tokens == "rows" and self.grain == "tensor")


_GRAINS: dict[str, tuple[Grain, Grain]] = {
    "tensorwise": ("tensor", "tensor"),
    "rowwise": ("row", "row"),
    "blockwise": ("strip", "tile"),
}
"""The grains of activations and gradients, and of weights, by recipe."""


class Fp8Products:
    """Products in 8 bits. Weights and inputs are e4m3; gradients of outputs too, or with the hybrid format e5m2.

    Scales follow from the numbers at hand: nothing is remembered from one product to the next. They are those that one process
    would take: where the tensor or the context group divides numbers with a common scale, its ranks take the maximum over all.

    A matrix is quantised anew for each product, since each sums over another dimension, along which scales may not change within a
    row or a strip. So the gradient of the weight, which sums over tokens, has factors with scales by column, not those of
    the other two products turned round.

    Args:
        group: the tensor ranks.
        split: what they divide: the weight's rows, its columns, or the tokens.
        sharers: the context ranks, which divide the tokens.
    """

    def __init__(self, fp8: Fp8, group: Group, split: Split, sharers: Group = SELF_GROUP) -> None:
        self.group, self.sharers = group, sharers
        self._of_tokens, self._of_weight = _GRAINS[fp8.recipe]
        self._gradients = E5M2 if fp8.format == "hybrid" else E4M3
        self._outputs_split, self._inputs_split, self._tokens_split = (
            group.size > 1 and split == which for which in ("outputs", "inputs", "tokens")
        )
        # Hopper sums fast in fewer digits; gradients are summed in all of them. Kernels with blocks have no such choice.
        self._fast = fp8.recipe != "blockwise"

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Products`."""
        out_split, in_split = self._outputs_split, self._inputs_split
        a, b = self._quantised(
            _Factor(x.flatten(0, -2), E4M3, self._of_tokens, in_split, rows_split=self._tokens_split, tokens="rows"),
            _Factor(weight, E4M3, self._of_weight, in_split, rows_split=out_split),
        )
        return scaled_product(a, b, x.dtype, bias, fast=self._fast).view(*x.shape[:-1], -1)

    def input_gradient(self, grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Products`."""
        out_split, in_split = self._outputs_split, self._inputs_split
        a, b = self._quantised(
            _Factor(
                grad_output.flatten(0, -2),
                self._gradients,
                self._of_tokens,
                out_split,
                rows_split=self._tokens_split,
                tokens="rows",
            ),
            _Factor(weight.t(), E4M3, self._of_weight, out_split, rows_split=in_split),
        )
        return scaled_product(a, b, grad_output.dtype).view(*grad_output.shape[:-1], -1)

    def weight_gradient(self, grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        """See `Products`."""
        out_split, in_split = self._outputs_split, self._inputs_split
        a, b = self._quantised(
            _Factor(grad_output.t(), self._gradients, self._of_tokens, self._tokens_split, rows_split=out_split, tokens="k"),
            _Factor(x.t(), E4M3, self._of_tokens, self._tokens_split, rows_split=in_split, tokens="k"),
        )
        scaled_product_into(into, a, b, add=add)

    def _quantised(self, *factors: _Factor) -> list[Quantised]:
        largest = [magnitudes(factor.matrix, factor.grain) for factor in factors]
        largest = _over(self.group, largest, [factor.shares_scales for factor in factors])
        if self.sharers.size > 1:
            largest = _over(self.sharers, largest, [factor.shares_scales_of_tokens for factor in factors])
        return [
            quantised(factor.matrix, numbers, factor.grain, factor.format) for factor, numbers in zip(factors, largest, strict=True)
        ]


def _over(group: Group, largest: list[torch.Tensor], shared: Sequence[bool]) -> list[torch.Tensor]:
    """Those that are shared as maxima over the ranks, in one message."""
    if not any(shared):
        return largest
    own = [numbers for numbers, one in zip(largest, shared, strict=True) if one]
    joined = all_reduce(torch.cat([numbers.flatten() for numbers in own]), group, dist.ReduceOp.MAX)
    parts = iter(joined.split([numbers.numel() for numbers in own]))
    return [next(parts).view_as(numbers) if one else numbers for numbers, one in zip(largest, shared, strict=True)]
