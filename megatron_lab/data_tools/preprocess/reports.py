"""What a job reports: a line of progress every few seconds, whether the disk will hold it, bad records, a summary."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from megatron.data.indexed_writer import appearing
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.input_shards import InputShard
from megatron_lab.data_tools.preprocess.part_files import PartFolder, ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.text_records import InputPiece


@dataclass
class Summary:
    """What was done. Documents and tokens are counted over all keys."""

    prefixes: tuple[str, ...]
    """Paths of the datasets without .bin and .idx."""
    num_bytes: int
    """Bytes of the input files."""
    num_documents: int
    num_tokens: int
    num_empty: int
    """Number of blank lines and texts without a token."""
    num_learned: int
    """Tokens of conversations that a model is to learn."""
    num_bad_lines: int
    num_bad_files: int
    """Files of which nothing could be read."""
    num_kept: int
    """Number of shards that an earlier run had finished."""
    bad_lines: list[str] = field(default_factory=list)
    """"FILE:LINE: what is wrong" for the first bad records."""
    bad_lines_file: str | None = None
    """The file with all of them, if there are any."""


class Meter:
    """Follows all shards, and shows a line of progress every few seconds."""

    def __init__(
        self,
        shards: Sequence[InputShard],
        show: Callable[[str], None],
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = max(sum(shard.num_bytes for shard in shards), 1)
        self._show, self._every, self._clock = show, every, clock
        self._start = self._shown = clock()
        self._done, self._new = ShardCounts(), ShardCounts()
        self._under_way: dict[int, ShardCounts] = {}

    def listen(self, number: int, found: ShardCounts | ShardReport) -> None:
        """Take in the progress of a shard, or its report."""
        if isinstance(found, ShardCounts):
            self._under_way[number] = found
        else:
            self._under_way.pop(number, None)
            self._done += found.counts
            if found.new:
                self._new += found.counts
        if (now := self._clock()) - self._shown >= self._every:
            self._shown = now
            self._show(self.line())

    def line(self) -> str:
        """The share done, the speed and the time left. The speed is that of this run alone."""
        seconds = max(self._clock() - self._start, 1e-9)
        done, new = (sum(self._under_way.values(), counts) for counts in (self._done, self._new))
        left = "unknown"
        if new.num_bytes:
            left = str(timedelta(seconds=round((self._total - done.num_bytes) * seconds / new.num_bytes)))
        return (
            f"{done.num_bytes / self._total:6.1%}  {new.num_bytes / 1e6 / seconds:,.1f} MB/s  "
            f"{new.num_documents / seconds:,.0f} documents/s  {done.num_tokens:,} tokens  time left {left}"
        )


_SHARE_TO_JUDGE_BY = 0.01


class DiskRoom:
    """Warns once if the disk will be too small for the parts and the joined files, which lie there together for a while.

    The size of the whole is judged by the share of the input, of `num_bytes`, that has been read.
    """

    def __init__(self, folder: str, num_bytes: int, warn: Callable[[str], None]) -> None:
        self._folder, self._total, self._warn = folder, num_bytes, warn
        self._read = self._written = 0
        self._told = storage.is_url(folder)

    def listen(self, report: ShardReport) -> None:
        """Take in the report of a shard."""
        self._read += report.num_bytes
        self._written += sum(int(str(size)) for size, _ in report.files.values())
        if self._told or self._read < _SHARE_TO_JUDGE_BY * self._total:
            return
        whole = self._written * self._total / max(self._read, 1)
        needed, free = 2 * whole - self._written, shutil.disk_usage(self._folder).free
        if free < needed:
            self._told = True
            self._warn(
                f"WARNING: {self._folder}: the disk has {free / 1e6:,.1f} MB free, but about {needed / 1e6:,.1f} MB more are "
                "needed (the parts, and beside them the joined files). Make room; finished shards are kept for --resume."
            )


_KEPT_FOR_THE_SUMMARY = 1000


@dataclass(frozen=True)
class JobReports:
    """The reports of the shards that are made, by the number of the shard; without their bad records, which may be many."""

    parts: PartFolder
    shards: Sequence[InputShard]
    of_shard: dict[int, ShardReport] = field(default_factory=dict)
    passed_over: Sequence[str] = ()
    """"FILE: what is wrong" for files that could not be read."""

    def summary(self, prefixes: tuple[str, ...]) -> Summary:
        """What was done, once all shards are made."""
        reports = self.of_shard.values()
        made = sum((report.counts for report in reports), ShardCounts())
        return Summary(
            prefixes,
            num_bytes=made.num_bytes,
            num_documents=made.num_documents,
            num_tokens=made.num_tokens,
            num_empty=sum(report.num_empty for report in reports),
            num_learned=sum(report.num_learned for report in reports),
            num_bad_lines=sum(report.num_bad for report in reports),
            num_bad_files=len(self.passed_over),
            num_kept=sum(not report.new for report in reports),
        )

    def write_bad_lines(self, path: str, summary: Summary) -> None:
        """Write the bad records to a file beside the datasets, and the first into the summary. An earlier file is removed."""
        if not summary.num_bad_lines + summary.num_bad_files:
            storage.remove(path)
            return
        with self.parts.workspace() as workspace:
            local = f"{workspace}/bad_lines.txt" if storage.is_url(path) else path
            with appearing(local, folder=workspace, sync=False) as (file,):
                for line in self.bad_lines():
                    file.write(f"{line}\n".encode(errors="backslashreplace"))
                    if len(summary.bad_lines) < _KEPT_FOR_THE_SUMMARY:
                        summary.bad_lines.append(line)
            if local != path:
                storage.upload(local, path)
        summary.bad_lines_file = path

    def bad_lines(self) -> Iterator[str]:
        """Lines "FILE:LINE: what is wrong" once all shards are made: files that were passed over, then the order of the input."""
        yield from self.passed_over
        for number, shard in enumerate(self.shards):
            report = self.parts.report(shard.name) if self.of_shard[number].num_bad else None
            if report is None:
                continue
            before = {index: self.records_before(number, index) for index in {index for index, _, _ in report.bad}}
            for index, record, reason in report.bad:
                yield f"{shard.pieces[index].place(before[index] + record)}: {reason}"
            if report.num_bad > len(report.bad):
                yield f"{shard.pieces[-1].path}: {report.num_bad - len(report.bad):,} more up to here"

    def records_before(self, number: int, piece: int) -> int:
        """Number of records of a file before a piece of a shard: as finished shards counted them, or counted now."""
        wanted = self.shards[number].pieces[piece]
        if wanted.records_before is not None:
            return wanted.records_before
        total = 0
        for before in range(number - 1, -1, -1):
            (earlier,) = self.shards[before].pieces  # a file that is cut shares no shard
            total += self.of_shard[before].num_records[0] if before in self.of_shard else count_lines(earlier)
            if earlier.records_before == 0:
                break
        return total


def count_lines(piece: InputPiece) -> int:
    """Number of lines that begin in its range of bytes."""
    count, position = int(piece.begin == 0), max(piece.begin - 1, 0)
    with storage.open_binary(piece.path) as file:
        file.seek(position)
        while block := file.read(min(storage.BUFFER_BYTES, piece.end - 1 - position)):
            count += block.count(b"\n")
            position += len(block)
    return count
