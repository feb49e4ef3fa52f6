"""The three products of a linear layer, y = x w^T: output, gradient of the input, gradient of the weight. A layer asks one object.

Shapes: x [..., in], w [out, in], dy [..., out]; `n` tokens.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from megatron.config.imports import named
from megatron.config.precision import Fp8, PrecisionConfig
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


# ---- Which GPUs compute in 8 bits.

_CUBLAS_WITH_BLOCKS = (12, 9)
"""The first cuBLAS that takes scales in blocks; torch brings that of the CUDA that it was built with."""


def check_device(precision: PrecisionConfig, device: torch.device) -> None:
    """Check that the device of this rank has the products that --fp8-format asks for. On a CPU, and with --fp64, all are emulated.

    Raises:
        ValueError: it has not; with its name, and what it can do.
    """
    if precision.fp8_format is None or precision.fp64 or device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        raise ValueError(f"--fp8-format is built for NVIDIA's formats of 8 bits; {name} has others. Use --bf16 alone.")
    capability = torch.cuda.get_device_capability(device)
    lacking = why_not(Fp8(precision.fp8_format, precision.fp8_recipe), capability, torch.version.cuda or "0.0")
    if lacking is not None:
        raise ValueError(
            f"--fp8-format {precision.fp8_format} --fp8-recipe {precision.fp8_recipe} {lacking}; "
            f"{name} has {capability[0]}.{capability[1]}, torch CUDA {torch.version.cuda}."
        )


def why_not(fp8: Fp8, capability: tuple[int, int], cuda: str) -> str | None:
    """What a format and recipe need that is not there, or None (the conditions of aten/src/ATen/native/cuda/ScaledBlas.cpp).

    Args:
        capability: compute capability of the device.
        cuda: version of CUDA that torch was built with.
    """
    if capability < (8, 9):
        return "needs compute capability 8.9 or higher (use --bf16 alone)"
    if fp8.recipe == "blockwise":
        if fp8.format != "e4m3":  # cuda/ScaledBlasUtils.cpp, check_deepseek_recipe
            return "is not what torch's kernels take: with blocks both factors are e4m3 (use --fp8-format e4m3)"
        if capability[0] != 9:
            return "needs compute capability 9.0 (use --fp8-recipe rowwise or tensorwise)"
        if tuple(map(int, cuda.split(".")[:2])) < _CUBLAS_WITH_BLOCKS:
            return "needs a torch built with CUDA 12.9 or newer (use --fp8-recipe rowwise or tensorwise)"
    return None


def describe_precision(precision: PrecisionConfig, num_layers: int, device: torch.device, depths: int = 0) -> list[str]:
    """A line of the start-up log on products in fewer bits than the model has, if there are any."""
    if precision.fp32_matmul_precision == "high" and device.type == "cuda":
        return ["products of float32 in TensorFloat32, where the GPU has it (--fp32-matmul-precision high)"]
    if precision.fp8_format is None:
        return []
    total = num_layers + depths
    count = sum(precision.fp8_of(layer, num_layers) is not None for layer in range(total))
    gradients = "e5m2" if precision.fp8_format == "hybrid" else "e4m3"
    emulated = device.type != "cuda" or precision.fp64
    how = "emulated, which is slow and shows the numbers of a GPU" if emulated else "by the device's own kernels"
    return [
        f"products of linear layers in 8 bits in {count} of {total} layers ({precision.fp8_recipe} scales, weights and inputs "
        f"e4m3, gradients of outputs {gradients}), {how}; the output layer and all else in the model's dtype"
    ]
