"""Format and reader of indexed datasets: the token files PREFIX.bin and PREFIX.idx. The reader checks the files before use.

``.bin`` contains the tokens of all sequences. ``.idx``, little-endian and without padding::

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

from megatron.config.regular_file import open_regular
from megatron.data.samples import get_index_dtype

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
COUNTS_OFFSET = 18
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_BLOCK = 1 << 20  # entries of the index that are processed at a time


class DatasetError(ValueError):
    """Error for a dataset that cannot be used. The message contains the file, the problem and the remedy."""


def get_token_dtype(vocab_size: int) -> type[np.integer]:
    """Return the integer type for the tokens of a vocabulary: uint16 below 65,500 ids, otherwise int32, as in Megatron-LM."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """Reader of an indexed dataset: documents of tokens in two files, read through a memory map. Safe to use from several threads.

    Args:
        prefix: path without ``.bin`` and ``.idx``.

    Raises:
        DatasetError: a file is missing, truncated or not of this format, or the two files contradict each other.
    """

    dtype: np.dtype[np.integer]
    """Integer type of the tokens in .bin."""
    lengths: NDArray[np.int32]
    """Number of tokens of each sequence."""
    offsets: NDArray[np.int64]
    """Offset of each sequence in .bin, in bytes."""
    document_index: NDArray[np.int64]
    """Boundaries of the documents: 0, then for each document the number of sequences up to its end."""

    # These arrays are unaligned views of the file. Only index them: searchsorted and take would copy the complete array.

    def __init__(self, prefix: str) -> None:
        if "://" in prefix:
            raise DatasetError(
                f"dataset {prefix}: tokens are read from files of this machine, not from an object store.\n"
                f"  Copy {prefix}.bin and {prefix}.idx to a local disk first, and give the path there."
            )
        self.prefix = prefix
        self._index = _map_file(_require_file(prefix, ".idx"))
        self._bin = _map_file(_require_file(prefix, ".bin"))
        self.data = memoryview(self._bin)
        """All bytes of .bin."""
        self._read_header(self._index)
        self._check_index()
        _release_pages(self._index)

    def _read_header(self, index: mmap.mmap | bytes) -> None:
        path = f"{self.prefix}.idx"
        if index[: len(MAGIC)] != MAGIC or len(index) < HEADER.size:
            raise DatasetError(
                f"{path} is not the index of an indexed dataset: it does not start with {MAGIC!r} and a header of {HEADER.size} "
                "bytes.\n  Give the path, without .bin and .idx, of files made by tools/preprocess_data.py. If these are such "
                "files, the .idx file is damaged: make or copy it again."
            )
        _, version, code, num_sequences, num_entries = HEADER.unpack_from(index)
        if version != VERSION:
            raise DatasetError(
                f"{path} has version {version} of the index format, but only version {VERSION} is supported.\n"
                "  Make the dataset again from its text with tools/preprocess_data.py."
            )
        dtype: np.dtype[Any] = np.dtype(TOKEN_TYPES.get(code, np.float64)).newbyteorder("<")
        if dtype.kind not in "iu":
            supported = ", ".join(f"{code} {np.dtype(t).name}" for code, t in TOKEN_TYPES.items() if np.dtype(t).kind in "iu")
            raise DatasetError(
                f"{path} has token type {code}, but the type of token ids must be one of: {supported}.\n"
                "  Make the dataset again from its text with tools/preprocess_data.py."
            )
        expected = HEADER.size + 12 * num_sequences + 8 * num_entries
        if len(index) != expected:
            raise DatasetError(
                f"{path} has {len(index):,} bytes, but its header ({num_sequences:,} sequences, {num_entries:,} entries of the "
                f"document index) requires {expected:,} bytes.\n  The file is truncated or damaged: make or copy it again."
            )
        self.dtype = dtype
        offsets_start, documents_start = HEADER.size + 4 * num_sequences, HEADER.size + 12 * num_sequences
        self.lengths = np.frombuffer(index, "<i4", num_sequences, HEADER.size)
        self.offsets = np.frombuffer(index, "<i8", num_sequences, offsets_start)
        self.document_index = np.frombuffer(index, "<i8", num_entries, documents_start)

    def _check_index(self) -> None:
        """Check that the document index rises from 0 to the number of sequences, and that every sequence lies within .bin.

        The index is checked in blocks, so that a large index is never copied as a whole.
        """
        path, num_sequences = f"{self.prefix}.idx", len(self.lengths)
        entries = self.document_index
        is_ascending, has_single_sequences = True, len(entries) == num_sequences + 1
        for block in iter_blocks(len(entries) - 1):
            starts, ends = entries[block], entries[block.start + 1 : block.stop + 1]
            is_ascending = is_ascending and bool((starts <= ends).all())
            has_single_sequences = has_single_sequences and bool((ends - starts == 1).all())
        if not len(entries) or entries[0] != 0 or entries[-1] != num_sequences or not is_ascending:
            raise DatasetError(
                f"{path}: the document index must rise from 0 to the number of sequences, {num_sequences:,}.\n"
                "  The file is damaged: make or copy it again."
            )
        self.has_single_sequences = has_single_sequences
        """Whether each document is one sequence, as in almost all datasets."""
        size, itemsize, covered_bytes = len(self.data), self.dtype.itemsize, 0
        for block in iter_blocks(num_sequences):
            lengths, offsets = self.lengths[block].astype(np.int64), self.offsets[block]
            # Compare with a difference, because offset + length of a damaged file may overflow int64.
            is_invalid = (lengths < 0) | (offsets < 0) | (offsets > size - lengths * itemsize) | (offsets & (itemsize - 1) != 0)
            if is_invalid.any():
                i = int(np.argmax(is_invalid))
                raise DatasetError(
                    f"{self.prefix}.bin has {size:,} bytes, but {path} places sequence {block.start + i:,} ({lengths[i]:,} "
                    f"tokens of {itemsize} bytes) at byte {offsets[i]:,}.\n"
                    "  The .bin file is truncated or belongs to another .idx: make or copy both again."
                )
            covered_bytes += int(lengths.sum()) * itemsize
        self._covered_bytes = covered_bytes

    def check_covered(self) -> None:
        """Check that the sequences cover all of .bin. If they do not, .bin probably belongs to another index.

        Raises:
            DatasetError: .bin has bytes that belong to no sequence.
        """
        if self._covered_bytes < len(self.data):
            raise DatasetError(
                f"{self.prefix}.bin has {len(self.data):,} bytes, but the sequences in {self.prefix}.idx cover "
                f"only {self._covered_bytes:,} of them.\n"
                "  The files do not belong together, or one is damaged (tools/inspect_data.py checks them).\n"
                "  Make or copy both again."
            )

    @cached_property
    def digest(self) -> str:
        """Hash (XXH3, 128 bits) of the content of the .idx file."""
        from xxhash import xxh3_128_hexdigest  # not needed for mock data

        digest = xxh3_128_hexdigest(self._index)
        _release_pages(self._index)
        return digest

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    def count_tokens(self, documents: range) -> int:
        """Return the number of tokens in a range of consecutive documents."""
        first, stop = self.document_index[documents.start], self.document_index[documents.stop]
        return int(self.lengths[first:stop].sum(dtype=np.int64))

    def get_sequences(self, documents: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return the indices of all sequences of these documents, in order."""
        dtype = get_index_dtype(len(self.lengths))
        if self.has_single_sequences:
            return documents.astype(dtype, copy=False)
        index_blocks = [np.empty(0, dtype)]
        for block in iter_blocks(len(documents)):
            first = self.document_index[documents[block]]
            counts = self.document_index[documents[block] + np.int64(1)] - first
            indices = np.repeat(first - np.cumsum(counts) + counts, counts)  # first, first + 1, ... of each document
            indices += np.arange(len(indices))
            index_blocks.append(indices.astype(dtype))
        return np.concatenate(index_blocks)

    def check_not_truncated(self) -> None:
        """Check, before tokens are read, that the files have not become shorter. Reading beyond the end of a mapped file would kill
        the process.

        Raises:
            DatasetError: a file has become shorter.
        """
        for mapped, suffix in ((self._bin, ".bin"), (self._index, ".idx")):
            if isinstance(mapped, mmap.mmap) and mapped.size() < len(mapped):
                raise DatasetError(
                    f"{self.prefix}{suffix} was cut from {len(mapped):,} to {mapped.size():,} bytes while it was in use.\n"
                    "  A dataset must not change while a run reads it: make or copy it again, and start the run again."
                )

    def read(self, sequence: int, offset: int, count: int) -> NDArray[np.integer]:
        """Return `count` tokens of a sequence, from `offset` on, as a view of the file."""
        self.check_not_truncated()
        start = int(self.offsets[sequence]) + offset * self.dtype.itemsize
        return np.frombuffer(self.data[start : start + count * self.dtype.itemsize], self.dtype)

    def get_document(self, document: int) -> NDArray[np.integer]:
        """Return all tokens of a document."""
        sequences = range(self.document_index[document], self.document_index[document + 1])
        token_arrays = [self.read(sequence, 0, int(self.lengths[sequence])) for sequence in sequences]
        return np.concatenate([np.empty(0, self.dtype), *token_arrays])

    def find_document(self, sequence: int) -> int:
        """Return the index of the document to which a sequence belongs."""
        if self.has_single_sequences:
            return sequence
        return bisect.bisect_right(self.document_index, sequence) - 1


def iter_blocks(count: int) -> Iterator[slice]:
    """Yield consecutive slices that together cover `count` array entries. Each slice has bounded size, so that a large index can be
    processed without a full copy."""
    return (slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))


def _map_file(path: Path) -> mmap.mmap | bytes:
    with open_regular(path) as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


def _release_pages(mapped: mmap.mmap | bytes) -> None:
    """Release the pages of a mapped file that this process has read, so that they do not count as its memory. The next access maps
    them again."""
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _require_file(prefix: str, suffix: str) -> Path:
    path = Path(prefix + suffix)
    if path.is_file():
        return path
    hint = "Give the path without .bin and .idx, of files made by tools/preprocess_data.py."
    prefixes = sorted(str(index_path.with_suffix("")) for index_path in path.parent.glob("*.idx"))
    if nearest := difflib.get_close_matches(prefix, prefixes, n=3, cutoff=0.5):
        hint += f" Nearest: {', '.join(nearest)}."
    raise DatasetError(f"dataset {prefix}: the file {path} does not exist.\n  {hint}")


_NUM_SAMPLED_BLOCKS, _SAMPLED_BLOCK_BYTES = 256, 4096


def fingerprint(dataset: IndexedDataset) -> str:
    """Return a hash (XXH3, 128 bits) of a dataset's content: of the .idx file, the size of .bin and a part of its bytes.

    The index alone cannot distinguish datasets whose documents all have the same length, and .bin is too large to read at start-up.
    So the hash includes 256 evenly spaced blocks of 4 KiB of .bin, among them the first and the last.
    """
    from xxhash import xxh3_128

    state = xxh3_128(f"{dataset.digest} {len(dataset.data)} ".encode())
    for start in np.linspace(0, max(len(dataset.data) - _SAMPLED_BLOCK_BYTES, 0), _NUM_SAMPLED_BLOCKS).astype(np.int64).tolist():
        state.update(dataset.data[start : start + _SAMPLED_BLOCK_BYTES])
    return state.hexdigest()


def get_tokenizer_file(prefix: str) -> str:
    """Return the path of the file with the fingerprint of a dataset's tokenizer, PREFIX.tokenizer."""
    return f"{prefix}.tokenizer"


# ---- Loss masks of datasets: which tokens count in the loss, and where conversations end.
#
# The loss mask of a dataset PREFIX is the indexed dataset PREFIX_loss_mask. It has one byte of marks per token, in the same
# documents. With a loss mask, a model learns the answers of a conversation and not the questions.
# `tools/preprocess_data.py --chat-template` writes both datasets.
#
# Ends of documents are marked too, because the end-of-document token may also end each turn of a conversation.

MARK_TYPE = np.uint8


def get_loss_mask_prefix(prefix: str) -> str:
    """Return the path of a dataset's loss mask, PREFIX_loss_mask, without .bin and .idx. The mask has one byte per token."""
    return f"{prefix}_loss_mask"


def has_loss_mask(prefix: str) -> bool:
    """Return whether the file PREFIX_loss_mask.idx of a dataset's loss mask exists."""
    return Path(f"{get_loss_mask_prefix(prefix)}.idx").exists()


def open_loss_mask(dataset: IndexedDataset) -> IndexedDataset:
    """Open the loss mask of a dataset: an indexed dataset that has one mark byte for each token.

    One bit of the byte says whether the token counts in the loss as a label (`IN_LOSS`). Another bit says whether it ends a
    document (`DOCUMENT_END`).

    Raises:
        DatasetError: a file is missing or damaged, or the mask belongs to another dataset.
    """
    marks = IndexedDataset(get_loss_mask_prefix(dataset.prefix))
    if marks.dtype != MARK_TYPE:
        raise DatasetError(
            f"{marks.prefix} is not a loss mask: its values are {marks.dtype.name}, but must be {np.dtype(MARK_TYPE).name}.\n"
            "  Make the dataset again with tools/preprocess_data.py --chat-template."
        )
    is_same = all(
        len(dataset_array) == len(marks_array)
        and all(np.array_equal(dataset_array[block], marks_array[block]) for block in iter_blocks(len(dataset_array)))
        for dataset_array, marks_array in ((dataset.lengths, marks.lengths), (dataset.document_index, marks.document_index))
    )
    if not is_same:
        raise DatasetError(
            f"{marks.prefix} is not the loss mask of {dataset.prefix}: the lengths of the documents differ.\n"
            "  The two datasets come from different runs of tools/preprocess_data.py: make both again, or copy both again."
        )
    return marks
