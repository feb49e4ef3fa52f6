"""The interface of storages for saving and loading: a local folder (`local_storage.py`), an object store through fsspec
(`object_storage.py`), or the memory of the nodes (`node_storage.py`); `storage_kinds.py` chooses. It knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class Reading(Protocol):
    """A file that is open for reading."""

    size: int
    """Bytes in the file."""

    def read(self, start: int, length: int) -> bytes:
        """`length` bytes from `start` on.

        Raises:
            TruncatedError: the file ends before.
        """
        data = bytearray(length)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from `start` on.

        Raises:
            TruncatedError: the file ends before.
        """


class Writing(Protocol):
    """A file that is being written."""

    num_bytes: int = 0
    """Bytes written so far."""

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data` at the end."""
        rest = memoryview(data)
        while rest:
            written = self.write_some(rest)
            self.num_bytes += written
            rest = rest[written:]

    def write_some(self, data: memoryview) -> int:
        """Write the first bytes of `data`, as many as go at once. Returns how many these were."""

    def sync(self) -> None:
        """Bring what is written so far to the disk, where that can be done before the end."""


MANIFEST = "manifest.json"
"""The file that is written last: with it a checkpoint is complete."""
CONFIG = "config.json"
STATE = "state.json"
COUNTS = ("iteration", "consumed_samples", "updated_samples", "skipped_iterations")
"""Names of the counts of a run's progress, in its state."""
RECENT = "recent"
"""Name of the loss and gradient norm of the last steps in a run's progress, [[loss, norm], ...]."""

Place = Path | str
"""A folder, or its URL."""


class Storage(Protocol):
    """A folder, local or by URL. Names are relative to it, with `/` between; the empty name is the folder itself.

    Every kind of storage raises `OSError` where it fails, and `FileNotFoundError` where a file to be read is missing.
    """

    location: str
    """The folder as a user names it: a path or a URL. Another process can open the same storage with it."""
    local: Path | None
    """The folder, if it is a local one."""

    @property
    def place(self) -> Place:
        """The folder, for callers outside this package."""
        return self.local or self.location

    def at(self, name: str) -> str:
        """A file in it, as a user names it."""

    def child(self, name: str) -> Storage:
        """A folder in it, which need not exist."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is no such file."""

    def names(self, folder: str = "") -> list[str]:
        """Files and folders directly in a folder, sorted, hidden ones too; empty if there is no such folder."""

    def read(self, name: str) -> bytes:
        """A whole file."""

    def open(self, name: str) -> AbstractContextManager[Reading]:
        """A file, opened for reading."""

    def make(self) -> None:
        """Make the folder and those above it where they are missing."""

    def create(self, name: str) -> AbstractContextManager[Writing]:
        """A new file as a stream, in place of an old one. It is on the disk when the block ends, and gone if that raises."""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file in one step: readers see the old content or the new. It is on the disk on return."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all in it, if it exists."""

    def draft(self, name: str, token: str) -> Draft:
        """The place where the checkpoint `name` is written.

        Args:
            name: name of the checkpoint, a folder here.
            token: that of the run that writes it, from `[0-9a-f]`. What other runs left or still write does not disturb it.
        """

    def retire(self, name: str) -> None:
        """Remove a checkpoint in an order in which half of one is never taken for a whole one."""

    def sweep(self, keep: str) -> None:
        """Remove what killed saves and removals left; what cannot be removed stays. Call it when no other run saves here.

        Args:
            keep: the token of the run whose drafts stay.
        """


class Draft(Protocol):
    """A checkpoint that is being written. Nobody takes it for a checkpoint before `publish`."""

    storage: Storage
    """The folder in which its files are."""

    def file_name(self, name: str) -> str:
        """The name of a data file, or of a message between writers, both here and in the manifest.

        If files are written under the name of the checkpoint itself, it has the token in it. So neither a save nor a late writer of
        a killed run can touch the files of a complete checkpoint.
        """

    def make(self) -> None:
        """Make the folder, without what an earlier attempt of the same run left. One process calls it before the others write."""

    def join(self) -> None:
        """Make the folder, unless another process that writes the same checkpoint has."""

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write the last files, and put the checkpoint in its place; an older one of the same name is removed.

        Args:
            files: the small files that have fixed names, the manifest last. When that one is there, the checkpoint is complete.
        """

    def abandon(self) -> None:
        """Remove what was written, as far as that is possible."""


def is_url(location: str) -> bool:
    """Whether the location is no local path."""
    return "://" in location and not location.startswith("file://")
