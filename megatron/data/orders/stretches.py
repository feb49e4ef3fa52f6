"""A run whose sequence length changes on the way: which part of which epoch it reads next.

The epoch in which a stretch of the run stopped is finished first: what it left unread is cut into windows of the new length. So
what was read stays read, and no token is predicted twice in an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.data.order import LEFT_WINDOWS, WINDOWS, Key
from megatron.data.orders.epoch_index import Intervals, Windows, cut, cut_points, whole


@dataclass(frozen=True)
class Stretch:
    """A part of a run in which the sequence length stayed the same."""

    seq_length: int
    num_samples: int
    """Samples that were read of the dataset."""


@dataclass(frozen=True)
class Level:
    """What one stretch read of an epoch that it did not finish."""

    stretch: int
    """Its number in the run."""
    seq_length: int
    num_read: int


@dataclass(frozen=True)
class Resumption:
    """Where a stretch starts."""

    epoch: int
    levels: tuple[Level, ...]
    """What was read of this epoch before; empty if it starts with a whole one."""
    stretch: int
    """The number of the stretch in the run."""


class EpochCutter:
    """Cuts epochs of `num_tokens` tokens into windows, permuted by keys of (seed, split, epoch)."""

    def __init__(self, num_tokens: int, seed: int, split: int) -> None:
        self._num_tokens = num_tokens
        self._seed = seed
        self._split = split

    def samples_per_epoch(self, seq_length: int) -> int:
        """Windows of a whole epoch."""
        return (self._num_tokens - 1) // seq_length

    def windows(self, at: Resumption, seq_length: int) -> Windows:
        """The windows of what is left of an epoch."""
        return cut(self.left(at), seq_length, self._key(at.epoch, at.stretch if at.levels else 0))

    def num_windows(self, at: Resumption, seq_length: int) -> int:
        """How many windows that makes."""
        return int(cut_points(self.left(at), seq_length)[1][-1])

    def left(self, at: Resumption) -> Intervals:
        """What the levels leave of an epoch."""
        left = whole(self._num_tokens)
        for number, level in enumerate(at.levels):
            left = cut(left, level.seq_length, self._key(at.epoch, level.stretch if number else 0)).left(level.num_read)
        return left

    def _key(self, epoch: int, stretch: int) -> Key:
        """Of a whole epoch where the stretch is 0: the same as in a run that always had this sequence length."""
        if not stretch:
            return (WINDOWS, self._seed, self._split, epoch)
        return (LEFT_WINDOWS, self._seed, self._split, epoch, stretch)


def resume(earlier: Sequence[Stretch], cutter: EpochCutter) -> Resumption:
    """Where the stretch after these starts."""
    at = Resumption(0, (), 0)
    for number, stretch in enumerate(earlier):
        num_samples, epoch, levels = stretch.num_samples, at.epoch, at.levels
        if levels:
            left = cutter.num_windows(at, stretch.seq_length)
            if num_samples < left:
                levels = (*levels, Level(number, stretch.seq_length, num_samples))
                at = Resumption(epoch, levels, number + 1)
                continue
            num_samples, epoch, levels = num_samples - left, epoch + 1, ()
        epochs, num_read = divmod(num_samples, cutter.samples_per_epoch(stretch.seq_length))
        levels = (Level(number, stretch.seq_length, num_read),) if num_read else ()
        at = Resumption(epoch + epochs, levels, number + 1)
    return at


def merged(earlier: Sequence[Stretch]) -> list[Stretch]:
    """Stretches without empty ones, and with neighbours of one sequence length joined."""
    found: list[Stretch] = []
    for stretch in earlier:
        if found and found[-1].seq_length == stretch.seq_length:
            found[-1] = Stretch(stretch.seq_length, found[-1].num_samples + stretch.num_samples)
        elif stretch.num_samples:
            found.append(stretch)
    return found
