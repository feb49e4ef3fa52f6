"""The three matrix products (GEMMs) of a linear layer y = x @ w^T: output, input gradient and weight gradient.

A linear layer calls one `LinearGemms` object for all three.

Shapes: x [..., in], w [out, in], dy [..., out]; `n` tokens.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from megatron.config.imports import import_object
from megatron.config.precision import Fp8, PrecisionConfig
from megatron.parallel.context import Group
from megatron.parallel.matmul import compute_input_product, compute_weight_product, linear

GemmSplit = Literal["nothing", "outputs", "inputs", "tokens"]
"""Dimension of a linear layer's matrices that the tensor-parallel group splits: outputs or inputs of the weight, or the tokens."""


class LinearGemms(Protocol):
    """Interface of implementations of the three matrix products of a linear layer: output, input gradient and weight gradient."""

    def compute_output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output of the layer, x @ w^T + bias: x [..., in] and w [out, in] to [..., out]."""

    def compute_input_grad(self, grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the layer's input, dy @ w: dy [..., out] and w [out, in] to [..., in]."""

    def compute_weight_grad(self, grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        """Compute the weight gradient dy^T @ x, and write it to `into`, or add it if `add` is true.

        Args:
            grad_output: gradient dy of the output, [n, out] for `n` tokens.
            x: input, [n, in].
            into: [out, in], in the dtype of the operands or float32.
        """


class DefaultGemms:
    """Matrix products of a linear layer in the dtype of the operands (not in 8 bits)."""

    compute_output = staticmethod(linear)
    compute_input_grad = staticmethod(compute_input_product)
    compute_weight_grad = staticmethod(compute_weight_product)


DEFAULT_GEMMS: LinearGemms = DefaultGemms()


def build_gemms(fp8: Fp8 | None, group: Group, split: GemmSplit, context_group: Group) -> LinearGemms:
    """Build the implementation of a linear layer's matrix products: in 8 bits (`Fp8Gemms`) if `fp8` is set, otherwise in the dtype
    of the operands.

    Args:
        group: tensor-parallel group.
        split: dimension of the layer's matrices that the tensor-parallel group splits.
        context_group: context-parallel group.
    """
    if fp8 is None:
        return DEFAULT_GEMMS
    gemms: LinearGemms = import_object("megatron.precision.fp8_gemms:Fp8Gemms")(fp8, group, split, context_group)
    return gemms


# ---- Support of 8-bit products by devices.

_MIN_CUDA_FOR_BLOCKWISE = (12, 9)
"""First CUDA version whose cuBLAS supports blockwise scales. Torch bundles the cuBLAS of the CUDA version it was built with."""


def check_fp8_support(precision: PrecisionConfig, device: torch.device) -> None:
    """Check that the device of this rank supports the 8-bit products of --fp8-format.

    CPUs, and all devices with --fp64, emulate the products and need no support.

    Raises:
        ValueError: the GPU, or the CUDA version of the installed torch, does not support them.
    """
    if precision.fp8_format is None or precision.fp64 or device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        raise ValueError(f"--fp8-format uses NVIDIA's 8-bit types, which {name} lacks. Use --bf16 without --fp8-format.")
    capability = torch.cuda.get_device_capability(device)
    problem = find_fp8_problem(Fp8(precision.fp8_format, precision.fp8_recipe), capability, torch.version.cuda or "0.0")
    if problem is not None:
        raise ValueError(
            f"--fp8-format {precision.fp8_format} --fp8-recipe {precision.fp8_recipe} {problem}; "
            f"{name} has compute capability {capability[0]}.{capability[1]}, and torch was built with CUDA {torch.version.cuda}."
        )


def find_fp8_problem(fp8: Fp8, capability: tuple[int, int], cuda: str) -> str | None:
    """Return why the GPU cannot compute products in this 8-bit format and recipe, or None if it can. The reason is the end of a
    sentence, such as "needs compute capability 9.0".

    The conditions are those of aten/src/ATen/native/cuda/ScaledBlas.cpp.

    Args:
        capability: compute capability of the GPU (major, minor).
        cuda: CUDA version that torch was built with.
    """
    if capability < (8, 9):
        return "needs compute capability 8.9 or higher (use --bf16 without --fp8-format)"
    if fp8.recipe == "blockwise":
        if fp8.format != "e4m3":  # cuda/ScaledBlasUtils.cpp, check_deepseek_recipe
            return "is not supported by torch's kernels: with blockwise scales, both operands must be e4m3 (use --fp8-format e4m3)"
        if capability[0] != 9:
            return "needs compute capability 9.0 (use --fp8-recipe rowwise or tensorwise)"
        if tuple(map(int, cuda.split(".")[:2])) < _MIN_CUDA_FOR_BLOCKWISE:
            return "needs a torch built with CUDA 12.9 or newer (use --fp8-recipe rowwise or tensorwise)"
    return None


def format_precision(precision: PrecisionConfig, num_layers: int, device: torch.device, num_mtp_layers: int = 0) -> list[str]:
    """Return a list with the start-up log line about matrix products in lower precision than the model. The list is empty if all
    products have the precision of the model."""
    if precision.fp32_matmul_precision == "high" and device.type == "cuda":
        return ["products of float32 in TensorFloat32, where the GPU has it (--fp32-matmul-precision high)"]
    if precision.fp8_format is None:
        return []
    num_total = num_layers + num_mtp_layers
    num_fp8_layers = sum(precision.get_fp8(layer, num_layers) is not None for layer in range(num_total))
    grad_type = "e5m2" if precision.fp8_format == "hybrid" else "e4m3"
    is_emulated = device.type != "cuda" or precision.fp64
    implementation = "emulated, which is slow and gives the results of a GPU" if is_emulated else "by the device's own kernels"
    return [
        f"products of linear layers in 8 bits in {num_fp8_layers} of {num_total} layers ({precision.fp8_recipe} scales, "
        f"weights and inputs e4m3, gradients of outputs {grad_type}), {implementation}; "
        "the output layer and all else in the model's dtype"
    ]
