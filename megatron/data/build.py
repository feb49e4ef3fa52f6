"""The training, validation and test data that the flags ask for."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megatron.config.data import DataConfig, WeightedPrefix, split_words
from megatron.data.fingerprint import fingerprint
from megatron.data.history import Blending
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.split import SPLIT_NAMES, split_documents
from megatron.data.split_data import Component, SplitData
from megatron.data.tokenizers.protocol import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """What a run reads; a split that is not needed is None."""

    train: SplitData
    valid: SplitData | None
    test: SplitData | None

    def all(self) -> list[SplitData]:
        """Those that are needed."""
        return [data for data in (self.train, self.valid, self.test) if data is not None]


def open_datasets(
    config: DataConfig, *, seed: int, seq_length: int, tokenizer: Tokenizer, need_validation: bool, need_test: bool
) -> Datasets:
    """Open and check the data before anything else is built. Only ranks that need samples call this.

    Raises:
        ValueError: no dataset, words that are no blend, a damaged file, or a needed split that holds less than one sample.
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
        data.source(num_samples=1)  # an empty split is found now
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
    """The datasets of a blend with their documents of a split and their weights."""
    found: list[Component] = []
    for each in given:
        if each.weight == 0:
            _log.info("%s: %s has weight 0 and is not read", SPLIT_NAMES[split], each.prefix)
            continue
        dataset = opened.get(each.prefix) or opened.setdefault(each.prefix, IndexedDataset(each.prefix))
        documents = range(dataset.num_documents) if shares is None else split_documents(shares, dataset.num_documents)[split]
        size = max(dataset.num_tokens(documents) - 1, 0) // seq_length  # samples of an epoch
        found.append(Component(dataset, documents, float(size) if each.weight is None else each.weight))
    _refuse_repeats([component.dataset for component in found], config)
    return found


def _refuse_repeats(datasets: list[IndexedDataset], config: DataConfig) -> None:
    """A dataset named twice would give the same samples twice, in the same order.

    Raises:
        DatasetError: so it is.
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
