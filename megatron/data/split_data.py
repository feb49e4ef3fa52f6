"""One split of a run's data: the blend that it is read from, and the samples that this makes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.data.batches import Piece, SampleSource
from megatron.data.blends.blended_dataset import BlendedDataset
from megatron.data.blends.greedy_blend import GreedyBlend, requested_samples
from megatron.data.cache.index_cache import cache_for
from megatron.data.fingerprint import fingerprint
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.history import Blending, Part, Phase, read_before, readings
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.mock import MockDataset
from megatron.data.orders.stretches import Stretch
from megatron.data.split import SPLIT_NAMES

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Component:
    """A dataset of a blend: its documents of one split."""

    dataset: IndexedDataset
    documents: range
    weight: float
    """As given, or the samples of an epoch; only the ratios in a blend count."""

    def part(self) -> Part:
        """As it is written down in the history of a run."""
        first, count = self.documents.start, len(self.documents)
        return Part(self.dataset.prefix, fingerprint(self.dataset), first, count, self.weight)


@dataclass(frozen=True)
class SplitData:
    """What one split is read from: a blend of datasets, or made-up tokens where there are none."""

    split: int
    """0 training, 1 validation, 2 test."""
    config: DataConfig
    seed: int
    seq_length: int
    vocab_size: int
    eod: int
    components: tuple[Component, ...]
    blending: Blending

    def parts(self) -> tuple[Part, ...]:
        """The datasets, as the history of a run names them."""
        return tuple(component.part() for component in self.components)

    def source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_read: int | None = None) -> SampleSource:
        """The samples.

        Args:
            num_samples: length of the run; with --data-order megatron it decides the order.
            phases: the run's history, whose last phase reads these samples; empty where they are read from the start.
            num_read: samples that are read, if that is fewer.

        Raises:
            DatasetError: the split of a dataset holds less than one sample.
        """
        if not self.components:
            return MockDataset(
                split=self.split, seed=self.seed, seq_length=self.seq_length, vocab_size=self.vocab_size, eod=self.eod
            )
        if self.config.data_order == "megatron":
            return self._in_megatron_order(num_samples, num_samples if num_read is None else num_read)
        before = [read_before(phases, part) if phases else [] for part in self.parts()]
        sources = [self._dataset(each, earlier=earlier) for each, earlier in zip(self.components, before, strict=True)]
        first_sample = readings(phases)[-1].first_sample if phases else 0
        if len(sources) == 1 and not first_sample:
            return sources[0]
        blend = BlendedDataset(sources, [each.weight for each in self.components])
        return LaterSamples(blend, first_sample) if first_sample else blend

    def _in_megatron_order(self, num_samples: int, num_read: int) -> SampleSource:
        if self.blending == "none":
            return self._dataset(self.components[0], num_samples=num_samples)
        weights = [each.weight for each in self.components]
        by_size = self.blending == "sizes"
        if by_size:
            num_samples = min(num_samples, int(sum(weights)))  # an epoch of each
            if num_read > num_samples:
                raise DatasetError(
                    f"{SPLIT_NAMES[self.split]} reads {num_read:,} samples, but in Megatron's order a blend by sizes has one epoch "
                    f"of each dataset: {num_samples:,}.\n"
                    "  Give weights (--data-path WEIGHT PREFIX ...), read less, or use --data-order epoch."
                )
        counts: Sequence[int | None] = [None] * len(weights) if by_size else requested_samples(weights, num_samples)
        sources = [self._dataset(each, num_samples=count) for each, count in zip(self.components, counts, strict=True)]
        cache = cache_for(self.components[0].dataset.prefix, self.config.data_cache_path, note=_log.info)
        return BlendedDataset(sources, weights, blend=GreedyBlend(weights, num_samples, cache, by_size=by_size))

    def _dataset(self, component: Component, *, num_samples: int | None = None, earlier: Sequence[Stretch] = ()) -> GPTDataset:
        return GPTDataset(
            component.dataset,
            component.documents,
            split=self.split,
            seed=self.seed,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            order=self.config.data_order,
            num_samples=num_samples,
            earlier=earlier,
            cache=cache_for(component.dataset.prefix, self.config.data_cache_path, note=_log.info),
        )


class LaterSamples:
    """Samples whose numbers begin later: those of a phase of a run begin where the phase before it ended."""

    def __init__(self, source: SampleSource, first_sample: int) -> None:
        self.seq_length = source.seq_length
        self._source, self._first_sample = source, first_sample

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of `count` samples from number `first` on, [count, s + 1]."""
        return self._source.samples(first - self._first_sample, count)

    def lineage(self, number: int) -> list[Piece]:
        """Where the tokens of a sample come from, in their order."""
        return self._source.lineage(number - self._first_sample)

    def describe(self, num_samples: int) -> list[str]:
        """Lines of the start-up log for a run that ends after so many samples."""
        return self._source.describe(num_samples - self._first_sample)
