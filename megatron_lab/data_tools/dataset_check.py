"""Checks a whole dataset: every token, and how the sequences lie in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import IndexedDataset, blocks

_BYTES_AT_ONCE = 1 << 24
_NUM_BINS = 64


@dataclass(frozen=True)
class DatasetProblem:
    """Something that is wrong in a dataset."""

    text: str
    document: int | None = None
    position: int | None = None
    """Token of the document."""


@dataclass(frozen=True)
class LengthBin:
    """Documents of `low` to `high` tokens."""

    low: int
    high: int
    num_documents: int
    num_tokens: int


def verify(dataset: IndexedDataset, vocab_size: int) -> Iterator[DatasetProblem]:
    """Look for ids outside the vocabulary and for bytes of .bin that no sequence, or more than one, has.

    Reads the files once, in their order; memory does not grow with them. What opening a dataset checks is not checked again: sizes,
    lengths, offsets, and that the document index rises.

    Args:
        dataset: Tokens.
        vocab_size: Every id must be below it.

    Yields:
        problems in the order of the file, the first bad id of each document.
    """
    end, last_document = 0, -1
    for block in blocks(len(dataset.lengths)):
        lengths = dataset.lengths[block].astype(np.int64)
        starts = dataset.offsets[block].astype(np.int64)
        stops = starts + lengths * dataset.dtype.itemsize
        before = np.concatenate([[end], stops[:-1]])
        for at in np.flatnonzero(starts != before).tolist():
            document = dataset.document_of(block.start + at)
            yield DatasetProblem(
                f"{dataset.prefix}.idx: document {document:,} does not follow on the sequence before it: that ends at byte "
                f"{before[at]:,}, and this starts at byte {starts[at]:,}",
                document,
            )
        end = int(stops[-1])
        for at in _sequences_with_bad_ids(dataset, starts, stops, vocab_size):
            sequence = block.start + at
            document = dataset.document_of(sequence)
            if document != last_document:
                last_document = document
                yield _bad_id(dataset, document, vocab_size)
    if end != len(dataset.data):
        yield DatasetProblem(f"{dataset.prefix}.bin has {len(dataset.data):,} bytes, and the last sequence ends at byte {end:,}")


def _sequences_with_bad_ids(
    dataset: IndexedDataset, starts: NDArray[np.int64], stops: NDArray[np.int64], vocab_size: int
) -> Iterator[int]:
    """Those of a block of sequences, given by their bytes, that hold an id outside the vocabulary."""
    bounds = [0, *(np.flatnonzero(starts[1:] != stops[:-1]) + 1).tolist(), len(starts)]
    for first, last in pairwise(bounds):  # sequences that lie one after another are read together
        end = int(stops[last - 1])
        for begin in range(int(starts[first]), end, _BYTES_AT_ONCE):
            tokens: NDArray[np.integer] = np.frombuffer(dataset.data[begin : min(begin + _BYTES_AT_ONCE, end)], dataset.dtype)
            if int(tokens.max()) < vocab_size and int(tokens.min()) >= 0:
                continue
            places = begin + _bad(tokens, vocab_size) * dataset.dtype.itemsize
            yield from (first + np.unique(np.searchsorted(starts[first:last], places, side="right") - 1)).tolist()


def _bad_id(dataset: IndexedDataset, document: int, vocab_size: int) -> DatasetProblem:
    tokens = dataset.document(document)
    bad = _bad(tokens, vocab_size)
    more = f" (and {len(bad) - 1:,} more in this document)" if len(bad) > 1 else ""
    return DatasetProblem(
        f"{dataset.prefix}: document {document:,} has token id {tokens[bad[0]]:,} at token {bad[0]:,}{more}; the vocabulary has "
        f"{vocab_size:,} ids (0 to {vocab_size - 1:,})",
        document,
        int(bad[0]),
    )


def _bad(tokens: NDArray[np.integer], vocab_size: int) -> NDArray[np.intp]:
    return np.flatnonzero((tokens < 0) | (tokens >= vocab_size))


def length_histogram(dataset: IndexedDataset) -> list[LengthBin]:
    """Documents by their length in tokens: 0, 1, 2 to 3, 4 to 7, and so on, from the shortest to the longest."""
    documents = np.zeros(_NUM_BINS, np.int64)
    tokens = np.zeros(_NUM_BINS, np.int64)
    for block in blocks(dataset.num_documents):
        bounds = dataset.document_index[block.start : block.stop + 1].astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(dataset.lengths[bounds[0] : bounds[-1]], dtype=np.int64)])
        lengths = np.diff(ends[bounds - bounds[0]])
        bins = np.frexp(lengths.astype(np.float64))[1]  # how many bits the number has
        documents += np.bincount(bins, minlength=_NUM_BINS)
        tokens += np.bincount(bins, weights=lengths, minlength=_NUM_BINS).astype(np.int64)
    used = np.flatnonzero(documents)
    return [
        LengthBin((1 << at) >> 1, (1 << at) - 1 if at else 0, int(documents[at]), int(tokens[at]))
        for at in (range(int(used[0]), int(used[-1]) + 1) if len(used) else ())
    ]
