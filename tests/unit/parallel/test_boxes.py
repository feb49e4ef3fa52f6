"""Boxes against tensors of indices: what they cover, in which order, and how many there are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.tensor_slice import FlatRange, TensorSlice, cover_flat_range, map_flat_range

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def cut(tensor: torch.Tensor, box: TensorSlice) -> torch.Tensor:
    """The elements of a box."""
    return tensor[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))]


def indices(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the shape that counts its elements."""
    return torch.arange(math.prod(shape)).reshape(shape)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape and a range of its elements, perhaps empty."""
    shape = draw(SHAPES)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@given(ranges())
def test_a_flat_range_is_covered_exactly_in_order_by_few_boxes(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = cover_flat_range(shape, start, stop)
    covered = [index for box in boxes for index in cut(indices(shape), box).flatten().tolist()]
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel == cut(indices(shape), box).numel() > 0 for box in boxes)


def test_the_bounds_on_the_number_of_boxes_are_reached() -> None:
    assert cover_flat_range((4, 5), 3, 17) == [
        TensorSlice((0, 3), (1, 2)),
        TensorSlice((1, 0), (2, 5)),
        TensorSlice((3, 0), (1, 2)),
    ]
    assert len(cover_flat_range((3, 3, 3), 1, 26)) == 5
    assert len(cover_flat_range((3, 3, 3, 3), 1, 80)) == 7


@pytest.mark.parametrize(
    ("shape", "whole"), [((), TensorSlice((), ())), ((6,), TensorSlice((0,), (6,))), ((2, 3, 4), TensorSlice((0, 0, 0), (2, 3, 4)))]
)
def test_a_whole_tensor_is_one_box(shape: tuple[int, ...], whole: TensorSlice) -> None:
    assert cover_flat_range(shape, 0, math.prod(shape)) == [whole]
    assert cover_flat_range(shape, 0, 0) == []


def test_whole_rows_are_one_box() -> None:
    assert cover_flat_range((5, 2, 3), 6, 18) == [TensorSlice((1, 0, 0), (2, 2, 3))]
    assert cover_flat_range((5, 2, 3), 6, 12) == [TensorSlice((1, 0, 0), (1, 2, 3))]
    assert cover_flat_range((5, 2, 3), 9, 12) == [TensorSlice((1, 1, 0), (1, 1, 3))]


@st.composite
def holdings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], TensorSlice, FlatRange]:
    """A global shape, the box that a rank holds (perhaps no rows), its padded local shape, and a piece of the local tensor."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    offsets, sizes = [], []
    for dim, whole in enumerate(shape):
        low, high = sorted(draw(st.tuples(*[st.integers(0, whole)] * 2)))
        if dim and low == high:  # only the first dimension may be empty
            low, high = 0, whole
        offsets.append(low)
        sizes.append(high - low)
    local = (sizes[0] + draw(st.integers(0, 3)), *sizes[1:])
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(local))] * 2)))
    return shape, local, TensorSlice(tuple(offsets), tuple(sizes)), FlatRange(start, stop)


@given(holdings())
def test_places_of_a_piece_against_a_tensor_of_indices(
    case: tuple[tuple[int, ...], tuple[int, ...], TensorSlice, FlatRange],
) -> None:
    """The local tensor holds the global indices, with -1 in the padded rows; the piece is cut from it and put back."""
    shape, local, held, piece = case
    whole = indices(shape)
    mine = torch.full(local, -1)
    mine[: held.sizes[0]] = cut(whole, held)
    data = mine.flatten()[piece.start : piece.stop]

    seen = torch.zeros(len(data), dtype=torch.bool)
    for placed in map_flat_range(local, held, piece):
        part = slice(placed.offset, placed.offset + placed.slice.numel)
        assert torch.equal(data[part], cut(whole, placed.slice).flatten())
        assert not seen[part].any()
        seen[part] = True
    assert torch.equal(seen, data >= 0), "all but padding is placed"


def test_a_padded_vocabulary_shard_by_hand() -> None:
    """The last of four tensor ranks holds rows 39 to 49 of 50 and two of padding; the piece begins inside row 43."""
    held = TensorSlice((39, 0), (11, 4))
    placed = map_flat_range((13, 4), held, FlatRange(18, 36))
    assert [(p.slice, p.offset) for p in placed] == [(TensorSlice((43, 2), (1, 2)), 0), (TensorSlice((44, 0), (4, 4)), 2)]
    assert map_flat_range((13, 4), held, FlatRange(44, 52)) == []
    assert map_flat_range((13, 4), TensorSlice((50, 0), (0, 4)), FlatRange(0, 52)) == []


def test_only_the_first_dimension_may_be_padded() -> None:
    with pytest.raises(AssertionError, match="only the first dimension"):
        map_flat_range((4, 6), TensorSlice((0, 0), (4, 5)), FlatRange(0, 24))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], TensorSlice, TensorSlice]:
    """Two boxes of one tensor."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))

    def box() -> TensorSlice:
        pairs = [sorted(draw(st.tuples(*[st.integers(0, whole)] * 2))) for whole in shape]
        return TensorSlice(tuple(low for low, _ in pairs), tuple(high - low for low, high in pairs))

    return shape, box(), box()


@given(two_boxes())
def test_intersection_is_what_both_hold(case: tuple[tuple[int, ...], TensorSlice, TensorSlice]) -> None:
    shape, a, b = case
    both = a.intersect(b)
    common = set(cut(indices(shape), a).flatten().tolist()) & set(cut(indices(shape), b).flatten().tolist())
    assert (set() if both is None else set(cut(indices(shape), both).flatten().tolist())) == common
    assert both == b.intersect(a)


def test_scalars_intersect() -> None:
    assert TensorSlice((), ()).intersect(TensorSlice((), ())) == TensorSlice((), ())
