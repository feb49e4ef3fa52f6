"""Samples for a GPT: windows of seq_length + 1 tokens over the documents of a split, laid end to end in an order."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataOrder
from megatron.data.epoch_order import EpochOrder, Stretch
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.megatron_order import MegatronOrder
from megatron.data.samples import SamplePiece, SampleSource
from megatron.data.split import SPLIT_NAMES, Selection
from megatron.data.windows import PassIndex, SampleOrder, WindowReader


class GPTDataset(SampleSource):
    """Samples of one split of an indexed dataset.

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
        """The number of samples in one pass over the split."""
        return self._order.samples_per_epoch

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
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

    def lineage(self, number: int) -> list[SamplePiece]:
        place = self._order.place(number)
        index = self._passes.get(place.pass_number)
        start = index.windows.starts(index.windows.order[place.position : place.position + 1])
        return self._reader.lineage(index.layout, int(start[0]), self.seq_length + 1)

    def describe(self, num_samples: int) -> list[str]:
        chosen, dataset = self.selection, self.selection.dataset
        name = f"{SPLIT_NAMES[chosen.split]}: {dataset.prefix}"
        size = f"{len(chosen.documents):,} of {dataset.num_documents:,} documents, {chosen.num_tokens:,} tokens"
        first, *more = self._order.describe(num_samples)
        return [f"{name}: {size}; {first}", *(f"{name}: {line}" for line in more)]


_NUM_KEPT = 2  # reading ahead crosses the end of an epoch


class KeptPasses:
    """Builds the index of a pass at its first use, and keeps the two that were used last.

    Threads that want the same pass wait for the one that builds it; others read on.
    """

    def __init__(self, build: Callable[[int], PassIndex]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._slots: OrderedDict[int, _Slot] = OrderedDict()

    def get(self, pass_number: int) -> PassIndex:
        """The index of a pass."""
        with self._lock:
            slot = self._slots.get(pass_number)
            if slot is None:
                while len(self._slots) >= _NUM_KEPT:  # before building, to keep the peak of memory down
                    self._slots.popitem(last=False)
                slot = self._slots[pass_number] = _Slot()
            self._slots.move_to_end(pass_number)
        with slot.lock:
            if slot.index is None:
                slot.index = self._build(pass_number)
            return slot.index


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index: PassIndex | None = None


_OWN_PATHS = ("--train-data-path", "--valid-data-path", "--test-data-path")


def make_order(
    order: DataOrder, selection: Selection, *, num_samples: int | None, earlier: Sequence[Stretch], cache: IndexCache
) -> SampleOrder:
    """The order of a split's samples. For the arguments see `GPTDataset`. Indexes are built when they are first needed.

    Raises:
        DatasetError: the split is shorter than one window.
        ValueError: stretches at other sequence lengths in Megatron's order.
    """
    for length in (selection.seq_length, *(stretch.seq_length for stretch in earlier)):
        _check_size(selection, length)
    if order == "epoch":
        return EpochOrder(selection, earlier=earlier, cache=cache)
    if earlier:
        raise ValueError(
            f"--data-order megatron has no order for a run that changes --seq-length on the way ({earlier[-1].seq_length} before, "
            f"{selection.seq_length} now).\n  Keep --seq-length, or train with --data-order epoch."
        )
    return MegatronOrder(selection, num_samples=num_samples, cache=cache)


def _check_size(selection: Selection, seq_length: int) -> None:
    if selection.num_tokens > seq_length:
        return
    dataset, split = selection.dataset, selection.split
    raise DatasetError(
        f"the {SPLIT_NAMES[split]} split of {dataset.prefix} has {len(selection.documents):,} of {dataset.num_documents:,} "
        f"documents and {selection.num_tokens:,} tokens; one sample takes {seq_length + 1:,} (--seq-length {seq_length} + 1).\n"
        "  Give it a larger share with --split, take a dataset with more documents or a shorter --seq-length"
        + (f", give this split data of its own ({_OWN_PATHS[split]}), or do without evaluation (--eval-iters 0)." if split else ".")
    )
