"""Evaluations that read each set completely (--full-validation): each sample once, then padding up to a whole number of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES
from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.samples import DEFAULT_MARKS, IN_LOSS, DocumentSpan, SampleSource
from megatron.data.splits import DataSplit
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.failure import SetupError, format_ranks


class CompleteSet(SampleSource):
    """Source of all samples of a set: one epoch of each of its datasets, one dataset after the other.

    Samples after the last one are padding: copies of the last sample whose tokens do not count in the loss.

    Args:
        split: split to which the set belongs.

    Raises:
        ValueError: the data has no end, or a dataset has less than one sample.
    """

    def __init__(self, split: DataSplit) -> None:
        self._sources, counts = zip(*split.build_epochs(), strict=True)
        self._starts = [0, *accumulate(counts)]
        self.num_samples = self._starts[-1]
        self.seq_length = split.seq_length
        self._name, self._has_weights = SPLIT_NAMES[split.split], split.blending == "weights"

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        rows = [source.get_samples(start, num_rows) for source, start, num_rows in self._iter_ranges(first, count)]
        samples = np.concatenate(rows)
        return np.concatenate([samples, np.repeat(samples[-1:], count - len(samples), axis=0)])

    def get_marks(self, first: int, count: int) -> NDArray[np.uint8]:
        all_marks, row = np.full((count, self.seq_length + 1), DEFAULT_MARKS, dtype=MARK_TYPE), 0
        for source, start, num_rows in self._iter_ranges(first, count):
            if (marks := source.get_marks(start, num_rows)) is not None:
                all_marks[row : row + num_rows] = marks
            row += num_rows
        all_marks[row:] = all_marks[row - 1]
        all_marks[max(0, self.num_samples - first) :] &= ~MARK_TYPE(IN_LOSS)
        return all_marks

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        ((source, start, _),) = self._iter_ranges(sample_index, 1)
        return source.get_lineage(start)

    def describe(self, num_samples: int) -> list[str]:
        counts = [stop - start for start, stop in pairwise(self._starts)]
        lines = [line for source, count in zip(self._sources, counts, strict=True) for line in source.describe(count)]
        weights = "; the weights of the blend have no effect" if self._has_weights else ""
        return [*lines, f"{self._name}: all {self.num_samples:,} samples, each once (--full-validation){weights}"]

    def _iter_ranges(self, first: int, count: int) -> Iterator[tuple[SampleSource, int, int]]:
        """Yield consecutive ranges of these samples without the padding: the source, its first sample and the number of samples.
        For padding only, yield the last sample of the set."""
        first, stop = min(first, self.num_samples - 1), min(first + count, self.num_samples)
        for source, (source_start, source_stop) in zip(self._sources, pairwise(self._starts), strict=True):
            start, end = max(first, source_start), min(stop, source_stop)
            if start < end:
                yield source, start - source_start, end - start


def count_batches(
    context: ParallelContext, valid: Mapping[str, CompleteSet], test: Mapping[str, CompleteSet], batch_size: int
) -> dict[tuple[str, str], int]:
    """Return the number of global batches in an evaluation of each set, by the name of its split ("validation" or "test") and of
    the set. All ranks call this function together.

    Args:
        valid: the validation sets by name; empty on a rank that does not read data.
        test: the test data, likewise.
        batch_size: number of sequences of a global batch.

    Raises:
        SetupError: on every rank, if the datasets of two ranks differ in size.
    """
    sets_by_split = {"validation": valid, "test": test}
    counts = {(split, name): item.num_samples for split, sets in sets_by_split.items() for name, item in sets.items()}
    counts_of_ranks = gather_objects(counts, context.world)
    reading_ranks = [rank for rank, counts in enumerate(counts_of_ranks) if counts]
    expected = counts_of_ranks[reading_ranks[0]]
    if differing := [rank for rank in reading_ranks if counts_of_ranks[rank] != expected]:
        raise SetupError(
            f"--full-validation: the validation or test data of {format_ranks(differing)} has another number of samples than that "
            f"of rank {reading_ranks[0]}.\n  Give all nodes the same files."
        )
    return {key: -(-count // batch_size) for key, count in expected.items()}
