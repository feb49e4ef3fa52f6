"""Folder of an unfinished preprocessing job, PREFIX.parts.

It contains the settings of the job. For each finished shard (part of the input), it contains the converted part of each dataset and
a report.

The report of a shard is written last and atomically, so a shard with a report is finished. All files are first written under
temporary names. No write waits until the data is on disk: if a power failure damages a part, the comparison with the shard's report
finds the damage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.regular_file import parse_json
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.storage import compute_digest
from megatron_lab.data_tools.preprocess.text_encoding import ErrorHandling

_DATASET_SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True)
class ShardCounts:
    """Counts that show the progress of preprocessing: those of one shard (part of the input), or the sums over several shards.

    Documents and tokens are summed over all JSON keys: a record with two keys counts as two documents.
    """

    num_bytes: int = 0
    """Number of bytes of the input that have been read."""
    num_documents: int = 0
    num_tokens: int = 0

    def __add__(self, counts: ShardCounts) -> ShardCounts:
        return ShardCounts(
            self.num_bytes + counts.num_bytes, self.num_documents + counts.num_documents, self.num_tokens + counts.num_tokens
        )


@dataclass
class ShardReport:
    """Counts, invalid records and output files of a finished shard (part of the input). It is stored as JSON in the job folder."""

    num_documents: list[int]
    """Number of documents for each JSON key, in the order of the keys."""
    num_tokens: int
    num_empty: int
    num_bytes: int
    """Number of bytes of the input files that were read for the shard."""
    num_records: list[int]
    """Number of records in each file range of the shard."""
    num_bad: int
    bad: list[tuple[int, int, str]]
    """Invalid records, up to a maximum number: (index of the file range in the shard, index of the record in the range,
    problem)."""
    files: dict[str, list[object]] = field(default_factory=dict)
    """[size in bytes, xxh3 hash] of each output file, by its suffix. The suffix follows the name of the shard, for example
    "_0.bin"."""
    num_learned: int = 0
    """Number of tokens that count in the loss, if the records are conversations."""
    num_encodings: int = 0
    """Number of file ranges with a note about their encoding."""
    encodings: list[tuple[int, str]] = field(default_factory=list)
    """Notes about encodings: (index of the file range in the shard, note)."""
    num_undecodable: int = 0
    """Number of invalid records that have bytes which are invalid in the encoding of their file."""
    num_replaced_records: int = 0
    """Number of records whose invalid bytes were replaced."""
    num_replaced_bytes: int = 0
    replaced: list[tuple[int, int, int, str]] = field(default_factory=list)
    """Records whose invalid bytes were replaced, up to a maximum number: (index of the file range in the shard, index of the record
    in the range, number of invalid bytes, description of the first of them)."""
    chat_notes: dict[str, int] = field(default_factory=dict)
    """Number of times that each note about a conversation was given, such as about fields that the template does not write."""
    errors: ErrorHandling | None = None
    """Treatment of invalid bytes when the shard was converted (--errors); None in a report of a version of the tool that did not
    detect encodings."""
    new: bool = True
    """Whether this run converted the shard; False if an earlier run did."""

    def drop_lists(self) -> None:
        """Remove the lists, which may be long, from memory. They stay in the job folder."""
        self.bad, self.encodings, self.replaced = [], [], []

    @property
    def counts(self) -> ShardCounts:
        """Documents, tokens and input bytes of the finished shard, for the progress of the job."""
        return ShardCounts(self.num_bytes, sum(self.num_documents), self.num_tokens)


@dataclass(frozen=True)
class JobFolder:
    """Folder in which an unfinished preprocessing job stores its finished shards, so that a later run can continue the job.

    Args:
        folder: path or URL of the folder.
        num_datasets: number of datasets of the job. Each shard (part of the input) gives one part of each dataset.
    """

    folder: str
    num_datasets: int

    def get_part_prefix(self, shard: str, dataset_index: int) -> str:
        """Return the path of the part that a shard gives to a dataset, without .bin and .idx.

        Args:
            shard: name of the shard.
            dataset_index: index of the dataset among those of the job.
        """
        return f"{self.folder}/{shard}_{dataset_index}"

    def read_settings(self) -> dict[str, object] | None:
        """Return the settings of the job that created the folder.

        The settings are None if the folder does not exist, and empty if the folder has no readable settings.
        """
        settings = self._read_json(storage.JOB_FILE)
        return settings if settings is not None or not storage.is_folder(self.folder) else {}

    def create(self, settings: dict[str, object]) -> None:
        """Create the folder, if it does not exist, and write the settings of the job."""
        if not storage.is_url(self.folder):
            os.makedirs(self.folder, exist_ok=True)
        storage.write_text(f"{self.folder}/{storage.JOB_FILE}", json.dumps(settings, indent=1))

    @contextlib.contextmanager
    def open_workspace(self) -> Iterator[str]:
        """Provide a local folder for writing output files of shards: the job folder, or a temporary folder if the job folder is a
        URL."""
        if not storage.is_url(self.folder):
            yield self.folder
        else:
            with tempfile.TemporaryDirectory(prefix="preprocess-") as folder:
                yield folder

    def finish_shard(self, shard: str, workspace: str, report: ShardReport) -> None:
        """Record that a shard is finished: add its output files to the report, and write the report to the job folder.

        If the job folder is a URL, upload the output files first.

        Args:
            shard: name of the shard.
            workspace: local folder that contains the output files under their final names.
            report: report of the shard; its field `files` is filled in.
        """
        for dataset_index in range(self.num_datasets):
            for suffix in _DATASET_SUFFIXES:
                name = f"_{dataset_index}{suffix}"
                local_path = f"{workspace}/{shard}{name}"
                report.files[name] = [os.path.getsize(local_path), compute_digest(local_path)]
                if workspace != self.folder:
                    storage.upload(local_path, f"{self.folder}/{shard}{name}")
        storage.write_text(f"{self.folder}/{shard}.json", json.dumps({**dataclasses.asdict(report), "new": False}), sync=False)

    def read_report(self, shard: str) -> ShardReport | None:
        """Return the report of a shard, or None if there is no readable report.

        Args:
            shard: name of the shard.
        """
        report_json = self._read_json(f"{shard}.json")
        try:
            return None if report_json is None else ShardReport(**report_json)
        except TypeError:
            return None

    def _read_json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a file of the folder, or None if the file is missing or contains anything else."""
        path = f"{self.folder}/{name}"
        if storage.stat(path) is None:
            return None
        with storage.open_binary(path) as file:
            try:
                content = parse_json(file.read())
            except ValueError:
                return None
        return content if isinstance(content, dict) else None

    def find_finished(self, shard: str) -> ShardReport | None:
        """Return the report of a shard that an earlier run has finished, or None if the shard must be processed.

        The output files of the shard must match the report. Local files are compared by size and xxh3 hash, files at a URL only by
        size.

        Args:
            shard: name of the shard.
        """
        report = self.read_report(shard)
        if report is None or len(report.files) != self.num_datasets * len(_DATASET_SUFFIXES):
            return None
        for name, (size, digest) in report.files.items():
            path = f"{self.folder}/{shard}{name}"
            file_stat = storage.stat(path)
            if file_stat is None or file_stat[0] != size or not (storage.is_url(path) or compute_digest(path) == digest):
                return None
        return report

    def remove_unfinished(self) -> None:
        """Remove the temporary files that a killed run has left in the folder."""
        if not storage.is_url(self.folder):
            for path in Path(self.folder).glob("*.partial-*"):
                path.unlink(missing_ok=True)

    def has_no_shards(self) -> bool:
        """Return whether the folder contains no output of any shard."""
        return all(
            path.endswith((f"/{storage.JOB_FILE}", "/lock")) or ".partial-" in path for path in storage.list_files(self.folder)
        )

    def remove(self) -> None:
        """Remove the job folder with its content.

        A local folder is renamed first, so that a partially removed folder is never mistaken for an unfinished job.
        """
        if storage.is_url(self.folder):
            storage.remove(self.folder)
        elif os.path.isdir(self.folder):
            os.rename(self.folder, f"{self.folder}.removed-{os.getpid()}")
            for removed_folder in glob.glob(f"{glob.escape(self.folder)}.removed-*"):  # including those that a killed run has left
                storage.remove(removed_folder)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other runs on this machine, as a context manager. A URL is not locked.

        Raises:
            ValueError: another run has locked the folder.
        """
        if storage.is_url(self.folder):
            yield
            return
        with open(f"{self.folder}/lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"{self.folder}: another run is working on this job.\n  Wait until that run has ended, or stop that run."
                ) from error
            except OSError:
                pass  # some network file systems do not support locks
            yield
