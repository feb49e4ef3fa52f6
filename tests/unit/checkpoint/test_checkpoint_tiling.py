"""Boxes that make up a whole tensor, judged by counting every element."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.manifest import is_partition
from megatron.parallel.tensor_slice import TensorSlice, cover_flat_range


def counted(shape: tuple[int, ...], boxes: list[TensorSlice]) -> bool:
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        if any(offset + size > whole for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True)):
            return False
        counts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return bool((counts == 1).all())


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[TensorSlice]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    numel = int(np.prod(shape))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=4))), numel]
    return shape, [box for low, high in itertools.pairwise(cuts) for box in cover_flat_range(shape, low, high)]


@given(cut_tensors())
def test_flat_ranges_tile(cut: tuple[tuple[int, ...], list[TensorSlice]]) -> None:
    shape, boxes = cut
    assert counted(shape, boxes) and is_partition(shape, boxes)


@given(cut_tensors(), st.data())
def test_a_box_too_few_too_many_or_moved(cut: tuple[tuple[int, ...], list[TensorSlice]], data: st.DataObject) -> None:
    shape, boxes = cut
    at = data.draw(st.integers(0, len(boxes) - 1))
    assert not is_partition(shape, boxes[:at] + boxes[at + 1 :])
    assert not is_partition(shape, [*boxes, boxes[at]])
    moved = TensorSlice(tuple(offset + data.draw(st.integers(0, 2)) for offset in boxes[at].offsets), boxes[at].sizes)
    changed = boxes[:at] + [moved] + boxes[at + 1 :]
    assert is_partition(shape, changed) == counted(shape, changed)


def test_equal_volume_is_not_enough() -> None:
    left, right = TensorSlice((0, 0), (2, 1)), TensorSlice((0, 1), (2, 1))
    assert is_partition((2, 2), [left, right])
    assert not is_partition((2, 2), [left, left])
    assert not is_partition((2, 2), [left, TensorSlice((0, 2), (2, 1))])
    assert is_partition((), [TensorSlice((), ())]) and not is_partition((), [])
    assert is_partition((0, 3), [])
