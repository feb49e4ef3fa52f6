"""Products of rows with many matrices, and their gradients, against one product after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.moe import grouped
from megatron.moe.grouped import each_product, grouped_linear
from megatron.parallel.accumulate import GradSink, deferring
from tests.support.host_waits import host_waits

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


@pytest.mark.parametrize("transposed", [True, False])
def test_the_kernel_of_torch_does_the_same(transposed: bool) -> None:
    """As far as its results are rounded the same."""
    x, weight = torch.randn(sum(COUNTS), 16).bfloat16(), torch.randn(4, 32, 16).bfloat16()
    x = x if transposed else torch.randn(sum(COUNTS), 32).bfloat16()
    assert grouped._fits_kernel(x, weight)
    found = grouped.in_one_kernel(x, weight, COUNTS, transposed=transposed)
    torch.testing.assert_close(found, each_product(x, weight, COUNTS, transposed=transposed), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("width", "hidden"), [(8, 16), (16, 8), (12, 16), (16, 20), (5, 6), (7, 8)])
def test_it_is_asked_for_what_it_takes(width: int, hidden: int) -> None:
    """The meta device has the checks of the kernel: what it refuses is multiplied matrix by matrix."""
    weight = torch.empty(4, width, hidden, dtype=torch.bfloat16, device="meta")
    for transposed in (True, False):
        x = torch.empty(sum(COUNTS), hidden if transposed else width, dtype=torch.bfloat16, device="meta")
        if not grouped._fits_kernel(x, weight):
            assert width % 8 or hidden % 8
            continue
        with host_waits() as waits:
            found = grouped.in_one_kernel(x, weight, COUNTS, transposed=transposed)
        assert found.shape == (len(x), width if transposed else hidden) and found.is_contiguous()
        assert not waits, waits
    plain = torch.empty(4, 8, 8)
    assert not grouped._has_kernel(plain.device) and not grouped._fits_kernel(torch.empty(3, 8), plain)
    assert not grouped._fits_kernel(torch.empty(0, 8, dtype=torch.bfloat16), plain.bfloat16())
    odd = torch.empty(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 8, 8)
    assert not grouped._fits_kernel(torch.empty(3, 8, dtype=torch.bfloat16), odd)
