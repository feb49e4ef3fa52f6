"""What a job has done so far, and the line that says so every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TextIO

from megatron.data.preprocess.parts import ShardReport
from megatron.data.preprocess.shards import Shard
from megatron.data.preprocess.work import Counts


@dataclass
class Summary:
    """What was done; documents and tokens are counted over all keys."""

    prefixes: tuple[str, ...]
    """Of the datasets."""
    num_bytes: int = 0
    """Of the input files."""
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    """Blank lines and texts without a token."""
    num_bad_lines: int = 0
    bad_lines: list[str] = field(default_factory=list)
    """FILE:LINE: what is wrong; the first ones."""
    bad_lines_file: str | None = None
    """Where all of them are written, if there are any."""
    num_kept: int = 0
    """Shards that an earlier run had finished."""


class Meter:
    """Follows all shards, and shows a line now and then.

    Args:
        shards: The job.
        show: Given the line.
        every: Seconds between lines.
        clock: The time in seconds.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        show: Callable[[str], None],
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = max(sum(shard.num_bytes for shard in shards), 1)
        self._show, self._every, self._clock = show, every, clock
        self._start = self._shown = clock()
        self._done, self._new = Counts(), Counts()
        self._under_way: dict[int, Counts] = {}

    def listen(self, number: int, found: Counts | ShardReport) -> None:
        """Take in how far a shard is, or what it became."""
        if isinstance(found, Counts):
            self._under_way[number] = found
        else:
            self._under_way.pop(number, None)
            counts = Counts(found.num_bytes, sum(found.num_documents), found.num_tokens)
            self._done = _sum(self._done, counts)
            if found.new:
                self._new = _sum(self._new, counts)
        if (now := self._clock()) - self._shown >= self._every:
            self._shown = now
            self._show(self.line())

    def line(self) -> str:
        """Share, speed and time left; the speed is that of this run alone."""
        seconds = max(self._clock() - self._start, 1e-9)
        done, new = (_sum(counts, *self._under_way.values()) for counts in (self._done, self._new))
        left = "unknown"
        if new.num_bytes:
            left = str(timedelta(seconds=round((self._total - done.num_bytes) * seconds / new.num_bytes)))
        return (
            f"{done.num_bytes / self._total:6.1%}  {new.num_bytes / 1e6 / seconds:,.1f} MB/s  "
            f"{new.num_documents / seconds:,.0f} documents/s  {done.num_tokens:,} tokens  time left {left}"
        )


def _sum(*counts: Counts) -> Counts:
    return Counts(
        sum(one.num_bytes for one in counts), sum(one.num_documents for one in counts), sum(one.num_tokens for one in counts)
    )


class Screen:
    """Lines on a stream; on a terminal a line of progress replaces the one before."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open = ""

    def note(self, text: str) -> None:
        """A line that stays."""
        self._stream.write(f"{self._erase()}{text}\n")
        self._stream.flush()

    def progress(self, text: str) -> None:
        """A line of progress."""
        if not self._stream.isatty():
            self.note(text)
            return
        self._stream.write(f"{self._erase()}{text}")
        self._stream.flush()
        self._open = text

    def _erase(self) -> str:
        erased = f"\r{' ' * len(self._open)}\r" if self._open else ""
        self._open = ""
        return erased
