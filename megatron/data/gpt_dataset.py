"""Samples for a GPT: windows of seq_length + 1 tokens over the documents of a split, laid end to end in a keyed order."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.order import DOCUMENTS, WINDOWS, permutation, place
from megatron.data.split import SPLIT_NAMES

_CACHED_EPOCHS = 2  # reading ahead crosses the end of an epoch


@dataclass(frozen=True)
class Epoch:
    """The order of one pass over a split."""

    sequences: NDArray[np.integer]
    """Sequences of the indexed dataset in the order in which they are laid end to end."""
    starts: NDArray[np.int64]
    """Token at which each of them starts, and the end of the last."""
    windows: NDArray[np.integer]
    """Window at each position: window w starts at token w x seq_length."""


class GPTDataset:
    """Samples of one split; sample numbers go on for ever, epoch after epoch.

    In each epoch the documents are permuted by a key of (seed, split, epoch), cut into windows that overlap by one token (so that
    every token but the first is predicted once), and the windows are permuted by the same key. The last tokens, too few for a
    window, are left out: other ones in each epoch. An epoch's order does not depend on how long the run is.

    Args:
        dataset: Tokens.
        documents: Range of documents that belong to the split.
        split: 0 training, 1 validation, 2 test.
        seed: Seed of the order.
        seq_length: Tokens that the model reads at once.
        vocab_size: Every token id must be below it.
        masked_id: Token at which the loss does not count, if any.

    Raises:
        DatasetError: the split is shorter than one window.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        *,
        split: int,
        seed: int,
        seq_length: int,
        vocab_size: int,
        masked_id: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.documents = documents
        self.split = split
        self.seed = seed
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.masked_id = masked_id
        self.num_tokens = dataset.num_tokens(documents)
        self.samples_per_epoch = (self.num_tokens - 1) // seq_length
        if self.samples_per_epoch < 1:
            raise DatasetError(
                f"the {SPLIT_NAMES[split]} split of {dataset.prefix} has {len(documents):,} of {dataset.num_documents:,} documents "
                f"and {self.num_tokens:,} tokens; one sample takes {seq_length + 1:,} (--seq-length {seq_length} + 1).\n"
                "  Give it a larger share with --split, take a dataset with more documents or a shorter --seq-length"
                + (", or do without evaluation (--eval-iters 0)." if split else ".")
            )
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()
        self._lock = threading.Lock()

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens of a sample, [seq_length + 1].

        Raises:
            DatasetError: a token id is not below the vocabulary size.
        """
        epoch_number, position = place(number, self.samples_per_epoch)
        epoch = self._epoch(epoch_number)
        start = int(epoch.windows[position]) * self.seq_length
        at = int(np.searchsorted(epoch.starts, start, side="right")) - 1
        offset = start - int(epoch.starts[at])
        window = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        while filled < len(window):
            sequence = int(epoch.sequences[at])
            count = min(int(self.dataset.lengths[sequence]) - offset, len(window) - filled)
            if count:
                tokens = self.dataset.read(sequence, offset, count)
                self._check_ids(tokens, sequence)
                window[filled : filled + count] = tokens
            filled += count
            at, offset = at + 1, 0
        return window

    def epochs_for(self, num_samples: int) -> float:
        """Passes over the split that a number of samples takes."""
        return num_samples / self.samples_per_epoch

    def describe(self) -> str:
        """What a user wants to know of the split."""
        dropped = self.num_tokens - self.samples_per_epoch * self.seq_length - 1
        return (
            f"{SPLIT_NAMES[self.split]}: {self.dataset.prefix}, {len(self.documents):,} of {self.dataset.num_documents:,} "
            f"documents, {self.num_tokens:,} tokens, {self.samples_per_epoch:,} samples of {self.seq_length} tokens an epoch "
            f"({dropped:,} tokens left out of each epoch: less than a sample)"
        )

    def _epoch(self, number: int) -> Epoch:
        with self._lock:
            if number in self._epochs:
                self._epochs.move_to_end(number)
            else:
                while len(self._epochs) >= _CACHED_EPOCHS:  # before building, to keep the peak of memory down
                    self._epochs.popitem(last=False)
                self._epochs[number] = self._build_epoch(number)
            return self._epochs[number]

    def _build_epoch(self, number: int) -> Epoch:
        documents = permutation(len(self.documents), (DOCUMENTS, self.seed, self.split, number))
        sequences = self.dataset.sequences(documents + np.int64(self.documents.start))
        starts = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(self.dataset.lengths[sequences], out=starts[1:])
        return Epoch(sequences, starts, permutation(self.samples_per_epoch, (WINDOWS, self.seed, self.split, number)))

    def _check_ids(self, tokens: NDArray[np.integer], sequence: int) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low >= 0 and high < self.vocab_size:
            return
        raise DatasetError(
            f"{self.dataset.prefix}: document {self.dataset.document_of(sequence):,} has token id {high if low >= 0 else low:,}, "
            f"but the tokenizer has {self.vocab_size:,} ids (0 to {self.vocab_size - 1:,}).\n"
            "  The dataset was made with another tokenizer: give that one (--tokenizer-type and its files, or --vocab-size), or "
            "make the dataset again with tools/preprocess_data.py."
        )
