"""Matrix products in the form that the device computes fast.

On CPU, float16 products run at about 1 GFLOP/s (measured, one thread, against 95 in float32). So there they are computed in float32
and rounded back, which is also what a tensor core computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def slow_half(tensor: torch.Tensor) -> bool:
    """Whether products of this tensor should be computed in float32."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T + bias: [..., in] and [out, in] to [..., out]."""
    if slow_half(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).half()
    return F.linear(x, weight, bias)


def input_product(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gradient of a linear layer's input: [..., out] and [out, in] to [..., in]."""
    if slow_half(grad_output):
        return (grad_output.float() @ weight.float()).half()
    return grad_output @ weight


def weight_product(grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
    """Write or add grad_output^T x to `into`, with as few copies as the dtypes allow.

    Args:
        grad_output: [n, out].
        x: [n, in].
        into: [out, in], of the same dtype or float32.
        add: add to `into` instead of overwriting it.
    """
    if slow_half(x):
        grad_output, x = grad_output.float(), x.float()
    if into.dtype == x.dtype:
        if add:
            into.addmm_(grad_output.t(), x)
        else:
            torch.mm(grad_output.t(), x, out=into)
    elif x.is_cuda and into.dtype == torch.float32:
        # The product accumulates in float32 anyway; asking for it in float32 loses nothing to rounding.
        product = torch.mm(grad_output.t(), x, out_dtype=torch.float32)
        _ = into.add_(product) if add else into.copy_(product)
    else:
        product = grad_output.t() @ x
        _ = into.add_(product) if add else into.copy_(product)
