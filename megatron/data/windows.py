"""One pass over documents: laid end to end, cut into windows, the windows in an order; and the reader of such windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.order import Key, permutation
from megatron.data.samples import SamplePiece


@dataclass(frozen=True)
class DocumentLayout:
    """Documents laid end to end."""

    sequences: NDArray[np.integer]
    """Indices of sequences of the dataset, in the order in which they are laid."""
    starts: NDArray[np.int64]
    """Token at which each of them starts, and the end of the last."""


def lay_out(dataset: IndexedDataset, documents: NDArray[np.integer]) -> DocumentLayout:
    """Lay documents end to end in the order in which they are given."""
    sequences = dataset.sequences(documents)
    starts = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(dataset.lengths[sequences], out=starts[1:])
    return DocumentLayout(sequences, starts)


@dataclass(frozen=True)
class Intervals:
    """Disjoint ranges of tokens of a layout, in rising order: `begins` included, `ends` excluded."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def num_predicted(self) -> int:
        """Number of tokens that follow another token of their interval."""
        return int((self.ends - self.begins - 1).sum())


def whole(num_tokens: int) -> Intervals:
    """One interval with all tokens of a layout."""
    return Intervals(np.array([0], np.int64), np.array([num_tokens], np.int64))


@dataclass(frozen=True)
class Windows:
    """Windows of seq_length + 1 tokens, in the order in which they are read.

    The windows of an interval overlap by one token, so that every token but the first is predicted once.
    """

    seq_length: int
    begins: NDArray[np.int64]
    """Token at which each interval begins."""
    firsts: NDArray[np.int64]
    """Index of the first window of each interval, and the number of all windows."""
    order: NDArray[np.integer]
    """Index of the window at each position of the order."""

    def starts(self, windows: NDArray[np.integer]) -> NDArray[np.int64]:
        """The token at which each window starts."""
        at = self.firsts.searchsorted(windows, side="right") - 1
        return self.begins[at] + (windows - self.firsts[at]) * self.seq_length

    def left(self, num_read: int) -> Intervals:
        """What is unread after the first `num_read` positions. Consecutive windows are joined again."""
        unread = np.ones(len(self.order), dtype=bool)
        unread[self.order[:num_read]] = False
        starts = self.starts(np.flatnonzero(unread))
        # Windows of two intervals are never neighbours: at least one window that was read lies between them.
        breaks = np.flatnonzero(np.diff(starts) != self.seq_length)
        return Intervals(
            starts[np.concatenate([[0], breaks + 1])[: len(starts)]],
            starts[np.concatenate([breaks, [-1]])[: len(starts)]] + self.seq_length + 1,
        )


def cut(intervals: Intervals, seq_length: int, key: Key) -> Windows:
    """Cut each interval into windows, and permute them by the key. What is too short for a window is left out."""
    begins, firsts = cut_points(intervals, seq_length)
    return Windows(seq_length, begins, firsts, permutation(int(firsts[-1]), key))


def cut_points(intervals: Intervals, seq_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`begins` and `firsts` of the windows of these intervals."""
    counts = (intervals.ends - intervals.begins - 1) // seq_length
    return intervals.begins, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


_TOKENS_AT_ONCE = 1 << 17  # fits the cache of a core


@dataclass(frozen=True)
class _Pieces:
    """Parts of sequences that, one after another, make up windows."""

    sequences: NDArray[np.integer]
    first: NDArray[np.int64]
    """Index of the first token within the sequence."""
    counts: NDArray[np.int64]


class WindowReader:
    """Reads windows of an indexed dataset; every token id must be below the vocabulary size. Safe to use from several threads."""

    def __init__(self, dataset: IndexedDataset, vocab_size: int) -> None:
        self._dataset = dataset
        self._vocab_size = vocab_size
        self._may_be_negative = dataset.dtype.kind == "i"
        self._may_be_beyond = self._may_be_negative or 1 << 8 * dataset.dtype.itemsize > vocab_size

    def read(self, layout: DocumentLayout, starts: NDArray[np.int64], windows: NDArray[np.int64]) -> None:
        """Fill in windows of consecutive tokens, [len(starts), length], that start at these tokens of the layout.

        Raises:
            DatasetError: a token id is not below the vocabulary size.
        """
        length = windows.shape[1]
        step = max(1, _TOKENS_AT_ONCE // length)
        for begin in range(0, len(starts), step):
            pieces = self._pieces(layout, starts[begin : begin + step], length)
            windows[begin : begin + step] = self._tokens(pieces).reshape(-1, length)

    def lineage(self, layout: DocumentLayout, start: int, length: int) -> list[SamplePiece]:
        """The documents of a window. Consecutive sequences of a document are one piece."""
        dataset, pieces = self._dataset, self._pieces(layout, np.array([start], np.int64), length)
        found: list[SamplePiece] = []
        for sequence, first, count in zip(pieces.sequences.tolist(), pieces.first.tolist(), pieces.counts.tolist(), strict=True):
            if not count:
                continue
            document = dataset.document_of(sequence)
            before = dataset.lengths[dataset.document_index[document] : sequence].sum(dtype=np.int64)
            piece = SamplePiece(dataset.prefix, document, int(before) + first, count)
            last = found[-1] if found else None
            if last and last.document == document and last.first_token + last.num_tokens == piece.first_token:
                found[-1] = SamplePiece(dataset.prefix, document, last.first_token, last.num_tokens + count)
            else:
                found.append(piece)
        return found

    def _pieces(self, layout: DocumentLayout, starts: NDArray[np.int64], length: int) -> _Pieces:
        # Methods of arrays: numpy's functions of the same names cost twice as much for a single window.
        at = layout.starts.searchsorted(starts, side="right") - 1
        counts = layout.starts.searchsorted(starts + (length - 1), side="right") - at
        at = (at - counts.cumsum() + counts).repeat(counts)
        at += np.arange(len(at))  # at, at + 1, ... of each window
        window_starts, sequence_starts = starts.repeat(counts), layout.starts[at]
        begins = np.maximum(sequence_starts, window_starts)
        ends = np.minimum(layout.starts[at + 1], window_starts + length)
        return _Pieces(layout.sequences[at], begins - sequence_starts, ends - begins)

    def _tokens(self, pieces: _Pieces) -> NDArray[np.integer]:
        width, data = self._dataset.dtype.itemsize, self._dataset.data
        begins = self._dataset.offsets[pieces.sequences] + pieces.first * width
        ends = begins + pieces.counts * width
        # One join of views is several times as fast as a copy by numpy for each piece, or than gathering token by token.
        raw = b"".join([data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])
        tokens: NDArray[np.integer] = np.frombuffer(raw, self._dataset.dtype)
        if (self._may_be_beyond and tokens.max() >= self._vocab_size) or (self._may_be_negative and tokens.min() < 0):
            self._refuse(tokens, pieces)
        return tokens

    def _refuse(self, tokens: NDArray[np.integer], pieces: _Pieces) -> None:
        position = int(np.argmax((tokens < 0) | (tokens >= self._vocab_size)))
        at = int(np.searchsorted(np.cumsum(pieces.counts), position, side="right"))
        raise DatasetError(
            f"{self._dataset.prefix}: document {self._dataset.document_of(int(pieces.sequences[at])):,} has token id "
            f"{tokens[position]:,}, but the tokenizer has {self._vocab_size:,} ids (0 to {self._vocab_size - 1:,}).\n"
            "  The dataset was made with another tokenizer: give that one (--tokenizer-type and its files, or --vocab-size), or "
            "make the dataset again with tools/preprocess_data.py."
        )


@dataclass(frozen=True)
class PassIndex:
    """The order of one pass."""

    layout: DocumentLayout
    windows: Windows


@dataclass(frozen=True)
class SamplePlace:
    """The place of a sample in the passes."""

    pass_number: int
    position: int
    """Position in the pass."""
    num_left: int
    """Samples of the pass from this one on."""


class SampleOrder(Protocol):
    """Says which window of which pass each sample is."""

    samples_per_epoch: int

    def place(self, number: int) -> SamplePlace:
        """Place of a sample.

        Raises:
            DatasetError: the order ends before it.
        """

    def index(self, pass_number: int) -> PassIndex:
        """The order of a pass. Takes seconds for a large dataset that is not in the cache."""

    def describe(self, num_samples: int) -> list[str]:
        """Words for the log: which epochs `num_samples` samples take, and what is left out. One line, or two."""
