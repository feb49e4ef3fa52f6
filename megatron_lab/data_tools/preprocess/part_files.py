"""The folder of an unfinished job, PREFIX.parts: its settings, and for each finished shard part files and a report.

The report is written last and whole, so a shard is finished when it has one. All writing goes to temporary names first. Nothing
waits for the disk: the damage that a loss of power does to a part shows when it is compared with its report.
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

from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.storage import digest

_SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True)
class ShardCounts:
    """The progress of a shard, or of several. Documents and tokens are counted over all keys."""

    num_bytes: int = 0
    """Bytes of the input."""
    num_documents: int = 0
    num_tokens: int = 0

    def __add__(self, other: ShardCounts) -> ShardCounts:
        return ShardCounts(
            self.num_bytes + other.num_bytes, self.num_documents + other.num_documents, self.num_tokens + other.num_tokens
        )


@dataclass
class ShardReport:
    """The result of one shard."""

    num_documents: list[int]
    """Number of documents, for each key."""
    num_tokens: int
    num_empty: int
    num_bytes: int
    """Bytes of the input."""
    num_records: list[int]
    """Number of records, for each piece."""
    num_bad: int
    bad: list[tuple[int, int, str]]
    """(piece, number of the record in it, reason) of the first bad records."""
    files: dict[str, list[object]] = field(default_factory=dict)
    """Bytes and xxh3 of each part file, by the end of its name."""
    num_learned: int = 0
    """Tokens of conversations that a model is to learn."""
    new: bool = True
    """Whether it was made just now, not by an earlier run."""

    @property
    def counts(self) -> ShardCounts:
        """Its part of the progress."""
        return ShardCounts(self.num_bytes, sum(self.num_documents), self.num_tokens)


@dataclass(frozen=True)
class PartFolder:
    """The folder of a job.

    Args:
        folder: A path or a URL.
        num_datasets: Number of datasets that each shard is a part of.
    """

    folder: str
    num_datasets: int

    def prefix(self, shard: str, key: int) -> str:
        """Path of a part without .bin and .idx."""
        return f"{self.folder}/{shard}_{key}"

    def settings(self) -> dict[str, object] | None:
        """The settings of the job that made the folder; None if there is no such folder, empty if it does not say."""
        found = self._read(storage.JOB_FILE)
        return found if found is not None or not storage.is_folder(self.folder) else {}

    def make(self, settings: dict[str, object]) -> None:
        """Make the folder, if it is not there, and write the settings into it."""
        if not storage.is_url(self.folder):
            os.makedirs(self.folder, exist_ok=True)
        storage.write_text(f"{self.folder}/{storage.JOB_FILE}", json.dumps(settings, indent=1))

    @contextlib.contextmanager
    def workspace(self) -> Iterator[str]:
        """A local folder in which part files are made: this one, or a temporary one before an upload."""
        if not storage.is_url(self.folder):
            yield self.folder
        else:
            with tempfile.TemporaryDirectory(prefix="preprocess-") as folder:
                yield folder

    def finish(self, shard: str, workspace: str, report: ShardReport) -> None:
        """Record that a shard is finished; its part files lie in the workspace under their names."""
        for key in range(self.num_datasets):
            for suffix in _SUFFIXES:
                name = f"_{key}{suffix}"
                local = f"{workspace}/{shard}{name}"
                report.files[name] = [os.path.getsize(local), digest(local)]
                if workspace != self.folder:
                    storage.upload(local, f"{self.folder}/{shard}{name}")
        storage.write_text(f"{self.folder}/{shard}.json", json.dumps({**dataclasses.asdict(report), "new": False}), sync=False)

    def report(self, shard: str) -> ShardReport | None:
        """The report of a shard; None if it has none that can be read."""
        found = self._read(f"{shard}.json")
        try:
            return None if found is None else ShardReport(**found)
        except TypeError:
            return None

    def _read(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file; None if there is none."""
        path = f"{self.folder}/{name}"
        if storage.stat(path) is None:
            return None
        with storage.open_binary(path) as file:
            try:
                found = json.loads(file.read())
            except ValueError:
                return None
        return found if isinstance(found, dict) else None

    def finished(self, shard: str) -> ShardReport | None:
        """The report of a shard whose part files agree with it; None if the shard must be made.

        Local files are read and compared by xxh3; of those at a URL only the sizes are.
        """
        report = self.report(shard)
        if report is None or len(report.files) != self.num_datasets * len(_SUFFIXES):
            return None
        for name, (size, content) in report.files.items():
            path = f"{self.folder}/{shard}{name}"
            found = storage.stat(path)
            if found is None or found[0] != size or not (storage.is_url(path) or digest(path) == content):
                return None
        return report

    def remove_unfinished(self) -> None:
        """Remove what a run that was killed left under temporary names."""
        if not storage.is_url(self.folder):
            for path in Path(self.folder).glob("*.partial-*"):
                path.unlink(missing_ok=True)

    def is_bare(self) -> bool:
        """Whether no shard has been finished."""
        return all(path.endswith((f"/{storage.JOB_FILE}", "/lock")) or ".partial-" in path for path in storage.find(self.folder))

    def remove(self) -> None:
        """Remove the folder. It loses its name first, so that a half removed folder is never taken for an unfinished job."""
        if storage.is_url(self.folder):
            storage.remove(self.folder)
        elif os.path.isdir(self.folder):
            os.rename(self.folder, f"{self.folder}.removed-{os.getpid()}")
            for removed in glob.glob(f"{glob.escape(self.folder)}.removed-*"):  # also what a killed run left here
                storage.remove(removed)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let no other run of this machine work in the folder meanwhile.

        Raises:
            ValueError: one does.
        """
        if storage.is_url(self.folder):
            yield
            return
        with open(f"{self.folder}/lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{self.folder}: another run works on this job now.\n  Wait for it, or stop it.") from error
            except OSError:
                pass  # some network file systems have no locks
            yield
