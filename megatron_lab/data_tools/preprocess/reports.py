"""Reports of a preprocessing job to the user: progress lines, a warning if the disk is too small, invalid records, and a
summary."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from megatron.data.indexed_writer import write_atomically
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.input_shards import InputShard
from megatron_lab.data_tools.preprocess.part_files import JobFolder, ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.text_encoding import EncodingNotes, format_count, format_replaced
from megatron_lab.data_tools.preprocess.text_records import InputRange


@dataclass
class Summary:
    """Result of a preprocessing job: its datasets and counts.

    Documents and tokens are summed over all JSON keys (`--json-keys`): a record with two keys counts as two documents.
    """

    prefixes: tuple[str, ...]
    """Paths of the datasets without .bin and .idx."""
    num_bytes: int
    """Number of bytes of the input files."""
    num_documents: int
    num_tokens: int
    num_empty: int
    """Number of records and texts that gave no token, such as blank lines."""
    num_loss_tokens: int
    """Number of tokens that count in the loss, if the records are conversations."""
    num_bad_records: int
    num_bad_files: int
    """Number of files that were skipped completely, because they could not be opened or have an invalid format or columns."""
    num_resumed_shards: int
    """Number of shards (parts of the input) that an earlier run had finished."""
    bad_records: list[str] = field(default_factory=list)
    """"FILE:LINE: problem" for each of the first `_MAX_SUMMARY_RECORDS` invalid records."""
    bad_records_file: str | None = None
    """Path of the file that lists all invalid records; None if there are none."""
    encoding_notes: EncodingNotes = field(default_factory=EncodingNotes)
    """Files that are not UTF-8, and records with invalid bytes."""
    chat_notes: dict[str, int] = field(default_factory=dict)
    """Notes about conversations, for example about fields that the template does not write, with the number of times that each was
    given. `format_chat_notes` makes lines of them."""
    chat_notes_file: str | None = None
    """Path of the list of `chat_notes`; None if the list is empty."""
    encodings_file: str | None = None
    """Path of the list of files that are not UTF-8 and of records whose invalid bytes were replaced; None if this list is empty."""


class ProgressMeter:
    """Meter of the progress of a preprocessing job. It shows a line every few seconds.

    Args:
        shards: all shards (parts of the input) of the job.
        show: called with each progress line.
        interval: minimum time between two lines, in seconds.
        clock: returns the current time in seconds.
    """

    def __init__(
        self,
        shards: Sequence[InputShard],
        show: Callable[[str], None],
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = max(sum(shard.num_bytes for shard in shards), 1)
        self._show, self._interval, self._clock = show, interval, clock
        self._start = self._last_shown = clock()
        self._finished, self._finished_in_this_run = ShardCounts(), ShardCounts()
        self._running: dict[int, ShardCounts] = {}

    def update(self, shard_index: int, progress: ShardCounts | ShardReport) -> None:
        """Record the progress of a shard. Show a progress line if `interval` seconds have passed since the last line.

        Args:
            shard_index: index of the shard in the job.
            progress: counts of the shard so far, or the report of the finished shard.
        """
        if isinstance(progress, ShardCounts):
            self._running[shard_index] = progress
        else:
            self._running.pop(shard_index, None)
            self._finished += progress.counts
            if progress.new:
                self._finished_in_this_run += progress.counts
        if (now := self._clock()) - self._last_shown >= self._interval:
            self._last_shown = now
            self._show(self.format_line())

    def format_line(self) -> str:
        """Return a line with the processed percentage of the input, the speed and the estimated remaining time.

        The speed does not count shards that an earlier run had finished.
        """
        elapsed = max(self._clock() - self._start, 1e-9)
        total_counts, run_counts = (sum(self._running.values(), counts) for counts in (self._finished, self._finished_in_this_run))
        time_left = "unknown"
        if run_counts.num_bytes:
            time_left = str(timedelta(seconds=round((self._total - total_counts.num_bytes) * elapsed / run_counts.num_bytes)))
        return (
            f"{total_counts.num_bytes / self._total:6.1%}  {run_counts.num_bytes / 1e6 / elapsed:,.1f} MB/s  "
            f"{run_counts.num_documents / elapsed:,.0f} documents/s  {total_counts.num_tokens:,} tokens  time left {time_left}"
        )


_MIN_SHARE_FOR_ESTIMATE = 0.01
"""Share of the input that must be processed before the disk space is estimated."""


class DiskSpaceMonitor:
    """Monitor that warns once if the disk is too small for the output.

    The parts of all shards and the datasets joined from them exist at the same time, so the output needs twice its final size. This
    size is extrapolated from the share of the input that has been read.

    Args:
        folder: folder of the job.
        num_bytes: total number of input bytes.
        warn: called with the warning.
    """

    def __init__(self, folder: str, num_bytes: int, warn: Callable[[str], None]) -> None:
        self._folder, self._total, self._warn = folder, num_bytes, warn
        self._bytes_read = self._bytes_written = 0
        self._is_disabled = storage.is_url(folder)

    def update(self, report: ShardReport) -> None:
        """Add a finished shard. Warn if the free space of the disk is smaller than the estimated size of the remaining output.

        Args:
            report: report of the finished shard.
        """
        self._bytes_read += report.num_bytes
        self._bytes_written += sum(int(str(size)) for size, _ in report.files.values())
        if self._is_disabled or self._bytes_read < _MIN_SHARE_FOR_ESTIMATE * self._total:
            return
        estimated_total = self._bytes_written * self._total / max(self._bytes_read, 1)
        needed_bytes, free_bytes = 2 * estimated_total - self._bytes_written, shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            self._is_disabled = True
            self._warn(
                f"WARNING: {self._folder}: the disk has {free_bytes / 1e6:,.1f} MB free, but about "
                f"{needed_bytes / 1e6:,.1f} MB more are needed (for the parts and the "
                "joined files together). Make room; finished shards are kept for --resume."
            )


_MAX_SUMMARY_RECORDS = 1000
"""Maximum number of invalid records in a `Summary`."""


def format_chat_notes(notes: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each note about conversations.

    Args:
        notes: number of times that each note was given. The number replaces the braces around the unit: "{message}" becomes
            "2 messages".
    """
    for note, count in notes.items():
        yield re.sub(r"\{([a-z ]+)\}", lambda match, count=count: format_count(count, match[1]), note)  # type: ignore[misc]


@dataclass(frozen=True)
class JobReports:
    """Reports of a job's processed shards (parts of the input), by the index of the shard.

    The lists of invalid records in these reports are empty, because they may be long. `iter_bad_records` reads them from the job
    folder.
    """

    job_folder: JobFolder
    shards: Sequence[InputShard]
    by_shard: dict[int, ShardReport] = field(default_factory=dict)
    skipped_files: Sequence[str] = ()
    """"FILE: problem" for each file that was skipped because it could not be opened or has an invalid format."""

    def build_summary(self, prefixes: tuple[str, ...]) -> Summary:
        """Return the summary of the job. Call this method after all shards have been processed.

        Args:
            prefixes: paths of the datasets without .bin and .idx.
        """
        reports = self.by_shard.values()
        total_counts = sum((report.counts for report in reports), ShardCounts())
        return Summary(
            prefixes,
            num_bytes=total_counts.num_bytes,
            num_documents=total_counts.num_documents,
            num_tokens=total_counts.num_tokens,
            num_empty=sum(report.num_empty for report in reports),
            num_loss_tokens=sum(report.num_learned for report in reports),
            num_bad_records=sum(report.num_bad for report in reports),
            num_bad_files=len(self.skipped_files),
            num_resumed_shards=sum(not report.new for report in reports),
        )

    def write_bad_records(self, path: str, summary: Summary) -> None:
        """Write the list of skipped files and invalid records to a file, and add its first lines and its path to the summary.

        If nothing is invalid, remove the list of an earlier job.

        Args:
            path: path or URL of the list.
            summary: summary of the job, updated in place.
        """

        def iter_lines() -> Iterator[str]:
            for message in self.iter_bad_records():
                yield message
                if len(summary.bad_records) < _MAX_SUMMARY_RECORDS:
                    summary.bad_records.append(message)

        if self._write_list(path, iter_lines() if summary.num_bad_records + summary.num_bad_files else None):
            summary.bad_records_file = path

    def write_encoding_notes(self, path: str, summary: Summary) -> None:
        """Write the list of files that are not UTF-8 and of records whose invalid bytes were replaced to a file, and add the counts
        and the path to the summary. An empty list is not written, and the list of an earlier job is removed.

        Args:
            path: path or URL of the list.
            summary: summary of the job, updated in place.
        """
        reports = self.by_shard.values()
        summary.encoding_notes.num_undecodable = sum(report.num_undecodable for report in reports)
        has_lines = any(report.num_encodings + report.num_replaced_records for report in reports)
        if self._write_list(path, self._iter_encoding_notes(summary.encoding_notes) if has_lines else None):
            summary.encodings_file = path

    def write_chat_notes(self, path: str, summary: Summary) -> None:
        """Write the notes about conversations to a file, and add the notes and the path to the summary.

        An empty list is not written, and the list of an earlier job is removed.

        Args:
            path: path or URL of the list.
            summary: summary of the job, updated in place.
        """
        total: Counter[str] = Counter()
        for report in self.by_shard.values():
            total.update(report.chat_notes)
        summary.chat_notes = dict(sorted(total.items()))
        if self._write_list(path, format_chat_notes(summary.chat_notes) if total else None):
            summary.chat_notes_file = path

    def _write_list(self, path: str, lines: Iterator[str] | None) -> bool:
        """Write lines to a file, or remove the file of an earlier job if `lines` is None. Return whether the file was written."""
        if lines is None:
            storage.remove(path)
            return False
        with self.job_folder.open_workspace() as workspace:
            local_path = f"{workspace}/list.txt" if storage.is_url(path) else path
            with write_atomically(local_path, folder=workspace, sync=False) as (file,):
                file.writelines(f"{line}\n".encode(errors="backslashreplace") for line in lines)
            if local_path != path:
                storage.upload(local_path, path)
        return True

    def _iter_encoding_notes(self, notes: EncodingNotes) -> Iterator[str]:
        """Add all files that are not UTF-8, and all records whose invalid bytes were replaced, to `notes`. Yield a line for each.

        They are in the order of the input.
        """
        for shard_index, shard in enumerate(self.shards):
            counts = self.by_shard[shard_index]
            report = self.job_folder.read_report(shard.name) if counts.num_encodings + counts.num_replaced_records else None
            if report is None:
                continue
            for range_index, note in report.encodings:
                path = shard.ranges[range_index].path
                if notes.add_file(path, note):
                    yield f"{path}: {note}"
            record_indices = {
                range_index: self.count_records_before(shard_index, range_index)
                for range_index in {range_index for range_index, *_ in report.replaced}
            }
            for range_index, record_index, num_bytes, problem in report.replaced:
                location = shard.ranges[range_index].format_location(record_indices[range_index] + record_index)
                notes.add_replaced(location, num_bytes, problem)
                yield format_replaced(location, num_bytes, problem)
            if num_more := report.num_replaced_records - len(report.replaced):
                yield f"{shard.ranges[-1].path}: {num_more:,} more records with invalid bytes up to here"
                notes.num_replaced_records += num_more
                notes.num_replaced_bytes += report.num_replaced_bytes - sum(num_bytes for _, _, num_bytes, _ in report.replaced)

    def iter_bad_records(self) -> Iterator[str]:
        """Yield "FILE:LINE: problem" for all skipped files, and then for all invalid records in the order of the input.

        Call this method after all shards have been processed.
        """
        yield from self.skipped_files
        for shard_index, shard in enumerate(self.shards):
            report = self.job_folder.read_report(shard.name) if self.by_shard[shard_index].num_bad else None
            if report is None:
                continue
            first_records = {
                range_index: self.count_records_before(shard_index, range_index)
                for range_index in {range_index for range_index, _, _ in report.bad}
            }
            for range_index, record_index, reason in report.bad:
                yield f"{shard.ranges[range_index].format_location(first_records[range_index] + record_index)}: {reason}"
            if report.num_bad > len(report.bad):
                yield f"{shard.ranges[-1].path}: {report.num_bad - len(report.bad):,} more invalid records up to here"

    def count_records_before(self, shard_index: int, range_index: int) -> int:
        """Return the number of records that precede a file range of a shard in the same file.

        The numbers are taken from the reports of finished shards. In the ranges of unfinished shards, the lines are counted now.

        Args:
            shard_index: index of the shard in the job.
            range_index: index of the range in the shard.
        """
        input_range = self.shards[shard_index].ranges[range_index]
        if input_range.num_preceding_records is not None:
            return input_range.num_preceding_records
        total = 0
        for earlier_index in range(shard_index - 1, -1, -1):
            (earlier_range,) = self.shards[earlier_index].ranges  # a file with several ranges shares no shard with other files
            total += self.by_shard[earlier_index].num_records[0] if earlier_index in self.by_shard else count_lines(earlier_range)
            if earlier_range.num_preceding_records == 0:
                break
        return total


def count_lines(input_range: InputRange) -> int:
    """Return the number of lines that start in a byte range of a file."""
    count, position = int(input_range.start == 0), max(input_range.start - 1, 0)
    with storage.open_binary(input_range.path) as file:
        file.seek(position)
        while block := file.read(min(storage.BUFFER_BYTES, input_range.end - 1 - position)):
            count += block.count(b"\n")
            position += len(block)
    return count
