"""`--data-order epoch`: each epoch is shuffled apart, so a longer run only appends to what a shorter one reads."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import NDArray

from megatron.data.cache.index_cache import IndexCache
from megatron.data.order import DOCUMENTS, permutation
from megatron.data.orders.epoch_index import Layout, Windows, lay_out
from megatron.data.orders.sample_order import PassIndex, Place
from megatron.data.orders.selection import Selection
from megatron.data.orders.stretches import EpochCutter, Resumption, Stretch, merged, resume

_MUCH = 0.05


class EpochOrder:
    """An order in which each epoch stands alone, and epochs go on for ever.

    In each epoch the documents are permuted by a key of (seed, split, epoch), cut into windows that overlap by one token (so that
    every token but the first is predicted once), and the windows are permuted by the same key. The last tokens, too few for a
    window, are left out: other ones in each epoch.

    Args:
        selection: What is put into the order, of at least one window.
        earlier: What was read before at other sequence lengths.
        cache: Where large indexes are kept.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        earlier: Sequence[Stretch],
        cache: IndexCache,
    ) -> None:
        self._of = selection
        self._cache = cache
        self._cutter = EpochCutter(selection.num_tokens, selection.seed, selection.split)
        stretches = merged(earlier)
        # At the same sequence length this is no new stretch, but goes on with the last one.
        self._offset = stretches.pop().num_samples if stretches and stretches[-1].seq_length == selection.seq_length else 0
        self._start = resume(stretches, self._cutter)
        self._num_resumed = self._cutter.num_windows(self._start, selection.seq_length) if self._start.levels else 0
        self.samples_per_epoch = self._cutter.samples_per_epoch(selection.seq_length)

    def place(self, number: int) -> Place:
        """Place of a sample; a pass is an epoch."""
        number, first_whole = number + self._offset, self._start.epoch
        if self._start.levels:
            if number < self._num_resumed:
                return Place(first_whole, number, self._num_resumed - number)
            number, first_whole = number - self._num_resumed, first_whole + 1
        epochs, position = divmod(number, self.samples_per_epoch)
        return Place(first_whole + epochs, position, self.samples_per_epoch - position)

    def index(self, pass_number: int) -> PassIndex:
        """The order of an epoch."""
        at = self._start if pass_number == self._start.epoch else Resumption(pass_number, (), 0)
        levels = [(level.stretch, level.seq_length, level.num_read) for level in at.levels]
        cut_by = (self._of.seq_length, at.stretch if levels else 0, *levels)

        def key() -> tuple[object, ...]:
            chosen = self._of
            return (chosen.dataset.digest, chosen.documents.start, chosen.documents.stop, chosen.split, chosen.seed, pass_number)

        laid = self._cache.get(
            "documents", ("sequences", "starts"), key, len(self._of.documents), lambda: self._lay_out(pass_number)
        )
        windows = self._cache.get(
            "windows", ("begins", "firsts", "order"), lambda: (*key(), *cut_by), self.samples_per_epoch, lambda: self._cut(at)
        )
        return PassIndex(Layout(*laid), Windows(self._of.seq_length, *windows))

    def describe(self, num_samples: int) -> list[str]:
        """Which epochs so many samples take, and what is left out; a second line where an epoch was read at other lengths."""
        tail = self._of.num_tokens - 1 - self.samples_per_epoch * self._of.seq_length
        lines = [
            f"epochs {self._epochs_at(0):.2f} to {self._epochs_at(num_samples):.2f} of {self.samples_per_epoch:,} samples "
            f"({tail:,} tokens of each left out: less than a sample)"
        ]
        if self._start.levels:
            read = " and ".join(f"{level.num_read:,} samples of {level.seq_length} tokens" for level in self._start.levels)
            left = self._num_resumed * self._of.seq_length
            dropped = self._cutter.left(self._start).num_predicted - left
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
        """Epochs before a sample: whole ones, and the share of its own that was read."""
        place = self.place(number)
        if self._start.levels and place.pass_number == self._start.epoch:
            read = sum(level.num_read * level.seq_length for level in self._start.levels) + place.position * self._of.seq_length
            return place.pass_number + read / self._of.num_tokens
        return place.pass_number + place.position / self.samples_per_epoch

    def _lay_out(self, epoch: int) -> tuple[NDArray, ...]:
        documents = permutation(len(self._of.documents), (DOCUMENTS, self._of.seed, self._of.split, epoch))
        if self._of.documents.start:
            documents = documents + documents.dtype.type(self._of.documents.start)
        laid = lay_out(self._of.dataset, documents)
        return laid.sequences, laid.starts

    def _cut(self, at: Resumption) -> tuple[NDArray, ...]:
        windows = self._cutter.windows(at, self._of.seq_length)
        return windows.begins, windows.firsts, windows.order
