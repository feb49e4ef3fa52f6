"""Initial values as a function of (seed, global name, tile), so that they do not depend on the layout.

A parameter is seen as a matrix, whose columns are its last dimension, and cut into tiles of rows x columns. Tiles are drawn one by
one on CPU in float32, each from its own generator. A rank draws the tiles that it needs and keeps its slice, of rows or of columns.
So one rank and a thousand ranks start from the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megatron.parallel.boxes import Box, FlatPiece, PlacedBox
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.random import stable_seed

_TILE_ELEMENTS = 1 << 16
_TILE_COLUMNS = 1 << 10


def tile_size(record: ParamRecord) -> tuple[int, int]:
    """(rows, columns) of a parameter's tiles; those at its lower and right edge may be smaller."""
    columns = min(record.shape[-1], _TILE_COLUMNS)
    return max(1, _TILE_ELEMENTS // columns), columns


def tile_values(record: ParamRecord, seed: int, down: int, across: int) -> np.ndarray:
    """The values of one tile of the whole parameter, float32 [rows, columns]. `down` and `across` are its indices."""
    rows, columns = tile_size(record)
    height = min(rows, math.prod(record.shape[:-1]) - down * rows)
    width = min(columns, record.shape[-1] - across * columns)
    number = down * -(-record.shape[-1] // columns) + across
    generator = np.random.Generator(np.random.Philox(stable_seed(seed, record.name, number)))
    values = generator.standard_normal((height, width), dtype=np.float32)
    values *= np.float32(record.init.std)
    return values


def fill(flat: torch.Tensor, record: ParamRecord, boxes: Sequence[PlacedBox], seed: int) -> None:
    """Give a rank's part of a parameter its initial values; padding becomes 0.

    Args:
        flat: the part's elements, of any dtype (values are rounded to it).
        boxes: which boxes of the whole parameter they are, and where each begins in `flat`; the rest is padding.
    """
    with torch.no_grad():
        if record.init.std == 0.0:
            flat.fill_(record.init.constant)
            return
        if sum(placed.box.numel for placed in boxes) < flat.numel():
            flat.zero_()
        for placed in boxes:
            _fill_box(flat[placed.start : placed.start + placed.box.numel], record, placed.box, seed)


def _fill_box(flat: torch.Tensor, record: ParamRecord, box: Box, seed: int) -> None:
    rows, columns = tile_size(record)
    # The box as ranges of rows: all leading dimensions but the last of them are walked one index at a time.
    wanted = np.arange(math.prod(record.shape[:-1])).reshape(record.shape[:-1])
    wanted = wanted[box.index[:-1]].ravel()
    target = flat.view(-1, box.sizes[-1])
    left, right = box.offsets[-1], box.offsets[-1] + box.sizes[-1]
    tiles = wanted // rows
    ends = [*np.flatnonzero(np.diff(tiles)) + 1, len(wanted)]
    for start, end in zip([0, *ends], ends, strict=False):  # rows of one tile are consecutive in the box too
        down = int(tiles[start])
        inside = wanted[start:end] - down * rows
        for across in range(left // columns, -(-right // columns)):
            origin = across * columns
            low, high = max(left, origin), min(right, origin + columns)
            values = tile_values(record, seed, down, across)[inside, low - origin : high - origin]
            target[start:end, low - left : high - left].copy_(torch.from_numpy(np.ascontiguousarray(values)))


def initialize(param: torch.Tensor, record: ParamRecord, context: ParallelContext, seed: int) -> None:
    """Fill this rank's part of a parameter; padding becomes 0."""
    fill(param.detach().view(-1), record, record.boxes(FlatPiece(0, param.numel()), context), seed)
