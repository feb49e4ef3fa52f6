"""Complete preprocessing job: find the input files, divide them into shards, convert the shards, and join their parts to
datasets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from megatron.data.indexed_dataset import get_loss_mask_prefix, get_tokenizer_file
from megatron.data.indexed_writer import join_datasets, write_shuffled
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.chat_detection import find_first_form
from megatron_lab.data_tools.preprocess.chat_records import KNOWN_FORMS, MESSAGES_KEY, describe_form, get_pair_form
from megatron_lab.data_tools.preprocess.engines import Engine
from megatron_lab.data_tools.preprocess.file_formats import FileFormat
from megatron_lab.data_tools.preprocess.input_shards import InputShard, find_sources, select_shard_size, split_into_shards
from megatron_lab.data_tools.preprocess.part_files import JobFolder, ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.reports import DiskSpaceMonitor, JobReports, ProgressMeter, Summary
from megatron_lab.data_tools.preprocess.shard_work import (
    BadShardError,
    PreprocessJob,
    compute_file_digests,
    get_job_settings,
    get_tokenizer,
)
from megatron_lab.data_tools.preprocess.storage import explain_disk_full
from megatron_lab.data_tools.preprocess.text_records import InputRange
from megatron_lab.tokenizers.fingerprint import compute_fingerprint, format_dataset_fingerprint, write_dataset_fingerprint

_RESUME = "Continue with --resume: finished shards are kept."
_FREE_SPACE = f"Make room there. {_RESUME}"
_DETECTS_ENCODINGS = "detects encodings"
"""Setting in the job folder of versions that detect encodings. Folders of earlier versions lack it."""


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    job: PreprocessJob,
    *,
    input_format: FileFormat | None = None,
    input_split: str | None = None,
    engine: Engine | None = None,
    shard_size: int | None = None,
    start_mode: Literal["new", "resume", "restart"] = "new",
    log: Callable[[str], None] = lambda line: None,
    log_progress: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Convert input texts to datasets: ``<output_prefix>_<key>_document.bin`` and ``.idx`` for each JSON key (--json-keys).
    Conversations also get datasets with their loss masks. ``<output_prefix>_<key>_document.tokenizer`` has the fingerprint of the
    tokenizer.

    The bytes of the datasets do not depend on the engine or the shard size. Unfinished work is stored in the folder
    ``<output_prefix>.parts``, which remains if the job is interrupted. The memory of a worker is bounded by its longest record (for
    parquet, its largest row group).

    Args:
        inputs: files, folders, patterns (such as data/*.jsonl) and URLs, read in this order.
        output_prefix: start of the output paths; a path whose folder exists, or a URL.
        job: JSON keys, tokenizer and other settings of the job. Without keys, those of the first conversation are used.
        input_format: format of all files; None to detect it from their names.
        input_split: split to read of each folder that `DatasetDict.save_to_disk` wrote.
        engine: backend that processes the shards (parts of the input); None for this process.
        shard_size: bytes of the input per shard; None for the shard size of the resumed job, or for about a thousandth of the
            input.
        start_mode: treatment of the folder of an earlier, unfinished job: refuse to start (new), continue that job (resume), or
            remove the folder (restart).
        log: called with lines for the log.
        log_progress: called with a progress line every few seconds.

    Returns:
        Paths of the datasets, and counts of documents, tokens and invalid records.

    Raises:
        ValueError: an input is missing, damaged or invalid, the tokenizer cannot be built, the folder of an earlier job exists or
            belongs to another job, the disk is full, or the input has no document.
    """
    if output_prefix.endswith("/"):
        raise ValueError(
            f"--output-prefix {output_prefix} is a folder.\n"
            f"  Append the first part of the names of the output files, such as {output_prefix}/corpus."
        )
    if any("/" in key for key in job.keys):
        raise ValueError(
            f"--json-keys {' '.join(job.keys)}: a key becomes a part of a file name, so a key must not contain '/'. Rename the key "
            "in the input."
        )
    output_prefix = storage.normalize_path(output_prefix)
    if not storage.is_url(output_prefix) and not Path(output_prefix).parent.is_dir():
        raise ValueError(
            f"--output-prefix {output_prefix}: the folder {Path(output_prefix).parent} does not exist.\n  Make it first."
        )
    bad_records_file, encodings_file = f"{output_prefix}_bad_lines.txt", f"{output_prefix}_encodings.txt"
    chat_notes_file = f"{output_prefix}_chat_notes.txt"
    output_files = [bad_records_file, encodings_file, chat_notes_file]
    sources, messages = find_sources(inputs, input_format, output_files=output_files, split=input_split)
    for message in messages:
        log(message)
    job = _select_chat_keys(job, sources, log)
    job_folder = JobFolder(f"{output_prefix}.parts", len(job.dataset_suffixes))
    if start_mode == "restart" and job_folder.read_settings() is not None:
        with job_folder.lock():
            job_folder.remove()
    skipped_files: list[str] = []
    shards = _prepare_shards(
        job_folder, job, sources, shard_size, start_mode, log, skipped_files.append if job.skip_bad_files else None
    )
    with job_folder.lock(), explain_disk_full(job_folder.folder, _FREE_SPACE):
        job_folder.remove_unfinished()
        try:
            reports = _run_shards(
                JobReports(job_folder, shards, skipped_files=skipped_files), job, engine or Engine(), log, log_progress
            )
            summary = reports.build_summary(tuple(f"{output_prefix}{name}" for name in job.dataset_suffixes))
            if summary.num_resumed_shards:
                log(f"shards finished by an earlier run: {summary.num_resumed_shards:,} of {len(shards):,}")
            _join_parts(reports, job, summary, log)
            reports.write_bad_records(bad_records_file, summary)
            reports.write_encoding_notes(encodings_file, summary)
            reports.write_chat_notes(chat_notes_file, summary)
        except BaseException:
            job_folder.remove_unfinished()
            if job_folder.has_no_shards():
                job_folder.remove()  # no finished shard to resume
            raise
        job_folder.remove()
    return summary


def _select_chat_keys(job: PreprocessJob, sources: Sequence[InputRange], log: Callable[[str], None]) -> PreprocessJob:
    """Return a job of conversations with the keys that contain them: those of the first record, if the user has set none.

    A prompt and an answer under two keys become one dataset, which is named as one of messages.
    """
    if job.chat is None or job.column is not None:
        return job
    keys = job.keys
    if not keys:
        found = find_first_form(sources, job.text_encoding, skips_bad_records=job.skip_bad_records)
        if found is None:
            keys = (MESSAGES_KEY,)
            log(
                f"the first record has no conversation under a known key ({KNOWN_FORMS}), so {MESSAGES_KEY!r} is expected; "
                "--json-keys sets another key"
            )
        else:
            location, keys = found
            log(f"{location}: the records are {describe_form(keys)}; --json-keys sets other keys")
    return (
        dataclasses.replace(job, keys=(MESSAGES_KEY,), chat_keys=keys)
        if get_pair_form(keys)
        else dataclasses.replace(job, keys=keys)
    )


def _prepare_shards(
    job_folder: JobFolder,
    job: PreprocessJob,
    sources: Sequence[InputRange],
    shard_size: int | None,
    start_mode: str,
    log: Callable[[str], None],
    on_skipped_file: Callable[[str], None] | None,
) -> list[InputShard]:
    """Divide the input into shards. Create the job folder, or check that the existing folder belongs to this job.

    Args:
        sources: input files.
        shard_size: bytes of the input per shard; None for the size of the earlier job or, in a new job, a suitable size.
        start_mode: "new", "resume" or "restart", as in `preprocess`.
        log: called with lines for the log.
        on_skipped_file: called with "FILE: problem" for each unusable file, which is skipped; None to raise the error.

    Raises:
        ValueError: the folder exists although `start_mode` is "new", or it belongs to a job with other settings.
    """
    earlier_settings = job_folder.read_settings()
    if earlier_settings is None and start_mode == "resume":
        log(f"{job_folder.folder} does not exist: there is no job to resume, so this is a new job")
    if earlier_settings is not None and start_mode == "new":
        raise ValueError(
            f"{job_folder.folder} exists: it contains the work of an unfinished job.\n"
            "  Continue this job with --resume, or remove its work and start again with --restart."
        )
    compute_file_digests.cache_clear()  # the files may have changed since an earlier job of this process
    job_settings = get_job_settings(job)
    if earlier_settings == {} and not job_folder.has_no_shards():
        raise ValueError(
            f"--resume: {job_folder.folder} has no readable settings of its job, so the job cannot be continued.\n"
            "  Start again with --restart, which removes this folder."
        )
    if earlier_settings:
        differences = [
            f"{name} was {_format_setting(earlier_settings, name)}, now {_format_setting(job_settings, name)}"
            for name in {**earlier_settings, **job_settings}
            if name not in ("shard size", _DETECTS_ENCODINGS) and earlier_settings.get(name) != job_settings.get(name)
        ]
        if shard_size is not None and shard_size != earlier_settings.get("shard size"):
            differences.append(f"shard size was {earlier_settings.get('shard size'):,}, now {shard_size:,}")
        if differences:
            raise ValueError(
                f"--resume: {job_folder.folder} belongs to a job with other settings: {'; '.join(differences)}.\n"
                "  Use the same settings, or start again with --restart, which removes this folder."
            )
        shard_size = int(str(earlier_settings["shard size"]))
        if _DETECTS_ENCODINGS not in earlier_settings:
            log(
                f"{job_folder.folder} is the work of an earlier version, which did not detect encodings: its shards of text files "
                "and of tables, and those with invalid records, are converted again"
            )
    bytes_per_shard = shard_size or select_shard_size(sources)
    shards = split_into_shards(
        sources,
        bytes_per_shard,
        job.keys,
        columns=job.columns,
        requires_strings=job.chat is None,
        text_encoding=job.text_encoding,
        on_skipped_file=on_skipped_file,
    )
    log(f"files: {len(sources):,}, {sum(source.num_bytes for source in sources) / 1e6:,.1f} MB; shards: {len(shards):,}")
    unsplit_files = [
        input_range.path
        for shard in shards
        for input_range in shard.ranges
        if input_range.num_bytes > bytes_per_shard and input_range.file_format not in ("jsonl", "parquet", "text")
    ]
    if unsplit_files:
        log(
            f"files that cannot be split: {len(unsplit_files):,}, for example {unsplit_files[0]}; one worker reads each "
            "of them to its end (smaller files or uncompressed jsonl use all workers)"
        )
    job_folder.create({**job_settings, "shard size": bytes_per_shard, _DETECTS_ENCODINGS: True})
    return shards


def _format_setting(settings: Mapping[str, object], name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"


def _run_shards(
    reports: JobReports,
    job: PreprocessJob,
    engine: Engine,
    log: Callable[[str], None],
    log_progress: Callable[[str], None],
) -> JobReports:
    """Convert all shards of the input with the engine. Add the report of each shard to `reports`, and return `reports`."""
    job_folder, shards = reports.job_folder, reports.shards
    progress_meter = ProgressMeter(shards, log_progress)
    disk_monitor = DiskSpaceMonitor(job_folder.folder, sum(shard.num_bytes for shard in shards), log)

    def on_update(shard_index: int, update: ShardCounts | ShardReport) -> None:
        progress_meter.update(shard_index, update)
        if isinstance(update, ShardReport):
            disk_monitor.update(update)
            update.drop_lists()
            reports.by_shard[shard_index] = update

    try:
        engine.run(job, shards, job_folder.folder, on_update)
    except BadShardError as error:
        shard_index = [shard.name for shard in shards].index(error.shard)
        record_index = reports.count_records_before(shard_index, error.range_index) + error.record_index
        raise ValueError(
            f"{shards[shard_index].ranges[error.range_index].format_location(record_index)}: {error.reason}\n"
            "  To skip such records instead, set --on-error skip. No dataset is written; finished shards are kept for "
            "--resume (those of changed files are processed again)."
        ) from error
    return reports


def _join_parts(reports: JobReports, job: PreprocessJob, summary: Summary, log: Callable[[str], None]) -> None:
    """Join the converted parts of all shards into complete datasets.

    If the output is a URL, a dataset is joined in a local folder and then uploaded, the .idx file last.
    """
    job_folder = reports.job_folder
    for name, (key_index, prefix) in zip(job.keys, enumerate(summary.prefixes), strict=False):
        if not any(report.num_documents[key_index] for report in reports.by_shard.values()):
            message = f"no document with a token for {prefix} (key {name!r}). No dataset is written."
            if num_skipped := summary.num_bad_records + summary.num_bad_files:
                skipped_text = "invalid records and files" if summary.num_bad_files else "invalid records"
                message += f"\n  {num_skipped:,} {skipped_text} were skipped, the first: {next(reports.iter_bad_records())}"
            job_folder.remove()  # resuming would fail again
            raise ValueError(message)
    log(f"joining the parts into {' and '.join(summary.prefixes)}")
    # Old loss masks are removed and new ones written first, so that a dataset never exists without its mask or with an older mask.
    # The fingerprint is removed first and written last, so that it is never next to an older dataset.
    text_prefixes = summary.prefixes[: len(job.keys)]
    fingerprint = compute_fingerprint(get_tokenizer(job)[0], job.tokenizer)
    for prefix in text_prefixes:
        storage.remove(get_tokenizer_file(prefix))
        for suffix in (".idx", ".bin"):
            storage.remove(f"{get_loss_mask_prefix(prefix)}{suffix}")
    for dataset_index, prefix in reversed(list(enumerate(summary.prefixes))):
        # A dataset and its mask have the same number of documents, so the seed gives both the same order.
        seed = job.shuffle_seed
        nonempty_shards = (
            shard
            for shard_index, shard in enumerate(reports.shards)
            if reports.by_shard[shard_index].num_documents[dataset_index % len(job.keys)]
        )
        part_prefixes = [job_folder.get_part_prefix(shard.name, dataset_index) for shard in nonempty_shards]
        if not storage.is_url(prefix):
            if seed is None:
                # Temporary files are written to the job folder, where a later run removes those of a killed run.
                join_datasets(part_prefixes, prefix, job_folder.folder, _RESUME)
            else:
                join_datasets(part_prefixes, f"{job_folder.folder}/joined", advice=_RESUME)
                write_shuffled(f"{job_folder.folder}/joined", prefix, seed, job_folder.folder)
            continue
        with job_folder.open_workspace() as folder, explain_disk_full(folder, _FREE_SPACE):
            local_prefixes = [f"{folder}/{os.path.basename(name)}" for name in part_prefixes]
            for name, path in zip(part_prefixes, local_prefixes, strict=True):
                for suffix in (".bin", ".idx"):
                    storage.download(name + suffix, path + suffix)
            join_datasets(local_prefixes, f"{folder}/in_order" if seed is not None else f"{folder}/joined", advice=_RESUME)
            if seed is not None:
                write_shuffled(f"{folder}/in_order", f"{folder}/joined", seed)
            storage.remove(f"{prefix}.idx")
            for suffix in (".bin", ".idx"):
                storage.upload(f"{folder}/joined{suffix}", prefix + suffix)
    for prefix in text_prefixes:
        if storage.is_url(prefix):
            storage.write_text(get_tokenizer_file(prefix), format_dataset_fingerprint(fingerprint))
        else:
            write_dataset_fingerprint(prefix, fingerprint, job_folder.folder)
