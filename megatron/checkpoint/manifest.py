"""The manifest: what a checkpoint holds and where. Together with the data files it is all that a reader needs.

A reader need not know which rank wrote a file, nor where a box lies in it. Readers ignore fields that they do not know; a change
that old readers must not ignore raises the version.

docs/checkpoints.md shows `manifest.json`. Manifests of the first programs have no `content` and no `content_digest`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.safetensors_file import DTYPES
from megatron.checkpoint.storage import STATE
from megatron.parallel.boxes import Box

# ---- Checksums of boxes, content sums of tensors, and digests of a whole checkpoint.
#
# A checksum of a box says that its file is sound. Content sums say what a tensor holds, in 64 bits that do not depend on how it is
# cut: boxes of any layout add up to the same number. So memory after a load can be compared with what was saved at another layout.
#
# See the tensor as a matrix (the last dimension is the columns, all others together the rows; a 1-D tensor is one row) of the
# elements' bits, read as unsigned integers u of 32 bits: elements of 8 and 16 bits are widened, elements of 64 bits count as two
# columns, the low half first. Let v = u XOR (u >> 16). With all arithmetic modulo 2^32 and an odd weight for each row and each
# column ::
#
#     rows    = sum over r of  weight(r, seed 0) * (sum over c of v[r, c])
#     columns = sum over c of  weight(c, seed 1) * (sum over r of v[r, c])
#
# (With u in place of v the highest bits would hardly be weighted: modulo 2^32 an odd multiple of 2^31 is 2^31, whatever the weight,
# so two changed signs would cancel.)
#
# r and c count in the whole tensor, so a box adds its share. A single changed element always changes both sums; exchanged rows or
# columns change one of them. `content` in the manifest is `rows` and `columns`, 8 hexadecimal digits each.
#
# weight(i, seed) is the finaliser of MurmurHash3 (32 bits) of i XOR (seed * 0x9E3779B9), with the lowest bit set; i is taken modulo
# 2^32.

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


FORMAT = "megatron-boxes"
VERSION = 1


@dataclass(frozen=True)
class StoredBox:
    """A box, its file and its checksum."""

    box: Box
    file: str
    key: str
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor, as it is stored."""

    shape: tuple[int, ...]
    dtype: str
    """A name in `DTYPES`."""
    boxes: tuple[StoredBox, ...]
    content: str | None = None
    """Its content sums (`content.Sums.hex`); None in old checkpoints."""


@dataclass(frozen=True)
class StoredFile:
    """Size of a file, and its checksum where the boxes in it do not have their own."""

    num_bytes: int
    checksum: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of tensors and training state, one entry a box: `name shape dtype offsets sizes checksum`."""
        entries = [f"{STATE} {self.files[STATE].checksum}"] if STATE in self.files else []
        for name, tensor in self.tensors.items():
            head = f"{name} {list(tensor.shape)} {tensor.dtype}"
            entries += [f"{head} {list(s.box.offsets)} {list(s.box.sizes)} {s.checksum}" for s in tensor.boxes]
            if not tensor.boxes:
                entries.append(head)
        return content_digest(entries)

    @functools.cached_property
    def content_digest(self) -> str | None:
        """Digest of the tensors, one entry each: `name shape dtype content`. The same at every layout; None in old checkpoints."""
        if any(tensor.content is None for tensor in self.tensors.values()):
            return None
        return content_digest(f"{name} {list(t.shape)} {t.dtype} {t.content}" for name, t in self.tensors.items())

    def to_json(self) -> bytes:
        """The content of `manifest.json`."""
        files = {
            name: {"bytes": file.num_bytes} | ({"checksum": file.checksum} if file.checksum else {})
            for name, file in self.files.items()
        }
        tensors = {
            name: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                **({} if tensor.content is None else {"content": tensor.content}),
                "boxes": [
                    {"offsets": s.box.offsets, "sizes": s.box.sizes, "file": s.file, "key": s.key, "checksum": s.checksum}
                    for s in tensor.boxes
                ],
            }
            for name, tensor in self.tensors.items()
        }
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest}
        if self.content_digest is not None:
            head["content_digest"] = self.content_digest
        return json.dumps({**head, "files": files, "tensors": tensors}, separators=(",", ":")).encode()


def joined(parts: Iterable[tuple[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Put together parts of tensors that were just written, by name: boxes one after another, content sums added up."""
    heads: dict[str, StoredTensor] = {}
    boxes: dict[str, list[StoredBox]] = defaultdict(list)
    sums: dict[str, Sums] = defaultdict(lambda: NO_SUMS)
    for name, part in parts:
        assert part.content is not None, "a part that was just written has sums"
        heads.setdefault(name, part)
        boxes[name] += part.boxes
        sums[name] = sums[name].plus(Sums.from_hex(part.content))
    return {name: StoredTensor(head.shape, head.dtype, tuple(boxes[name]), sums[name].hex) for name, head in heads.items()}


def part_from_json(data: bytes, path: str, name: str) -> Manifest:
    """Read and check a manifest, or a rank's part of one.

    Args:
        data: content of the file.
        path: the checkpoint's folder, for messages.
        name: name of the file, for messages.

    Raises:
        CheckpointError: it is of another format, or written by a newer version.
        DamagedCheckpointError: it is unreadable or altered.
    """
    file = f"{path.rstrip('/')}/{name}"
    try:
        content = json.loads(data)
        written_as, version = content["format"], content["version"]
        if written_as != FORMAT or not isinstance(version, int):
            raise CheckpointError(f"{path} is of format {written_as!r}, version {version!r}; this program reads {FORMAT!r}")
        if version > VERSION:
            raise CheckpointError(
                f"{path} was written by a newer version of this program (format version {version}; this one reads up to "
                f"{VERSION}): update the program that loads"
            )
        manifest = Manifest(
            {name: _tensor_from_json(tensor) for name, tensor in content["tensors"].items()},
            {name: StoredFile(_count(file["bytes"]), file.get("checksum")) for name, file in content["files"].items()},
        )
        stated = content["digest"], content.get("content_digest")
        found = manifest.digest, manifest.content_digest
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{file} is not readable ({error!r})") from error
    if found != stated:
        raise DamagedCheckpointError(f"{file} was altered: its content does not have the digest that it states")
    misnamed = [
        stored.key
        for name, tensor in manifest.tensors.items()
        for stored in tensor.boxes
        if stored.key != box_key(name, tensor.shape, stored.box)
    ]
    if misnamed:
        raise DamagedCheckpointError(f"{file} takes boxes for parts of tensors after which they are not named: {misnamed[:3]}")
    named = {stored.file for tensor in manifest.tensors.values() for stored in tensor.boxes}
    if strange := sorted(name for name in named | manifest.files.keys() if name not in manifest.files or Path(name).name != name):
        raise DamagedCheckpointError(f"{file} names files that are not in its list or not in its folder: {strange[:3]}")
    return manifest


def box_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Name of a box in a file: `name` for a whole tensor of `shape`, else `name[0:128,64:128]`.

    A reader asks for it by this name, so that no box is taken for another one of the same size.
    """
    if box.sizes == shape:
        return name
    return f"{name}[{','.join(f'{part.start}:{part.stop}' for part in box.index)}]"


def _tensor_from_json(content: dict) -> StoredTensor:
    boxes = tuple(
        StoredBox(Box(tuple(map(_count, b["offsets"])), tuple(map(_count, b["sizes"]))), b["file"], b["key"], b["checksum"])
        for b in content["boxes"]
    )
    if (dtype := content["dtype"]) not in DTYPES:
        raise KeyError(dtype)
    return StoredTensor(tuple(map(_count, content["shape"])), dtype, boxes, content.get("content"))


def _count(value: object) -> int:
    """A number of elements or bytes.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]} is no number of elements or bytes")
    return value


def tiles(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether the boxes cover every element of a tensor of `shape` exactly once, and nothing outside.

    Take a box as a function that is 1 inside and 0 outside. Its corners, each with the sign (-1)^(number of upper ends), determine
    it. The functions add up to that of the whole tensor exactly if their signed corners do. So this needs one pass over the boxes,
    where comparing pairs would need a square of it.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    whole, boxes = Box.whole(shape), [*boxes]
    if boxes == [whole]:
        return True
    for box, weight in [(whole, -1), *((box, 1) for box in boxes)]:
        for corner in itertools.product(*(((part.start, 1), (part.stop, -1)) for part in box.index)):
            corners[tuple(at for at, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())
