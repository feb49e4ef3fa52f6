"""Runs a whole job: find the inputs, cut them into shards, have these made, join the parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from megatron.data.indexed_dataset import loss_mask_prefix
from megatron.data.indexed_writer import join, write_shuffled
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.engines import Engine
from megatron_lab.data_tools.preprocess.input_shards import InputShard, cut, default_shard_size, find_sources
from megatron_lab.data_tools.preprocess.part_files import PartFolder, ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.reports import DiskRoom, JobReports, Meter, Summary
from megatron_lab.data_tools.preprocess.shard_work import BadShardError, PreprocessJob, file_digests, settings
from megatron_lab.data_tools.preprocess.storage import told_where_no_room
from megatron_lab.data_tools.preprocess.text_records import InputPiece, Kind

_RESUME = "Go on with --resume: finished shards are kept."
_ON_DISK = f"Make room there. {_RESUME}"


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    job: PreprocessJob,
    *,
    input_format: Kind | None = None,
    engine: Engine | None = None,
    shard_size: int | None = None,
    start: Literal["new", "resume", "restart"] = "new",
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Write ``<output_prefix>_<key>_document.bin`` and ``.idx`` for each key, and beside those of conversations their loss masks;
    the same bytes for every engine and shard size.

    Unfinished work lies in the folder ``<output_prefix>.parts``, and stays there if the job is ended by whatever means. The memory
    of a worker is bounded by its longest record (of parquet, its largest row group).

    Args:
        inputs: files, folders, patterns and URLs, read in this order.
        output_prefix: a path, whose folder must exist, or a URL.
        job: keys, tokenizer, and perhaps the template of conversations.
        input_format: the kind of all files; None: as their names say.
        engine: what makes the shards; None: this process.
        shard_size: in bytes of the input; None: that of the job that is resumed, or about a thousandth of the input.
        start: what to do with the folder of an earlier job: refuse it (new), continue it (resume) or remove it (restart).
        note: called with lines for the log.
        progress: called with a line every few seconds.

    Raises:
        ValueError: an input that is missing, damaged or bad, a tokenizer that cannot be built, an earlier job that was not
            mentioned or is another one, a full disk, or no document at all.
    """
    if output_prefix.endswith("/"):
        raise ValueError(f"--output-prefix {output_prefix} is a folder.\n  Add the beginning of the names of the files in it.")
    if any("/" in key for key in job.keys):
        raise ValueError(f"--json-keys {' '.join(job.keys)}: a key becomes a part of a file's name, and cannot hold '/'.")
    output_prefix = storage.normal(output_prefix)
    if not storage.is_url(output_prefix) and not Path(output_prefix).parent.is_dir():
        raise ValueError(
            f"--output-prefix {output_prefix}: the folder {Path(output_prefix).parent} does not exist.\n  Make it first."
        )
    bad_lines_file = f"{output_prefix}_bad_lines.txt"
    sources, notes = find_sources(inputs, input_format, own=[bad_lines_file])
    for line in notes:
        note(line)
    parts = PartFolder(f"{output_prefix}.parts", len(job.datasets))
    if start == "restart" and parts.settings() is not None:
        with parts.lock():
            parts.remove()
    passed_over: list[str] = []
    shards = _prepare(parts, job, sources, shard_size, start, note, passed_over.append if job.skip_bad_files else None)
    with parts.lock(), told_where_no_room(parts.folder, _ON_DISK):
        parts.remove_unfinished()
        try:
            reports = _make(JobReports(parts, shards, passed_over=passed_over), job, engine or Engine(), note, progress)
            summary = reports.summary(tuple(f"{output_prefix}{name}" for name in job.datasets))
            if summary.num_kept:
                note(f"shards finished by an earlier run: {summary.num_kept:,} of {len(shards):,}")
            _join(reports, job, summary, note)
            reports.write_bad_lines(bad_lines_file, summary)
        except BaseException:
            parts.remove_unfinished()
            if parts.is_bare():
                parts.remove()  # nothing that would be worth --resume
            raise
        parts.remove()
    return summary


def _prepare(
    parts: PartFolder,
    job: PreprocessJob,
    sources: Sequence[InputPiece],
    shard_size: int | None,
    start: str,
    note: Callable[[str], None],
    pass_over: Callable[[str], None] | None,
) -> list[InputShard]:
    """Make the folder, or check that it belongs to this job; returns the shards."""
    earlier = parts.settings()
    if earlier is None and start == "resume":
        note(f"{parts.folder} is not there: nothing to go on with, so this is a new job")
    if earlier is not None and start == "new":
        raise ValueError(
            f"{parts.folder} is there: the work of a job that did not end.\n"
            "  Go on with it by --resume, or remove it and start anew by --restart."
        )
    file_digests.cache_clear()  # they may have changed since another job of this process
    wanted = settings(job)
    if earlier == {} and not parts.is_bare():
        raise ValueError(f"--resume: {parts.folder} does not say what job it belongs to.\n  Remove it and start anew by --restart.")
    if earlier:
        changed = [
            f"{name} was {earlier.get(name)!r}, now {wanted.get(name)!r}"
            for name in {**earlier, **wanted}
            if name != "shard size" and earlier.get(name) != wanted.get(name)
        ]
        if shard_size is not None and shard_size != earlier.get("shard size"):
            changed.append(f"shard size was {earlier.get('shard size'):,}, now {shard_size:,}")
        if changed:
            raise ValueError(
                f"--resume: {parts.folder} belongs to a job with other settings: {'; '.join(changed)}.\n"
                "  Give the same settings, or remove the folder and start anew by --restart."
            )
        shard_size = int(str(earlier["shard size"]))
    size = shard_size or default_shard_size(sources)
    shards = cut(sources, size, job.keys, fields=job.fields, of_text=job.chat is None, pass_over=pass_over)
    note(f"files: {len(sources):,}, {sum(source.num_bytes for source in sources) / 1e6:,.1f} MB; shards: {len(shards):,}")
    whole = [source for source in sources if source.kind in ("jsonl.gz", "jsonl.zst") and source.num_bytes > size]
    if whole:
        note(
            f"packed files that cannot be divided: {len(whole):,}, for example {whole[0].path}; "
            "each keeps one worker busy to its end (smaller files, or plain jsonl, use all workers)"
        )
    parts.make({**wanted, "shard size": size})
    return shards


def _make(
    reports: JobReports,
    job: PreprocessJob,
    engine: Engine,
    note: Callable[[str], None],
    progress: Callable[[str], None],
) -> JobReports:
    """Have all shards made."""
    parts, shards = reports.parts, reports.shards
    meter = Meter(shards, progress)
    room = DiskRoom(parts.folder, sum(shard.num_bytes for shard in shards), note)

    def listen(number: int, found: ShardCounts | ShardReport) -> None:
        meter.listen(number, found)
        if isinstance(found, ShardReport):
            room.listen(found)
            found.bad = []
            reports.of_shard[number] = found

    try:
        engine.run(job, shards, parts.folder, listen)
    except BadShardError as error:
        number = [shard.name for shard in shards].index(error.shard)
        record = reports.records_before(number, error.piece) + error.record
        raise ValueError(
            f"{shards[number].pieces[error.piece].place(record)}: {error.reason}\n"
            "  Mend it, or leave such records out with --on-error skip. No dataset is written; finished shards are kept for "
            "--resume (those of files that change are made again)."
        ) from error
    return reports


def _join(reports: JobReports, job: PreprocessJob, summary: Summary, note: Callable[[str], None]) -> None:
    """Join the parts. A dataset whose prefix is a URL is joined here first and then uploaded, the index last."""
    parts = reports.parts
    for name, (key, prefix) in zip(job.keys, enumerate(summary.prefixes), strict=False):
        if not any(report.num_documents[key] for report in reports.of_shard.values()):
            told = f"no document with a token for {prefix} (key {name!r}). No dataset is written."
            if bad := summary.num_bad_lines + summary.num_bad_files:
                what = "bad records and files" if summary.num_bad_files else "bad records"
                told += f"\n  {bad:,} {what} were left out, the first: {next(reports.bad_lines())}"
            parts.remove()  # to continue would not help
            raise ValueError(told)
    note(f"joining the parts into {' and '.join(summary.prefixes)}")
    # Loss masks first: no dataset is there without its own, or with one of an earlier dataset.
    for prefix in summary.prefixes[: len(job.keys)]:
        for suffix in (".idx", ".bin"):
            storage.remove(f"{loss_mask_prefix(prefix)}{suffix}")
    for number, prefix in reversed(list(enumerate(summary.prefixes))):
        # A dataset and its mask have equally many documents, so the same order.
        seed = job.shuffle_seed
        made = (shard for at, shard in enumerate(reports.shards) if reports.of_shard[at].num_documents[number % len(job.keys)])
        names = [parts.prefix(shard.name, number) for shard in made]
        if not storage.is_url(prefix):
            if seed is None:
                join(names, prefix, parts.folder, _RESUME)  # what a killed run leaves in that folder is removed
            else:
                join(names, f"{parts.folder}/joined", remedy=_RESUME)
                write_shuffled(f"{parts.folder}/joined", prefix, seed, parts.folder)
            continue
        with parts.workspace() as folder, told_where_no_room(folder, _ON_DISK):
            local = [f"{folder}/{os.path.basename(name)}" for name in names]
            for name, path in zip(names, local, strict=True):
                for suffix in (".bin", ".idx"):
                    storage.download(name + suffix, path + suffix)
            join(local, f"{folder}/in_order" if seed is not None else f"{folder}/joined", remedy=_RESUME)
            if seed is not None:
                write_shuffled(f"{folder}/in_order", f"{folder}/joined", seed)
            storage.remove(f"{prefix}.idx")
            for suffix in (".bin", ".idx"):
                storage.upload(f"{folder}/joined{suffix}", prefix + suffix)
