"""Products of rows with many matrices, and their gradients, against one product after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.moe import grouped
from megatron.moe.grouped import compute_weight_grads_in_loop, grouped_linear, matmul_in_loop
from megatron.parallel.accumulate import GradSink, deferring
from tests.support.host_waits import host_waits
from tests.support.launches import Launches

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
    assert grouped._kernel_supports(x, weight)
    found = grouped.matmul_grouped(x, weight, COUNTS, transposed=transposed)
    torch.testing.assert_close(found, matmul_in_loop(x, weight, COUNTS, transposed=transposed), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("width", "hidden"), [(8, 16), (16, 8), (12, 16), (16, 20), (5, 6), (7, 8)])
def test_it_is_asked_for_what_it_takes(width: int, hidden: int) -> None:
    """The meta device has the checks of the kernel: what it refuses is multiplied matrix by matrix."""
    weight = torch.empty(4, width, hidden, dtype=torch.bfloat16, device="meta")
    for transposed in (True, False):
        x = torch.empty(sum(COUNTS), hidden if transposed else width, dtype=torch.bfloat16, device="meta")
        if not grouped._kernel_supports(x, weight):
            assert width % 8 or hidden % 8
            continue
        with host_waits() as waits:
            found = grouped.matmul_grouped(x, weight, COUNTS, transposed=transposed)
        assert found.shape == (len(x), width if transposed else hidden) and found.is_contiguous()
        assert not waits, waits
    plain = torch.empty(4, 8, 8)
    assert not grouped._has_grouped_kernel(plain.device) and not grouped._kernel_supports(torch.empty(3, 8), plain)
    assert not grouped._kernel_supports(torch.empty(0, 8, dtype=torch.bfloat16), plain.bfloat16())
    odd = torch.empty(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 8, 8)
    assert not grouped._kernel_supports(torch.empty(3, 8, dtype=torch.bfloat16), odd)


MANY = (3, 0, 5, 1, 0, 0, 0, 0, 17, 2, 8, 4)
"""Rows of experts: the second four have none."""


def many_gradients(inputs: int = 24, outputs: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(sum(MANY), size, generator=generator).to(dtype) for size in (outputs, inputs))  # type: ignore[return-value]


@pytest.mark.parametrize("in_kernel", [4, 5, 12])
@pytest.mark.parametrize("into_dtype", [torch.float32, torch.bfloat16])
def test_grouped_weight_gradients_are_those_of_a_loop(
    in_kernel: int, into_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one rounding of each product to bfloat16. The kernel leaves experts without rows as they were: not a number here."""
    kernel = grouped._call_grouped_mm

    def leaves_empty(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        products = kernel(a, b, ends)
        products[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
        return products

    monkeypatch.setattr(grouped, "_call_grouped_mm", leaves_empty)
    grad_output, x = many_gradients()
    into = torch.full((len(MANY), 16, 24), torch.nan, dtype=into_dtype)
    exact = torch.full((len(MANY), 16, 24), torch.nan, dtype=torch.float64)
    for add in (False, True):
        before = exact.clone()
        grouped.compute_weight_grads_grouped(grad_output, x, MANY, into, in_kernel, add=add)
        compute_weight_grads_in_loop(grad_output.double(), x.double(), MANY, exact, add=add)
        assert ((into - exact).abs() <= 2.0**-8 * (exact.abs() + (before.abs() if add else 0.0)) + 1e-4).all()
    assert (into[[index for index, rows in enumerate(MANY) if not rows]] == 0).all()


@pytest.mark.parametrize("experts", [16, 128])
def test_as_many_launches_for_many_experts_as_for_few(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with the kernel: gradients that fit the bound take the same few launches, whatever the number of experts."""
    counts = [6] * (experts - 1) + [0]
    weight = nn.Parameter(torch.empty(experts, 64, 32, dtype=torch.bfloat16, device="meta"))
    sink = GradSink(torch.float32, lambda: None, lambda: torch.empty(weight.shape, device="meta"))
    weight.grad_sink = sink  # type: ignore[attr-defined]
    x = torch.empty(sum(counts), 32, dtype=torch.bfloat16, device="meta")
    for _ in range(2):
        out = grouped_linear(x, weight, counts)
        with Launches() as launches:
            torch.autograd.backward(out, torch.empty_like(out))
        assert launches.by_name["aten::_grouped_mm"] == 1, "the input needs no gradient"
        assert launches.total <= 6, launches.by_name
    out = grouped_linear(x, weight, counts)
    with host_waits() as waits:  # by itself: it answers what has run before, which no outer count would see
        torch.autograd.backward(out, torch.empty_like(out))
    assert not waits, waits
    grouped_bytes = experts * 64 * 32 * 2
    monkeypatch.setattr(grouped, "MAX_GROUPED_GRAD_BYTES", grouped_bytes // 4)
    with Launches() as launches:
        torch.autograd.backward(grouped_linear(x, weight, counts), torch.empty(len(x), 64, dtype=x.dtype, device="meta"))
    assert launches.by_name["aten::_grouped_mm"] == 1 + 4, "of the forward, and for each quarter"


def test_the_rule_of_what_is_grouped() -> None:
    rule, mib = grouped.compute_experts_per_kernel, 1 << 20
    assert rule(128 * 256, 128, 2048, 768) == 21, "64 MiB of matrices of 3 MiB"
    assert rule(100, 8, 64, 64) == 8, "all of them"
    assert rule(8 * 1024, 8, 2 * 14336, 4096) == 0, "large products are computed one by one"
    assert rule(100, 3, 64, 64) == 0, "too few to save a launch"
    outputs = 8 * mib // 4096
    assert rule(8, 8, outputs, 4096) == 4 and rule(8, 8, outputs + 8, 4096) == 0, "at least four in the bound"
    rows = grouped._LAUNCH_FLOPS // (2 * 1024 * 1024)
    assert rule(16 * rows - 1, 16, 1024, 1024) == 16 and rule(16 * rows, 16, 1024, 1024) == 0, "the mean counts"


@pytest.mark.parametrize(
    ("dtype", "inputs", "grouped_kernels"), [(torch.bfloat16, 24, 1), (torch.bfloat16, 20, 0), (torch.float64, 24, 0)]
)
def test_only_what_the_kernel_takes_is_grouped(
    dtype: torch.dtype, inputs: int, grouped_kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin at no multiple of 16 bytes, and other dtypes, are multiplied one expert after the other, to the same bits."""
    monkeypatch.setattr(grouped, "_has_grouped_kernel", lambda device: True)
    grad_output, x = many_gradients(inputs, dtype=dtype)
    into, expected = (torch.empty(len(MANY), 16, inputs, dtype=dtype) for _ in range(2))
    with Launches() as launches:
        grouped.compute_weight_grads(grad_output, x, MANY, into, add=False)
    assert launches.by_name["aten::_grouped_mm"] == grouped_kernels
    compute_weight_grads_in_loop(grad_output, x, MANY, expected, add=False)
    assert torch.equal(into, expected) or grouped_kernels
