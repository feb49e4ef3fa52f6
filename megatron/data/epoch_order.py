"""Order of samples for `--data-order epoch`: each epoch is shuffled separately, so that a longer run only appends to a shorter one.

If a run changes its sequence length, it finishes the current epoch first: the unread tokens of the epoch are cut into windows of
the new length. So no token is a label twice in an epoch, and tokens that were read are not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.data.history import LengthPeriod, merge_periods
from megatron.data.indexed_writer import IndexCache
from megatron.data.samples import DOCUMENT_ORDER, UNREAD_WINDOW_ORDER, WINDOW_ORDER, Key, compute_permutation
from megatron.data.windows import (
    DocumentLayout,
    Intervals,
    PassIndex,
    SampleOrder,
    SamplePosition,
    Selection,
    Windows,
    compute_window_offsets,
    cut_windows,
    lay_out,
)

_MAX_DROPPED_SHARE = 0.05


class PartialRead(NamedTuple):
    """Number of samples of an unfinished epoch that a run has read with one sequence length."""

    period_index: int
    """Index of the `LengthPeriod` (part of the run with one sequence length) in which the samples were read."""
    seq_length: int
    num_samples: int


@dataclass(frozen=True)
class EpochStart:
    """State in which a `LengthPeriod` (part of the run with one sequence length) starts: the current epoch, and the samples of this
    epoch that earlier periods have read."""

    epoch: int
    partial_reads: tuple[PartialRead, ...]
    """Samples of this epoch that earlier periods have read, one entry for each period. Empty if the period starts a new
    epoch."""
    period_index: int
    """Index of the period that starts: the number of periods before it in the run. It is not used if `partial_reads` is empty."""


class EpochOrder(SampleOrder):
    """Order of samples in which each epoch is shuffled separately, and epochs follow each other without end.

    In each epoch, the documents are permuted pseudo-randomly by (seed, split, epoch) and cut into windows that overlap by one
    token, so that every token but the first is a label once. Then the windows are permuted by the same three numbers. The last
    tokens of the epoch, too few for a window, are left out. These are different tokens in each epoch.

    Args:
        selection: documents to order. They must have enough tokens for a window.
        earlier: number of samples that the run has already read from these documents, for each sequence length in turn.
        cache: file cache for the arrays of document layouts and windows.
    """

    def __init__(self, selection: Selection, *, earlier: Sequence[LengthPeriod], cache: IndexCache) -> None:
        self._selection = selection
        self._cache = cache
        self.samples_per_epoch = self._count_windows_per_epoch(selection.seq_length)
        periods = merge_periods(earlier)
        # If the last period had this sequence length, the order continues that period.
        self._offset = periods.pop().num_samples if periods and periods[-1].seq_length == selection.seq_length else 0
        self._start = self._start_after(periods)
        self._num_resumed = self._count_unread_windows(self._start, selection.seq_length) if self._start.partial_reads else 0

    def locate(self, sample_index: int) -> SamplePosition:
        sample_index, first_full_epoch = sample_index + self._offset, self._start.epoch
        if self._start.partial_reads:
            if sample_index < self._num_resumed:
                return SamplePosition(first_full_epoch, sample_index, self._num_resumed - sample_index)
            sample_index, first_full_epoch = sample_index - self._num_resumed, first_full_epoch + 1
        epochs, position = divmod(sample_index, self.samples_per_epoch)
        return SamplePosition(first_full_epoch + epochs, position, self.samples_per_epoch - position)

    def get_index(self, pass_index: int) -> PassIndex:
        selection = self._selection
        epoch_start = self._start if pass_index == self._start.epoch else EpochStart(pass_index, (), 0)
        window_key = (
            selection.seq_length,
            epoch_start.period_index if epoch_start.partial_reads else 0,
            *map(tuple, epoch_start.partial_reads),
        )

        def build_key() -> tuple[object, ...]:
            return (
                selection.dataset.digest,
                selection.documents.start,
                selection.documents.stop,
                selection.split,
                selection.seed,
                pass_index,
            )

        layout_arrays = self._cache.get(
            "documents", ("sequences", "starts"), build_key, len(selection.documents), lambda: self._lay_out_documents(pass_index)
        )
        interval_starts, first_windows, order = self._cache.get(
            "windows",
            ("begins", "firsts", "order"),
            lambda: (*build_key(), *window_key),
            self.samples_per_epoch,
            lambda: self._cut_unread(epoch_start)[:3],
        )
        return DocumentLayout(*layout_arrays), Windows(interval_starts, first_windows, order, selection.seq_length)

    def describe(self, num_samples: int) -> list[str]:
        num_leftover = self._selection.num_tokens - 1 - self.samples_per_epoch * self._selection.seq_length
        lines = [
            f"epochs {self._count_epochs_before(0):.2f} to {self._count_epochs_before(num_samples):.2f} "
            f"of {self.samples_per_epoch:,} samples "
            f"({num_leftover:,} tokens of each left out: less than a sample)"
        ]
        if self._start.partial_reads:
            partial_text = " and ".join(
                f"{partial_read.num_samples:,} samples of {partial_read.seq_length} tokens"
                for partial_read in self._start.partial_reads
            )
            num_remaining = self._num_resumed * self._selection.seq_length
            num_dropped = self._compute_unread_intervals(self._start).num_predicted - num_remaining
            lines.append(
                f"epoch {self._start.epoch:,}: {partial_text} were read; {self._num_resumed:,} samples of "
                f"{self._selection.seq_length} tokens remain, and {num_dropped:,} tokens "
                f"({num_dropped / self._selection.num_tokens:.2%}) in ranges shorter than a sample are dropped"
            )
            if num_dropped > _MAX_DROPPED_SHARE * (num_dropped + num_remaining):
                lines.append(
                    f"WARNING: these are {num_dropped / (num_dropped + num_remaining):.0%} of the unread tokens. To read complete "
                    "documents instead, start another order with --seed; tokens of this epoch are then read again"
                )
        return lines

    def _count_epochs_before(self, sample_index: int) -> float:
        """Return how many epochs have been read before a sample, for the start-up log. The number may be fractional."""
        position = self.locate(sample_index)
        if self._start.partial_reads and position.pass_index == self._start.epoch:
            num_tokens = (
                sum(partial_read.num_samples * partial_read.seq_length for partial_read in self._start.partial_reads)
                + position.position * self._selection.seq_length
            )
            return position.pass_index + num_tokens / self._selection.num_tokens
        return position.pass_index + position.position / self.samples_per_epoch

    def _lay_out_documents(self, epoch: int) -> DocumentLayout:
        documents = compute_permutation(
            len(self._selection.documents), (DOCUMENT_ORDER, self._selection.seed, self._selection.split, epoch)
        )
        if self._selection.documents.start:
            documents = documents + documents.dtype.type(self._selection.documents.start)
        return lay_out(self._selection.dataset, documents)

    def _count_windows_per_epoch(self, seq_length: int) -> int:
        """Return the number of windows in a complete epoch for a sequence length."""
        return (self._selection.num_tokens - 1) // seq_length

    def _cut_unread(self, epoch_start: EpochStart) -> Windows:
        """Cut the unread tokens of an epoch into windows of the current sequence length."""
        return cut_windows(
            self._compute_unread_intervals(epoch_start),
            self._selection.seq_length,
            self._build_permutation_key(epoch_start.epoch, epoch_start.period_index if epoch_start.partial_reads else 0),
        )

    def _count_unread_windows(self, epoch_start: EpochStart, seq_length: int) -> int:
        """Return how many windows for `seq_length` the unread tokens of an epoch yield."""
        return int(compute_window_offsets(self._compute_unread_intervals(epoch_start), seq_length)[1][-1])

    def _compute_unread_intervals(self, epoch_start: EpochStart) -> Intervals:
        """Return the ranges of an epoch's tokens that earlier periods (parts of the run with other sequence lengths) have not
        read."""
        unread = Intervals(np.array([0], np.int64), np.array([self._selection.num_tokens], np.int64))
        for i, partial_read in enumerate(epoch_start.partial_reads):
            unread = cut_windows(
                unread,
                partial_read.seq_length,
                self._build_permutation_key(epoch_start.epoch, partial_read.period_index if i else 0),
            ).compute_unread_intervals(partial_read.num_samples)
        return unread

    def _build_permutation_key(self, epoch: int, period_index: int) -> Key:
        """Return the key (integers that determine the random permutation) of the windows of an epoch.

        Args:
            period_index: 0 if the windows are cut from the complete epoch. If they are cut from the tokens that earlier sequence
                lengths left unread, index of the `LengthPeriod` that reads them.
        """
        if not period_index:
            return (WINDOW_ORDER, self._selection.seed, self._selection.split, epoch)
        return (UNREAD_WINDOW_ORDER, self._selection.seed, self._selection.split, epoch, period_index)

    def _start_after(self, earlier: Sequence[LengthPeriod]) -> EpochStart:
        """Return the state after the periods in `earlier`: the current epoch, and the samples of this epoch that these periods have
        read. A period is a part of the run with one sequence length."""
        epoch_start = EpochStart(0, (), 0)
        for period_index, period in enumerate(earlier):
            num_samples, epoch, partial_reads = period.num_samples, epoch_start.epoch, epoch_start.partial_reads
            if partial_reads:
                num_unread = self._count_unread_windows(epoch_start, period.seq_length)
                if num_samples < num_unread:
                    epoch_start = EpochStart(
                        epoch, (*partial_reads, PartialRead(period_index, period.seq_length, num_samples)), period_index + 1
                    )
                    continue
                num_samples, epoch = num_samples - num_unread, epoch + 1
            epochs, num_partial = divmod(num_samples, self._count_windows_per_epoch(period.seq_length))
            partial_reads = (PartialRead(period_index, period.seq_length, num_partial),) if num_partial else ()
            epoch_start = EpochStart(epoch + epochs, partial_reads, period_index + 1)
        return epoch_start
