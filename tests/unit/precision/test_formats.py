"""Rounding to 8 bits and scaling, against arithmetic on float64 numbers that knows no type of 8 bits."""

from __future__ import annotations

import pytest
import torch

from megatron.precision.fp8_gemms import BLOCK_SIZE, E4M3, E5M2, Fp8Type, ScaleGranularity, cast_into, compute_amax, quantize
from megatron_lab.planner.storages import StorageLedger
from megatron_lab.verification.reference.eight_bits import quantize_blocks, round_to_fp8

MANTISSA = {E4M3: 3, E5M2: 2}


def rounded(numbers: torch.Tensor, format_: Fp8Type) -> torch.Tensor:
    out = torch.empty(numbers.shape, dtype=format_.dtype)
    cast_into(out, numbers.clone(), format_)
    return out


def edges(format_: Fp8Type) -> torch.Tensor:
    """Every number of the format, every middle between two, and the float32 numbers next to all of them, in float32."""
    patterns = torch.arange(256, dtype=torch.uint8).view(format_.dtype).float()
    numbers = patterns[patterns.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2  # exact: one bit of mantissa more
    points = torch.cat([numbers, middles])
    far = torch.full_like(points, torch.inf)
    return torch.cat([points, torch.nextafter(points, far), torch.nextafter(points, -far)])


@pytest.mark.parametrize("format_", [E4M3, E5M2], ids=lambda format_: format_.name)
def test_rounding_is_to_the_nearest_and_to_even(format_: Fp8Type) -> None:
    """Of every number, middle and neighbour, in float32 and float64; of every finite bfloat16."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    for numbers in (edges(format_), edges(format_).double(), halves[halves.isfinite()]):
        found = rounded(numbers, format_).double()
        assert torch.equal(found, round_to_fp8(numbers.double(), MANTISSA[format_]))
    assert rounded(torch.tensor([1e30, -1e30]), format_).tolist() == [format_.max_value, -format_.max_value]
    assert rounded(torch.tensor([torch.nan]), format_).isnan().all()


SHARING: dict[ScaleGranularity, tuple[int, int]] = {
    "tensor": (2 * BLOCK_SIZE, 3 * BLOCK_SIZE),
    "row": (1, 3 * BLOCK_SIZE),
    "strip": (1, BLOCK_SIZE),
    "tile": (BLOCK_SIZE, BLOCK_SIZE),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("grain", SHARING)
def test_those_that_share_a_scale_are_scaled_alike(
    grain: ScaleGranularity, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of zeros among them; also of a matrix that lies turned in memory, and in parts."""
    monkeypatch.setattr("megatron.precision.fp8_gemms._QUANTIZE_CHUNK_ELEMENTS", 3 * BLOCK_SIZE * BLOCK_SIZE)
    x = torch.randn(2 * BLOCK_SIZE, 3 * BLOCK_SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x *= torch.logspace(-6, 6, 3 * BLOCK_SIZE, dtype=torch.float64)
    x[:BLOCK_SIZE, :BLOCK_SIZE] = 0.0
    x = x.to(dtype)
    exact = quantize_blocks(x.double(), 3, SHARING[grain])
    for same in (x, x.t().contiguous().t()):
        found = quantize(same, compute_amax(same, grain), grain, E4M3)
        assert found.values.is_contiguous() and found.scale.dtype == torch.promote_types(dtype, torch.float32)
        difference = (found.dequantize().double() - exact).abs()
        if dtype == torch.float64:
            torch.testing.assert_close(found.dequantize(), exact, rtol=1e-15, atol=0)
        else:  # scales and quotients in float32: a number next to a middle may fall to the other side
            assert (difference > 1e-6 * exact.abs()).double().mean() < 1e-4


@pytest.mark.parametrize("grain", SHARING)
def test_a_larger_matrix_takes_no_more_memory_beside_the_result(grain: ScaleGranularity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rows, or of longer ones: it is quantised in parts."""
    monkeypatch.setattr("megatron.precision.fp8_gemms._QUANTIZE_CHUNK_ELEMENTS", 4 * BLOCK_SIZE * BLOCK_SIZE)
    beside = set()
    for rows, columns in ((8, 2), (16, 2), (8, 4)):
        with StorageLedger() as ledger:
            x = torch.ones(rows * BLOCK_SIZE, columns * BLOCK_SIZE, dtype=torch.bfloat16)
            largest = compute_amax(x, grain)
            ledger.take_span()
            result = quantize(x, largest, grain, E4M3)
            beside.add(ledger.take_span().peak_bytes - result.values.nbytes - result.scale.nbytes)
    assert len(beside) == 1


@pytest.mark.parametrize("grain", SHARING)
def test_what_is_not_finite_stays_so(grain: ScaleGranularity) -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2 * BLOCK_SIZE, 3 * BLOCK_SIZE, dtype=torch.bfloat16)
        x[130, 200] = bad
        assert quantize(x, compute_amax(x, grain), grain, E5M2).dequantize()[130, 200].isnan()
