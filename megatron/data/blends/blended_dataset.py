"""Samples that are drawn from several datasets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.batches import Piece, SampleSource
from megatron.data.blends.blend import Blend, Placement


class BlendedDataset:
    """Samples of several sources, by number.

    Args:
        sources: All with the same sequence length.
        weights: Share of the samples that each gives (only their ratios count); one of weight 0 gives none.
        blend: Which source each sample comes from (by default `Blend(weights)`).

    Raises:
        ValueError: weights that make no blend.
    """

    def __init__(
        self,
        sources: Sequence[SampleSource],
        weights: Sequence[float],
        *,
        blend: Placement | None = None,
    ) -> None:
        self._sources = list(sources)
        self._blend = blend or Blend(weights)
        if len(self._sources) != len(weights):
            raise ValueError(f"{len(self._sources)} datasets have {len(weights)} weights")
        self.seq_length = self._sources[0].seq_length

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of `count` samples from number `first` on, [count, seq_length + 1]."""
        datasets, indices = self._blend.place(np.arange(first, first + count))
        found = np.empty((count, self.seq_length + 1), dtype=np.int64)
        for dataset in np.unique(datasets).tolist():
            of_it = datasets == dataset  # neighbouring samples of the source, since the numbers are neighbours
            found[of_it] = self._sources[dataset].samples(int(indices[of_it][0]), int(of_it.sum()))
        return found

    def lineage(self, number: int) -> list[Piece]:
        """Where the tokens of a sample come from, in their order."""
        datasets, indices = self._blend.place(np.array([number]))
        return self._sources[int(datasets[0])].lineage(int(indices[0]))

    def describe(self, num_samples: int) -> list[str]:
        """Share and samples of each source, and what it says of itself."""
        lines = []
        for source, weight, count in zip(self._sources, self._blend.weights, self._blend.counts(num_samples), strict=True):
            first, *more = source.describe(count)
            share = f"{weight:.4%} of the blend: {count:,} of {num_samples:,} samples" if weight else "weight 0, never read"
            lines += [f"{first}; {share}", *(more if weight else [])]
        return lines
