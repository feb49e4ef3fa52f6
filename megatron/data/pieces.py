"""Parts of the sequences of an indexed dataset, and what is read of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.windows import DocumentLayout


class SequencePieces(NamedTuple):
    """Parts of sequences that, one after another, make up windows or whole documents."""

    sequences: NDArray[np.integer]
    first: NDArray[np.int64]
    """Index of the first token within the sequence."""
    counts: NDArray[np.int64]


def joined(dataset: IndexedDataset, pieces: SequencePieces) -> NDArray[np.integer]:
    """What a dataset has in these pieces, one after another."""
    dataset.check_whole()
    width, data = dataset.dtype.itemsize, dataset.data
    begins = dataset.offsets[pieces.sequences] + pieces.first * width
    ends = begins + pieces.counts * width
    # One join of views is several times as fast as a copy by numpy for each piece, or than gathering token by token.
    return np.frombuffer(
        b"".join([data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]), dataset.dtype
    )


def pieces_of(layout: DocumentLayout, starts: NDArray[np.int64], length: int) -> SequencePieces:
    """The pieces of windows of `length` tokens that start at these tokens of the layout."""
    # Methods of arrays: numpy's functions of the same names cost twice as much for a single window.
    at = layout.starts.searchsorted(starts, side="right") - 1
    counts = layout.starts.searchsorted(starts + (length - 1), side="right") - at
    at = (at - counts.cumsum() + counts).repeat(counts)
    at += np.arange(len(at))  # at, at + 1, ... of each window
    window_starts, sequence_starts = starts.repeat(counts), layout.starts[at]
    begins = np.maximum(sequence_starts, window_starts)
    ends = np.minimum(layout.starts[at + 1], window_starts + length)
    return SequencePieces(layout.sequences[at], begins - sequence_starts, ends - begins)


class TokenReader:
    """Reads tokens of a dataset, and checks that each is a row of the vocabulary.

    Args:
        vocab_size: every token id must be below it.
    """

    def __init__(self, dataset: IndexedDataset, vocab_size: int) -> None:
        self._dataset, self._vocab_size = dataset, vocab_size
        self._may_be_negative = dataset.dtype.kind == "i"
        self._may_be_beyond = self._may_be_negative or 1 << 8 * dataset.dtype.itemsize > vocab_size

    def read(self, pieces: SequencePieces) -> NDArray[np.integer]:
        """The tokens of pieces, one after another, each a row of the vocabulary."""
        tokens = joined(self._dataset, pieces)
        if (self._may_be_beyond and tokens.max() >= self._vocab_size) or (self._may_be_negative and tokens.min() < 0):
            self._refuse(tokens, pieces)
        return tokens

    def _refuse(self, tokens: NDArray[np.integer], pieces: SequencePieces) -> None:
        dataset, position = self._dataset, int(np.argmax((tokens < 0) | (tokens >= self._vocab_size)))
        at = int(np.searchsorted(np.cumsum(pieces.counts), position, side="right"))
        raise DatasetError(
            f"{dataset.prefix}: document {dataset.document_of(int(pieces.sequences[at])):,} has token id {tokens[position]:,}, but "
            f"the tokenizer has {self._vocab_size:,} ids (0 to {self._vocab_size - 1:,}).\n"
            "  The dataset was made with another tokenizer: give that one (--tokenizer-type and its files, or --vocab-size), or "
            "make the dataset again with tools/preprocess_data.py."
        )
