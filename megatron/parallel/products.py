"""Matrix products in the form that the device computes fast.

On CPU, float16 products run at about 1 GFLOP/s (measured, one thread, against 95 in float32). So there they are computed in float32
and rounded back, which is also what a tensor core computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_BLOCK_ELEMENTS = 1 << 25
"""A weight gradient that has to be made in other bits than its destination's is made in blocks of rows of so many elements."""


def slow_half(tensor: torch.Tensor) -> bool:
    """Whether products of this tensor should be computed in float32."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T + bias: [..., in] and [out, in] to [..., out]."""
    if slow_half(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).half()
    return F.linear(x, weight, bias)


def product_into(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Write x matrix + bias to `out`: [n, k] and [k, m] to [n, m]. Outside of autograd."""
    if slow_half(x):
        product = x.float() @ matrix.float()
        return out.copy_(product if bias is None else product.add_(bias))
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)


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
    else:
        size = max(1, _BLOCK_ELEMENTS // into.shape[1])
        for part, columns in zip(into.split(size), grad_output.split(size, dim=1), strict=True):
            if x.is_cuda and into.dtype == torch.float32:
                # The product accumulates in float32 anyway; asking for it in float32 loses nothing to rounding.
                product = torch.mm(columns.t(), x, out_dtype=torch.float32)
            else:
                product = columns.t() @ x
            _ = part.add_(product) if add else part.copy_(product)
            del product  # before the next one


def add_rows(into: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows [n, h] to the rows of `into` [v, h] that `ids` [n] name, some perhaps several times, without a second [v, h].

    The same bits in every run: the CPU's index_add_ adds one row after the other. On CUDA that one adds atomically, in any order;
    there index_put_ sorts the ids (stably) and adds the rows of one id one after the other (aten/src/ATen/native/cuda/Indexing.cu).
    Its check of the ids would make the host wait. It is left out: the lookup has read these rows already.
    """
    if into.is_cuda:
        torch.ops.aten._index_put_impl_(into, [ids], rows, True, True)  # accumulate, without the check
    else:
        into.index_add_(0, ids, rows)
