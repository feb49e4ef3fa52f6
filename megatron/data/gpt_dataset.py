"""Samples for a GPT: windows of seq_length + 1 tokens over the documents of a split, laid end to end in an order."""

from __future__ import annotations

import bisect
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES, DataOrder
from megatron.config.imports import named
from megatron.data.epoch_order import EpochOrder
from megatron.data.history import Stretch
from megatron.data.indexed_dataset import MARK_TYPE, DatasetError, IndexedDataset
from megatron.data.indexed_writer import IndexCache
from megatron.data.samples import DOCUMENTS, ENDS, LEARNED, WINDOWS, SamplePiece, SampleSource, permutation
from megatron.data.windows import PassIndex, SampleOrder, Selection, SequencePieces, TokenReader, joined, lay_out, pieces_of


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
            make = named("megatron_lab.data_tools.megatron_order:MegatronOrder")
            self.order = make(self.selection, num_samples=num_samples, cache=cache)
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


# ---- Samples of whole documents: each holds as many as fit, and none is cut unless it is longer than a sample.
#
# The documents of a split are put into samples once, by best-fit decreasing (the longest first, each into the fullest sample with
# room for it), which leaves little room. An epoch permutes the samples by a key of (seed, split, epoch). So sample number 17 is the
# same tokens whatever was read before, and the number of samples consumed is the whole state, as in `gpt_dataset.py`.
#
# A sample is a window of seq_length + 1 tokens. Behind its documents it is filled with end-of-document tokens that do not count.
# The first token of a document is never learned: nothing before it in the sample says what it is.


class Parts(NamedTuple):
    """Documents, and parts of those that are longer than a sample, by number."""

    documents: NDArray[np.int64]
    """The document of each, counted from the first of the split."""
    begins: NDArray[np.int64]
    """Its first token there."""
    lengths: NDArray[np.int64]
    num_cut: int
    """Documents that are in several parts."""
    num_short: int
    """Documents of fewer than two tokens, in which there is nothing to predict; they are left out."""


def parts_of(lengths: NDArray[np.int64], room: int) -> Parts:
    """The parts in which documents of these lengths are read. Parts of one document overlap by a token, so that each token but the
    first is predicted once.

    Args:
        room: tokens of a sample.
    """
    counts = np.maximum(-(-(lengths - 1) // (room - 1)), 0)
    documents = np.repeat(np.arange(len(lengths)), counts)
    place = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = place * (room - 1)
    return Parts(documents, begins, np.minimum(lengths[documents] - begins, room), int((counts > 1).sum()), int((counts < 1).sum()))


def best_fit(lengths: NDArray[np.int64], room: int) -> list[list[int]]:
    """Put parts into samples: the longest first, those of equal length in the order of their numbers, each into the sample with the
    least room that is enough."""
    found: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those of `with_room`, in order
    for part in np.argsort(-lengths, kind="stable").tolist():
        length, at = int(lengths[part]), bisect.bisect_left(rooms, lengths[part])
        if at == len(rooms):
            found.append([part])
            sample, left = len(found) - 1, room - length
        else:
            sample, left = with_room[rooms[at]].pop(), rooms[at] - length
            found[sample].append(part)
            if not with_room[rooms[at]]:
                del with_room[rooms.pop(at)]
        if left >= 2:  # the shortest part
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left].append(sample)
    return found


class PackedDataset(SampleSource):
    """Samples of whole documents of one split of an indexed dataset.

    Args:
        dataset, documents, split, seed, seq_length: See `Selection`.
        vocab_size: Every token id must be below it.
        eod: The token that fills what is left of a sample.
        num_before: Samples that the run read before; they are numbered from 0 again after these.
        marks: The marks of the dataset's tokens, if it has any (see `loss_mask`).

    Raises:
        DatasetError: no document has two tokens.
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
        eod: int,
        num_before: int = 0,
        marks: IndexedDataset | None = None,
    ) -> None:
        self.selection = Selection(dataset, documents, split, seed, seq_length)
        self.seq_length, self._eod, self._before, self._marks = seq_length, eod, num_before, marks
        self._tokens = TokenReader(dataset, vocab_size)
        # In a random order, so that documents that lie together in the file do not end in the same samples.
        order = np.arange(documents.start, documents.stop)[permutation(len(documents), (DOCUMENTS, seed, split, 0))]
        self._layout = lay_out(dataset, order)
        firsts = dataset.document_index[order]
        counts = dataset.document_index[order + 1] - firsts
        self._order, ends = order, np.cumsum(counts)
        self._starts = self._layout.starts[ends - counts]
        self._parts = parts_of(self._layout.starts[ends] - self._starts, seq_length + 1)
        self._samples = best_fit(self._parts.lengths, seq_length + 1)
        if not self._samples:
            raise DatasetError(
                f"the {SPLIT_NAMES[split]} split of {dataset.prefix} has no document of two tokens or more.\n"
                "  Give it a larger share with --split, or do without evaluation (--eval-iters 0)."
            )
        self._epoch = functools.lru_cache(maxsize=2)(self._permuted)  # reading ahead crosses the end of an epoch

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples in one pass over the split."""
        return len(self._samples)

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        found = np.full((count, self.seq_length + 1), self._eod, dtype=np.int64)
        for row, number in zip(found, range(first, first + count), strict=True):
            at = 0
            for part in self._parts_at(number):
                length = self._parts.lengths[part]
                row[at : at + length] = self._tokens.read(self._pieces(part))
                at += length
        return found

    def marks(self, first: int, count: int) -> NDArray[np.uint8]:
        found = np.zeros((count, self.seq_length + 1), dtype=MARK_TYPE)
        for row, number in zip(found, range(first, first + count), strict=True):
            at = 0
            for part in self._parts_at(number):
                here = row[at : at + self._parts.lengths[part]]
                here[:] = LEARNED if self._marks is None else joined(self._marks, self._pieces(part)) & LEARNED
                here[0] &= ~MARK_TYPE(LEARNED)
                here[-1] |= ENDS
                at += len(here)
        return found

    def lineage(self, number: int) -> list[SamplePiece]:
        prefix, parts = self.selection.dataset.prefix, self._parts
        return [
            SamplePiece(prefix, int(self._order[parts.documents[part]]), int(parts.begins[part]), int(parts.lengths[part]))
            for part in self._parts_at(number)
        ]

    def describe(self, num_samples: int) -> list[str]:
        chosen, dataset, parts = self.selection, self.selection.dataset, self._parts
        epochs = [(self._before + number) / self.samples_per_epoch for number in (0, num_samples)]
        filled = 1 - parts.lengths.sum() / (self.samples_per_epoch * (self.seq_length + 1))
        lines = [
            f"{len(chosen.documents):,} of {dataset.num_documents:,} documents, {chosen.num_tokens:,} tokens; epochs "
            f"{epochs[0]:.2f} to {epochs[1]:.2f} of {self.samples_per_epoch:,} samples of whole documents, "
            f"{len(parts.lengths) / self.samples_per_epoch:.1f} in each; {filled:.1%} of the samples is filled up"
        ]
        if parts.num_cut:
            room = self.seq_length + 1
            lines.append(f"{parts.num_cut:,} documents are longer than a sample ({room:,} tokens) and read in parts")
        if parts.num_short:
            lines.append(f"{parts.num_short:,} documents of fewer than two tokens are left out")
        return [f"{SPLIT_NAMES[chosen.split]}: {dataset.prefix}: {line}" for line in lines]

    def _permuted(self, epoch: int) -> NDArray[np.integer]:
        return permutation(len(self._samples), (WINDOWS, self.selection.seed, self.selection.split, epoch))

    def _parts_at(self, number: int) -> list[int]:
        epoch, position = divmod(self._before + number, self.samples_per_epoch)
        return self._samples[self._epoch(epoch)[position]]

    def _pieces(self, part: int) -> SequencePieces:
        start = self._starts[self._parts.documents[part]] + self._parts.begins[part]
        return pieces_of(self._layout, np.array([start]), int(self._parts.lengths[part]))
