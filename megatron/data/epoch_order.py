"""`--data-order epoch`: each epoch is shuffled by itself, so a longer run only appends to what a shorter one reads.

Where a run changes its sequence length, the current epoch is finished first: what is unread of it is cut into windows of the new
length. So no token is predicted twice in an epoch, and what was read stays read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.data.history import Stretch, merged
from megatron.data.indexed_writer import IndexCache
from megatron.data.samples import DOCUMENTS, LEFT_WINDOWS, WINDOWS, Key, permutation
from megatron.data.windows import (
    DocumentLayout,
    Intervals,
    PassIndex,
    SampleOrder,
    SamplePlace,
    Selection,
    Windows,
    cut,
    cut_points,
    lay_out,
)

_MUCH = 0.05


class Level(NamedTuple):
    """The part of an unfinished epoch that one stretch read."""

    stretch: int
    """The stretch's index in the run."""
    seq_length: int
    num_read: int


@dataclass(frozen=True)
class Resumption:
    """The point in the epochs at which a stretch starts."""

    epoch: int
    levels: tuple[Level, ...]
    """What earlier stretches read of this epoch; empty if a new epoch begins."""
    stretch: int
    """The stretch's index in the run."""


class EpochOrder(SampleOrder):
    """An order in which each epoch is independent, and epochs never end.

    In each epoch the documents are permuted by a key of (seed, split, epoch) and cut into windows that overlap by one token (so
    that every token but the first is predicted once). The windows are permuted by the same key. The last tokens, too few for a
    window, are left out; these are other tokens in each epoch.

    Args:
        selection: The documents to be ordered, of at least one window.
        earlier: What was read before at other sequence lengths.
    """

    def __init__(self, selection: Selection, *, earlier: Sequence[Stretch], cache: IndexCache) -> None:
        self._of = selection
        self._cache = cache
        self.samples_per_epoch = self._whole_windows(selection.seq_length)
        stretches = merged(earlier)
        # At the same sequence length this is no new stretch, but continues the last one.
        self._offset = stretches.pop().num_samples if stretches and stretches[-1].seq_length == selection.seq_length else 0
        self._start = self._after(stretches)
        self._num_resumed = self._num_windows(self._start, selection.seq_length) if self._start.levels else 0

    def place(self, number: int) -> SamplePlace:
        number, first_whole = number + self._offset, self._start.epoch
        if self._start.levels:
            if number < self._num_resumed:
                return SamplePlace(first_whole, number, self._num_resumed - number)
            number, first_whole = number - self._num_resumed, first_whole + 1
        epochs, position = divmod(number, self.samples_per_epoch)
        return SamplePlace(first_whole + epochs, position, self.samples_per_epoch - position)

    def index(self, pass_number: int) -> PassIndex:
        chosen = self._of
        at = self._start if pass_number == self._start.epoch else Resumption(pass_number, (), 0)
        cut_by = (chosen.seq_length, at.stretch if at.levels else 0, *map(tuple, at.levels))

        def key() -> tuple[object, ...]:
            return (chosen.dataset.digest, chosen.documents.start, chosen.documents.stop, chosen.split, chosen.seed, pass_number)

        laid = self._cache.get("documents", ("sequences", "starts"), key, len(chosen.documents), lambda: self._lay_out(pass_number))
        begins, firsts, order = self._cache.get(
            "windows", ("begins", "firsts", "order"), lambda: (*key(), *cut_by), self.samples_per_epoch, lambda: self._cut(at)[:3]
        )
        return DocumentLayout(*laid), Windows(begins, firsts, order, chosen.seq_length)

    def describe(self, num_samples: int) -> list[str]:
        tail = self._of.num_tokens - 1 - self.samples_per_epoch * self._of.seq_length
        lines = [
            f"epochs {self._epochs_at(0):.2f} to {self._epochs_at(num_samples):.2f} of {self.samples_per_epoch:,} samples "
            f"({tail:,} tokens of each left out: less than a sample)"
        ]
        if self._start.levels:
            read = " and ".join(f"{level.num_read:,} samples of {level.seq_length} tokens" for level in self._start.levels)
            left = self._num_resumed * self._of.seq_length
            dropped = self._left(self._start).num_predicted - left
            lines.append(
                f"of epoch {self._start.epoch:,}, {read} were read; {self._num_resumed:,} samples of {self._of.seq_length} tokens "
                f"are left of it, and {dropped:,} tokens ({dropped / self._of.num_tokens:.2%}) in stretches too short for one are "
                "dropped"
            )
            if dropped > _MUCH * (dropped + left):
                lines.append(
                    f"WARNING: that is {dropped / (dropped + left):.0%} of what was unread. To read whole documents, at the "
                    "price that what was read comes again, begin another order with --seed"
                )
        return lines

    def _epochs_at(self, number: int) -> float:
        """Epochs read before a sample: whole ones, and the share that is read of the sample's own epoch."""
        place = self.place(number)
        if self._start.levels and place.pass_number == self._start.epoch:
            read = sum(level.num_read * level.seq_length for level in self._start.levels) + place.position * self._of.seq_length
            return place.pass_number + read / self._of.num_tokens
        return place.pass_number + place.position / self.samples_per_epoch

    def _lay_out(self, epoch: int) -> DocumentLayout:
        documents = permutation(len(self._of.documents), (DOCUMENTS, self._of.seed, self._of.split, epoch))
        if self._of.documents.start:
            documents = documents + documents.dtype.type(self._of.documents.start)
        return lay_out(self._of.dataset, documents)

    def _whole_windows(self, seq_length: int) -> int:
        """The number of windows in a whole epoch."""
        return (self._of.num_tokens - 1) // seq_length

    def _cut(self, at: Resumption) -> Windows:
        """The windows of what is unread of an epoch."""
        return cut(self._left(at), self._of.seq_length, self._key(at.epoch, at.stretch if at.levels else 0))

    def _num_windows(self, at: Resumption, seq_length: int) -> int:
        """The number of windows of this length in what is unread of an epoch."""
        return int(cut_points(self._left(at), seq_length)[1][-1])

    def _left(self, at: Resumption) -> Intervals:
        """The tokens of an epoch that no level has read."""
        left = Intervals(np.array([0], np.int64), np.array([self._of.num_tokens], np.int64))
        for number, level in enumerate(at.levels):
            left = cut(left, level.seq_length, self._key(at.epoch, level.stretch if number else 0)).left(level.num_read)
        return left

    def _key(self, epoch: int, stretch: int) -> Key:
        """Key of a permutation. Stretch 0 stands for a whole epoch, as in a run that always had this sequence length."""
        if not stretch:
            return (WINDOWS, self._of.seed, self._of.split, epoch)
        return (LEFT_WINDOWS, self._of.seed, self._of.split, epoch, stretch)

    def _after(self, earlier: Sequence[Stretch]) -> Resumption:
        """The point at which the stretch after these starts."""
        at = Resumption(0, (), 0)
        for number, stretch in enumerate(earlier):
            num_samples, epoch, levels = stretch.num_samples, at.epoch, at.levels
            if levels:
                left = self._num_windows(at, stretch.seq_length)
                if num_samples < left:
                    at = Resumption(epoch, (*levels, Level(number, stretch.seq_length, num_samples)), number + 1)
                    continue
                num_samples, epoch = num_samples - left, epoch + 1
            epochs, num_read = divmod(num_samples, self._whole_windows(stretch.seq_length))
            levels = (Level(number, stretch.seq_length, num_read),) if num_read else ()
            at = Resumption(epoch + epochs, levels, number + 1)
        return at
