"""Training, validation and test data of a run. The code for datasets in files is imported only if the run reads files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.data import DataConfig
from megatron.config.imports import import_object
from megatron.data.history import BlendEntry, Blending, Phase
from megatron.data.samples import DocumentRules, MockDataset, SampleSource
from megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class DataSplit(ABC):
    """Training, validation or test data of a run."""

    split: int
    """Index of the split: 0 training, 1 validation, 2 test."""
    config: DataConfig
    seed: int
    seq_length: int
    vocab_size: int
    eod: int
    components: tuple[Any, ...] = ()
    """Datasets of the blend; empty for mock data."""
    blending: Blending = "none"

    def blend_entries(self) -> tuple[BlendEntry, ...]:
        """Return a description of each dataset of the split (path, fingerprint, documents and weight) for the data history that
        checkpoints contain."""
        return tuple(component.blend_entry(whole_documents=self.config.whole_documents) for component in self.components)

    def count_epoch_samples(self) -> int | None:
        """Return the number of samples of one pass over the split (--train-epochs), or None if the split has no end or an unknown
        size."""
        return None

    def find_warnings(self, rules: DocumentRules) -> list[str]:
        """Return warnings about datasets whose documents lack the end-of-document tokens on which the document rules act."""
        return []

    @abstractmethod
    def build_source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_consumed: int | None = None) -> SampleSource:
        """Build the source of the split's samples.

        Args:
            num_samples: number of samples of the run, on which the order depends with --data-order megatron.
            phases: history of the run: its parts with constant data settings. The source gives the samples of the last part. Empty
                to read from the start.
            num_consumed: number of samples that are read; None for all `num_samples`.

        Raises:
            DatasetError: a dataset of the split has less than one sample.
        """


class MockSplit(DataSplit):
    """Split of mock data (--mock-data)."""

    def build_source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_consumed: int | None = None) -> SampleSource:
        """Build the source of mock samples. The arguments have no effect: mock samples do not depend on the history of the run."""
        return MockDataset(split=self.split, seed=self.seed, seq_length=self.seq_length, vocab_size=self.vocab_size, eod=self.eod)


class Datasets(NamedTuple):
    """Training, validation and test data of a run. A split that the run does not need is None."""

    train: DataSplit
    valid: DataSplit | None
    test: DataSplit | None


def open_datasets(
    config: DataConfig, *, seed: int, seq_length: int, tokenizer: Tokenizer, need_validation: bool, need_test: bool
) -> Datasets:
    """Open and check the datasets of all splits, before other parts of the run are built. Only ranks that need samples call this
    function.

    Raises:
        ValueError: the settings name no dataset, a flag is not a list of datasets with optional weights, a file is damaged, or a
            required split has less than one sample.
    """
    datasets_by_prefix: dict[str, Any] = {}

    def open_split_data(split: int) -> DataSplit:
        data: DataSplit
        if config.mock_data:
            data = MockSplit(split, config, seed, seq_length, tokenizer.vocab_size, tokenizer.eod)
        else:
            open_split = import_object("megatron.data.datasets:open_split")
            data = open_split(
                split, config, seed=seed, seq_length=seq_length, tokenizer=tokenizer, datasets_by_prefix=datasets_by_prefix
            )
        data.build_source(num_samples=1)  # raises now if the split is empty
        return data

    return Datasets(open_split_data(0), open_split_data(1) if need_validation else None, open_split_data(2) if need_test else None)
