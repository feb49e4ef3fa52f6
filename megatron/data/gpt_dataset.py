"""Samples for a GPT: windows of seq_length + 1 tokens over the documents of a split, laid end to end in an order."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES, DataOrder
from megatron.data.epoch_order import EpochOrder
from megatron.data.history import Stretch
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.loss_mask import MARK_TYPE
from megatron.data.megatron_order import MegatronOrder
from megatron.data.pieces import SequencePieces, TokenReader, joined, pieces_of
from megatron.data.samples import SamplePiece, SampleSource
from megatron.data.windows import PassIndex, SampleOrder, Selection


class GPTDataset(SampleSource):
    """Samples of one split of an indexed dataset.

    Args:
        dataset, documents, split, seed, seq_length: See `Selection`.
        vocab_size: Every token id must be below it.
        order: `EpochOrder`, whose numbers go on for ever, or `MegatronOrder`.
        num_samples: Samples asked for, on which Megatron's order depends; None for those of one epoch.
        earlier: What the run read of this split before, at other sequence lengths (epoch order only). Samples are numbered from 0
            again after it.
        cache: Where large indexes are kept (nowhere by default).
        marks: The marks of the dataset's tokens, if it has any (see `loss_mask`).

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
        marks: IndexedDataset | None = None,
    ) -> None:
        self._marks = marks
        self.selection = Selection(dataset, documents, split, seed, seq_length)
        self.seq_length = seq_length
        for length in (seq_length, *(stretch.seq_length for stretch in earlier)):
            _check_size(self.selection, length)
        cache = cache or IndexCache(None)
        if order == "epoch":
            self.order: SampleOrder = EpochOrder(self.selection, earlier=earlier, cache=cache)
        elif earlier:
            raise ValueError(
                "--data-order megatron has no order for a run that changes --seq-length on the way "
                f"({earlier[-1].seq_length} before, {seq_length} now).\n"
                "  Keep --seq-length, or train with --data-order epoch."
            )
        else:
            self.order = MegatronOrder(self.selection, num_samples=num_samples, cache=cache)
        self._passes = KeptPasses(self.order.index)
        self._tokens = TokenReader(dataset, vocab_size)

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples in one pass over the split."""
        return self.order.samples_per_epoch

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        found = np.empty((count, self.seq_length + 1), dtype=np.int64)
        self._fill(found, first, self._tokens.read)
        return found

    def marks(self, first: int, count: int) -> NDArray[np.uint8] | None:
        if (marks := self._marks) is None:
            return None
        found = np.empty((count, self.seq_length + 1), dtype=MARK_TYPE)
        self._fill(found, first, lambda pieces: joined(marks, pieces))
        return found

    def _fill(self, found: NDArray[Any], first: int, read: Callable[[SequencePieces], NDArray[np.integer]]) -> None:
        """Fill rows with what is read of the pieces of these samples."""
        count, length = found.shape
        at_once, done = max(1, _TOKENS_AT_ONCE // length), 0
        while done < count:
            place = self.order.place(first + done)
            layout, windows = self._passes.get(place.pass_number)
            stop = done + min(place.num_left, count - done, at_once)
            starts = windows.starts(windows.order[place.position : place.position + stop - done])
            found[done:stop] = read(pieces_of(layout, starts, length)).reshape(-1, length)
            done = stop

    def lineage(self, number: int) -> list[SamplePiece]:
        dataset, place = self.selection.dataset, self.order.place(number)
        layout, windows = self._passes.get(place.pass_number)
        pieces = pieces_of(layout, windows.starts(windows.order[place.position : place.position + 1]), self.seq_length + 1)
        found: list[SamplePiece] = []
        for sequence, first, count in zip(*(array.tolist() for array in pieces), strict=True):
            if not count:
                continue
            document = dataset.document_of(sequence)
            before = dataset.lengths[dataset.document_index[document] : sequence].sum(dtype=np.int64)
            piece = SamplePiece(dataset.prefix, document, int(before) + first, count)
            last = found[-1] if found else None
            # Consecutive sequences of a document are one piece.
            if last and last.document == document and last.first_token + last.num_tokens == piece.first_token:
                found[-1] = SamplePiece(dataset.prefix, document, last.first_token, last.num_tokens + count)
            else:
                found.append(piece)
        return found

    def describe(self, num_samples: int) -> list[str]:
        chosen, dataset = self.selection, self.selection.dataset
        name = f"{SPLIT_NAMES[chosen.split]}: {dataset.prefix}"
        size = f"{len(chosen.documents):,} of {dataset.num_documents:,} documents, {chosen.num_tokens:,} tokens"
        first, *more = self.order.describe(num_samples)
        return [f"{name}: {size}; {first}", *(f"{name}: {line}" for line in more)]


_TOKENS_AT_ONCE = 1 << 17  # fits the cache of a core


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


def _check_size(selection: Selection, seq_length: int) -> None:
    dataset, split = selection.dataset, selection.split
    if selection.num_tokens <= seq_length:
        own = f", give this split data of its own ({_OWN_PATHS[split]}), or do without evaluation (--eval-iters 0)."
        raise DatasetError(
            f"the {SPLIT_NAMES[split]} split of {dataset.prefix} has {len(selection.documents):,} of {dataset.num_documents:,} "
            f"documents and {selection.num_tokens:,} tokens; one sample takes {seq_length + 1:,} (--seq-length {seq_length} + 1).\n"
            "  Give it a larger share with --split, take a dataset with more documents or a shorter --seq-length"
            + (own if split else ".")
        )
