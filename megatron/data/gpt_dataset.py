"""Samples for GPT models from an indexed dataset.

`GPTDataset` cuts windows of seq_length + 1 tokens from the split's documents, laid end to end. `PackedDataset` packs complete
documents into samples.
"""

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
from megatron.config.imports import import_object
from megatron.data.epoch_order import EpochOrder
from megatron.data.history import LengthPeriod
from megatron.data.indexed_dataset import MARK_TYPE, DatasetError, IndexedDataset
from megatron.data.indexed_writer import IndexCache
from megatron.data.samples import (
    DOCUMENT_END,
    DOCUMENT_ORDER,
    IN_LOSS,
    PADDING,
    WINDOW_ORDER,
    DocumentSpan,
    SampleSource,
    compute_permutation,
)
from megatron.data.windows import (
    PassIndex,
    SampleOrder,
    Selection,
    SequenceSpans,
    TokenReader,
    compute_window_spans,
    lay_out,
    read_spans,
)


class GPTDataset(SampleSource):
    """Sample source over one split of an indexed dataset. Samples are windows over the documents, which are laid end to end.

    Args:
        dataset: indexed dataset.
        documents: consecutive documents of the dataset that belong to the split.
        split: index of the split: 0 training, 1 validation, 2 test.
        seed: seed of the order of samples.
        seq_length: number of tokens that the model reads per sample. A window has one token more, for the last label.
        vocab_size: upper bound of token ids, exclusive.
        order: "epoch" for `EpochOrder`, which has no end, or "megatron" for `MegatronOrder`.
        num_samples: number of samples of the run, on which Megatron-LM's order depends; None for one epoch.
        earlier: number of samples that the run has already read from this split, for each sequence length in turn (epoch order
            only). The first sample after these has index 0.
        cache: cache of large indexes; None for no cache.
        marks: loss mask of the dataset, one byte per token (see `open_loss_mask`); None if all tokens count in the loss.

    Raises:
        DatasetError: the split is shorter than one window.
        ValueError: the sequence length changes in Megatron-LM's order.
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
        earlier: Sequence[LengthPeriod] = (),
        cache: IndexCache | None = None,
        marks: IndexedDataset | None = None,
    ) -> None:
        self._marks = marks
        self.selection = Selection(dataset, documents, split, seed, seq_length)
        self.seq_length = seq_length
        for length in (seq_length, *(period.seq_length for period in earlier)):
            _check_size(self.selection, length)
        cache = cache or IndexCache(None)
        if order == "epoch":
            self.order: SampleOrder = EpochOrder(self.selection, earlier=earlier, cache=cache)
        elif earlier:
            raise ValueError(
                "--data-order megatron does not support a change of --seq-length within a run "
                f"({earlier[-1].seq_length} before, {seq_length} now).\n"
                "  Keep --seq-length, or train with --data-order epoch."
            )
        else:
            order_class = import_object("megatron_lab.data_tools.megatron_order:MegatronOrder")
            self.order = order_class(self.selection, num_samples=num_samples, cache=cache)
        self._passes = PassCache(self.order.get_index)
        self._tokens = TokenReader(dataset, vocab_size)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the split."""
        return self.order.samples_per_epoch

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        samples = np.empty((count, self.seq_length + 1), dtype=np.int64)
        self._fill_rows(samples, first, self._tokens.read)
        return samples

    def get_marks(self, first: int, count: int) -> NDArray[np.uint8] | None:
        if (marks := self._marks) is None:
            return None
        rows = np.empty((count, self.seq_length + 1), dtype=MARK_TYPE)
        self._fill_rows(rows, first, lambda spans: read_spans(marks, spans))
        return rows

    def _fill_rows(self, rows: NDArray[Any], first: int, read_values: Callable[[SequenceSpans], NDArray[np.integer]]) -> None:
        """Fill each row with the values (tokens or loss-mask bytes) of one sample.

        Args:
            rows: array to fill, [samples, seq_length + 1].
            first: index of the first sample.
            read_values: reads ranges of the dataset's sequences and returns their values, concatenated.
        """
        count, length = rows.shape
        batch_size, row = max(1, _MAX_BATCH_TOKENS // length), 0
        while row < count:
            position = self.order.locate(first + row)
            layout, windows = self._passes.get(position.pass_index)
            stop = row + min(position.num_remaining, count - row, batch_size)
            starts = windows.starts(windows.order[position.position : position.position + stop - row])
            rows[row:stop] = read_values(compute_window_spans(layout, starts, length)).reshape(-1, length)
            row = stop

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        dataset, position = self.selection.dataset, self.order.locate(sample_index)
        layout, windows = self._passes.get(position.pass_index)
        sequence_spans = compute_window_spans(
            layout, windows.starts(windows.order[position.position : position.position + 1]), self.seq_length + 1
        )
        spans: list[DocumentSpan] = []
        for sequence, first, count in zip(*(array.tolist() for array in sequence_spans), strict=True):
            if not count:
                continue
            document = dataset.find_document(sequence)
            num_preceding = dataset.lengths[dataset.document_index[document] : sequence].sum(dtype=np.int64)
            span = DocumentSpan(dataset.prefix, document, int(num_preceding) + first, count)
            last = spans[-1] if spans else None
            # Consecutive sequences of a document form one span.
            if last and last.document == document and last.first_token + last.num_tokens == span.first_token:
                spans[-1] = DocumentSpan(dataset.prefix, document, last.first_token, last.num_tokens + count)
            else:
                spans.append(span)
        return spans

    def describe(self, num_samples: int) -> list[str]:
        selection, dataset = self.selection, self.selection.dataset
        name = f"{SPLIT_NAMES[selection.split]}: {dataset.prefix}"
        size = f"{len(selection.documents):,} of {dataset.num_documents:,} documents, {selection.num_tokens:,} tokens"
        first_line, *further_lines = self.order.describe(num_samples)
        return [f"{name}: {size}; {first_line}", *(f"{name}: {line}" for line in further_lines)]


_MAX_BATCH_TOKENS = 1 << 17  # fits in the cache of a CPU core


_MAX_CACHED_PASSES = 2  # prefetching reads the next epoch before the current epoch ends


class PassCache:
    """Cache of the indexes of the two most recently used passes over the data. The index of a pass gives the order of its documents
    and windows. An index is built when it is first needed.

    Threads that need the same pass wait for the thread that builds its index. Other threads continue to read.
    """

    def __init__(self, build: Callable[[int], PassIndex]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._passes: OrderedDict[int, _CachedPass] = OrderedDict()

    def get(self, pass_index: int) -> PassIndex:
        """Return the index of a pass (the layout of its documents, and its windows). Build it if it is not in the cache."""
        with self._lock:
            cached = self._passes.get(pass_index)
            if cached is None:
                while len(self._passes) >= _MAX_CACHED_PASSES:  # before building, to reduce the peak memory
                    self._passes.popitem(last=False)
                cached = self._passes[pass_index] = _CachedPass()
            self._passes.move_to_end(pass_index)
        with cached.lock:
            if cached.index is None:
                cached.index = self._build(pass_index)
            return cached.index


class _CachedPass:
    """Entry of the cache: the index of a pass, and a lock for the thread that builds the index."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index: PassIndex | None = None


_PATH_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")


def _check_size(selection: Selection, seq_length: int) -> None:
    """Check that the split has enough tokens for one window.

    Raises:
        DatasetError: the split has fewer tokens.
    """
    dataset, split = selection.dataset, selection.split
    if selection.num_tokens <= seq_length:
        single = " --split cannot divide a single document." if dataset.num_documents == 1 else ""
        raise DatasetError(
            f"the {SPLIT_NAMES[split]} split of {dataset.prefix} has {len(selection.documents):,} of {dataset.num_documents:,} "
            f"documents and {selection.num_tokens:,} tokens, but one sample needs {seq_length + 1:,} tokens "
            f"(--seq-length {seq_length} + 1).{single}\n"
            "  Give this split a larger share with --split, use a dataset with more documents or a shorter --seq-length, cut long "
            f"texts with --cut-documents of tools/preprocess_data.py, or give this split its own data ({_PATH_FLAGS[split]})"
            + (", or do without evaluation (--eval-iters 0)." if split else ".")
        )


# ---- Samples of complete documents (--whole-documents). A document is split only if it is longer than a sample.
#
# The documents of a split are packed into samples once, by best-fit decreasing: the longest document first, each into the fullest
# sample in which it fits. This leaves little unused space. Each epoch permutes the samples by a key of (seed, split, epoch). So
# the tokens of sample 17 do not depend on what was read before, and the number of consumed samples is the complete state, as for
# `GPTDataset`.
#
# A sample has seq_length + 1 tokens. After its documents, it is padded with end-of-document tokens that do not count in the loss.
# The first token of a document does not count in the loss either, because no token before it allows a prediction.


class PackingItems(NamedTuple):
    """Items to pack into samples. An item is a document, or a part of a document that is longer than a sample."""

    documents: NDArray[np.int64]
    """Document to which each item belongs, as an index into the documents that `split_into_items` got."""
    starts: NDArray[np.int64]
    """First token of each item within its document."""
    lengths: NDArray[np.int64]
    num_split_documents: int
    """Number of documents that are split into several items."""
    num_short_documents: int
    """Number of documents with fewer than two tokens. They have no token to predict and are left out."""


def split_into_items(lengths: NDArray[np.int64], sample_length: int) -> PackingItems:
    """Make the items to pack: each document is an item, or is split into several items if it is longer than a sample.

    Consecutive items of a document overlap by one token, so that each token but the first is a label once.

    Args:
        lengths: number of tokens of each document.
        sample_length: number of tokens of a sample, seq_length + 1.
    """
    counts = np.maximum(-(-(lengths - 1) // (sample_length - 1)), 0)
    documents = np.repeat(np.arange(len(lengths)), counts)
    item_in_document = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = item_in_document * (sample_length - 1)
    return PackingItems(
        documents, starts, np.minimum(lengths[documents] - starts, sample_length), int((counts > 1).sum()), int((counts < 1).sum())
    )


def pack_best_fit(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack items into bins of equal capacity by best-fit decreasing.

    The longest items are packed first, and items of equal length in the order of their index. Each item goes into the bin that has
    the least remaining space among those with enough space.

    Args:
        lengths: length of each item.
        capacity: maximum total length of the items of a bin.

    Returns:
        for each bin, the indices of its items.
    """
    bins: list[list[int]] = []
    bins_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # keys of `bins_by_space`, ascending
    for item in np.argsort(-lengths, kind="stable").tolist():
        length, i = int(lengths[item]), bisect.bisect_left(spaces, lengths[item])
        if i == len(spaces):
            bins.append([item])
            bin_index, space = len(bins) - 1, capacity - length
        else:
            bin_index, space = bins_by_space[spaces[i]].pop(), spaces[i] - length
            bins[bin_index].append(item)
            if not bins_by_space[spaces[i]]:
                del bins_by_space[spaces.pop(i)]
        if space >= 2:  # length of the shortest item
            if space not in bins_by_space:
                bins_by_space[space] = []
                bisect.insort(spaces, space)
            bins_by_space[space].append(bin_index)
    return bins


class PackedDataset(SampleSource):
    """Sample source over one split of an indexed dataset. Each sample is packed from complete documents (--whole-documents).

    Args:
        dataset: indexed dataset.
        documents: consecutive documents of the dataset that belong to the split.
        split: index of the split: 0 training, 1 validation, 2 test.
        seed: seed of the order of samples.
        seq_length: number of tokens that the model reads per sample. A packed sample has one token more, for the last label.
        vocab_size: upper bound of token ids, exclusive.
        eod: end-of-document token, which also pads samples.
        num_consumed: number of samples that the run has already read. The first sample after these has index 0.
        marks: loss mask of the dataset, one byte per token (see `open_loss_mask`); None if all tokens count in the loss.

    Raises:
        DatasetError: no document has two tokens or more.
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
        num_consumed: int = 0,
        marks: IndexedDataset | None = None,
    ) -> None:
        self.selection = Selection(dataset, documents, split, seed, seq_length)
        self.seq_length, self._eod, self._num_consumed, self._marks = seq_length, eod, num_consumed, marks
        self._tokens = TokenReader(dataset, vocab_size)
        # Shuffle, so that documents that are adjacent in the file do not end up in the same samples.
        order = np.arange(documents.start, documents.stop)[compute_permutation(len(documents), (DOCUMENT_ORDER, seed, split, 0))]
        self._layout = lay_out(dataset, order)
        firsts = dataset.document_index[order]
        counts = dataset.document_index[order + 1] - firsts
        self._document_order, ends = order, np.cumsum(counts)
        self._starts = self._layout.starts[ends - counts]
        self._items = split_into_items(self._layout.starts[ends] - self._starts, seq_length + 1)
        self._samples = pack_best_fit(self._items.lengths, seq_length + 1)
        if not self._samples:
            raise DatasetError(
                f"the {SPLIT_NAMES[split]} split of {dataset.prefix} has no document of two tokens or more.\n"
                "  Give this split a larger share with --split, or do without evaluation (--eval-iters 0)."
            )
        self._epoch_order = functools.lru_cache(maxsize=2)(self._permute_samples)  # prefetching reads the next epoch early

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the split."""
        return len(self._samples)

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        samples = np.full((count, self.seq_length + 1), self._eod, dtype=np.int64)
        for row, sample_index in zip(samples, range(first, first + count), strict=True):
            offset = 0
            for item in self._get_items_of_sample(sample_index):
                length = self._items.lengths[item]
                row[offset : offset + length] = self._tokens.read(self._get_item_spans(item))
                offset += length
        return samples

    def get_marks(self, first: int, count: int) -> NDArray[np.uint8]:
        rows = np.full((count, self.seq_length + 1), PADDING, dtype=MARK_TYPE)
        for row, sample_index in zip(rows, range(first, first + count), strict=True):
            offset = 0
            for item in self._get_items_of_sample(sample_index):
                item_marks = row[offset : offset + self._items.lengths[item]]
                item_marks[:] = IN_LOSS if self._marks is None else read_spans(self._marks, self._get_item_spans(item)) & IN_LOSS
                item_marks[0] &= ~MARK_TYPE(IN_LOSS)
                item_marks[-1] |= DOCUMENT_END
                offset += len(item_marks)
        return rows

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        prefix, items = self.selection.dataset.prefix, self._items
        return [
            DocumentSpan(
                prefix, int(self._document_order[items.documents[item]]), int(items.starts[item]), int(items.lengths[item])
            )
            for item in self._get_items_of_sample(sample_index)
        ]

    def describe(self, num_samples: int) -> list[str]:
        selection, dataset, items = self.selection, self.selection.dataset, self._items
        epochs = [(self._num_consumed + sample_index) / self.samples_per_epoch for sample_index in (0, num_samples)]
        padding_share = 1 - items.lengths.sum() / (self.samples_per_epoch * (self.seq_length + 1))
        lines = [
            f"{len(selection.documents):,} of {dataset.num_documents:,} documents, {selection.num_tokens:,} tokens; epochs "
            f"{epochs[0]:.2f} to {epochs[1]:.2f} of {self.samples_per_epoch:,} samples of whole documents, "
            f"{len(items.lengths) / self.samples_per_epoch:.1f} in each; {padding_share:.1%} of the samples is filled up"
        ]
        if items.num_split_documents:
            sample_length = self.seq_length + 1
            lines.append(
                f"{items.num_split_documents:,} documents are longer than a sample ({sample_length:,} tokens) and read in parts"
            )
        if items.num_short_documents:
            lines.append(f"{items.num_short_documents:,} documents of fewer than two tokens are left out")
        return [f"{SPLIT_NAMES[selection.split]}: {dataset.prefix}: {line}" for line in lines]

    def _permute_samples(self, epoch: int) -> NDArray[np.integer]:
        return compute_permutation(len(self._samples), (WINDOW_ORDER, self.selection.seed, self.selection.split, epoch))

    def _get_items_of_sample(self, sample_index: int) -> list[int]:
        epoch, position = divmod(self._num_consumed + sample_index, self.samples_per_epoch)
        return self._samples[self._epoch_order(epoch)[position]]

    def _get_item_spans(self, item: int) -> SequenceSpans:
        """Return where the tokens of an item (a document or a part of one) are stored: ranges of the dataset's sequences."""
        start = self._starts[self._items.documents[item]] + self._items.starts[item]
        return compute_window_spans(self._layout, np.array([start]), int(self._items.lengths[item]))
