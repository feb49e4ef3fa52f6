"""Grouped linear layers of mixtures of experts: multiply each row by the matrix of its expert. Rows are sorted by expert.

Shapes: `n` rows, `E` local experts. A weight is [E, out, in], or [E, 2, out, in] for the gate and up halves of a gated MLP. Weights
may have further leading dimensions of size one.
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
from megatron.parallel.accumulate import accumulate_grouped, run_or_defer
from megatron.parallel.matmul import compute_weight_product, matmul_into

MAX_GROUPED_GRAD_BYTES = 64 << 20
"""Largest buffer of bfloat16 weight gradients that one grouped kernel writes, in addition to the float32 gradients."""
_LAUNCH_FLOPS = 1 << 33
"""FLOPs that a GPU computes while the host launches the next matrix product: 14 us at 600 TFLOP/s. An estimate, not measured."""
_MIN_EXPERTS = 4
"""Smallest number of experts per grouped kernel. With fewer experts, the kernel and the addition of its result save no
launches. The minimum also limits a matrix to 16 MiB of bfloat16: adding it to the float32 gradient takes no longer than a
launch."""


def grouped_linear(x: torch.Tensor, weight: nn.Parameter, rows_per_expert: Sequence[int]) -> torch.Tensor:
    """Multiply each row by the matrix of its expert: n rows [n, in] to [n, out] (or [n, 2 * out] for the gate and up halves of an
    MLP).

    Backward adds the weight gradient to the parameter's gradient sink, at once or deferred. The gradient of an expert without rows
    is zero.

    Args:
        x: [n, in], sorted by expert.
        weight: weights of the local experts, [experts, out, in] or [experts, 2, out, in].
        rows_per_expert: number of rows of each expert.
    """
    return _GroupedLinear.apply(x, weight, rows_per_expert)


class _GroupedLinear(torch.autograd.Function):
    """Autograd function of `grouped_linear`. Saves only x for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, rows_per_expert: Sequence[int]) -> torch.Tensor:  # type: ignore[override]
        if recompute.recomputing_region is not None:
            recompute.recomputing_region.offer(x)
        ctx.save_for_backward(x)
        ctx.weight, ctx.rows_per_expert = weight, rows_per_expert  # the weight is a leaf: autograd need not save it
        return _matmul_per_expert(x, _view_per_expert(weight, rows_per_expert), rows_per_expert, transposed=True)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:  # type: ignore[override]
        (x,), weight, rows_per_expert = ctx.saved_tensors, ctx.weight, ctx.rows_per_expert
        grad_output = grad_output.contiguous()
        grad_input = (
            _matmul_per_expert(grad_output, _view_per_expert(weight, rows_per_expert), rows_per_expert, transposed=False)
            if ctx.needs_input_grad[0]
            else None
        )
        run_or_defer(
            lambda: accumulate_grouped(weight, grad_output, x, rows_per_expert, compute_weight_grads),
            inputs=(grad_output, x),
        )
        return grad_input, None, None


def _view_per_expert(weight: torch.Tensor, rows_per_expert: Sequence[int]) -> torch.Tensor:
    """View a weight as one matrix per expert: [experts, out, in]. The weight may have further dimensions of size one in front."""
    return weight.view(len(rows_per_expert), -1, weight.shape[-1])


def _matmul_per_expert(x: torch.Tensor, weight: torch.Tensor, rows_per_expert: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """Multiply rows [n, k] by the matrices of their experts: [n, m].

    Args:
        x: n rows of k channels, sorted by expert.
        weight: one matrix per expert, [experts, m, k] if `transposed`, otherwise [experts, k, m].
        rows_per_expert: number of rows of each expert; the sum is n.
    """
    if _has_grouped_kernel(x.device) and _kernel_supports(x, weight):
        return matmul_grouped(x, weight, rows_per_expert, transposed=transposed)
    return matmul_in_loop(x, weight, rows_per_expert, transposed=transposed)


@functools.cache
def _has_grouped_kernel(device: torch.device) -> bool:
    """Return whether torch's `grouped_mm` is one kernel on this device: on GPUs of compute capability 9 and 10.

    On other GPUs `grouped_mm` is a loop, and the host waits for the row counts before it
    (aten/src/ATen/native/cuda/GroupedBlas.cpp). The meta device counts as a GPU with the kernel.
    """
    if device.type not in ("cuda", "meta"):
        return False
    return device.type == "meta" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _kernel_supports(*factors: torch.Tensor) -> bool:
    """Return whether torch's grouped kernel supports these tensors: bfloat16, not empty, and every row aligned to 16 bytes."""
    return all(
        factor.dtype == torch.bfloat16
        and len(factor)
        and not any(size % 8 for size in factor.shape[1:])
        and factor.data_ptr() % 16 == 0
        for factor in factors
    )


def _call_grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Call torch's grouped kernel, which computes one matrix product for each of E groups (experts).

    Either multiply groups of rows of a [n, k] by the matrices b [E, k, m]: [n, m]. Or multiply groups of columns of a [k, n] by
    groups of rows of b [n, m]: [E, k, m].

    Args:
        ends: index at which each group of rows or columns ends, int32 [E].
    """
    product: torch.Tensor = F.grouped_mm(a, b, offs=ends)
    return product


def _copy_to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy integers from the host to a tensor on the device, through pinned memory, so that the host does not wait."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def matmul_grouped(x: torch.Tensor, weight: torch.Tensor, rows_per_expert: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """Multiply rows, sorted by expert, by the matrices of their experts, in one grouped kernel. The arguments are those of
    `_matmul_per_expert`."""
    ends = _copy_to_device(list(accumulate(rows_per_expert)), torch.int32, x.device)
    return _call_grouped_mm(x, weight.transpose(1, 2) if transposed else weight, ends)


def matmul_in_loop(x: torch.Tensor, weight: torch.Tensor, rows_per_expert: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """Multiply rows, sorted by expert, by the matrices of their experts, with one matrix product per expert. The arguments are
    those of `_matmul_per_expert`.

    This is the fallback without a grouped kernel, and the reference for tests of that kernel.
    """
    out = x.new_empty(len(x), weight.shape[1 if transposed else 2])
    for rows, matrix in zip(_iter_row_ranges(rows_per_expert), weight.unbind(), strict=True):
        if rows.start < rows.stop:
            matmul_into(out[rows], x[rows], matrix.t() if transposed else matrix)
    return out


def compute_experts_per_kernel(num_rows: int, num_experts: int, out_features: int, in_features: int) -> int:
    """Return for how many experts one kernel computes the weight gradients, each [out_features, in_features]. 0 means one product
    per expert, without a grouped kernel.

    Many small products are grouped, because the host would take longer to launch them than the GPU to compute them. Large products
    are not grouped: a product for one expert writes straight into the float32 gradient, without a second tensor and without
    rounding to bfloat16.

    Args:
        num_rows: rows of all experts together.
    """
    group_size = min(num_experts, MAX_GROUPED_GRAD_BYTES // (torch.bfloat16.itemsize * out_features * in_features))
    return (
        group_size if group_size >= _MIN_EXPERTS and 2 * num_rows * out_features * in_features < num_experts * _LAUNCH_FLOPS else 0
    )


def compute_weight_grads(
    grad_output: torch.Tensor, x: torch.Tensor, rows_per_expert: Sequence[int], into: torch.Tensor, *, add: bool
) -> None:
    """Compute the weight gradient of each expert, grad_output^T x over the rows of the expert. Write it into `into`, or add it.

    The precision depends on which of two methods computes the gradient:

    - One product per expert: the product is summed and stored in float32 where `compute_weight_product` supports it.
    - Torch's grouped kernel, for several experts at once: it returns bfloat16. So the gradient of each microbatch is rounded to
      bfloat16 once, as in torch's autograd, before it is added to the float32 sum.

    If the device and the tensors allow the grouped kernel, `compute_experts_per_kernel` selects the method. The selection depends
    on the number of rows, which may differ from step to step.

    Args:
        grad_output: [n, out] for n rows, sorted by expert.
        x: [n, in].
        rows_per_expert: number of rows of each expert; the sum is n.
        into: weight gradients [experts, out, in].
        add: add to `into` instead of overwriting it.
    """
    group_size = 0
    if _has_grouped_kernel(x.device) and _kernel_supports(grad_output, x) and grad_output.is_contiguous() and x.is_contiguous():
        group_size = compute_experts_per_kernel(len(x), *into.shape)
    if group_size:
        compute_weight_grads_grouped(grad_output, x, rows_per_expert, into, group_size, add=add)
    else:
        compute_weight_grads_in_loop(grad_output, x, rows_per_expert, into, add=add)


def compute_weight_grads_grouped(
    grad_output: torch.Tensor, x: torch.Tensor, rows_per_expert: Sequence[int], into: torch.Tensor, group_size: int, *, add: bool
) -> None:
    """Compute the weight gradients of `group_size` experts at a time in one kernel. Arguments are those of `compute_weight_grads`.

    A kernel multiplies a range of rows of `grad_output` by the same rows of `x` for each of its experts. A range may start at any
    row, because the size of every row is a multiple of 16 bytes.
    """
    starts = [0, *accumulate(rows_per_expert)]
    groups = [range(first, min(first + group_size, len(rows_per_expert))) for first in range(0, len(rows_per_expert), group_size)]
    ends = _copy_to_device(
        [starts[expert + 1] - starts[group.start] for group in groups for expert in group], torch.int32, x.device
    )
    for group in groups:
        rows, grads = slice(starts[group.start], starts[group.stop]), into[group.start : group.stop]
        if rows.start == rows.stop:
            _ = None if add else grads.zero_()
            continue
        group_grads = _call_grouped_mm(grad_output[rows].t(), x[rows], ends[group.start : group.stop])
        # What the kernel writes for an expert without rows is not documented.
        if empty_experts := [index for index, expert in enumerate(group) if not rows_per_expert[expert]]:
            group_grads.index_fill_(0, _copy_to_device(empty_experts, torch.int64, x.device), 0)
        _ = grads.add_(group_grads) if add else grads.copy_(group_grads)
        del group_grads  # free the buffer before the next group allocates its own


def compute_weight_grads_in_loop(
    grad_output: torch.Tensor, x: torch.Tensor, rows_per_expert: Sequence[int], into: torch.Tensor, *, add: bool
) -> None:
    """Compute the weight gradient of each expert, grad_output^T x over the expert's rows, with one matrix product per expert.

    Args:
        grad_output: [n, out] for n rows, sorted by expert.
        x: [n, in].
        rows_per_expert: number of rows of each expert; the sum is n.
        into: weight gradients [experts, out, in].
        add: add to `into` instead of overwriting it.
    """
    for rows, matrix in zip(_iter_row_ranges(rows_per_expert), into.unbind(), strict=True):
        if rows.start < rows.stop:
            compute_weight_product(grad_output[rows], x[rows], matrix, add=add)
        elif not add:
            matrix.zero_()


def _iter_row_ranges(rows_per_expert: Sequence[int]) -> Iterator[slice]:
    """Yield for each expert the range of its rows in a matrix whose rows are sorted by expert."""
    start = 0
    for count in rows_per_expert:
        yield slice(start, start + count)
        start += count
