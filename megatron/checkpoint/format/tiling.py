"""Whether boxes make up a whole tensor. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from megatron.parallel.boxes import Box


def tiles(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether the boxes cover every element of a tensor of `shape` exactly once, and nothing outside.

    A box, as a function that is 1 inside and 0 outside, is known by its corners: give each the sign (-1)^(number of upper
    ends). Functions add up to that of the whole exactly if their signed corners do. So this needs one pass over the boxes,
    where comparing pairs would need a square of it.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    _add_corners(corners, Box((0,) * len(shape), shape), -1)
    for box in boxes:
        _add_corners(corners, box, 1)
    return not any(corners.values())


def _add_corners(corners: Counter[tuple[int, ...]], box: Box, weight: int) -> None:
    ends = [((offset, 1), (offset + size, -1)) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    for corner in itertools.product(*ends):
        sign = weight
        for _, end_sign in corner:
            sign *= end_sign
        corners[tuple(at for at, _ in corner)] += sign
