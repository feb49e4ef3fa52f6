"""Rounding to 8 bits and scaling, against arithmetic on float64 numbers that knows no type of 8 bits."""

from __future__ import annotations

import pytest
import torch

from megatron.precision.fp8_products import BLOCK, E4M3, E5M2, Format, Grain, magnitudes, quantised, rounded_into
from megatron_lab.planner.storages import StorageLedger
from megatron_lab.verification.reference.eight_bits import on_grid, scaled_to_grid

MANTISSA = {E4M3: 3, E5M2: 2}


def rounded(numbers: torch.Tensor, format_: Format) -> torch.Tensor:
    out = torch.empty(numbers.shape, dtype=format_.dtype)
    rounded_into(out, numbers.clone(), format_)
    return out


def edges(format_: Format) -> torch.Tensor:
    """Every number of the format, every middle between two, and the float32 numbers next to all of them, in float32."""
    patterns = torch.arange(256, dtype=torch.uint8).view(format_.dtype).float()
    numbers = patterns[patterns.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2  # exact: one bit of mantissa more
    points = torch.cat([numbers, middles])
    far = torch.full_like(points, torch.inf)
    return torch.cat([points, torch.nextafter(points, far), torch.nextafter(points, -far)])


@pytest.mark.parametrize("format_", [E4M3, E5M2], ids=lambda format_: format_.name)
def test_rounding_is_to_the_nearest_and_to_even(format_: Format) -> None:
    """Of every number, middle and neighbour, in float32 and float64; of every finite bfloat16."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    for numbers in (edges(format_), edges(format_).double(), halves[halves.isfinite()]):
        found = rounded(numbers, format_).double()
        assert torch.equal(found, on_grid(numbers.double(), MANTISSA[format_]))
    assert rounded(torch.tensor([1e30, -1e30]), format_).tolist() == [format_.largest, -format_.largest]
    assert rounded(torch.tensor([torch.nan]), format_).isnan().all()


SHARING: dict[Grain, tuple[int, int]] = {
    "tensor": (2 * BLOCK, 3 * BLOCK),
    "row": (1, 3 * BLOCK),
    "strip": (1, BLOCK),
    "tile": (BLOCK, BLOCK),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("grain", SHARING)
def test_those_that_share_a_scale_are_scaled_alike(grain: Grain, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of zeros among them; also of a matrix that lies turned in memory, and in parts."""
    monkeypatch.setattr("megatron.precision.fp8_products._ELEMENTS_AT_ONCE", 3 * BLOCK * BLOCK)
    x = torch.randn(2 * BLOCK, 3 * BLOCK, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x *= torch.logspace(-6, 6, 3 * BLOCK, dtype=torch.float64)
    x[:BLOCK, :BLOCK] = 0.0
    x = x.to(dtype)
    exact = scaled_to_grid(x.double(), 3, SHARING[grain])
    for same in (x, x.t().contiguous().t()):
        found = quantised(same, magnitudes(same, grain), grain, E4M3)
        assert found.values.is_contiguous() and found.scale.dtype == torch.promote_types(dtype, torch.float32)
        difference = (found.decoded().double() - exact).abs()
        if dtype == torch.float64:
            torch.testing.assert_close(found.decoded(), exact, rtol=1e-15, atol=0)
        else:  # scales and quotients in float32: a number next to a middle may fall to the other side
            assert (difference > 1e-6 * exact.abs()).double().mean() < 1e-4


@pytest.mark.parametrize("grain", SHARING)
def test_a_larger_matrix_takes_no_more_memory_beside_the_result(grain: Grain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rows, or of longer ones: it is quantised in parts."""
    monkeypatch.setattr("megatron.precision.fp8_products._ELEMENTS_AT_ONCE", 4 * BLOCK * BLOCK)
    beside = set()
    for rows, columns in ((8, 2), (16, 2), (8, 4)):
        with StorageLedger() as ledger:
            x = torch.ones(rows * BLOCK, columns * BLOCK, dtype=torch.bfloat16)
            largest = magnitudes(x, grain)
            ledger.cut()
            result = quantised(x, largest, grain, E4M3)
            beside.add(ledger.cut().peak - result.values.nbytes - result.scale.nbytes)
    assert len(beside) == 1


@pytest.mark.parametrize("grain", SHARING)
def test_what_is_not_finite_stays_so(grain: Grain) -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2 * BLOCK, 3 * BLOCK, dtype=torch.bfloat16)
        x[130, 200] = bad
        assert quantised(x, magnitudes(x, grain), grain, E5M2).decoded()[130, 200].isnan()
