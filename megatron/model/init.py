"""Initial values as a function of (seed, global name, block of rows), so they do not depend on the layout.

A parameter is seen as rows of its last dimension. Blocks of rows are drawn one by one on CPU in float32, each from its own
generator; a rank draws the blocks that it needs and keeps its slice. So one rank and a thousand start from the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megatron.parallel.boxes import Box, FlatPiece, PlacedBox, place
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, ParamTable
from megatron.parallel.random import stable_seed

_BLOCK_ELEMENTS = 1 << 16


def block_values(record: ParamRecord, seed: int, block: int, rows: int) -> np.ndarray:
    """Rows [block * rows, ...) of the whole parameter, float32 [rows or fewer, last dimension]."""
    columns = record.shape[-1]
    count = min(rows, math.prod(record.shape[:-1]) - block * rows)
    generator = np.random.Generator(np.random.Philox(stable_seed(seed, record.name, block)))
    values = generator.standard_normal((count, columns), dtype=np.float32)
    values *= np.float32(record.init.std)
    return values


def fill(flat: torch.Tensor, record: ParamRecord, boxes: Sequence[PlacedBox], seed: int) -> None:
    """Give a rank's part of a parameter its initial values; padding becomes 0.

    Args:
        flat: the part's elements, of any dtype (values are rounded to it).
        boxes: which boxes of the whole parameter they are, and where each begins; what no box covers is padding.
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
    columns = slice(box.offsets[-1], box.offsets[-1] + box.sizes[-1])
    rows = max(1, _BLOCK_ELEMENTS // record.shape[-1])
    # The box as ranges of rows: all leading dimensions but the last of them are walked one index at a time.
    wanted = np.arange(math.prod(record.shape[:-1])).reshape(record.shape[:-1])
    wanted = wanted[tuple(slice(o, o + n) for o, n in zip(box.offsets[:-1], box.sizes[:-1], strict=True))].ravel()
    target = flat.view(-1, box.sizes[-1])
    blocks = wanted // rows
    ends = [*np.flatnonzero(np.diff(blocks)) + 1, len(wanted)]
    for start, end in zip([0, *ends], ends, strict=False):  # rows of one block are neighbours in the slice too
        block = int(blocks[start])
        values = block_values(record, seed, block, rows)[:, columns]
        target[start:end].copy_(torch.from_numpy(np.ascontiguousarray(values[wanted[start:end] - block * rows])))


def initialize(param: torch.Tensor, record: ParamRecord, context: ParallelContext, seed: int) -> None:
    """Fill this rank's part of a parameter; padding becomes 0."""
    sizes = context.axis_sizes
    held = record.held_box(sizes, context.coordinates)
    fill(param.detach().view(-1), record, place(record.local_shape(sizes), held, FlatPiece(0, param.numel())), seed)


def initialize_all(table: ParamTable, context: ParallelContext, seed: int) -> None:
    """Fill every parameter that this rank holds."""
    for entry in table:
        initialize(entry.param, entry.record, context, seed)
