"""The documents of a split, and one pass over them: laid end to end, cut into windows, the windows in an order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import parse_split
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order import Key, permutation


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
