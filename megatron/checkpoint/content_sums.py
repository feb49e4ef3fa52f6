"""Checksums of boxes, content sums of tensors, and digests of a whole checkpoint.

A checksum of a box says that its file is sound. Content sums say what a tensor holds, in 64 bits that do not depend on how it is
cut: boxes of any layout add up to the same number. So memory after a load can be compared with what was saved at another layout.

See the tensor as a matrix (the last dimension is the columns, all others together the rows; a 1-D tensor is one row) of the
elements' bits, read as unsigned integers u of 32 bits: elements of 16 bits are widened, elements of 64 bits count as two columns,
the low half first. Let v = u XOR (u >> 16). With all arithmetic modulo 2^32 and an odd weight for each row and each column ::

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
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import xxhash

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


class BoxSummer:
    """Sums of one box. Feed it the box's bytes from the first to the last, in the pieces that `pieces` names.

    Args:
        dtype: name of the elements' dtype.
        box: the box.
        global_shape: shape of the whole tensor.
        block_bytes: about the largest size of a piece.
    """

    def __init__(self, dtype: str, box: Box, global_shape: tuple[int, ...], block_bytes: int = _BLOCK_BYTES) -> None:
        itemsize = DTYPES[dtype].itemsize
        self._unit = np.dtype("<u2" if itemsize == 2 else "<u4")
        words = itemsize // self._unit.itemsize
        width = words * (box.sizes[-1] if box.sizes else 1)
        first_column = words * (box.offsets[-1] if box.offsets else 0)
        self._width = width
        self._rows_at_once = max(1, block_bytes // (width * self._unit.itemsize)) if width else 1
        # A row that is longer than a piece is cut too; a piece then lies within one row.
        self._columns_at_once = width if self._rows_at_once > 1 else max(1, min(width, block_bytes // self._unit.itemsize))
        self._row_weights = _row_weights(box, global_shape)
        self._column_weights = _weights(first_column, width, 1)
        self._columns = np.zeros(width, np.uint32)
        self._scratch = np.empty(self._rows_at_once * self._columns_at_once, np.uint32)
        self._rows = 0
        self._row = self._column = 0

    def pieces(self) -> Iterable[tuple[int, int]]:
        """Start and end, in bytes, of the pieces in which the data is to be fed."""
        row_bytes = self._width * self._unit.itemsize
        num_rows = len(self._row_weights)
        if self._columns_at_once == self._width:
            for start in range(0, num_rows, self._rows_at_once):
                yield start * row_bytes, min(start + self._rows_at_once, num_rows) * row_bytes
            return
        step = self._columns_at_once * self._unit.itemsize
        for row in range(num_rows):
            for start in range(0, row_bytes, step):
                yield row * row_bytes + start, row * row_bytes + min(start + step, row_bytes)

    def add(self, data: memoryview | bytes) -> None:
        """Take in the next piece."""
        bits = np.frombuffer(data, self._unit)
        flat = self._scratch[: len(bits)]
        if self._unit.itemsize == 2:
            np.copyto(flat, bits)
        else:
            np.right_shift(bits, np.uint32(16), out=flat)
            np.bitwise_xor(flat, bits, out=flat)
        if self._columns_at_once < self._width:
            end = self._column + len(flat)
            self._columns[self._column : end] += flat
            self._rows += int(self._row_weights[self._row]) * int(np.add.reduce(flat, dtype=np.uint32))
            self._row, self._column = (self._row, end) if end < self._width else (self._row + 1, 0)
            return
        block = flat.reshape(-1, self._width)
        self._columns += np.add.reduce(block, axis=0, dtype=np.uint32)
        sums = np.add.reduce(block, axis=1, dtype=np.uint32)
        self._rows += int(np.add.reduce(sums * self._row_weights[self._row : self._row + len(block)], dtype=np.uint32))
        self._row += len(block)

    def sums(self) -> Sums:
        """The sums of all pieces so far."""
        columns = np.add.reduce(self._columns * self._column_weights, dtype=np.uint32)
        return Sums(self._rows & 0xFFFFFFFF, int(columns))


def content_sums(data: memoryview | bytes | bytearray, dtype: str, box: Box, global_shape: tuple[int, ...]) -> Sums:
    """Sums of a box.

    Args:
        data: its raw bytes, row-major, little-endian; contiguous.
        dtype: name of the elements' dtype.
        box: which part of the tensor it is.
        global_shape: of the whole tensor.
    """
    summer = BoxSummer(dtype, box, global_shape)
    view = memoryview(data).cast("B") if box.numel else memoryview(b"")
    for start, end in summer.pieces():
        summer.add(view[start:end])
    return summer.sums()


def digest_of(entries: Iterable[tuple[str, tuple[int, ...], str, str]]) -> str:
    """One digest of many tensors: the `content_digest` of the lines `name [shape] dtype content`.

    Args:
        entries: name, shape, name of the dtype and content sums (`Sums.hex`) of each.
    """
    return content_digest(f"{name} {list(shape)} {dtype} {content}" for name, shape, dtype, content in entries)


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


def checksum(data: memoryview | bytes) -> str:
    """Checksum of raw bytes, with its kind: `xxh3:` and 16 hexadecimal digits (XXH3, 64 bits, seed 0).

    It keeps up with memory (28 GB/s a core, where zlib's CRC-32 does 4), so checking costs a load next to nothing.
    """
    return f"{_KIND}{xxhash.xxh3_64_hexdigest(data)}"


class Checksum:
    """The checksum of bytes that come in pieces."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, data: memoryview | bytes) -> None:
        """Take in the next piece."""
        self._hash.update(data)

    @property
    def text(self) -> str:
        """What `checksum` gives for all pieces together."""
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
