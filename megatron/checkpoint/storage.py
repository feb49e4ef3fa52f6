"""Interfaces of the storage of checkpoints: folders, files, and drafts (checkpoints that are being written). They know nothing of
tensors.

The implementations are a local folder (`local_storage.py`), an object store through fsspec (`object_storage.py`) and the memory of
the nodes (`node_storage.py`). `open_storage` in `storage_url.py` selects one by the path or URL.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class FileReader(Protocol):
    """Interface of a file that is open for reading."""

    size: int
    """Size of the file in bytes."""

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from offset `start` on.

        Raises:
            TruncatedError: the file ends before the last of these bytes.
        """
        data = bytearray(length)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from offset `start` on.

        Raises:
            TruncatedError: the file ends before the buffer is full.
        """


class FileWriter(Protocol):
    """Interface of a file that is open for writing."""

    num_bytes: int = 0
    """Number of bytes written so far."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data` to the file."""
        remaining = memoryview(data)
        while remaining:
            num_written = self.write_partial(remaining)
            self.num_bytes += num_written
            remaining = remaining[num_written:]

    def write_partial(self, data: memoryview) -> int:
        """Append the first bytes of `data` by one call of the storage. The storage decides how many.

        Returns:
            the number of bytes that were written.
        """

    def sync(self) -> None:
        """Flush the bytes written so far to the disk, if the storage can do that before the file is closed."""


MANIFEST = "manifest.json"
"""File that a save writes last. A checkpoint with this file is complete."""
CONFIG = "config.json"
STATE = "state.json"
PROGRESS_COUNTS = ("iteration", "consumed_samples", "updated_samples", "skipped_iterations")
"""Keys of the counters under `progress` in `state.json`."""
RECENT_STEPS = "recent"
"""Key of the loss and gradient norm of the last steps under `progress` in `state.json`: [[loss, norm], ...]."""

PathOrUrl = Path | str
"""Path or URL of a folder."""


class Storage(Protocol):
    """Interface of a folder for checkpoints and their files, at a local path or a URL. Names are relative to the folder and use
    `/`; the empty name is the folder itself.

    All implementations raise `OSError` on failure, and `FileNotFoundError` if a file to read does not exist.
    """

    location: str
    """Path or URL of the folder, as a user writes it. Another process can open the folder with this string (`open_storage`)."""
    local: Path | None
    """Path of the folder if it is local, otherwise None."""

    @property
    def path_or_url(self) -> PathOrUrl:
        """The folder as a `Path` if it is local, otherwise its URL; for callers outside this package."""
        return self.local or self.location

    def get_location(self, name: str) -> str:
        """Return the path or URL of a file in the folder, as a user writes it."""

    def get_child(self, name: str) -> Storage:
        """Return the `Storage` of a subfolder. The subfolder need not exist."""

    def get_file_size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file."""

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names of all files and folders directly in a subfolder, sorted, including hidden ones. Return an empty list if
        the subfolder does not exist."""

    def read(self, name: str) -> bytes:
        """Return the full content of a file."""

    def open(self, name: str) -> AbstractContextManager[FileReader]:
        """Open a file for reading."""

    def create_folder(self) -> None:
        """Create the folder and its missing parents."""

    def create(self, name: str) -> AbstractContextManager[FileWriter]:
        """Open a new file for writing. It replaces an existing file of the same name.

        The file is on the disk when the `with` block ends, and is removed if the block raises.
        """

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file atomically: readers see either the old or the new content. The content is on the disk on
        return."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder and its content, if it exists."""

    def draft(self, name: str, token: str) -> Draft:
        """Return the draft of a new checkpoint: the place where its files are written until the checkpoint is complete.

        Args:
            name: folder name of the checkpoint.
            token: hexadecimal digits that identify the run that writes the checkpoint. Drafts of other runs do not interfere.
        """

    def remove_checkpoint(self, name: str) -> None:
        """Remove a checkpoint. If the removal is interrupted, the remaining files never look like a complete checkpoint."""

    def remove_unfinished(self, active_token: str) -> None:
        """Remove the files of interrupted saves and removals. Files that cannot be removed are ignored.

        Call this only while no other run saves in the folder.

        Args:
            active_token: hexadecimal digits that identify the active run, whose drafts are not removed.
        """


class Draft(Protocol):
    """Interface of a checkpoint that is being written. Readers do not see it as a checkpoint before `publish`."""

    storage: Storage
    """Folder that holds the draft's files."""

    def get_file_name(self, name: str) -> str:
        """Return the name that a rank's file has in the draft and in the manifest.

        Some storages write files directly into the final folder of the checkpoint. They insert the token that identifies the run
        into the name. Then neither a new save nor a late writer of a killed run can overwrite files of a complete checkpoint.

        Args:
            name: name of a data file, or of a file by which writer processes report to each other.
        """

    def create_folder(self) -> None:
        """Create the draft's folder and remove files of an earlier attempt by the same run. One process calls this before any
        process writes."""

    def ensure_folder(self) -> None:
        """Create the draft's folder unless another process that writes the same checkpoint has already created it."""

    def publish(self, small_files: Mapping[str, bytes]) -> None:
        """Write the small files of the checkpoint, and make the draft a complete checkpoint under its final name. An older
        checkpoint of the same name is replaced.

        Args:
            small_files: contents of `config.json`, `state.json` and `manifest.json`, by name. The manifest is last, because it
                makes the checkpoint complete.
        """

    def discard(self) -> None:
        """Remove the draft's files. Files that cannot be removed are ignored."""


def is_url(location: str) -> bool:
    """Return whether the location is a URL and not a local path (`file://` counts as a local path)."""
    return "://" in location and not location.startswith("file://")
