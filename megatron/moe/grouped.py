"""Products of rows with many matrices: each row with that of its expert. The rows of an expert are neighbours.

Shapes: `n` rows, `E` experts of this rank. A weight is [E, out, in], or [E, 2, out, in] for the two halves of a gated MLP; its
leading dimensions may be one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.memory.recompute import about_to_save
from megatron.parallel.accumulate import accumulate_grouped, now_or_deferred
from megatron.parallel.products import product_into


def grouped_linear(x: torch.Tensor, weight: nn.Parameter, counts: Sequence[int]) -> torch.Tensor:
    """Multiply each row with the matrix of its expert: [n, in] to [n, out] (or [n, 2 out]).

    The gradient of the weight goes where `accumulate` says, now or deferred; that of an expert without rows is zero.

    Args:
        counts: rows of each expert.
    """
    return _GroupedLinear.apply(x, weight, counts)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, counts: Sequence[int]) -> torch.Tensor:  # type: ignore[override]
        about_to_save(x)
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts = weight, counts  # a leaf, which needs no saving
        return _products(x, _matrices(weight, counts), counts, transposed=True)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:  # type: ignore[override]
        (x,), weight, counts = ctx.saved_tensors, ctx.weight, ctx.counts
        grad_output = grad_output.contiguous()
        grad_input = (
            _products(grad_output, _matrices(weight, counts), counts, transposed=False) if ctx.needs_input_grad[0] else None
        )
        now_or_deferred(
            lambda: accumulate_grouped(weight, [(grad_output[rows], x[rows]) for rows in _rows(counts)]), keeps=(grad_output, x)
        )
        return grad_input, None, None


def _matrices(weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The matrix of each expert [E, ..., in], also of a weight whose leading dimensions are one."""
    return weight.view(len(counts), -1, weight.shape[-1])


def _products(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """Rows [n, k] times the matrices [E, m, k] transposed, or [E, k, m] as they are: [n, m]."""
    if _has_kernel(x.device) and _fits_kernel(x, weight):
        return in_one_kernel(x, weight, counts, transposed=transposed)
    return each_product(x, weight, counts, transposed=transposed)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Whether torch multiplies with all matrices in one kernel: on GPUs of compute capability 9 and 10. On others `grouped_mm` is a
    loop, before which the host waits for the numbers of rows (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _fits_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes them: bfloat16, with rows of matrices and of products that begin at multiples of 16 bytes."""
    if x.dtype != torch.bfloat16 or not len(x) or x.shape[1] % 8 or weight.shape[1] % 8 or weight.shape[2] % 8:
        return False
    return x.data_ptr() % 16 == 0 == weight.data_ptr() % 16


def in_one_kernel(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """The products in torch's kernel. The host does not wait for the copy of the counts, which are in pinned memory."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=x.is_cuda).to(x.device, non_blocking=True)
    found: torch.Tensor = F.grouped_mm(x, weight.transpose(1, 2) if transposed else weight, offs=ends)
    return found


def each_product(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """The same, one expert after the other: what a grouped kernel is compared with, and the way where there is none."""
    out = x.new_empty(len(x), weight.shape[1 if transposed else 2])
    for rows, matrix in zip(_rows(counts), weight.unbind(), strict=True):
        if rows.start < rows.stop:
            product_into(out[rows], x[rows], matrix.t() if transposed else matrix)
    return out


def _rows(counts: Sequence[int]) -> Iterator[slice]:
    """The rows of each expert."""
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count
