"""Samples of whole documents: each holds as many as fit, and none is cut unless it is longer than a sample.

The documents of a split are put into samples once, by best-fit decreasing (the longest first, each into the fullest sample with
room for it), which leaves little room. An epoch permutes the samples by a key of (seed, split, epoch). So sample number 17 is the
same tokens whatever was read before, and the number of samples consumed is the whole state, as in `gpt_dataset.py`.

A sample is a window of seq_length + 1 tokens. Behind its documents it is filled with end-of-document tokens that do not count. The
first token of a document is never learned: nothing before it in the sample says what it is.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.loss_mask import MARK_TYPE
from megatron.data.order import DOCUMENTS, WINDOWS, permutation
from megatron.data.pieces import SequencePieces, TokenReader, joined, pieces_of
from megatron.data.samples import ENDS, LEARNED, SamplePiece, SampleSource
from megatron.data.windows import Selection, lay_out


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
