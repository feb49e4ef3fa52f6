"""The training, validation and test data that the flags ask for: which datasets each split reads, and its samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.data import DataConfig, DataOrder, WeightedPrefix, split_words
from megatron.data.blend import BlendedDataset
from megatron.data.epoch_order import Stretch
from megatron.data.gpt_dataset import GPTDataset, make_order
from megatron.data.history import Blending, BlendPart, Phase, read_before, readings
from megatron.data.index_cache import IndexCache, cache_for
from megatron.data.indexed_dataset import DatasetError, IndexedDataset, fingerprint
from megatron.data.megatron_blend import GreedyBlend, requested_samples
from megatron.data.mock import MockDataset
from megatron.data.samples import SampleSource
from megatron.data.split import SPLIT_NAMES, Selection, split_documents
from megatron.data.tokenizers.simple_tokenizers import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """The splits that a run reads; a split that is not needed is None."""

    train: SplitData
    valid: SplitData | None
    test: SplitData | None

    def all(self) -> list[SplitData]:
        """The splits that are needed."""
        return [data for data in (self.train, self.valid, self.test) if data is not None]


def open_datasets(
    config: DataConfig, *, seed: int, seq_length: int, tokenizer: Tokenizer, need_validation: bool, need_test: bool
) -> Datasets:
    """Open and check the data before anything else is built. Only ranks that need samples call this.

    Raises:
        ValueError: no dataset, flags that are no blend, a damaged file, or a needed split that holds less than one sample.
    """
    opened: dict[str, IndexedDataset] = {}
    own_splits, per_split = split_words(config)

    def make(split: int) -> SplitData:
        components: list[Component] = []
        blending: Blending = "none"
        if not config.mock_data:
            given = per_split[split]
            if not given:
                raise ValueError(
                    f"the {SPLIT_NAMES[split]} split has no data: no entry in {config.per_split_data_args_path}.\n"
                    "  Add it there, or do without evaluation (--eval-iters 0)."
                )
            if len(given) > 1 or (given[0].weight is not None and not own_splits):  # Megatron's distinction
                blending = "sizes" if given[0].weight is None else "weights"
            components = _components(given, split, opened, None if own_splits else config.split, config, seq_length)
        data = SplitData(split, config, seed, seq_length, tokenizer.vocab_size, tokenizer.eod, tuple(components), blending)
        data.source(num_samples=1)  # so that an empty split is found now
        return data

    return Datasets(make(0), make(1) if need_validation else None, make(2) if need_test else None)


def _components(
    given: list[WeightedPrefix],
    split: int,
    opened: dict[str, IndexedDataset],
    shares: str | None,
    config: DataConfig,
    seq_length: int,
) -> list[Component]:
    """The datasets of a blend, with their documents of a split and their weights."""
    found: list[Component] = []
    for each in given:
        if each.weight == 0:
            _log.info("%s: %s has weight 0 and is not read", SPLIT_NAMES[split], each.prefix)
            continue
        dataset = opened.get(each.prefix) or opened.setdefault(each.prefix, IndexedDataset(each.prefix))
        documents = range(dataset.num_documents) if shares is None else split_documents(shares, dataset.num_documents)[split]
        size = max(dataset.num_tokens(documents) - 1, 0) // seq_length  # the number of samples in an epoch
        found.append(Component(dataset, documents, float(size) if each.weight is None else each.weight))
    _refuse_repeats([component.dataset for component in found], config)
    return found


def _refuse_repeats(datasets: list[IndexedDataset], config: DataConfig) -> None:
    """Refuse a dataset that is named twice: it would give the same samples twice, in the same order.

    Raises:
        DatasetError: one is.
    """
    if config.data_order == "megatron":
        return  # exactly what it does there
    first: dict[str, str] = {}
    for dataset in datasets if len(datasets) > 1 else []:
        found = fingerprint(dataset)
        if found in first:
            raise DatasetError(
                f"a blend has {first[found]} and {dataset.prefix}, the same dataset: each of its samples would be read twice.\n"
                "  Name it once, with the sum of the weights."
            )
        first[found] = dataset.prefix


@dataclass(frozen=True)
class Component:
    """One dataset of a blend, with its documents of one split."""

    dataset: IndexedDataset
    documents: range
    weight: float
    """The given weight, or the number of samples in an epoch; only the ratios in a blend count."""

    def part(self) -> BlendPart:
        """The form in which the history of a run records it."""
        first, count = self.documents.start, len(self.documents)
        return BlendPart(self.dataset.prefix, fingerprint(self.dataset), first, count, self.weight)


@dataclass(frozen=True)
class SplitData:
    """The data of one split: a blend of datasets, or made-up tokens where there are none."""

    split: int
    """0 training, 1 validation, 2 test."""
    config: DataConfig
    seed: int
    seq_length: int
    vocab_size: int
    eod: int
    components: tuple[Component, ...]
    blending: Blending

    def parts(self) -> tuple[BlendPart, ...]:
        """The datasets, as the history of a run names them."""
        return tuple(component.part() for component in self.components)

    def source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_read: int | None = None) -> SampleSource:
        """The samples of the split.

        Args:
            num_samples: length of the run; with --data-order megatron it decides the order.
            phases: the run's history, whose last phase reads these samples; empty where they are read from the start.
            num_read: samples that are read, if fewer.

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
        return BlendedDataset(sources, [each.weight for each in self.components], first_sample=first_sample)

    def _in_megatron_order(self, num_samples: int, num_read: int) -> SampleSource:
        if self.blending == "none":
            return self._dataset(self.components[0], num_samples=num_samples)
        weights = [each.weight for each in self.components]
        by_size = self.blending == "sizes"
        if by_size:
            num_samples = min(num_samples, int(sum(weights)))  # one epoch of each
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


def build_index(
    prefix: str,
    *,
    split: str | None,
    seed: int,
    seq_length: int,
    epochs: int = 1,
    order: DataOrder = "epoch",
    num_samples: Sequence[int | None] = (None, None, None),
    data_cache_path: str | None = None,
) -> list[str]:
    """Make the indexes that training with these settings would make at its start.

    Args:
        prefix: An indexed dataset.
        split: Shares as in --split; None gives all documents to training, as --train-data-path does.
        seed: The seed of the run (--seed).
        seq_length: The sequence length of the run.
        epochs: How many epochs, from the first on; the megatron order has all in one index.
        order: As --data-order.
        num_samples: Samples that training, validation and test are asked for, on which the megatron order depends.
        data_cache_path: As in training; by default the folder `cache` beside the dataset.

    Returns:
        a line for each split: what was made, what was there, or why nothing is needed.

    Raises:
        ValueError: a damaged dataset, or a cache that cannot be written.
    """
    dataset = IndexedDataset(prefix)
    everything = range(dataset.num_documents)
    ranges = (everything,) if split is None else split_documents(split, dataset.num_documents)
    lines = []
    for number, documents in enumerate(ranges):
        selection = Selection(dataset, documents, number, seed, seq_length)
        cache = cache_for(dataset.prefix, data_cache_path)
        told = _build_split(selection, epochs if order == "epoch" else 1, order, num_samples[number], cache)
        lines.append(f"{SPLIT_NAMES[number]}: {dataset.prefix}: {told}")
    return lines


def _build_split(selection: Selection, num_passes: int, order: DataOrder, num_samples: int | None, cache: IndexCache) -> str:
    """Make the indexes of the first passes; returns a line that says what was made."""
    try:
        samples = make_order(order, selection, num_samples=num_samples, earlier=(), cache=cache)
    except DatasetError as error:
        return f"no index, since {str(error).splitlines()[0]}"
    for number in range(num_passes):
        samples.index(number)
    if cache.fault:
        raise ValueError(cache.fault)
    if not cache.made and not cache.found:
        return "no index is kept: it is so small that every start computes it in a blink"
    size = sum(file.stat().st_size for file in cache.made) / 1e6
    made = f"made {len(cache.made)} files ({size:,.0f} MB)" if cache.made else "nothing to do"
    return f"{made}, {len(cache.found)} files were there, in {cache.folder}"
