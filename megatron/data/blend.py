"""Blends: samples drawn from several datasets by weight.

A formula gives the dataset of each sample directly from the sample's index. The formula needs no state and no tables, and is exact
for any index.
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
from megatron.data.samples import DEFAULT_MARKS, DocumentSpan, SampleSource

_HALF_BITS = 31
_LOW_MASK = (1 << _HALF_BITS) - 1
_SHARE_SCALE = 1 << 2 * _HALF_BITS


class BlendOrder(Protocol):
    """Order of the samples of a blend, a weighted mixture of datasets: decides from which dataset each sample comes. Within a
    dataset, samples come in the dataset's own order."""

    weights: list[float]
    """Fraction of the samples that comes from each dataset. The fractions sum to 1."""

    def locate(self, sample_indices: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Return the index of the dataset from which each sample comes, and the sample's index within that dataset.

        Raises:
            ValueError: the blend ends before one of the samples.
        """

    def count_samples(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples come from each dataset."""


class Blend(BlendOrder):
    """Blend order for any number of samples. A binary tree whose leaves are the datasets divides the samples: each sample goes from
    the root to one dataset.

    A node sends the fraction a of its samples to its left child, where a is a multiple of 2**-62. Sample i of the node goes left if
    floor((i + 1) * a + 1/2) > floor(i * a + 1/2). Of the node's first n samples, floor(n * a + 1/2) go left. This number differs
    from n * a by at most half a sample.

    Error bound: the number of a dataset's samples among the first n differs from n times its weight by at most 1.68 samples. This
    holds for any n and any number of datasets. The tree joins the two smallest weights first, as a Huffman code does. So the
    weights of the nodes above a dataset grow at least like Fibonacci numbers. The error of a node, half a sample, reaches a dataset
    multiplied by the dataset's share of the node. The total error is therefore at most half the sum of the reciprocal Fibonacci
    numbers, 3.36 / 2 = 1.68 samples. The bound holds exactly for weights that are multiples of 2**-62. Rounding to floating point
    changes weights by about 2**-53, which is far less than a sample in any run.

    Args:
        weights: weight of each dataset: finite, not negative, not all 0. Only their ratios matter. A dataset of weight 0 is never
            read.

    Raises:
        ValueError: the weights do not satisfy these conditions.
    """

    MAX_ERROR = 1.7
    """Largest difference between the number of a dataset's samples among the first n and the dataset's share of n, for any n."""

    def __init__(self, weights: Sequence[float]) -> None:
        check_weights(weights)
        self._root = _build_tree(weights)
        self.weights = [weight / math.fsum(weights) for weight in weights]

    def locate(self, sample_indices: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        # Exact for sample indices below 2**62.
        datasets = np.empty(len(sample_indices), dtype=np.int32)
        indices = np.empty(len(sample_indices), dtype=np.int64)
        pending = [(self._root, np.arange(len(sample_indices)), np.asarray(sample_indices, dtype=np.int64))]
        while pending:
            node, rows, node_indices = pending.pop()
            if isinstance(node, int):
                datasets[rows], indices[rows] = node, node_indices
                continue
            num_left = node.count_left(node_indices)
            is_left = node.count_left(node_indices + 1) > num_left
            pending.append((node.left, rows[is_left], num_left[is_left]))
            pending.append((node.right, rows[~is_left], (node_indices - num_left)[~is_left]))
        return datasets, indices

    def count_samples(self, num_samples: int) -> list[int]:
        counts = [0] * len(self.weights)
        pending = [(self._root, num_samples)]
        while pending:
            node, count = pending.pop()
            if isinstance(node, int):
                counts[node] = count
                continue
            num_left = int(node.count_left(np.array([count], np.int64))[0])
            pending += [(node.left, num_left), (node.right, count - num_left)]
        return counts


@dataclass(frozen=True)
class _Node:
    """Inner node of the binary tree of a `Blend`: divides the samples that reach it between its two children."""

    left: _Node | int
    """Left child: a node, or the index of a dataset."""
    right: _Node | int
    """Right child, which gets the samples that do not go left: a node, or the index of a dataset."""
    left_share: int
    """Share of samples that go to the left child, in units of 2**-62; at most a half."""

    def count_left(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of the node's first `counts` samples go to the left child: floor(count * left_share / 2**62 + 1/2).

        The product is computed in halves of 31 bits, so that it cannot overflow int64.
        """
        count_high, count_low = counts >> _HALF_BITS, counts & _LOW_MASK
        high, low = self.left_share >> _HALF_BITS, self.left_share & _LOW_MASK
        middle = count_high * low + count_low * high + (count_low * low >> _HALF_BITS) + (1 << _HALF_BITS - 1)
        return count_high * high + (middle >> _HALF_BITS)


def check_weights(weights: Sequence[float]) -> None:
    """Check the weights of a blend.

    Raises:
        ValueError: there are no weights, a weight is negative or not finite, or all weights are 0.
    """
    for i, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"the weight of dataset {i + 1} of the {len(weights)} datasets of the blend is {weight}.\n"
                "  Set the weight to a finite number of 0 or more."
            )
    if not sum(weights) > 0:
        raise ValueError(
            f"no dataset of the blend has a weight above 0 (weights: {', '.join(map(str, weights)) or 'none'}).\n"
            "  Give at least one dataset a weight above 0."
        )


def _build_tree(weights: Sequence[float]) -> _Node | int:
    """Build the binary tree by which `Blend` selects the dataset of a sample. Datasets of weight 0 are left out.

    As in a Huffman code, the two subtrees with the smallest total weights are repeatedly joined under a new node. Among datasets of
    equal weight, those with lower indices are joined first.

    Returns:
        the root, or the index of the dataset if only one dataset has a weight above 0.
    """
    subtrees: list[tuple[float, int, _Node | int]] = [
        (weight, dataset_index, dataset_index) for dataset_index, weight in enumerate(weights) if weight > 0
    ]
    heapq.heapify(subtrees)
    for order in range(len(weights), len(weights) + len(subtrees) - 1):
        (left_weight, _, left), (right_weight, _, right) = heapq.heappop(subtrees), heapq.heappop(subtrees)
        total_weight = left_weight + right_weight
        share = max(round(left_weight / total_weight * _SHARE_SCALE), 1)  # at most a half; no weight above 0 is rounded to 0
        heapq.heappush(subtrees, (total_weight, order, _Node(left, right, share)))
    return subtrees[0][2]


class BlendedDataset(SampleSource):
    """Sample source for a blend of datasets: each sample comes from one of several sources.

    Args:
        sources: one source for each dataset of the blend. All have the same sequence length.
        blend: decides from which source each sample comes.
        first_sample: index of the blend's first sample in the run. It is above 0 if the run had another blend before.
    """

    def __init__(self, sources: Sequence[SampleSource], blend: BlendOrder, *, first_sample: int = 0) -> None:
        assert len(sources) == len(blend.weights), f"{len(sources)} datasets have {len(blend.weights)} weights"
        self._sources, self._blend, self._first_sample = sources, blend, first_sample
        self.seq_length = sources[0].seq_length

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        samples = np.empty((count, self.seq_length + 1), dtype=np.int64)
        for rows, source, source_first, source_count in self._iter_samples_by_source(first, count):
            samples[rows] = source.get_samples(source_first, source_count)
        return samples

    def get_marks(self, first: int, count: int) -> NDArray[np.uint8] | None:
        all_marks = np.full((count, self.seq_length + 1), DEFAULT_MARKS, dtype=MARK_TYPE)
        has_marks = False
        for rows, source, source_first, source_count in self._iter_samples_by_source(first, count):
            if (marks := source.get_marks(source_first, source_count)) is not None:
                all_marks[rows], has_marks = marks, True
        return all_marks if has_marks else None

    def _iter_samples_by_source(self, first: int, count: int) -> Iterator[tuple[NDArray[np.bool_], SampleSource, int, int]]:
        """Divide the `count` samples from `first` on by their source. For each source that has any of them, yield:

        - a mask [count] of the samples that come from this source,
        - the source,
        - the index of the first of these samples within the source,
        - the number of these samples.
        """
        datasets, indices = self._blend.locate(np.arange(first, first + count) - self._first_sample)
        for dataset in np.unique(datasets).tolist():
            is_selected = datasets == dataset  # samples of one source; their indices within it are consecutive
            yield is_selected, self._sources[dataset], int(indices[is_selected][0]), int(is_selected.sum())

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        datasets, indices = self._blend.locate(np.array([sample_index - self._first_sample]))
        return self._sources[int(datasets[0])].get_lineage(int(indices[0]))

    def describe(self, num_samples: int) -> list[str]:
        num_samples -= self._first_sample
        lines = []
        for source, weight, count in zip(self._sources, self._blend.weights, self._blend.count_samples(num_samples), strict=True):
            first_line, *further_lines = source.describe(count)
            share = f"{weight:.4%} of the blend: {count:,} of {num_samples:,} samples" if weight else "weight 0, never read"
            lines += [f"{first_line}; {share}", *(further_lines if weight else [])]
        return lines
