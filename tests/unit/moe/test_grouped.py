"""Products of rows with many matrices, and their gradients, against one product after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.moe.grouped import each_product, grouped_linear
from megatron.parallel.accumulate import GradSink, deferring

COUNTS = (3, 0, 5, 1)


@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 2, 3, 5)])
@pytest.mark.parametrize("deferred", [False, True])
def test_each_row_meets_the_matrix_of_its_expert(shape: tuple[int, ...], deferred: bool) -> None:
    """Two microbatches add up; an expert without rows has a gradient of zero, even where the memory held something else."""
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    plain = weight.detach().clone().requires_grad_()
    writes: list[int] = []
    sink = GradSink(torch.float64, lambda: writes.append(1), lambda: torch.full(shape, torch.nan, dtype=torch.float64))
    weight.grad_sink = sink  # type: ignore[attr-defined]
    for _ in range(2):
        x = torch.randn(sum(COUNTS), 5, dtype=torch.float64, requires_grad=True)
        own = x.detach().clone().requires_grad_()
        expected = torch.cat([part @ w.flatten(0, -2).T for part, w in zip(own.split(COUNTS), plain, strict=True)])
        found = grouped_linear(x, weight, COUNTS)
        torch.testing.assert_close(found, expected)
        given = torch.randn_like(found)
        expected.backward(given)
        if deferred:
            with deferring() as later:
                found.backward(given)
            before = len(writes)
            later.run()
            assert len(writes) == before + 1
        else:
            found.backward(given)
        torch.testing.assert_close(x.grad, own.grad)
    assert plain.grad is not None and sink.main_grad is not None and len(writes) == 2
    torch.testing.assert_close(sink.main_grad, plain.grad)
    assert (sink.main_grad[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_grouped_kernel_of_torch_does_the_same(dtype: torch.dtype) -> None:
    """As far as its results are rounded the same; it is used where it is fast."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped is None:
        pytest.skip("this torch has no grouped_mm")
    x, weight = torch.randn(sum(COUNTS), 16, dtype=dtype), torch.randn(4, 32, 16, dtype=dtype)
    ends = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    found = grouped(x, weight.transpose(1, 2), offs=ends)
    torch.testing.assert_close(found, each_product(x, weight, COUNTS, transposed=True), rtol=2e-2, atol=2e-2)
