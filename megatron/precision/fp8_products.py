"""The products of a linear layer in 8 bits.

Shapes: x [..., in], w [out, in], dy [..., out]; `n` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron.config.precision import Fp8
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import SELF_GROUP, Group
from megatron.precision.formats import E4M3, E5M2, Format
from megatron.precision.products import Split
from megatron.precision.scaled_product import scaled_product, scaled_product_into
from megatron.precision.scaling import Grain, Quantised, magnitudes, quantised


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
