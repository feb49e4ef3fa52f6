"""Signatures do not depend on how a tensor is cut, and digests of bits on nothing but the bits."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megatron.parallel.tensor_slice import BufferSlice, TensorSlice, cover_flat_range
from megatron_lab.audit import digests as bits
from megatron_lab.audit import signature
from megatron_lab.audit.digests import DigestComparer, compute_bit_digest, compute_sketch
from megatron_lab.audit.signature import compute_buffer_signature, compute_signature, compute_slice_signature, to_trace_signature
from megatron_lab.audit.trace_file import NUM_SIGNS, SIGNATURE_SIZE


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHAPES = [(), (7,), (5, 8), (2, 9, 4), (3, 1)]


@given(st.sampled_from(SHAPES), st.lists(st.floats(0, 1), max_size=4))
def test_boxes_of_flat_slices_add_up(shape: tuple[int, ...], cuts: list[float]) -> None:
    whole = random_tensor(*shape)
    ends = sorted({0, whole.numel(), *(int(cut * whole.numel()) for cut in cuts)})
    total = torch.zeros(SIGNATURE_SIZE, dtype=torch.float64)
    for start, stop in pairwise(ends):
        placed, at = [], 0
        for box in cover_flat_range(shape, start, stop):
            placed.append(BufferSlice(box, at))
            at += box.numel
        total += compute_buffer_signature("w", placed, whole.reshape(-1)[start:stop])
    torch.testing.assert_close(total, compute_signature("w", whole), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_of_a_dimension_add_up(dim: int) -> None:
    """Also far from the start, where signs come from another drawing."""
    whole = random_tensor(*(9000 if d == dim else 3 for d in range(3)))
    total = torch.zeros(SIGNATURE_SIZE, dtype=torch.float64)
    for start, stop in ((0, 4095), (4095, 8193), (8193, 9000)):
        offsets = [start if d == dim else 0 for d in range(3)]
        part = whole.narrow(dim, start, stop - start)
        total += compute_slice_signature("w", TensorSlice(tuple(offsets), tuple(part.shape)), part)
    torch.testing.assert_close(total, compute_signature("w", whole), rtol=1e-13, atol=1e-10)


def test_it_does_not_depend_on_the_blocks_that_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_tensor(33, 17)
    before = compute_signature("w", whole)
    monkeypatch.setattr(signature, "_BLOCK_SIZE", 40)
    torch.testing.assert_close(compute_signature("w", whole), before, rtol=0, atol=1e-12)


def test_it_is_linear_and_ends_with_the_sum_of_squares() -> None:
    x, y = random_tensor(12, 30), random_tensor(12, 30, seed=1)
    both = compute_signature("w", 2 * x - y)[:NUM_SIGNS]
    torch.testing.assert_close(both, (2 * compute_signature("w", x) - compute_signature("w", y))[:NUM_SIGNS])
    assert to_trace_signature(compute_signature("w", x))[0] == pytest.approx(float(x.norm()))


def test_signs_are_signs() -> None:
    """Of one element each, so that the signed sum is the element or its negative; half of them of each kind, and k by k others."""
    signs = torch.stack([compute_signature("w", torch.eye(400)[i])[:NUM_SIGNS] for i in range(400)])
    assert signs.abs().eq(1).all()
    assert (signs.mean(0).abs() < 0.15).all()
    products = signs.t() @ signs / 400 - torch.eye(NUM_SIGNS, dtype=torch.float64)
    assert products.abs().max() < 0.2


def test_squared_differences_tell_how_far_two_tensors_are_apart() -> None:
    found = []
    for seed in range(100):
        x, y = random_tensor(20, 30, seed=seed), random_tensor(20, 30, seed=1000 + seed)
        apart = (compute_signature(f"w{seed}", x) - compute_signature(f"w{seed}", y))[:NUM_SIGNS]
        found.append(float(apart.square().mean() / (x - y).square().sum()))
    assert sum(found) / 100 == pytest.approx(1.0, abs=0.25)
    assert all(0.001 < share < 10 for share in found)


def test_it_sees_where_and_of_what() -> None:
    x = random_tensor(6, 8)
    turned = x[torch.tensor([1, 0, 2, 3, 4, 5])]
    for other in (compute_signature("w", turned), compute_signature("v", x), compute_signature("w", x.t().reshape(6, 8))):
        assert (other - compute_signature("w", x))[:NUM_SIGNS].abs().max() > 0.1


def test_signatures_stay_what_they_are() -> None:
    """Files of older versions are compared with those of newer ones."""
    found = to_trace_signature(compute_signature("layers.0.mlp.up.weight", torch.arange(30.0).view(5, 6)))
    assert found == pytest.approx((math.sqrt(8555), 135, -55, -23, -5), rel=1e-12)


def test_dtypes_are_widened_first() -> None:
    x = random_tensor(64, 64).to(torch.bfloat16)
    assert torch.equal(compute_signature("w", x), compute_signature("w", x.double()))


# ---- bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 3, 8, 1001])
def test_any_bit_changes_the_digest(dtype: torch.dtype, numel: int) -> None:
    tensor = random_tensor(numel).to(dtype)
    digests = {int(compute_bit_digest(tensor))}
    for byte in {0, tensor.nbytes // 2, tensor.nbytes - 1}:
        for bit in range(8):
            other = tensor.clone()
            other.view(torch.uint8)[byte] ^= 1 << bit
            digests.add(int(compute_bit_digest(other)))
    assert len(digests) == 1 + 8 * len({0, tensor.nbytes // 2, tensor.nbytes - 1})


def test_the_digest_is_of_bits_not_of_places_in_memory() -> None:
    tensor = random_tensor(1001).to(torch.bfloat16)
    for shift in range(5):
        moved = torch.zeros(1010, dtype=torch.bfloat16)[shift : shift + 1001]
        moved.copy_(tensor)
        assert torch.equal(compute_bit_digest(moved), compute_bit_digest(tensor))
    assert torch.equal(compute_bit_digest(tensor.view(7, 143).t().contiguous().t()), compute_bit_digest(tensor))


def test_the_digest_sees_order_in_long_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words, rows of words, and blocks of rows."""
    monkeypatch.setattr(bits, "_ROWS_PER_BLOCK", 2)
    tensor = random_tensor(5 * bits._ROW_LENGTH + 77)
    digests = {int(compute_bit_digest(tensor))}
    for i, j in ((0, 1), (3, 3 + bits._ROW_LENGTH), (3, 3 + 2 * bits._ROW_LENGTH), (4, 4 + 5 * bits._ROW_LENGTH)):
        other = tensor.clone()
        other[i], other[j] = tensor[j], tensor[i]
        digests.add(int(compute_bit_digest(other)))
    assert len(digests) == 5
    assert int(compute_bit_digest(torch.tensor([0.0]))) != int(compute_bit_digest(torch.tensor([-0.0])))
    nan = torch.tensor([math.nan])
    assert torch.equal(compute_bit_digest(nan), compute_bit_digest(nan.clone()))


# ---- values up to rounding


@pytest.mark.parametrize("rows", [0.01, 2, 3.4])
def test_sketches_estimate_how_far_tensors_are_apart(monkeypatch: pytest.MonkeyPatch, rows: float) -> None:
    """With signs of elements, rows and blocks of rows: the mean over many tensors comes near the true square."""
    monkeypatch.setattr(bits, "_ROWS_PER_BLOCK", 2)
    size, ratios = int(rows * bits._ROW_LENGTH), []
    for seed in range(60):
        torch.manual_seed(seed)
        x, y = torch.randn(size), torch.randn(size)
        found = (compute_sketch(x) - compute_sketch(y))[:4].square().mean() / (x - y).double().square().sum()
        ratios.append(float(found))
        assert torch.allclose(compute_sketch(x)[4], x.double().square().sum())
    assert 0.7 < sum(ratios) / len(ratios) < 1.3


def test_what_is_apart() -> None:
    """A gradient that moved by more than the band; rounding of one that is nearly zero is none. NaN is apart."""
    big, small = random_tensor(500), 1e-7 * random_tensor(500)
    loss = torch.tensor([3.0])
    changes = [(0, 1e-5, False), (0, 0.1, True), (1, 0.5, False), (2, 1e-5, False), (2, 0.1, True), (2, math.nan, True)]
    for band, differs_by_a_bit in ((1e-3, False), (None, True)):
        likeness = DigestComparer(band)
        before = torch.stack([likeness.compute(x) for x in (big, small, loss)]).view(3, -1)
        assert before.shape == likeness.allocate_digests(3, big.device).shape
        for row, change, apart in changes:
            after = before.clone()
            after[row] = likeness.compute((big, small, loss)[row] * (1 + change))
            assert likeness.find_differences(before, after).tolist() == [
                number == row and (apart or differs_by_a_bit) for number in range(3)
            ]
