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

from megatron.memory import recompute
from megatron.parallel.accumulate import accumulate_grouped, now_or_deferred
from megatron.parallel.products import product_into, weight_product

GROUPED_BYTES = 64 << 20
"""Most bytes of weight gradients in bfloat16 that lie beside the float32 ones, where one kernel computes those of many experts."""
_LAUNCH_FLOPS = 1 << 33
"""FLOPs of a product that a GPU computes while the host launches the next: 14 us at 600 TFLOP/s. An estimate, not measured."""
_MIN_EXPERTS = 4
"""With fewer in a kernel, the kernel and the addition of its result save no launches. It also bounds a matrix to 16 MiB, whose
second trip through memory takes no longer than a launch."""


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
        if recompute.remaking is not None:
            recompute.remaking.offer(x)
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
            lambda: accumulate_grouped(weight, grad_output, x, counts, weight_products),
            keeps=(grad_output, x),
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
    loop, before which the host waits for the numbers of rows (aten/src/ATen/native/cuda/GroupedBlas.cpp). The meta device stands
    for a GPU that has the kernel."""
    if device.type not in ("cuda", "meta"):
        return False
    return device.type == "meta" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _fits_kernel(*factors: torch.Tensor) -> bool:
    """Whether the kernel takes rows and matrices: bfloat16, with rows that begin at multiples of 16 bytes."""
    return all(
        factor.dtype == torch.bfloat16
        and len(factor)
        and not any(size % 8 for size in factor.shape[1:])
        and factor.data_ptr() % 16 == 0
        for factor in factors
    )


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Torch's kernel. The groups that `ends` [E] divides: rows of a [n, k], for b [E, k, m]; or columns of a [k, n] and rows of
    b [n, m], for a result [E, k, m]."""
    product: torch.Tensor = F.grouped_mm(a, b, offs=ends)
    return product


def _on_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers of the host, which does not wait: they are in pinned memory."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def in_one_kernel(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """The products in torch's kernel."""
    ends = _on_device(list(accumulate(counts)), torch.int32, x.device)
    return _grouped(x, weight.transpose(1, 2) if transposed else weight, ends)


def each_product(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """The same, one expert after the other: what a grouped kernel is compared with, and the way where there is none."""
    out = x.new_empty(len(x), weight.shape[1 if transposed else 2])
    for rows, matrix in zip(_rows(counts), weight.unbind(), strict=True):
        if rows.start < rows.stop:
            product_into(out[rows], x[rows], matrix.t() if transposed else matrix)
    return out


def experts_per_kernel(rows: int, experts: int, outputs: int, inputs: int) -> int:
    """Return for how many experts one kernel computes weight gradients [outputs, inputs], or 0 to compute each by itself.

    Many small products are grouped: the host would take longer to launch them than the GPU to compute them. Large ones are not:
    a single product is written straight into float32, without a second tensor and without rounding.

    Args:
        rows: of all experts together.
    """
    grouped = min(experts, GROUPED_BYTES // (torch.bfloat16.itemsize * outputs * inputs))
    return grouped if grouped >= _MIN_EXPERTS and 2 * rows * outputs * inputs < experts * _LAUNCH_FLOPS else 0


def weight_products(grad_output: torch.Tensor, x: torch.Tensor, counts: Sequence[int], into: torch.Tensor, *, add: bool) -> None:
    """Write or add to the weight gradient of each expert the product grad_output^T x of its rows.

    Precision: a product by itself is summed and kept in float32 where `weight_product` can. Torch's grouped kernel gives bfloat16.
    So where `experts_per_kernel` chooses it, the gradient of each microbatch is rounded to bfloat16 once, as torch's own autograd
    does, before it is added to the float32 sum. The choice depends on the number of rows, which may differ from step to step.

    Args:
        grad_output: [n, out].
        x: [n, in].
        counts: rows of each expert, n in all.
        into: [E, out, in].
        add: add to `into` instead of overwriting it.
    """
    in_kernel = 0
    if _has_kernel(x.device) and _fits_kernel(grad_output, x) and grad_output.is_contiguous() and x.is_contiguous():
        in_kernel = experts_per_kernel(len(x), *into.shape)
    if in_kernel:
        grouped_weight_products(grad_output, x, counts, into, in_kernel, add=add)
    else:
        each_weight_product(grad_output, x, counts, into, add=add)


def grouped_weight_products(
    grad_output: torch.Tensor, x: torch.Tensor, counts: Sequence[int], into: torch.Tensor, in_kernel: int, *, add: bool
) -> None:
    """Compute the weight gradients of so many experts at a time in one kernel.

    The groups divide what is summed over: rows of both factors, which may begin anywhere, since each is a multiple of 16 bytes.
    """
    starts = [0, *accumulate(counts)]
    chunks = [range(first, min(first + in_kernel, len(counts))) for first in range(0, len(counts), in_kernel)]
    ends = _on_device([starts[expert + 1] - starts[chunk.start] for chunk in chunks for expert in chunk], torch.int32, x.device)
    for chunk in chunks:
        rows, gradients = slice(starts[chunk.start], starts[chunk.stop]), into[chunk.start : chunk.stop]
        if rows.start == rows.stop:
            _ = None if add else gradients.zero_()
            continue
        products = _grouped(grad_output[rows].t(), x[rows], ends[chunk.start : chunk.stop])
        # What the kernel writes for an expert without rows is not documented.
        if empty := [index for index, expert in enumerate(chunk) if not counts[expert]]:
            products.index_fill_(0, _on_device(empty, torch.int64, x.device), 0)
        _ = gradients.add_(products) if add else gradients.copy_(products)
        del products  # before the next ones


def each_weight_product(
    grad_output: torch.Tensor, x: torch.Tensor, counts: Sequence[int], into: torch.Tensor, *, add: bool
) -> None:
    """Compute the weight gradient of one expert after the other."""
    for rows, matrix in zip(_rows(counts), into.unbind(), strict=True):
        if rows.start < rows.stop:
            weight_product(grad_output[rows], x[rows], matrix, add=add)
        elif not add:
            matrix.zero_()


def _rows(counts: Sequence[int]) -> Iterator[slice]:
    """The rows of each expert."""
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count
