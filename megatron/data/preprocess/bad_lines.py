"""Bad records, named by their number in the file, which follows from what other shards count."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from megatron.data.indexed_writer import unfinished
from megatron.data.preprocess import storage
from megatron.data.preprocess.parts import Parts, ShardReport
from megatron.data.preprocess.progress import Summary
from megatron.data.preprocess.records import place
from megatron.data.preprocess.shards import Shard

_KEPT_FOR_THE_SUMMARY = 1000


def write_bad_lines(parts: Parts, shards: Sequence[Shard], reports: dict[int, ShardReport], path: str, summary: Summary) -> None:
    """All that were kept go to a file beside the datasets, the first ones into the summary; the file of an earlier job goes."""
    if not summary.num_bad_lines:
        storage.remove(path)
        return
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="preprocess-")) if storage.is_url(path) else None
        local = f"{folder}/bad_lines.txt" if folder else unfinished(f"{parts.folder}/bad_lines.txt")
        with open(local, "w", encoding="utf-8", errors="backslashreplace") as file:
            for line in bad_lines(parts, shards, reports):
                file.write(line + "\n")
                if len(summary.bad_lines) < _KEPT_FOR_THE_SUMMARY:
                    summary.bad_lines.append(line)
        if folder:
            storage.upload(local, path)
        else:
            os.replace(local, path)
    summary.bad_lines_file = path


def bad_lines(parts: Parts, shards: Sequence[Shard], reports: dict[int, ShardReport]) -> Iterator[str]:
    """FILE:LINE: what is wrong, in the order of the input."""
    before: dict[str, int] = {}  # records of a file in earlier pieces
    for number, shard in enumerate(shards):
        report = parts.report(shard.name) if reports[number].num_bad else None
        bad: dict[int, list[tuple[int, str]]] = {}
        for index, record, reason in report.bad if report else ():
            bad.setdefault(index, []).append((record, reason))
        for index, piece in enumerate(shard.pieces):
            first = before.get(piece.path, 0)
            for record, reason in bad.get(index, ()):
                yield f"{place(piece.path, piece.kind, first + record)}: {reason}"
            before[piece.path] = first + reports[number].num_records[index]
        if report and report.num_bad > len(report.bad):
            yield f"{shard.pieces[-1].path}: {report.num_bad - len(report.bad):,} more up to here"


def records_before(shards: Sequence[Shard], reports: dict[int, ShardReport], shard: int, piece: int) -> int:
    """Records of a file before one of its pieces: counted by finished shards, or now."""
    wanted = shards[shard].pieces[piece]
    if wanted.records_before is not None:
        return wanted.records_before
    total = 0
    for number in range(shard - 1, -1, -1):
        (earlier,) = shards[number].pieces  # a file that is cut shares no shard
        total += reports[number].num_records[0] if number in reports else count_lines(earlier.path, earlier.begin, earlier.end)
        if earlier.records_before == 0:
            break
    return total


def count_lines(path: str, begin: int, end: int) -> int:
    """Lines that begin in a range of bytes."""
    count, position = int(begin == 0), max(begin - 1, 0)
    with storage.open_binary(path) as file:
        file.seek(position)
        while block := file.read(min(storage.BUFFER_BYTES, end - 1 - position)):
            count += block.count(b"\n")
            position += len(block)
    return count
