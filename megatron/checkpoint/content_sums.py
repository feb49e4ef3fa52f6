"""Checksums of boxes, content sums of tensors, and digests of a whole checkpoint.

A checksum of a box says that its file is sound. Content sums say what a tensor holds, in 64 bits that do not depend on how it is
cut: boxes of any layout add up to the same number. So memory after a load can be compared with what was saved at another layout.

See the tensor as a matrix (the last dimension is the columns, all others together the rows; a 1-D tensor is one row) of the
elements' bits, read as unsigned integers u of 32 bits: elements of 8 and 16 bits are widened, elements of 64 bits count as two
columns, the low half first. Let v = u XOR (u >> 16). With all arithmetic modulo 2^32 and an odd weight for each row and each
column ::

    rows    = sum over r of  weight(r, seed 0) * (sum over c of v[r, c])
    columns = sum over c of  weight(c, seed 1) * (sum over r of v[r, c])

(With u in place of v the highest bits would hardly be weighted: modulo 2^32 an odd multiple of 2^31 is 2^31, whatever the weight,
so two changed signs would cancel.)

r and c count in the whole tensor, so a box adds its share. A single changed element always changes both sums; exchanged rows or
columns change one of them. `content` in the manifest is `rows` and `columns`, 8 hexadecimal digits each.

weight(i, seed) is the finaliser of MurmurHash3 (32 bits) of i XOR (seed * 0x9E3779B9), with the lowest bit set; i is taken modulo
2^32.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.safetensors_file import DTYPES
from megatron.parallel.boxes import Box

_BLOCK_BYTES = 1 << 18
"""Bytes that are summed both ways before the next are touched: so they stay in the cache in between."""


class Sums(NamedTuple):
    """The two sums of a tensor or of a part of it: a tensor's content, in 64 bits."""

    rows: int
    columns: int

    def plus(self, other: Sums) -> Sums:
        """The sums of two disjoint parts together."""
        return Sums((self.rows + other.rows) & 0xFFFFFFFF, (self.columns + other.columns) & 0xFFFFFFFF)

    @property
    def hex(self) -> str:
        """The sums as 16 hexadecimal digits."""
        return f"{self.rows:08x}{self.columns:08x}"

    @classmethod
    def from_hex(cls, text: str) -> Sums:
        """The sums written as 16 hexadecimal digits."""
        return cls(int(text[:8], 16), int(text[8:], 16))


NO_SUMS = Sums(0, 0)


def content_sums(
    data: memoryview | bytes | bytearray,
    dtype: str,
    box: Box,
    global_shape: tuple[int, ...],
    take: Callable[[memoryview], None] | None = None,
    block_bytes: int = _BLOCK_BYTES,
) -> Sums:
    """Sums of a box.

    Args:
        data: its raw bytes, row-major, little-endian; contiguous.
        dtype: name of the elements' dtype.
        box: which part of the tensor it is.
        global_shape: of the whole tensor.
        take: called with one piece of the data after the other, just before each is summed: while it is in the cache.
        block_bytes: about the largest size of a piece.
    """
    if not box.numel:
        return NO_SUMS
    view = memoryview(data).cast("B")
    itemsize = DTYPES[dtype].itemsize
    unit = np.dtype(f"<u{min(itemsize, 4)}")
    words = itemsize // unit.itemsize
    width, first_column = (words * box.sizes[-1], words * box.offsets[-1]) if box.sizes else (words, 0)
    # A piece holds whole rows, or a part of one row that is longer than a piece.
    block = max(1, block_bytes // unit.itemsize)
    num_rows, num_columns = max(1, block // width), min(width, block)
    row_weights = _row_weights(box, global_shape)
    rows, columns = 0, np.zeros(width, np.uint32)
    scratch = np.empty(num_rows * num_columns, np.uint32)
    for row in range(0, len(row_weights), num_rows):
        weights = row_weights[row : row + num_rows]
        for column in range(0, width, num_columns):
            some = len(weights) * min(num_columns, width - column)
            start = (row * width + column) * unit.itemsize
            piece = view[start : start + some * unit.itemsize]
            if take is not None:
                take(piece)
            bits, mixed = np.frombuffer(piece, unit), scratch[:some]
            if unit.itemsize < 4:
                np.copyto(mixed, bits)
            else:
                np.right_shift(bits, np.uint32(16), out=mixed)
                np.bitwise_xor(mixed, bits, out=mixed)
            matrix = mixed.reshape(len(weights), -1)
            columns[column : column + matrix.shape[1]] += np.add.reduce(matrix, axis=0, dtype=np.uint32)
            rows += int(np.add.reduce(np.add.reduce(matrix, axis=1, dtype=np.uint32) * weights, dtype=np.uint32))
    column_weights = _weights(first_column, width, 1)
    return Sums(rows & 0xFFFFFFFF, int(np.add.reduce(columns * column_weights, dtype=np.uint32)))


def _row_weights(box: Box, global_shape: tuple[int, ...]) -> np.ndarray:
    """Weight of each row of a box, [product of all sizes but the last]."""
    if len(box.sizes) <= 1:
        return _weights(0, 1, 0)
    if box.offsets[1:-1] == (0,) * (len(global_shape) - 2) and box.sizes[1:-1] == global_shape[1:-1]:
        inner = math.prod(global_shape[1:-1])  # rows that follow each other
        return _weights(box.offsets[0] * inner, box.sizes[0] * inner, 0)
    rows = np.zeros(1, np.int64)
    for offset, size, whole in zip(box.offsets[:-1], box.sizes[:-1], global_shape[:-1], strict=True):
        rows = (rows[:, None] * whole + np.arange(offset, offset + size)).reshape(-1)
    return _mixed(rows, 0)


@functools.lru_cache(maxsize=32)
def _weights(first: int, count: int, seed: int) -> np.ndarray:
    """Weights of the indices first, first + 1, ..., [count]."""
    return _mixed(np.arange(first, first + count, dtype=np.int64), seed)


def _mixed(index: np.ndarray, seed: int) -> np.ndarray:
    mixed = index.astype(np.uint32) ^ np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed | np.uint32(1)


_KIND = "xxh3:"


class Checksum:
    """Checksum of raw bytes, which may come in pieces (XXH3, 64 bits, seed 0).

    It keeps up with memory (28 GB/s a core, where zlib's CRC-32 does 4), so checking costs a load next to nothing.
    """

    def __init__(self, data: memoryview | bytes = b"") -> None:
        from xxhash import xxh3_64  # only checkpoints need it

        self._hash = xxh3_64(data)

    def update(self, data: memoryview | bytes) -> None:
        """Take in the next piece."""
        self._hash.update(data)

    @property
    def text(self) -> str:
        """The checksum of all pieces together, with its kind: `xxh3:` and 16 hexadecimal digits."""
        return f"{_KIND}{self._hash.hexdigest()}"


def matches(found: str, expected: str) -> bool:
    """Whether the checksum of some bytes is the one that was stored for them.

    Raises:
        CheckpointError: the stored checksum is of a kind that this program does not know.
    """
    if not expected.startswith(_KIND):
        raise CheckpointError(f"checksum {expected!r} is of an unknown kind: update the program that loads")
    return found == expected


def content_digest(entries: Iterable[str]) -> str:
    """Digest of what a checkpoint holds: the SHA-256 of its entries, sorted, each ended by a newline.

    It does not depend on which rank wrote what into which file. Equal content in other boxes (another layout) has another
    digest.
    """
    total = hashlib.sha256()
    for entry in sorted(entries):
        total.update(entry.encode())
        total.update(b"\n")
    return total.hexdigest()
