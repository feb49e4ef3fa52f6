"""Training, validation and test data of a run. The code for datasets in files is imported only if the run reads files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.data import SPLIT_FIELDS, DataConfig, WeightedPrefix, read_split_blends
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

    def build_epochs(self) -> list[tuple[SampleSource, int]]:
        """Return for each dataset a source that starts with one epoch, and the number of samples of the epoch.

        Raises:
            ValueError: the data has no end.
        """
        raise ValueError("--full-validation needs data with an end: use --eval-iters instead.")


class MockSplit(DataSplit):
    """Split of mock data (--mock-data)."""

    def build_source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_consumed: int | None = None) -> SampleSource:
        """Build the source of mock samples. The arguments have no effect: mock samples do not depend on the history of the run."""
        return MockDataset(split=self.split, seed=self.seed, seq_length=self.seq_length, vocab_size=self.vocab_size, eod=self.eod)


class Datasets(NamedTuple):
    """Training, validation and test data of a run. Validation and test are empty if the run does not need them."""

    train: DataSplit
    valid: Mapping[str, DataSplit]
    """Validation sets by name; a single set without a name has the key ""."""
    test: Mapping[str, DataSplit]
    """Test data, with the key ""."""


def open_datasets(
    config: DataConfig,
    *,
    seed: int,
    seq_length: int,
    tokenizer: Tokenizer,
    need_validation: bool,
    need_test: bool,
    need_training: bool = True,
) -> Datasets:
    """Open and check the datasets of all splits, before other parts of the run are built. Only ranks that need samples call this
    function.

    Args:
        need_training: whether samples of the training data are read. Otherwise `train` is a placeholder.

    Raises:
        ValueError: the settings name no dataset, a flag is not a list of datasets with optional weights, a file is damaged, or a
            required split has less than one sample.
    """
    datasets_by_prefix: dict[str, Any] = {}

    def open_split_data(split: int, blend: list[WeightedPrefix], *, is_mock: bool = config.mock_data) -> DataSplit:
        data: DataSplit
        if is_mock:
            data = MockSplit(split, config, seed, seq_length, tokenizer.vocab_size, tokenizer.eod)
        else:
            is_streamed = config.hf_dataset is not None and not getattr(config, SPLIT_FIELDS[split])
            open_split = import_object(
                "megatron_lab.data_tools.streamed_dataset:open_split" if is_streamed else "megatron.data.datasets:open_split"
            )
            data = open_split(
                split, blend, config, seed=seed, seq_length=seq_length, tokenizer=tokenizer, datasets_by_prefix=datasets_by_prefix
            )
        data.build_source(num_samples=1)  # raises now if the split is empty
        return data

    def open_sets(split: int, *, is_needed: bool) -> dict[str, DataSplit]:
        sets = blends[split] or {"": []} if is_needed else {}
        return {name: open_split_data(split, blend) for name, blend in sets.items()}

    _, blends = read_split_blends(config)
    train = open_split_data(0, blends[0].get("", []), is_mock=config.mock_data or not need_training)
    return Datasets(train, open_sets(1, is_needed=need_validation), open_sets(2, is_needed=need_test))
