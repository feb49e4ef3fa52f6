"""States over a parameter that ranks cut: each keeps what lies over its elements, and together their boxes are whole tensors."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
import torch

from megatron.checkpoint.manifest import is_partition
from megatron.parallel.state_shape import PER_COLUMN, PER_ELEMENT, PER_ROW, PerBlock, StateShape
from megatron.parallel.tensor_slice import FlatRange, TensorSlice

SHAPES = [
    *((5, 7), (1, 9), (6, 4), (2, 1, 6, 4), (8, 1)),
    *(pytest.param(shape, marks=pytest.mark.full("shapes of two and of four dimensions")) for shape in ((3, 4, 5), (2, 3, 8))),
]
STATES = {
    "elements": PER_ELEMENT,
    "rows": PER_ROW,
    "columns": PER_COLUMN,
    "blocks of 1": PerBlock(1),
    "of 3": PerBlock(3),
    "of 4": PerBlock(4),
    "of 6": PerBlock(6),
}


def lies_over(state: StateShape, shape: tuple[int, ...]) -> torch.Tensor:
    """For each element of a parameter, by itself, the flat number of the state that lies over it."""
    numbers = torch.arange(math.prod(state.get_shape(shape))).view(state.get_shape(shape))
    if state is PER_ROW:
        return numbers.unsqueeze(-1).expand(shape)
    if state is PER_COLUMN:
        return numbers.unsqueeze(-2).expand(shape)
    return numbers.repeat_interleave(state.block_size, -1)[..., : shape[-1]] if isinstance(state, PerBlock) else numbers


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_piece_has_the_numbers_over_its_elements(name: str, shape: tuple[int, ...]) -> None:
    """All and no others, in room for the worst place of so many elements on any of the ranks that divide rows; some needs it."""
    for ranks in (ranks for ranks in range(1, 5) if shape[-1] % ranks == 0):
        check_pieces(STATES[name], shape, ranks)


def check_pieces(state: StateShape, shape: tuple[int, ...], ranks: int) -> None:
    length = shape[-1] // ranks
    local = (*shape[:-1], length)
    numbers = torch.arange(math.prod(state.get_shape(shape))).view(state.get_shape(shape))

    @functools.cache
    def numbers_in(box: TensorSlice) -> list[int]:
        return numbers[box.index].reshape(-1).tolist()

    most: dict[int, int] = {}
    for rank in range(ranks):
        held = TensorSlice((*(0 for _ in shape[:-1]), rank * length), local)
        over = lies_over(state, shape)[held.index].reshape(-1).tolist()
        for start, stop in itertools.combinations(range(held.numel + 1), 2):
            boxes = [placed.slice for placed in state.get_slices(local, held, FlatRange(start, stop))]
            covered = [number for box in boxes for number in numbers_in(box)]
            found, distinct = set(over[start:stop]), set(covered)
            assert len(distinct) == len(covered)
            assert found <= distinct if state is PER_COLUMN else found == distinct  # a piece within a row has all columns
            most[stop - start] = max(most.get(stop - start, 0), len(covered))
    rooms = {count: state.compute_max_numel(shape, local, count) for count in most}
    assert all(rooms[count] >= needed for count, needed in most.items()) and state.compute_max_numel(shape, local, 0) == 0
    assert all(rooms[count] <= most[count] + (state is PER_COLUMN) * length + 1 for count in most), "no more than needed"


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("split", [None, 0, -1, -2])
def test_boxes_of_all_ranks_make_up_the_state(name: str, shape: tuple[int, ...], split: int | None) -> None:
    """Of tensor ranks that divide a dimension, the first perhaps with padding, each cut at random places."""
    state, draw = STATES[name], random.Random(str((name, shape, split)))
    ways = [1] if split is None else [n for n in (2, 3) if split == 0 or shape[split] % n == 0]
    for ranks in ways:
        local = list(shape)
        if split is not None:
            local[split] = -(-shape[split] // ranks)
        cuts = sorted({0, math.prod(local), *(draw.randrange(math.prod(local)) for _ in range(3))})
        boxes: list[TensorSlice] = []
        for rank in range(ranks):
            offsets, sizes = [0] * len(shape), list(shape)
            if split is not None:
                low = min(rank * local[split], shape[split])
                offsets[split], sizes[split] = low, min(low + local[split], shape[split]) - low
            held = TensorSlice(tuple(offsets), tuple(sizes))
            numbers = torch.arange(math.prod(state.get_shape(shape))).view(state.get_shape(shape))
            for start, stop in itertools.pairwise(cuts):
                placed = state.get_slices(tuple(local), held, FlatRange(start, stop))
                room = torch.full((state.compute_max_numel(shape, tuple(local), stop - start),), -1)
                for one in placed:  # boxes do not overlap in memory
                    view = room[one.offset : one.offset + one.slice.numel]
                    assert (view == -1).all()
                    view.copy_(numbers[one.slice.index].reshape(-1))
                    boxes.append(one.slice)
        distinct = list(dict.fromkeys(boxes))
        assert is_partition(state.get_shape(shape), distinct), "equal or disjoint, and together the whole"
