"""Check of a complete indexed dataset: every token id, and the positions of the sequences in the .bin file.

The module also computes the histogram of document lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import IndexedDataset, iter_blocks

_BYTES_PER_READ = 1 << 24
_NUM_BINS = 64


@dataclass(frozen=True)
class DatasetProblem:
    """Defect of a dataset: a message for the user, with the index of the document and of the token if they are known."""

    message: str
    document_index: int | None = None
    position: int | None = None
    """Index of the invalid token within the document; None if the problem is not a single token."""


@dataclass(frozen=True)
class LengthBin:
    """Bin of a length histogram: documents of `low` to `high` tokens, both inclusive."""

    low: int
    high: int
    num_documents: int
    num_tokens: int


def find_problems(dataset: IndexedDataset, vocab_size: int) -> Iterator[DatasetProblem]:
    """Find token ids outside the vocabulary, and bytes of the .bin file that belong to no sequence or to several.

    Both files are read once from start to end, in constant memory. `IndexedDataset` checks file sizes, lengths, offsets and the
    order of the document index when it opens the files, so this function does not check them again.

    Args:
        dataset: dataset of token ids.
        vocab_size: number of ids in the vocabulary; valid ids are 0 to `vocab_size` - 1.

    Yields:
        Problems in the order of the file. For each document, only its first invalid id is reported.
    """
    end, last_document = 0, -1
    for block in iter_blocks(len(dataset.lengths)):
        lengths = dataset.lengths[block].astype(np.int64)
        starts = dataset.offsets[block].astype(np.int64)
        ends = starts + lengths * dataset.dtype.itemsize
        previous_ends = np.concatenate([[end], ends[:-1]])
        for i in np.flatnonzero(starts != previous_ends).tolist():
            document_index = dataset.find_document(block.start + i)
            yield DatasetProblem(
                f"{dataset.prefix}.idx: document {document_index:,} does not start where the previous sequence ends: the "
                f"previous one ends at byte {previous_ends[i]:,}, and this one starts at byte {starts[i]:,}",
                document_index,
            )
        end = int(ends[-1])
        for i in _find_bad_sequences(dataset, starts, ends, vocab_size):
            sequence_index = block.start + i
            document_index = dataset.find_document(sequence_index)
            if document_index != last_document:
                last_document = document_index
                yield _describe_bad_id(dataset, document_index, vocab_size)
    if end != len(dataset.data):
        yield DatasetProblem(f"{dataset.prefix}.bin has {len(dataset.data):,} bytes, and the last sequence ends at byte {end:,}")


def _find_bad_sequences(
    dataset: IndexedDataset, starts: NDArray[np.int64], ends: NDArray[np.int64], vocab_size: int
) -> Iterator[int]:
    """Find the sequences of a block (consecutive sequences of the dataset) that contain a token id outside the vocabulary.

    Args:
        starts: offset of each sequence's first byte in the .bin file.
        ends: offset of the byte after each sequence.

    Yields:
        The index of each such sequence within the block.
    """
    bounds = [0, *(np.flatnonzero(starts[1:] != ends[:-1]) + 1).tolist(), len(starts)]
    for first, last in pairwise(bounds):  # consecutive sequences without a gap are read together
        end = int(ends[last - 1])
        for offset in range(int(starts[first]), end, _BYTES_PER_READ):
            tokens: NDArray[np.integer] = np.frombuffer(dataset.data[offset : min(offset + _BYTES_PER_READ, end)], dataset.dtype)
            if int(tokens.max()) < vocab_size and int(tokens.min()) >= 0:
                continue
            bad_offsets = offset + _find_bad_ids(tokens, vocab_size) * dataset.dtype.itemsize
            yield from (first + np.unique(np.searchsorted(starts[first:last], bad_offsets, side="right") - 1)).tolist()


def _describe_bad_id(dataset: IndexedDataset, document_index: int, vocab_size: int) -> DatasetProblem:
    tokens = dataset.get_document(document_index)
    bad_positions = _find_bad_ids(tokens, vocab_size)
    suffix = f" (and {len(bad_positions) - 1:,} more in this document)" if len(bad_positions) > 1 else ""
    return DatasetProblem(
        f"{dataset.prefix}: document {document_index:,} has token id {tokens[bad_positions[0]]:,} at token "
        f"{bad_positions[0]:,}{suffix}; the vocabulary has {vocab_size:,} ids (0 to {vocab_size - 1:,})",
        document_index,
        int(bad_positions[0]),
    )


def _find_bad_ids(tokens: NDArray[np.integer], vocab_size: int) -> NDArray[np.intp]:
    return np.flatnonzero((tokens < 0) | (tokens >= vocab_size))


def compute_length_histogram(dataset: IndexedDataset) -> list[LengthBin]:
    """Count documents and tokens by document length, in bins of 0, 1, 2 to 3, 4 to 7 tokens and so on.

    The bins range from the shortest to the longest document. Bins between them may be empty.
    """
    document_counts = np.zeros(_NUM_BINS, np.int64)
    token_counts = np.zeros(_NUM_BINS, np.int64)
    for block in iter_blocks(dataset.num_documents):
        bounds = dataset.document_index[block.start : block.stop + 1].astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(dataset.lengths[bounds[0] : bounds[-1]], dtype=np.int64)])
        lengths = np.diff(ends[bounds - bounds[0]])
        bins = np.frexp(lengths.astype(np.float64))[1]  # number of bits of each length, which is the index of its bin
        document_counts += np.bincount(bins, minlength=_NUM_BINS)
        token_counts += np.bincount(bins, weights=lengths, minlength=_NUM_BINS).astype(np.int64)
    nonempty_bins = np.flatnonzero(document_counts)
    return [
        LengthBin((1 << i) >> 1, (1 << i) - 1 if i else 0, int(document_counts[i]), int(token_counts[i]))
        for i in (range(int(nonempty_bins[0]), int(nonempty_bins[-1]) + 1) if len(nonempty_bins) else ())
    ]
