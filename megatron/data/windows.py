"""The documents of a split, and one pass over them: laid end to end, cut into windows, the windows in an order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import parse_split
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.samples import Key, permutation


def split_documents(text: str, num_documents: int) -> tuple[range, range, range]:
    """The documents of each split: consecutive ranges whose bounds are rounded fractions of all documents.

    Rounding (halves to even, of a running sum of shares) is Megatron's, so the same file splits at the same documents.
    """
    bounds = [round(share * num_documents) for share in itertools.accumulate(parse_split(text), initial=0.0)]
    train, valid, test = (range(start, stop) for start, stop in itertools.pairwise(bounds))
    return train, valid, test


@dataclass(frozen=True)
class Selection:
    """The documents of a split, the seed of their order, and the sequence length."""

    dataset: IndexedDataset
    documents: range
    """Consecutive documents that belong to the split."""
    split: int
    """0 training, 1 validation, 2 test."""
    seed: int
    seq_length: int
    """Tokens that the model reads at once."""

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens in the split."""
        return self.dataset.num_tokens(self.documents)


class DocumentLayout(NamedTuple):
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


class Windows(NamedTuple):
    """Windows of seq_length + 1 tokens, in the order in which they are read.

    The windows of an interval overlap by one token, so that every token but the first is predicted once.
    """

    begins: NDArray[np.int64]
    """Token at which each interval begins."""
    firsts: NDArray[np.int64]
    """Index of the first window of each interval, and the number of all windows."""
    order: NDArray[np.integer]
    """Index of the window at each position of the order."""
    seq_length: int

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
    return Windows(begins, firsts, permutation(int(firsts[-1]), key), seq_length)


def cut_points(intervals: Intervals, seq_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`begins` and `firsts` of the windows of these intervals."""
    counts = (intervals.ends - intervals.begins - 1) // seq_length
    return intervals.begins, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


PassIndex = tuple[DocumentLayout, Windows]
"""The order of one pass."""


class SamplePlace(NamedTuple):
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


# ---- Parts of the sequences of an indexed dataset, and what is read of them.


class SequencePieces(NamedTuple):
    """Parts of sequences that, one after another, make up windows or whole documents."""

    sequences: NDArray[np.integer]
    first: NDArray[np.int64]
    """Index of the first token within the sequence."""
    counts: NDArray[np.int64]


def joined(dataset: IndexedDataset, pieces: SequencePieces) -> NDArray[np.integer]:
    """What a dataset has in these pieces, one after another."""
    dataset.check_whole()
    width, data = dataset.dtype.itemsize, dataset.data
    begins = dataset.offsets[pieces.sequences] + pieces.first * width
    ends = begins + pieces.counts * width
    # One join of views is several times as fast as a copy by numpy for each piece, or than gathering token by token.
    return np.frombuffer(
        b"".join([data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]), dataset.dtype
    )


def pieces_of(layout: DocumentLayout, starts: NDArray[np.int64], length: int) -> SequencePieces:
    """The pieces of windows of `length` tokens that start at these tokens of the layout."""
    # Methods of arrays: numpy's functions of the same names cost twice as much for a single window.
    at = layout.starts.searchsorted(starts, side="right") - 1
    counts = layout.starts.searchsorted(starts + (length - 1), side="right") - at
    at = (at - counts.cumsum() + counts).repeat(counts)
    at += np.arange(len(at))  # at, at + 1, ... of each window
    window_starts, sequence_starts = starts.repeat(counts), layout.starts[at]
    begins = np.maximum(sequence_starts, window_starts)
    ends = np.minimum(layout.starts[at + 1], window_starts + length)
    return SequencePieces(layout.sequences[at], begins - sequence_starts, ends - begins)


class TokenReader:
    """Reads tokens of a dataset, and checks that each is a row of the vocabulary.

    Args:
        vocab_size: every token id must be below it.
    """

    def __init__(self, dataset: IndexedDataset, vocab_size: int) -> None:
        self._dataset, self._vocab_size = dataset, vocab_size
        self._may_be_negative = dataset.dtype.kind == "i"
        self._may_be_beyond = self._may_be_negative or 1 << 8 * dataset.dtype.itemsize > vocab_size

    def read(self, pieces: SequencePieces) -> NDArray[np.integer]:
        """The tokens of pieces, one after another, each a row of the vocabulary."""
        tokens = joined(self._dataset, pieces)
        if (self._may_be_beyond and tokens.max() >= self._vocab_size) or (self._may_be_negative and tokens.min() < 0):
            self._refuse(tokens, pieces)
        return tokens

    def _refuse(self, tokens: NDArray[np.integer], pieces: SequencePieces) -> None:
        dataset, position = self._dataset, int(np.argmax((tokens < 0) | (tokens >= self._vocab_size)))
        at = int(np.searchsorted(np.cumsum(pieces.counts), position, side="right"))
        raise DatasetError(
            f"{dataset.prefix}: document {dataset.document_of(int(pieces.sequences[at])):,} has token id {tokens[position]:,}, but "
            f"the tokenizer has {self._vocab_size:,} ids (0 to {self._vocab_size - 1:,}).\n"
            "  The dataset was made with another tokenizer: give that one (--tokenizer-type and its files, or --vocab-size), or "
            "make the dataset again with tools/preprocess_data.py."
        )
