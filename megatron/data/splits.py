"""The training, validation and test data of a run. Datasets in files are imported where a run has some."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES, DataConfig
from megatron.config.imports import named
from megatron.data.history import Blending, BlendPart, Phase
from megatron.data.order import MOCK_RULE, MOCK_SAMPLE, permutation, random_numbers
from megatron.data.samples import SamplePiece, SampleSource
from megatron.data.tokenizer import Tokenizer

# ---- Made-up tokens from which a model can learn, for trying things out without a dataset.

_MOST_TOKENS = 64
_DOCUMENT_END = 0.1


class MockDataset(SampleSource):
    """Samples in which each token follows from the one before, except after the end of a document.

    The tokens run around a fixed circle of up to 64 ids, spread over the whole vocabulary so that every part of a split embedding
    is used. One position in ten, at random, holds the end of a document instead, after which the run starts anywhere on the circle.
    A model needs to learn 64 pairs, so the loss falls quickly: from log(vocab_size) to about 0.7 at 64 ids. The circle depends on
    the seed alone, so the validation loss falls too.

    Raises:
        ValueError: the vocabulary is too small.
    """

    def __init__(self, *, split: int, seed: int, seq_length: int, vocab_size: int, eod: int) -> None:
        if vocab_size < 2:
            raise ValueError(f"--mock-data needs a vocabulary of at least 2 ids, not {vocab_size}: use a larger --vocab-size.")
        self.split = split
        self.seed = seed
        self.seq_length = seq_length
        self._eod = eod
        count = min(vocab_size - 1, _MOST_TOKENS)
        ids = np.arange(count, dtype=np.int64) * (vocab_size - 1) // count
        ids += ids >= eod  # every id but the end of document
        self._circle = ids[permutation(count, (MOCK_RULE, seed, 0, 0))]

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        made = [self._sample(number) for number in range(first, first + count)]
        return np.stack(made) if made else np.empty((0, self.seq_length + 1), np.int64)

    def lineage(self, number: int) -> list[SamplePiece]:
        return [SamplePiece("made-up tokens", number, 0, self.seq_length + 1)]

    def describe(self, num_samples: int) -> list[str]:
        return [f"{SPLIT_NAMES[self.split]}: made-up tokens (--mock-data), {len(self._circle) + 1} different ids, never repeated"]

    def _sample(self, number: int) -> NDArray[np.int64]:
        """Tokens of a sample: a function of (seed, split, number) and the position."""
        draws, jumps = random_numbers(2 * (self.seq_length + 1), (MOCK_SAMPLE, self.seed, self.split, number)).reshape(2, -1)
        positions = np.arange(self.seq_length + 1)
        ends = draws < np.uint64(_DOCUMENT_END * 2**64)
        # A run starts after an end (and at the first position) at a random place of the circle and moves on by one.
        last_end = np.maximum.accumulate(np.where(ends, positions, 0))
        places = (jumps[last_end] % np.uint64(len(self._circle))).astype(np.int64) + positions - last_end
        return np.where(ends, self._eod, self._circle[places % len(self._circle)])


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
