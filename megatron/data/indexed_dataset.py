"""Token files PREFIX.bin and PREFIX.idx: the reader, checked before use, and the writer, complete or absent.

``.bin`` holds the tokens of all sequences. ``.idx``, little-endian and without padding::

    offset   size  field
    0        9     magic "MMIDIDX" and two zero bytes
    9        8     uint64 version = 1
    17       1     uint8 token type (TOKEN_TYPES)
    18       8     uint64 S, sequences
    26       8     uint64 D, entries of the document index (documents + 1)
    34       4 S   int32 length of each sequence in tokens
    34+4S    8 S   int64 byte offset of each sequence in .bin
    34+12S   8 D   int64 document index: 0, then the number of sequences up to the end of each document
"""

from __future__ import annotations

import difflib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.data.order import index_dtype

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
COUNTS_OFFSET = 18
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_BLOCK = 1 << 20  # entries of the index that are handled at once


class DatasetError(ValueError):
    """A dataset that cannot be used; the message says which file, what is wrong and what to do."""


def token_dtype(vocab_size: int) -> type[np.integer]:
    """Type in which a vocabulary is written: uint16 below 65,500 ids, otherwise int32 (Megatron's rule)."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """Documents of tokens behind a memory map. Safe to read from several threads.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Raises:
        DatasetError: a file is missing, truncated, foreign or contradicts the other.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        index = _map(_existing(prefix, ".idx"))
        self._tokens = _map(_existing(prefix, ".bin"))
        self._read_header(index)
        self._check_index()

    def _read_header(self, index: mmap.mmap | bytes) -> None:
        path = f"{self.prefix}.idx"
        if index[: len(MAGIC)] != MAGIC or len(index) < HEADER.size:
            raise DatasetError(
                f"{path} is not the index of an indexed dataset: it does not start with {MAGIC!r} and a header of {HEADER.size} "
                "bytes.\n  Give the prefix of files made by tools/preprocess_data.py; if this was one, it is damaged: make or copy "
                "it again."
            )
        _, version, code, num_sequences, num_entries = HEADER.unpack_from(index)
        if version != VERSION:
            raise DatasetError(f"{path} has version {version}; only version {VERSION} is known.\n  Make it again from the text.")
        dtype = np.dtype(TOKEN_TYPES.get(code, np.float64)).newbyteorder("<")
        if dtype.kind not in "iu":
            known = ", ".join(f"{code} {np.dtype(t).name}" for code, t in TOKEN_TYPES.items() if np.dtype(t).kind in "iu")
            raise DatasetError(f"{path} has token type {code}; token ids are one of: {known}.\n  Make it again from the text.")
        expected = HEADER.size + 12 * num_sequences + 8 * num_entries
        if len(index) != expected:
            raise DatasetError(
                f"{path} has {len(index):,} bytes, but its header ({num_sequences:,} sequences, {num_entries:,} entries of the "
                f"document index) asks for {expected:,}.\n  It is truncated or damaged: make or copy it again."
            )
        self.dtype = dtype
        first, second = HEADER.size + 4 * num_sequences, HEADER.size + 12 * num_sequences
        self.lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num_sequences, HEADER.size)
        self._offsets: NDArray[np.int64] = np.frombuffer(index, "<i8", num_sequences, first)
        self.document_index: NDArray[np.int64] = np.frombuffer(index, "<i8", num_entries, second)

    def _check_index(self) -> None:
        """Every number of the index, in blocks, so that a large index does not need its size again in memory."""
        path, entries, num_sequences = f"{self.prefix}.idx", self.document_index, len(self.lengths)
        rising = all((entries[block] <= entries[block.start + 1 : block.stop + 1]).all() for block in _blocks(len(entries) - 1))
        if not len(entries) or entries[0] != 0 or entries[-1] != num_sequences or not rising:
            raise DatasetError(
                f"{path}: the document index must rise from 0 to the number of sequences, {num_sequences:,}.\n"
                "  It is damaged: make or copy it again."
            )
        size = len(self._tokens)
        for block in _blocks(num_sequences):
            lengths, offsets = self.lengths[block].astype(np.int64), self._offsets[block]
            # As a difference: offset + length of a damaged file may pass 2**63.
            bad = (lengths < 0) | (offsets < 0) | (offsets > size - lengths * self.dtype.itemsize)
            if bad.any():
                at = int(np.argmax(bad))
                raise DatasetError(
                    f"{self.prefix}.bin has {size:,} bytes, but {path} places sequence {block.start + at:,} ({lengths[at]:,} "
                    f"tokens of {self.dtype.itemsize} bytes) at byte {offsets[at]:,}.\n"
                    "  The .bin file is truncated or belongs to another .idx: make or copy both again."
                )

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    def num_tokens(self, documents: range) -> int:
        """Tokens in a range of neighbouring documents."""
        first, stop = self.document_index[documents.start], self.document_index[documents.stop]
        return int(self.lengths[first:stop].sum(dtype=np.int64))

    def sequences(self, documents: NDArray[np.integer]) -> NDArray[np.integer]:
        """Numbers of all sequences of these documents, in their order."""
        first = self.document_index[documents]
        counts = self.document_index[documents + 1] - first
        if (counts != 1).any():  # documents of several (or no) sequences: first, first + 1, ... of each
            first = np.repeat(first - np.cumsum(counts) + counts, counts)
            first += np.arange(len(first))
        return first.astype(index_dtype(len(self.lengths)))

    def read(self, sequence: int, offset: int, count: int) -> NDArray[np.integer]:
        """`count` > 0 tokens of a sequence from `offset` on, as a view of the file."""
        start = int(self._offsets[sequence]) + offset * self.dtype.itemsize
        return np.frombuffer(self._tokens, self.dtype, count, start)

    def document(self, number: int) -> NDArray[np.integer]:
        """All tokens of a document."""
        sequences = range(self.document_index[number], self.document_index[number + 1])
        parts = [self.read(sequence, 0, int(self.lengths[sequence])) for sequence in sequences if self.lengths[sequence]]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def document_of(self, sequence: int) -> int:
        """Document that a sequence belongs to."""
        return int(np.searchsorted(self.document_index, sequence, side="right")) - 1


class IndexedDatasetWriter:
    """Writes documents of one sequence each; memory use does not grow with what is written.

    Until `finalise` both files lie under temporary names beside the final ones. As a context manager it finalises at the end of
    the block and removes the temporary files if the block failed.

    Args:
        prefix: Path without ``.bin`` and ``.idx``; its folder must exist.
        dtype: Type of the tokens, for example `token_dtype(vocab_size)`.
    """

    def __init__(self, prefix: str, dtype: DTypeLike) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = 0
        self.num_tokens = 0
        self._code = next(code for code, known in TOKEN_TYPES.items() if np.dtype(known) == np.dtype(dtype))
        self._partial = {suffix: Path(f"{prefix}{suffix}.partial-{os.getpid()}") for suffix in (".bin", ".idx")}
        self._tokens = self._partial[".bin"].open("wb")
        try:
            self._index = self._partial[".idx"].open("w+b")
        except OSError:
            self._tokens.close()
            self._partial[".bin"].unlink()
            raise
        self._index.write(HEADER.pack(MAGIC, VERSION, self._code, 0, 0))  # the counts are filled in at the end

    def add_document(self, tokens: ArrayLike) -> None:
        """Append one document.

        Raises:
            ValueError: a token does not fit the type of the file.
        """
        array = np.asarray(tokens)
        self.add_documents(array, [array.size])

    def add_documents(self, tokens: ArrayLike, lengths: Sequence[int] | NDArray[np.integer]) -> None:
        """Append several documents: their tokens one after another, and how many each has.

        Raises:
            ValueError: a token does not fit the type of the file, or a document has 2**31 tokens or more.
        """
        array, counts = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        assert counts.sum() == array.size, f"{counts.sum()} tokens in the lengths, {array.size} given"
        if array.size and array.dtype != self.dtype:
            low, high, bounds = array.min(), array.max(), np.iinfo(self.dtype)
            if array.dtype.kind not in "iu" or low < bounds.min or high > bounds.max:
                raise ValueError(
                    f"tokens from {low} to {high} ({array.dtype}) do not fit into {self.dtype.name} of {self.prefix}.bin"
                )
        if counts.size and counts.max() >= 2**31:
            raise ValueError(f"a document of {counts.max():,} tokens is too long for {self.prefix}.idx (below 2**31 = {2**31:,})")
        self._tokens.write(array.astype(self.dtype, copy=False).tobytes())
        self._index.write(counts.astype("<i4").tobytes())
        self.num_documents += counts.size
        self.num_tokens += array.size

    def finalise(self) -> None:
        """Complete both files and give them their final names."""
        try:
            self._write_offsets_and_documents()
            for file in (self._tokens, self._index):
                file.flush()
                os.fsync(file.fileno())
                file.close()
            # An index never lies beside a .bin of another dataset, whenever we are interrupted.
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                self._partial[suffix].replace(f"{self.prefix}{suffix}")
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written."""
        self._tokens.close()
        self._index.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def _write_offsets_and_documents(self) -> None:
        end = HEADER.size + 4 * self.num_documents
        position = 0
        for block in _blocks(self.num_documents):
            self._index.seek(HEADER.size + 4 * block.start)
            ends = position + np.cumsum(np.frombuffer(self._index.read(4 * (block.stop - block.start)), "<i4"), dtype="<i8")
            offsets = np.concatenate([np.array([position], "<i8"), ends[:-1]]) * self.dtype.itemsize
            position = int(ends[-1])
            self._index.seek(end + 8 * block.start)
            self._index.write(offsets.tobytes())
        self._index.seek(end + 8 * self.num_documents)
        for block in _blocks(self.num_documents + 1):
            self._index.write(np.arange(block.start, block.stop, dtype="<i8").tobytes())
        self._index.seek(COUNTS_OFFSET)
        self._index.write(struct.pack("<QQ", self.num_documents, self.num_documents + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finalise()
        else:
            self.discard()


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


def _existing(prefix: str, suffix: str) -> Path:
    path = Path(prefix + suffix)
    if path.is_file():
        return path
    hint = "Give the path without .bin and .idx, of files made by tools/preprocess_data.py."
    prefixes = sorted(str(found.with_suffix("")) for found in path.parent.glob("*.idx"))
    if nearest := difflib.get_close_matches(prefix, prefixes, n=3, cutoff=0.5):
        hint += f" Nearest: {', '.join(nearest)}."
    raise DatasetError(f"dataset {prefix}: the file {path} does not exist.\n  {hint}")
