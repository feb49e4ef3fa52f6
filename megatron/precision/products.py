"""The three products of a linear layer, y = x w^T: output, gradient of the input, gradient of the weight. A layer asks one object.

Shapes: x [..., in], w [out, in], dy [..., out]; `n` tokens.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from megatron.config.imports import named
from megatron.config.precision import Fp8
from megatron.parallel.context import Group
from megatron.parallel.products import input_product, linear, weight_product

Split = Literal["nothing", "outputs", "inputs", "tokens"]
"""What of a product a tensor group divides."""


class Products(Protocol):
    """What a linear layer's products are computed by."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x w^T + bias."""

    def input_gradient(self, grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dy w."""

    def weight_gradient(self, grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        """The product dy^T x, written or added: [n, out] and [n, in], to `into` [out, in], of the same dtype or float32."""


class PlainProducts:
    """Products in the dtype of the factors."""

    output = staticmethod(linear)
    input_gradient = staticmethod(input_product)
    weight_gradient = staticmethod(weight_product)


PLAIN: Products = PlainProducts()


def products_of(fp8: Fp8 | None, group: Group, split: Split, sharers: Group) -> Products:
    """The products of a layer; see `Fp8Products`."""
    if fp8 is None:
        return PLAIN
    found: Products = named("megatron.precision.fp8_products:Fp8Products")(fp8, group, split, sharers)
    return found
