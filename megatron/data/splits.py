"""The training, validation and test data of a run. Datasets in files are imported where a run has some."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.data import DataConfig
from megatron.config.imports import named
from megatron.data.history import Blending, BlendPart, Phase
from megatron.data.samples import DocumentRules, MockDataset, SampleSource
from megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class DataSplit(ABC):
    """The data of one split."""

    split: int
    """0 training, 1 validation, 2 test."""
    config: DataConfig
    seed: int
    seq_length: int
    vocab_size: int
    eod: int
    components: tuple[Any, ...] = ()
    """The datasets of a blend; none where tokens are made up."""
    blending: Blending = "none"

    def parts(self) -> tuple[BlendPart, ...]:
        """The datasets, as the history of a run names them."""
        return tuple(component.part(whole_documents=self.config.whole_documents) for component in self.components)

    def warnings(self, rules: DocumentRules) -> list[str]:
        """Return what to warn of, since the data does not fit the rules about documents."""
        return []

    @abstractmethod
    def source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_read: int | None = None) -> SampleSource:
        """The samples of the split.

        Args:
            num_samples: length of the run; with --data-order megatron it decides the order.
            phases: the run's history, whose last phase reads these samples; empty where they are read from the start.
            num_read: samples that are read, if fewer.

        Raises:
            DatasetError: the split of a dataset holds less than one sample.
        """


class MockSplit(DataSplit):
    """Made-up tokens (--mock-data)."""

    def source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_read: int | None = None) -> SampleSource:
        """See `DataSplit`."""
        return MockDataset(split=self.split, seed=self.seed, seq_length=self.seq_length, vocab_size=self.vocab_size, eod=self.eod)


class Datasets(NamedTuple):
    """The splits that a run reads; a split that is not needed is None."""

    train: DataSplit
    valid: DataSplit | None
    test: DataSplit | None


def open_datasets(
    config: DataConfig, *, seed: int, seq_length: int, tokenizer: Tokenizer, need_validation: bool, need_test: bool
) -> Datasets:
    """Open and check the data before anything else is built. Only ranks that need samples call this.

    Raises:
        ValueError: no dataset, flags that are no blend, a damaged file, or a needed split that holds less than one sample.
    """
    opened: dict[str, Any] = {}

    def make(split: int) -> DataSplit:
        data: DataSplit
        if config.mock_data:
            data = MockSplit(split, config, seed, seq_length, tokenizer.vocab_size, tokenizer.eod)
        else:
            open_split = named("megatron.data.datasets:open_split")
            data = open_split(split, config, seed=seed, seq_length=seq_length, tokenizer=tokenizer, opened=opened)
        data.source(num_samples=1)  # so that an empty split is found now
        return data

    return Datasets(make(0), make(1) if need_validation else None, make(2) if need_test else None)
