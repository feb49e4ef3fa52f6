"""Draws samples from several datasets.

A closed formula says which dataset a sample comes from. It is exact for any sample number, without state or tables.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.samples import UNMARKED, SamplePiece, SampleSource

_HALF_BITS = 31
_LOW = (1 << _HALF_BITS) - 1
_ONE = 1 << 2 * _HALF_BITS


class SampleDraw(Protocol):
    """A sequence of samples drawn from several datasets, from each in its own order."""

    weights: list[float]
    """The share of each dataset; together they are 1."""

    def place(self, numbers: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """The dataset of each sample, and its sample number within that dataset.

        Raises:
            ValueError: the blend ends before one of them.
        """

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` come from each dataset."""


class Blend(SampleDraw):
    """A binary tree that splits the samples in two, again and again, until each part is one dataset.

    A node with the left share a = A / 2**62 sends its sample i to the left if floor((i + 1) a + 1/2) > floor(i a + 1/2). So
    floor(n a + 1/2) of its first n samples go left, which is never further than half a sample from n a. The tree joins the two
    smallest weights first (as a Huffman code does), so the weights of the nodes above a dataset grow at least like Fibonacci
    numbers. A node's error of half a sample reaches a dataset scaled by the dataset's share of the node. So a dataset is never
    further than half the sum of the reciprocal Fibonacci numbers, 3.36 / 2 = 1.68 samples, from its share of the first n samples,
    for any n and any number of datasets. This holds exactly for weights that are multiples of the unit of the shares; rounding to
    floating point moves weights by some 2**-53, which is far less than a sample for any run.

    Args:
        weights: Not negative, finite, not all 0; a dataset of weight 0 is never read. Only their ratios count.

    Raises:
        ValueError: the weights are not so.
    """

    MAX_ERROR = 1.7
    """The most samples by which a dataset may be away from its share of the first n samples, for any n."""

    def __init__(self, weights: Sequence[float]) -> None:
        check_weights(weights)
        self._root = _join(weights)
        self.weights = [weight / math.fsum(weights) for weight in weights]

    def place(self, numbers: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        # Exact for numbers below 2**62.
        datasets = np.empty(len(numbers), dtype=np.int32)
        indices = np.empty(len(numbers), dtype=np.int64)
        below = [(self._root, np.arange(len(numbers)), np.asarray(numbers, dtype=np.int64))]
        while below:
            node, at, inner = below.pop()
            if isinstance(node, int):
                datasets[at], indices[at] = node, inner
                continue
            before = node.lefts(inner)
            goes_left = node.lefts(inner + 1) > before
            below.append((node.left, at[goes_left], before[goes_left]))
            below.append((node.right, at[~goes_left], (inner - before)[~goes_left]))
        return datasets, indices

    def counts(self, num_samples: int) -> list[int]:
        found = [0] * len(self.weights)
        below = [(self._root, num_samples)]
        while below:
            node, count = below.pop()
            if isinstance(node, int):
                found[node] = count
                continue
            lefts = int(node.lefts(np.array([count], np.int64))[0])
            below += [(node.left, lefts), (node.right, count - lefts)]
        return found


@dataclass(frozen=True)
class _Node:
    left: _Node | int
    """A dataset (its number), or a node of its own."""
    right: _Node | int
    share: int
    """The share of the left part, in units of 2**-62; at most a half."""

    def lefts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the first `counts` samples go left: floor(count * share / 2**62 + 1/2), by halves that do not overflow."""
        count_high, count_low = counts >> _HALF_BITS, counts & _LOW
        high, low = self.share >> _HALF_BITS, self.share & _LOW
        middle = count_high * low + count_low * high + (count_low * low >> _HALF_BITS) + (1 << _HALF_BITS - 1)
        return count_high * high + (middle >> _HALF_BITS)


def check_weights(weights: Sequence[float]) -> None:
    """Check the weights of a blend.

    Raises:
        ValueError: there are none, one is negative or not finite, or all are 0.
    """
    for at, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"the weight of dataset {at + 1} of {len(weights)} is {weight}.\n  Weights are finite numbers of 0 or more."
            )
    if not sum(weights) > 0:
        raise ValueError(
            f"no dataset has a weight above 0 (weights: {', '.join(map(str, weights)) or 'none'}).\n  Give one to some."
        )


def _join(weights: Sequence[float]) -> _Node | int:
    """Build the tree. Among equal weights, those of lower numbers are joined first."""
    waiting: list[tuple[float, int, _Node | int]] = [(weight, at, at) for at, weight in enumerate(weights) if weight > 0]
    heapq.heapify(waiting)
    for number in range(len(weights), len(weights) + len(waiting) - 1):
        (left_weight, _, left), (right_weight, _, right) = heapq.heappop(waiting), heapq.heappop(waiting)
        together = left_weight + right_weight
        share = max(round(left_weight / together * _ONE), 1)  # at most a half; no weight above 0 is rounded to 0
        heapq.heappush(waiting, (together, number, _Node(left, right, share)))
    return waiting[0][2]


class BlendedDataset(SampleSource):
    """Samples drawn from several sources.

    Args:
        sources: All with the same sequence length.
        blend: Which source each sample comes from.
        first_sample: Number of the first sample: a phase of a run begins where the phase before it ended.
    """

    def __init__(self, sources: Sequence[SampleSource], blend: SampleDraw, *, first_sample: int = 0) -> None:
        assert len(sources) == len(blend.weights), f"{len(sources)} datasets have {len(blend.weights)} weights"
        self._sources, self._blend, self._first_sample = sources, blend, first_sample
        self.seq_length = sources[0].seq_length

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        found = np.empty((count, self.seq_length + 1), dtype=np.int64)
        for rows, source, its_first, its_count in self._drawn(first, count):
            found[rows] = source.samples(its_first, its_count)
        return found

    def marks(self, first: int, count: int) -> NDArray[np.uint8] | None:
        found = np.full((count, self.seq_length + 1), UNMARKED, dtype=MARK_TYPE)
        marked = False
        for rows, source, its_first, its_count in self._drawn(first, count):
            if (marks := source.marks(its_first, its_count)) is not None:
                found[rows], marked = marks, True
        return found if marked else None

    def _drawn(self, first: int, count: int) -> Iterator[tuple[NDArray[np.bool_], SampleSource, int, int]]:
        """Which of these samples come from each source that gives some, its first one, and their number."""
        datasets, indices = self._blend.place(np.arange(first, first + count) - self._first_sample)
        for dataset in np.unique(datasets).tolist():
            of_it = datasets == dataset  # samples of one source, whose numbers are consecutive
            yield of_it, self._sources[dataset], int(indices[of_it][0]), int(of_it.sum())

    def lineage(self, number: int) -> list[SamplePiece]:
        datasets, indices = self._blend.place(np.array([number - self._first_sample]))
        return self._sources[int(datasets[0])].lineage(int(indices[0]))

    def describe(self, num_samples: int) -> list[str]:
        num_samples -= self._first_sample
        lines = []
        for source, weight, count in zip(self._sources, self._blend.weights, self._blend.counts(num_samples), strict=True):
            first, *more = source.describe(count)
            share = f"{weight:.4%} of the blend: {count:,} of {num_samples:,} samples" if weight else "weight 0, never read"
            lines += [f"{first}; {share}", *(more if weight else [])]
        return lines
