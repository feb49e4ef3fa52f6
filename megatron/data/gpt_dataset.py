"""Samples for a GPT: windows of seq_length + 1 tokens over the documents of a split, laid end to end in an order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataOrder
from megatron.data.batches import Piece
from megatron.data.cache.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.orders.kept_passes import KeptPasses
from megatron.data.orders.make import make_order
from megatron.data.orders.selection import Selection
from megatron.data.orders.stretches import Stretch
from megatron.data.split import SPLIT_NAMES
from megatron.data.window_reader import WindowReader


class GPTDataset:
    """Samples of one split, by number. Safe to use from several threads.

    Args:
        dataset: Tokens.
        documents: Range of documents that belong to the split.
        split: 0 training, 1 validation, 2 test.
        seed: Seed of the order.
        seq_length: Tokens that the model reads at once.
        vocab_size: Every token id must be below it.
        order: `EpochOrder`, whose numbers go on for ever, or `MegatronOrder`.
        num_samples: Samples asked for, on which Megatron's order depends; None for those of one epoch.
        earlier: What the run read of this split before, at other sequence lengths (epoch order only). Samples are numbered from 0
            again after it.
        cache: Where large indexes are kept (nowhere by default).

    Raises:
        DatasetError: the split is shorter than one window.
        ValueError: stretches at other sequence lengths in Megatron's order.
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
        order: DataOrder = "epoch",
        num_samples: int | None = None,
        earlier: Sequence[Stretch] = (),
        cache: IndexCache | None = None,
    ) -> None:
        self.selection = Selection(dataset, documents, split, seed, seq_length)
        self.seq_length = seq_length
        self._order = make_order(order, self.selection, num_samples=num_samples, earlier=earlier, cache=cache or IndexCache(None))
        self._passes = KeptPasses(self._order.index)
        self._reader = WindowReader(dataset, vocab_size)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass over the split."""
        return self._order.samples_per_epoch

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of `count` samples from number `first` on, [count, seq_length + 1].

        Raises:
            DatasetError: a token id is not below the vocabulary size, or the order ends before these samples.
        """
        found = np.empty((count, self.seq_length + 1), dtype=np.int64)
        done = 0
        while done < count:
            place = self._order.place(first + done)
            index = self._passes.get(place.pass_number)
            stop = done + min(place.num_left, count - done)
            windows = index.windows.order[place.position : place.position + stop - done]
            self._reader.read(index.layout, index.windows.starts(windows), found[done:stop])
            done = stop
        return found

    def lineage(self, number: int) -> list[Piece]:
        """Where the tokens of a sample come from, in their order."""
        place = self._order.place(number)
        index = self._passes.get(place.pass_number)
        start = index.windows.starts(index.windows.order[place.position : place.position + 1])
        return self._reader.lineage(index.layout, int(start[0]), self.seq_length + 1)

    def describe(self, num_samples: int) -> list[str]:
        """What a user wants to know of the split, for a run that takes so many samples of it."""
        chosen, dataset = self.selection, self.selection.dataset
        name = f"{SPLIT_NAMES[chosen.split]}: {dataset.prefix}"
        size = f"{len(chosen.documents):,} of {dataset.num_documents:,} documents, {chosen.num_tokens:,} tokens"
        first, *more = self._order.describe(num_samples)
        return [f"{name}: {size}; {first}", *(f"{name}: {line}" for line in more)]
