"""`--data-order megatron`: the order of Megatron-LM's GPTDataset, for runs that must read what a run of Megatron-LM reads.

It depends on the seed, on numpy's legacy random stream (which never changes), and on the number of samples asked for. So another
length of the run shuffles what was already read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import DatasetError
from megatron.data.order import index_dtype
from megatron.data.windows import DocumentLayout, PassIndex, SampleOrder, SamplePlace, Selection, Windows, lay_out

_LEAST_SHARE = 0.80
"""If a smaller share of the last epoch's samples is needed, that epoch is shuffled separately."""


@dataclass(frozen=True)
class MegatronPlan:
    """How many epochs are shuffled, and which samples they hold."""

    num_tokens: int
    """Tokens of an epoch; more than one window."""
    seq_length: int
    num_samples: int | None
    """Samples asked for; None for those of one epoch."""

    @property
    def num_epochs(self) -> int:
        """The fewest epochs that hold the samples asked for; samples overlap by one token."""
        asked = 0 if self.num_samples is None else self.num_samples * self.seq_length + 1
        return max(1, -(-asked // self.num_tokens))

    def samples_of(self, epochs: int) -> int:
        """Number of samples in `epochs` epochs, laid end to end."""
        return (epochs * self.num_tokens - 1) // self.seq_length

    @property
    def last_is_apart(self) -> bool:
        """Whether the last epoch is shuffled separately from those before."""
        if self.num_epochs == 1 or self.num_samples is None:
            return False
        of_last = self.num_samples - self.samples_of(self.num_epochs - 1)
        return of_last < int(_LEAST_SHARE * self.samples_of(1))

    @property
    def num_together(self) -> int:
        """Number of epochs that are shuffled together."""
        return self.num_epochs - self.last_is_apart


class MegatronOrder(SampleOrder):
    """One shuffle of the documents of all epochs, cut into windows that overlap by one token, and one shuffle of the windows.

    Both shuffles use the same random stream, one after the other. The last epoch has shuffles of its own if less than 80 % of its
    samples are asked for. Megatron-LM splits and shuffles sequences, this class documents: the same where each document is one
    sequence, as its tools write them for GPT. Other datasets are refused.

    Args:
        selection: The documents to be ordered. Each split starts the random stream of the seed anew.
        num_samples: Samples asked for; None for those of one epoch.

    Raises:
        DatasetError: a document is not one sequence.
    """

    def __init__(self, selection: Selection, *, num_samples: int | None, cache: IndexCache) -> None:
        dataset = selection.dataset
        if not dataset.one_sequence_each:
            raise DatasetError(
                f"{dataset.prefix} has documents of several sequences or of none ({len(dataset.lengths):,} sequences in "
                f"{dataset.num_documents:,} documents): Megatron-LM would split and shuffle its sequences, not its documents.\n"
                "  Train with --data-order epoch, or make the dataset again with tools/preprocess_data.py: one sequence a document."
            )
        self._of = selection
        self._cache = cache
        self._plan = MegatronPlan(selection.num_tokens, selection.seq_length, num_samples)
        self.samples_per_epoch = self._plan.samples_of(1)
        self._num_samples = self._plan.samples_of(self._plan.num_epochs)

    def place(self, number: int) -> SamplePlace:
        if not 0 <= number < self._num_samples:
            asked = self._plan.num_samples or self.samples_per_epoch
            raise DatasetError(
                f"the {SPLIT_NAMES[self._of.split]} split of {self._of.dataset.prefix} has no sample {number:,}: --data-order "
                f"megatron was asked for {asked:,} samples, for which it made {self._num_samples:,}.\n"
                "  A longer run needs another order from its start on; --data-order epoch has no end."
            )
        return SamplePlace(0, number, self._num_samples - number)

    def index(self, pass_number: int) -> PassIndex:
        plan = self._plan

        def key() -> tuple[object, ...]:
            documents = (self._of.documents.start, self._of.documents.stop)
            return (self._of.dataset.digest, *documents, self._of.seed, plan.seq_length, plan.num_epochs, plan.last_is_apart)

        sequences, starts, shuffle = self._cache.get(
            "megatron",
            ("sequences", "starts", "shuffle"),
            key,
            max(len(self._of.documents) * plan.num_epochs, self._num_samples),
            self._build,
        )
        firsts = np.array([0, self._num_samples], np.int64)
        return DocumentLayout(sequences, starts), Windows(np.zeros(1, np.int64), firsts, shuffle, plan.seq_length)

    def describe(self, num_samples: int) -> list[str]:
        plan = self._plan
        tail = plan.num_epochs * plan.num_tokens - 1 - self._num_samples * plan.seq_length
        apart = ", the last of them apart" if plan.last_is_apart else ""
        epochs = f"epochs 0.00 to {num_samples / self.samples_per_epoch:.2f} of {self.samples_per_epoch:,} samples"
        shuffled = (
            f"{plan.num_epochs:,} epochs{apart}: {self._num_samples:,} samples ({tail:,} tokens left out: less than a sample)"
        )
        return [f"{epochs}; --data-order megatron shuffles {shuffled}"]

    def _build(self) -> tuple[NDArray, ...]:
        plan, stream = self._plan, np.random.RandomState(self._of.seed)
        together, apart = plan.num_together, plan.num_epochs - plan.num_together
        shuffled = [_shuffled(stream, self._of.documents, epochs) for epochs in (together, apart) if epochs]
        layout = lay_out(self._of.dataset, np.concatenate(shuffled))
        bounds = [0, plan.samples_of(together), self._num_samples][: 3 if apart else 2]
        windows = [_shuffled(stream, range(start, stop), 1) for start, stop in pairwise(bounds)]
        return (*layout, np.concatenate(windows))


def _shuffled(stream: np.random.RandomState, numbers: range, times: int) -> NDArray[np.integer]:
    """`numbers`, repeated `times` times, in an order that the stream draws."""
    array = np.tile(np.arange(numbers.start, numbers.stop, dtype=index_dtype(numbers.stop)), times)
    stream.shuffle(array)
    return array
