"""The index of one pass over the documents as arrays: documents laid end to end, cut into windows, the windows in an order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order import Key, permutation


@dataclass(frozen=True)
class Layout:
    """Documents laid end to end."""

    sequences: NDArray[np.integer]
    """Sequences of the indexed dataset, in the order in which they are laid."""
    starts: NDArray[np.int64]
    """Token at which each of them starts, and the end of the last."""


def lay_out(dataset: IndexedDataset, documents: NDArray[np.integer]) -> Layout:
    """Lay documents end to end in the order in which they are given."""
    sequences = dataset.sequences(documents)
    starts = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(dataset.lengths[sequences], out=starts[1:])
    return Layout(sequences, starts)


@dataclass(frozen=True)
class Intervals:
    """Neighbouring tokens of a layout, disjoint and rising: `begins` included, `ends` excluded."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def num_predicted(self) -> int:
        """Tokens that follow another one of their interval."""
        return int((self.ends - self.begins - 1).sum())


def whole(num_tokens: int) -> Intervals:
    """All tokens of a layout."""
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
    """Number of the first window of each interval, and the number of all windows."""
    order: NDArray[np.integer]
    """Window at each position."""

    def starts(self, windows: NDArray[np.integer]) -> NDArray[np.int64]:
        """Token at which windows start."""
        at = self.firsts.searchsorted(windows, side="right") - 1
        return self.begins[at] + (windows - self.firsts[at]) * self.seq_length

    def left(self, num_read: int) -> Intervals:
        """What is not read after the first `num_read` positions; neighbouring windows are joined again."""
        unread = np.ones(len(self.order), dtype=bool)
        unread[self.order[:num_read]] = False
        starts = self.starts(np.flatnonzero(unread))
        # Windows of two intervals never stand as close as neighbours: at least one window that was read lies between them.
        breaks = np.flatnonzero(np.diff(starts) != self.seq_length)
        return Intervals(
            starts[np.concatenate([[0], breaks + 1])[: len(starts)]],
            starts[np.concatenate([breaks, [-1]])[: len(starts)]] + self.seq_length + 1,
        )


def cut(intervals: Intervals, seq_length: int, key: Key) -> Windows:
    """Cut each interval into windows, and permute them by the key; what is too short for a window is left out."""
    begins, firsts = cut_points(intervals, seq_length)
    return Windows(seq_length, begins, firsts, permutation(int(firsts[-1]), key))


def cut_points(intervals: Intervals, seq_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`begins` and `firsts` of the windows of these intervals."""
    counts = (intervals.ends - intervals.begins - 1) // seq_length
    return intervals.begins, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
