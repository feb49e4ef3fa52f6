"""The training, validation and test data that the flags ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config.data import DataConfig
from megatron.data.batches import SampleSource
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.mock import MockDataset
from megatron.data.split import split_documents
from megatron.data.tokenizers.protocol import Tokenizer


@dataclass(frozen=True)
class Datasets:
    """What a run reads; a split that is not needed is None."""

    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None

    def describe(self) -> list[str]:
        """One line a split for the start-up log."""
        return [source.describe() for source in (self.train, self.valid, self.test) if source is not None]


def build_datasets(
    config: DataConfig, *, seed: int, seq_length: int, tokenizer: Tokenizer, need_validation: bool, need_test: bool
) -> Datasets:
    """Open and check the data before anything else is built. Only ranks that need tokens call this.

    Raises:
        ValueError: no dataset or more than one, a damaged file, or a needed split that holds less than one sample.
    """
    masked_id = tokenizer.eod if config.eod_mask_loss else None
    make: Callable[[int], SampleSource]
    if config.mock_data:

        def make(split: int) -> SampleSource:
            return MockDataset(
                split=split,
                seed=seed,
                seq_length=seq_length,
                vocab_size=tokenizer.vocab_size,
                eod=tokenizer.eod,
                masked_id=masked_id,
            )
    else:
        if len(config.data_path) != 1:
            raise ValueError(
                f"--data-path needs one prefix (PREFIX.bin and PREFIX.idx), not {len(config.data_path)} values: "
                f"{' '.join(config.data_path) or '(none)'}.\n  Without a dataset, try --mock-data. Several datasets or weights are "
                "not supported: join the texts with tools/preprocess_data.py --input FILE FILE ..."
            )
        dataset = IndexedDataset(config.data_path[0])
        documents = split_documents(config.split, dataset.num_documents)

        def make(split: int) -> SampleSource:
            return GPTDataset(
                dataset,
                documents[split],
                split=split,
                seed=seed,
                seq_length=seq_length,
                vocab_size=tokenizer.vocab_size,
                masked_id=masked_id,
            )

    return Datasets(make(0), make(1) if need_validation else None, make(2) if need_test else None)
