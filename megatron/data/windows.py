"""Documents of a split laid end to end, and the windows of tokens that are cut from them, in the order in which one pass reads
them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import parse_split
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.samples import Key, compute_permutation


def split_document_ranges(text: str, num_documents: int) -> tuple[range, range, range]:
    """Return the documents of the training, validation and test split. Each split is a consecutive range of documents.

    The bounds are rounded as in Megatron-LM (half to even, of the cumulative shares), so that both programs split a dataset at the
    same documents.

    Args:
        text: shares of the three splits, in the format of --split.
    """
    bounds = [round(share * num_documents) for share in itertools.accumulate(parse_split(text), initial=0.0)]
    train, valid, test = (range(start, stop) for start, stop in itertools.pairwise(bounds))
    return train, valid, test


@dataclass(frozen=True)
class Selection:
    """Documents of one split, and what determines their order and the samples: the seed and the sequence length."""

    dataset: IndexedDataset
    documents: range
    """Consecutive documents that belong to the split."""
    split: int
    """Index of the split: 0 training, 1 validation, 2 test."""
    seed: int
    seq_length: int
    """Number of tokens that the model reads per sample."""

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens in the split."""
        return self.dataset.count_tokens(self.documents)


class DocumentLayout(NamedTuple):
    """Documents laid end to end as one long row of tokens. A dataset stores a document as one or more sequences, in almost all
    datasets as one. The layout says which sequences follow each other in the row, and where each starts."""

    sequences: NDArray[np.integer]
    """Index in the dataset of each sequence, in the order of the row."""
    starts: NDArray[np.int64]
    """Position in the row of the first token of each sequence, followed by the total number of tokens in the row."""


def lay_out(dataset: IndexedDataset, documents: NDArray[np.integer]) -> DocumentLayout:
    """Concatenate these documents in the given order. Return the sequences of the concatenation and where each starts."""
    sequences = dataset.get_sequences(documents)
    starts = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(dataset.lengths[sequences], out=starts[1:])
    return DocumentLayout(sequences, starts)


@dataclass(frozen=True)
class Intervals:
    """Disjoint ranges of tokens in the concatenated documents of a `DocumentLayout`, in ascending order. `starts` are included,
    `ends` excluded."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def num_predicted(self) -> int:
        """Number of tokens that follow another token of their interval, and so can be labels."""
        return int((self.ends - self.starts - 1).sum())


class Windows(NamedTuple):
    """Windows of seq_length + 1 tokens, cut from ranges (intervals) of concatenated documents, and the order in which they are
    read.

    Consecutive windows of an interval overlap by one token, so that every token of the interval but the first is a label once.
    """

    interval_starts: NDArray[np.int64]
    """Position of each interval's first token in the concatenated documents."""
    first_windows: NDArray[np.int64]
    """Index of the first window of each interval, followed by the total number of windows."""
    order: NDArray[np.integer]
    """Index of the window that is read first, second, and so on."""
    seq_length: int

    def starts(self, window_indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the first token of each window, as a position in the concatenated documents."""
        interval = self.first_windows.searchsorted(window_indices, side="right") - 1
        return self.interval_starts[interval] + (window_indices - self.first_windows[interval]) * self.seq_length

    def compute_unread_intervals(self, num_consumed: int) -> Intervals:
        """Return the ranges of tokens that are unread after the first `num_consumed` windows are read. Adjacent unread windows form
        one range."""
        unread = np.ones(len(self.order), dtype=bool)
        unread[self.order[:num_consumed]] = False
        starts = self.starts(np.flatnonzero(unread))
        # Windows of different intervals are never adjacent: at least one consumed window is between them.
        gaps = np.flatnonzero(np.diff(starts) != self.seq_length)
        return Intervals(
            starts[np.concatenate([[0], gaps + 1])[: len(starts)]],
            starts[np.concatenate([gaps, [-1]])[: len(starts)]] + self.seq_length + 1,
        )


def cut_windows(intervals: Intervals, seq_length: int, key: Key) -> Windows:
    """Cut each interval (range of tokens) into windows and permute the windows. The tokens at the end of an interval that are too
    few for a window are left out.

    Args:
        key: integers that determine the permutation (`generate_random_bits`).
    """
    interval_starts, first_windows = compute_window_offsets(intervals, seq_length)
    return Windows(interval_starts, first_windows, compute_permutation(int(first_windows[-1]), key), seq_length)


def compute_window_offsets(intervals: Intervals, seq_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the windows of each interval (range of tokens) start.

    Returns:
        the first token of each interval (`Windows.interval_starts`), and the index of its first window (`Windows.first_windows`).
    """
    counts = (intervals.ends - intervals.starts - 1) // seq_length
    return intervals.starts, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


PassIndex = tuple[DocumentLayout, Windows]
"""Layout of the documents in one pass, and the windows in the order of the pass."""


class SamplePosition(NamedTuple):
    """Position of a sample in the reading order: the pass over the data that contains the sample, and the position in this pass."""

    pass_index: int
    position: int
    """Position of the sample in its pass over the data, counted in samples."""
    num_remaining: int
    """Number of samples in the pass from this sample on."""


class SampleOrder(Protocol):
    """Interface of an order of samples: for each sample index, the pass over the data and the window in this pass.

    A window is a range of seq_length + 1 tokens of the concatenated documents.
    """

    samples_per_epoch: int

    def locate(self, sample_index: int) -> SamplePosition:
        """Return the position of a sample.

        Raises:
            DatasetError: the order has fewer samples.
        """

    def get_index(self, pass_index: int) -> PassIndex:
        """Return the document layout and the windows of a pass over the data. For a large dataset that is not in the cache, this
        takes seconds."""

    def describe(self, num_samples: int) -> list[str]:
        """Return log lines about a run that reads `num_samples` samples: the epochs that the samples cover, and the tokens that are
        left out."""


# ---- Spans of the sequences of an indexed dataset, and their values.


class SequenceSpans(NamedTuple):
    """Ranges of consecutive tokens within the stored sequences of a dataset. Concatenated, these ranges are one or more windows, or
    complete documents."""

    sequences: NDArray[np.integer]
    first_tokens: NDArray[np.int64]
    """Index of each range's first token within its sequence."""
    counts: NDArray[np.int64]


def read_spans(dataset: IndexedDataset, spans: SequenceSpans) -> NDArray[np.integer]:
    """Return the values in these ranges of a dataset's sequences, concatenated: tokens, or the bytes of a loss mask."""
    dataset.check_not_truncated()
    itemsize, data = dataset.dtype.itemsize, dataset.data
    starts = dataset.offsets[spans.sequences] + spans.first_tokens * itemsize
    ends = starts + spans.counts * itemsize
    # Joining views is several times as fast as a numpy copy per span or as gathering single tokens.
    return np.frombuffer(
        b"".join([data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]), dataset.dtype
    )


def compute_window_spans(layout: DocumentLayout, starts: NDArray[np.int64], length: int) -> SequenceSpans:
    """Return where windows of `length` tokens are stored, as ranges of the dataset's sequences.

    Args:
        layout: concatenation of the dataset's documents.
        starts: first token of each window, as a position in this concatenation.
    """
    # Array methods: for a single window, the numpy functions of these names take twice as long.
    sequence_index = layout.starts.searchsorted(starts, side="right") - 1
    counts = layout.starts.searchsorted(starts + (length - 1), side="right") - sequence_index
    sequence_index = (sequence_index - counts.cumsum() + counts).repeat(counts)
    sequence_index += np.arange(len(sequence_index))  # consecutive sequences for each window
    window_starts, sequence_starts = starts.repeat(counts), layout.starts[sequence_index]
    span_starts = np.maximum(sequence_starts, window_starts)
    span_ends = np.minimum(layout.starts[sequence_index + 1], window_starts + length)
    return SequenceSpans(layout.sequences[sequence_index], span_starts - sequence_starts, span_ends - span_starts)


class TokenReader:
    """Reader of a dataset's tokens that checks each token id against the vocabulary size.

    Args:
        vocab_size: upper bound of token ids, exclusive.
    """

    def __init__(self, dataset: IndexedDataset, vocab_size: int) -> None:
        self._dataset, self._vocab_size = dataset, vocab_size
        self._may_be_negative = dataset.dtype.kind == "i"
        self._may_be_beyond = self._may_be_negative or 1 << 8 * dataset.dtype.itemsize > vocab_size

    def read(self, spans: SequenceSpans) -> NDArray[np.integer]:
        """Return the tokens in these ranges of the dataset's sequences, concatenated.

        Raises:
            DatasetError: a token id is negative or not below the vocabulary size.
        """
        tokens = read_spans(self._dataset, spans)
        if (self._may_be_beyond and tokens.max() >= self._vocab_size) or (self._may_be_negative and tokens.min() < 0):
            self._raise_invalid_token(tokens, spans)
        return tokens

    def _raise_invalid_token(self, tokens: NDArray[np.integer], spans: SequenceSpans) -> None:
        dataset, position = self._dataset, int(np.argmax((tokens < 0) | (tokens >= self._vocab_size)))
        i = int(np.searchsorted(np.cumsum(spans.counts), position, side="right"))
        raise DatasetError(
            f"{dataset.prefix}: document {dataset.find_document(int(spans.sequences[i])):,} has token id {tokens[position]:,}, but "
            f"the tokenizer has {self._vocab_size:,} ids (0 to {self._vocab_size - 1:,}).\n"
            "  The dataset was made with another tokenizer, or has a special token without a row in the word embedding: set that "
            "tokenizer (--tokenizer-type and its files, or --vocab-size), or make the dataset again with tools/preprocess_data.py."
        )
