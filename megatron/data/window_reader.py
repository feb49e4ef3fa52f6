"""Reads windows of tokens from documents that are laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.batches import Piece
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.orders.epoch_index import Layout

_TOKENS_AT_ONCE = 1 << 17  # stays in the cache of a core


@dataclass(frozen=True)
class _Pieces:
    """Parts of sequences, one after another, that make up windows."""

    sequences: NDArray[np.integer]
    first: NDArray[np.int64]
    """First token, within the sequence."""
    counts: NDArray[np.int64]


class WindowReader:
    """Windows of an indexed dataset; every token id must be below the vocabulary size. Safe to use from several threads."""

    def __init__(self, dataset: IndexedDataset, vocab_size: int) -> None:
        self._dataset = dataset
        self._vocab_size = vocab_size
        self._may_be_negative = dataset.dtype.kind == "i"
        self._may_be_beyond = self._may_be_negative or 1 << 8 * dataset.dtype.itemsize > vocab_size

    def read(self, layout: Layout, starts: NDArray[np.int64], windows: NDArray[np.int64]) -> None:
        """Fill in windows of neighbouring tokens, [len(starts), length], that start at these tokens of the layout.

        Raises:
            DatasetError: a token id is not below the vocabulary size.
        """
        length = windows.shape[1]
        step = max(1, _TOKENS_AT_ONCE // length)
        for begin in range(0, len(starts), step):
            pieces = self._pieces(layout, starts[begin : begin + step], length)
            windows[begin : begin + step] = self._tokens(pieces).reshape(-1, length)

    def lineage(self, layout: Layout, start: int, length: int) -> list[Piece]:
        """Documents of a window. Neighbouring sequences of a document are one piece."""
        dataset, pieces = self._dataset, self._pieces(layout, np.array([start], np.int64), length)
        found: list[Piece] = []
        for sequence, first, count in zip(pieces.sequences.tolist(), pieces.first.tolist(), pieces.counts.tolist(), strict=True):
            if not count:
                continue
            document = dataset.document_of(sequence)
            before = dataset.lengths[dataset.document_index[document] : sequence].sum(dtype=np.int64)
            piece = Piece(dataset.prefix, document, int(before) + first, count)
            last = found[-1] if found else None
            if last and last.document == document and last.first_token + last.num_tokens == piece.first_token:
                found[-1] = Piece(dataset.prefix, document, last.first_token, last.num_tokens + count)
            else:
                found.append(piece)
        return found

    def _pieces(self, layout: Layout, starts: NDArray[np.int64], length: int) -> _Pieces:
        # Methods of arrays: numpy's functions of the same names cost twice as much for a single window.
        at = layout.starts.searchsorted(starts, side="right") - 1
        counts = layout.starts.searchsorted(starts + (length - 1), side="right") - at
        at = (at - counts.cumsum() + counts).repeat(counts)
        at += np.arange(len(at))  # at, at + 1, ... of each window
        window_starts, sequence_starts = starts.repeat(counts), layout.starts[at]
        begins = np.maximum(sequence_starts, window_starts)
        ends = np.minimum(layout.starts[at + 1], window_starts + length)
        return _Pieces(layout.sequences[at], begins - sequence_starts, ends - begins)

    def _tokens(self, pieces: _Pieces) -> NDArray[np.integer]:
        width, data = self._dataset.dtype.itemsize, self._dataset.data
        begins = self._dataset.offsets[pieces.sequences] + pieces.first * width
        ends = begins + pieces.counts * width
        # One join of views is several times as fast as a copy by numpy for each piece, or than gathering token by token.
        raw = b"".join([data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])
        tokens: NDArray[np.integer] = np.frombuffer(raw, self._dataset.dtype)
        if (self._may_be_beyond and tokens.max() >= self._vocab_size) or (self._may_be_negative and tokens.min() < 0):
            self._refuse(tokens, pieces)
        return tokens

    def _refuse(self, tokens: NDArray[np.integer], pieces: _Pieces) -> None:
        position = int(np.argmax((tokens < 0) | (tokens >= self._vocab_size)))
        at = int(np.searchsorted(np.cumsum(pieces.counts), position, side="right"))
        raise DatasetError(
            f"{self._dataset.prefix}: document {self._dataset.document_of(int(pieces.sequences[at])):,} has token id "
            f"{tokens[position]:,}, but the tokenizer has {self._vocab_size:,} ids (0 to {self._vocab_size - 1:,}).\n"
            "  The dataset was made with another tokenizer: give that one (--tokenizer-type and its files, or --vocab-size), or "
            "make the dataset again with tools/preprocess_data.py."
        )
