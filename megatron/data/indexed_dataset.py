"""Token files PREFIX.bin and PREFIX.idx: the format, and the reader, which checks them before use.

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

import bisect
import difflib
import mmap
import os
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.samples import index_dtype

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
COUNTS_OFFSET = 18
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_BLOCK = 1 << 20  # entries of the index that are processed at once


class DatasetError(ValueError):
    """A dataset that cannot be used. The message says which file, what is wrong and what to do."""


def token_dtype(vocab_size: int) -> type[np.integer]:
    """The integer type in which a vocabulary is written: uint16 below 65,500 ids, otherwise int32 (Megatron's rule)."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """Documents of tokens, read through a memory map. Safe to use from several threads.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Raises:
        DatasetError: a file is missing, truncated, foreign or contradicts the other.
    """

    dtype: np.dtype[np.integer]
    """Type of the tokens."""
    lengths: NDArray[np.int32]
    """Tokens of each sequence."""
    offsets: NDArray[np.int64]
    """Byte of .bin at which each sequence starts."""
    document_index: NDArray[np.int64]
    """0, then the number of sequences up to the end of each document."""

    # These are unaligned views of the file: index them; searchsorted and take would copy them whole.

    def __init__(self, prefix: str) -> None:
        if "://" in prefix:
            raise DatasetError(
                f"dataset {prefix}: tokens are read from files of this machine, not from an object store.\n"
                f"  Copy {prefix}.bin and {prefix}.idx to a local disk first, and give the path there."
            )
        self.prefix = prefix
        self._index = _map(_existing(prefix, ".idx"))
        self._tokens = _map(_existing(prefix, ".bin"))
        self.data = memoryview(self._tokens)
        """All bytes of .bin."""
        self._read_header(self._index)
        self._check_index()
        _forget(self._index)

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
        dtype: np.dtype[Any] = np.dtype(TOKEN_TYPES.get(code, np.float64)).newbyteorder("<")
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
        self.lengths = np.frombuffer(index, "<i4", num_sequences, HEADER.size)
        self.offsets = np.frombuffer(index, "<i8", num_sequences, first)
        self.document_index = np.frombuffer(index, "<i8", num_entries, second)

    def _check_index(self) -> None:
        """Check every number of the index, in blocks, so that a large index does not need its size again in memory."""
        path, num_sequences = f"{self.prefix}.idx", len(self.lengths)
        entries = self.document_index
        rising, single = True, len(entries) == num_sequences + 1
        for block in blocks(len(entries) - 1):
            before, after = entries[block], entries[block.start + 1 : block.stop + 1]
            rising = rising and bool((before <= after).all())
            single = single and bool((after - before == 1).all())
        if not len(entries) or entries[0] != 0 or entries[-1] != num_sequences or not rising:
            raise DatasetError(
                f"{path}: the document index must rise from 0 to the number of sequences, {num_sequences:,}.\n"
                "  It is damaged: make or copy it again."
            )
        self.one_sequence_each = single
        """Whether each document is one sequence, as in almost all datasets."""
        size, width, covered = len(self.data), self.dtype.itemsize, 0
        for block in blocks(num_sequences):
            lengths, offsets = self.lengths[block].astype(np.int64), self.offsets[block]
            # As a difference: offset + length of a damaged file may pass 2**63.
            bad = (lengths < 0) | (offsets < 0) | (offsets > size - lengths * width) | (offsets & (width - 1) != 0)
            if bad.any():
                at = int(np.argmax(bad))
                raise DatasetError(
                    f"{self.prefix}.bin has {size:,} bytes, but {path} places sequence {block.start + at:,} ({lengths[at]:,} "
                    f"tokens of {width} bytes) at byte {offsets[at]:,}.\n"
                    "  The .bin file is truncated or belongs to another .idx: make or copy both again."
                )
            covered += int(lengths.sum()) * width
        self._covered = covered

    def check_covered(self) -> None:
        """Check that the sequences make up all of .bin, as those of one that belongs to the index do.

        Raises:
            DatasetError: they do not.
        """
        if self._covered < len(self.data):
            raise DatasetError(
                f"{self.prefix}.bin has {len(self.data):,} bytes, but the sequences of {self.prefix}.idx only {self._covered:,}.\n"
                "  They do not belong together, or one is damaged (tools/inspect_data.py looks at them): make or copy both again."
            )

    @cached_property
    def digest(self) -> str:
        """Hash (XXH3, 128 bits) of the .idx file: the same wherever the files lie."""
        from xxhash import xxh3_128_hexdigest  # made-up data does without it

        found = xxh3_128_hexdigest(self._index)
        _forget(self._index)
        return found

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    def num_tokens(self, documents: range) -> int:
        """Number of tokens in a range of consecutive documents."""
        first, stop = self.document_index[documents.start], self.document_index[documents.stop]
        return int(self.lengths[first:stop].sum(dtype=np.int64))

    def sequences(self, documents: NDArray[np.integer]) -> NDArray[np.integer]:
        """Indices of all sequences of these documents, in order."""
        dtype = index_dtype(len(self.lengths))
        if self.one_sequence_each:
            return documents.astype(dtype, copy=False)
        parts = [np.empty(0, dtype)]
        for block in blocks(len(documents)):
            first = self.document_index[documents[block]]
            counts = self.document_index[documents[block] + np.int64(1)] - first
            numbers = np.repeat(first - np.cumsum(counts) + counts, counts)  # first, first + 1, ... of each document
            numbers += np.arange(len(numbers))
            parts.append(numbers.astype(dtype))
        return np.concatenate(parts)

    def check_whole(self) -> None:
        """Check, before tokens are read, that the files are as long as they were: to read what is cut off would end the process.

        Raises:
            DatasetError: one has become shorter.
        """
        for mapped, suffix in ((self._tokens, ".bin"), (self._index, ".idx")):
            if isinstance(mapped, mmap.mmap) and mapped.size() < len(mapped):
                raise DatasetError(
                    f"{self.prefix}{suffix} was cut from {len(mapped):,} to {mapped.size():,} bytes while it was in use.\n"
                    "  Nobody may write to a dataset that a run reads: make or copy it again, and start the run again."
                )

    def read(self, sequence: int, offset: int, count: int) -> NDArray[np.integer]:
        """`count` tokens of a sequence from `offset` on, as a view of the file."""
        self.check_whole()
        start = int(self.offsets[sequence]) + offset * self.dtype.itemsize
        return np.frombuffer(self.data[start : start + count * self.dtype.itemsize], self.dtype)

    def document(self, number: int) -> NDArray[np.integer]:
        """All tokens of a document."""
        sequences = range(self.document_index[number], self.document_index[number + 1])
        parts = [self.read(sequence, 0, int(self.lengths[sequence])) for sequence in sequences]
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def document_of(self, sequence: int) -> int:
        """The document that a sequence belongs to."""
        if self.one_sequence_each:
            return sequence
        return bisect.bisect_right(self.document_index, sequence) - 1


def blocks(count: int) -> Iterator[slice]:
    """Consecutive slices of the entries of an index, each of bounded size."""
    return (slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


def _forget(mapped: mmap.mmap | bytes) -> None:
    """Stop counting the pages that were read as memory of this process. Pages that are used again are mapped again."""
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _existing(prefix: str, suffix: str) -> Path:
    path = Path(prefix + suffix)
    if path.is_file():
        return path
    hint = "Give the path without .bin and .idx, of files made by tools/preprocess_data.py."
    prefixes = sorted(str(found.with_suffix("")) for found in path.parent.glob("*.idx"))
    if nearest := difflib.get_close_matches(prefix, prefixes, n=3, cutoff=0.5):
        hint += f" Nearest: {', '.join(nearest)}."
    raise DatasetError(f"dataset {prefix}: the file {path} does not exist.\n  {hint}")


_BLOCKS, _BLOCK_BYTES = 256, 4096


def fingerprint(dataset: IndexedDataset) -> str:
    """Hash (XXH3, 128 bits) of the .idx file, the size of .bin and some of its bytes: 256 blocks of 4 KiB, evenly spread, the first
    and the last among them.

    The index alone cannot tell two datasets apart whose documents all have one length, and .bin is too large to read at start-up.
    """
    from xxhash import xxh3_128

    state = xxh3_128(f"{dataset.digest} {len(dataset.data)} ".encode())
    for start in np.linspace(0, max(len(dataset.data) - _BLOCK_BYTES, 0), _BLOCKS).astype(np.int64).tolist():
        state.update(dataset.data[start : start + _BLOCK_BYTES])
    return state.hexdigest()


# ---- Loss masks in the data: which tokens a model is to learn, and where conversations end.
#
# Beside a dataset PREFIX lies the indexed dataset PREFIX_loss_mask: for each token one byte of marks, in the same documents. With
# it a model learns its own answers and not the questions (`tools/preprocess_data.py --chat-template` writes both).
#
# Ends are marked too, because a token that ends a document elsewhere may end each turn of a conversation.

MARK_TYPE = np.uint8


def loss_mask_prefix(prefix: str) -> str:
    """Path of a dataset's loss mask, without .bin and .idx."""
    return f"{prefix}_loss_mask"


def has_loss_mask(prefix: str) -> bool:
    """Whether a dataset has a loss mask."""
    return Path(f"{loss_mask_prefix(prefix)}.idx").exists()


def open_loss_mask(dataset: IndexedDataset) -> IndexedDataset:
    """The marks of a dataset's tokens.

    Raises:
        DatasetError: a file is missing or damaged, or the marks are not those of this dataset.
    """
    marks = IndexedDataset(loss_mask_prefix(dataset.prefix))
    if marks.dtype != MARK_TYPE:
        raise DatasetError(
            f"{marks.prefix}.idx has tokens of type {marks.dtype.name}; marks are {np.dtype(MARK_TYPE).name}.\n"
            "  Make the dataset again with tools/preprocess_data.py --chat-template."
        )
    same = all(
        len(ours) == len(its) and all(np.array_equal(ours[block], its[block]) for block in blocks(len(ours)))
        for ours, its in ((dataset.lengths, marks.lengths), (dataset.document_index, marks.document_index))
    )
    if not same:
        raise DatasetError(
            f"{marks.prefix} marks other documents than {dataset.prefix} has: their lengths differ.\n"
            "  They are of two runs of tools/preprocess_data.py; make both again, or copy both."
        )
    return marks
