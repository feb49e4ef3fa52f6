"""Storage in a local folder, or in a folder of a file system that all nodes share.

A checkpoint is written under a temporary name, and renamed when its data is on the disk. After a power loss the folder therefore
holds either the old or the new checkpoint::

    <save>/iter_0000100/                        complete checkpoint
    <save>/.iter_0000200.<token>.saving/        draft of a running save, or left by a killed save
    <save>/.iter_0000050.removing/              checkpoint during its removal, or left by a killed removal
    <save>/.iter_0000100.replaced/              old checkpoint while a new one takes its name, if names cannot be exchanged
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megatron.checkpoint.errors import TruncatedError
from megatron.checkpoint.storage import CONFIG, MANIFEST, STATE, Draft, FileReader, FileWriter, Storage
from megatron.config.regular_file import open_regular, read_regular

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sync_folder(path: Path) -> None:
    """Flush the list of files in a folder to the disk (fsync of the folder), so that new names survive a power loss."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_durable_folder(path: Path) -> None:
    """Create a folder and its missing parents, and flush their names to the disk, so that the folder survives a power loss."""
    if path.is_dir():
        return
    make_durable_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:  # another process has just created it, or it is a file
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync_folder(path.parent)


def rename_to_hidden(path: Path, suffix: str) -> Path:
    """Rename a folder `name` to the hidden name `.name.suffix`, and return the new path. A folder that already has the hidden name
    is removed first."""
    hidden = path.with_name(f".{path.name}.{suffix}")
    if hidden.exists():
        shutil.rmtree(hidden)
    path.rename(hidden)
    return hidden


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange the names of two folders atomically. Returns False if the file system does not support this; many network file
    systems do not."""
    return _get_linux_function("renameat2")(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


@functools.cache
def _get_linux_function(name: str) -> Callable[..., int]:
    """Return a function of the C library of Linux. On other systems, or if the library lacks the function, return one that always
    returns -1 (failure)."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return function or (lambda *arguments: -1)


_MAX_READ_BYTES = 8 << 30
"""Maximum size of a file that `LocalStorage.read` reads in one call. The manifest of a large run has some megabytes."""
FLUSH_BYTES = 4 << 20
"""Number of written bytes after which the disk is asked to start writing them, while the next bytes are prepared.

So the fsync at the end has little left to wait for. Writing 256 MiB with checksums took 0.12 s with this, 0.18 s without, and 0.15
s without both.
"""


class LocalFileReader(FileReader):
    """`FileReader` of a local file."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle, self.size = path, handle, os.fstat(handle).st_size

    def read_into(self, start: int, buffer: memoryview) -> None:
        total = 0
        while total < len(buffer):  # preadv reads at most 2 GiB per call
            num_read = os.preadv(self._handle, [buffer[total:]], start + total)
            if not num_read:
                raise TruncatedError(f"{self._path} ends before byte {start + total}: it was truncated; copy the file again")
            total += num_read


class LocalFileWriter(FileWriter):
    """`FileWriter` of a local file, unbuffered."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle, self._flushed = path, handle, 0

    def write_partial(self, data: memoryview) -> int:
        with _add_file_name(self._path):
            num_written = os.write(self._handle, data[:FLUSH_BYTES])
        length = self.num_bytes + num_written - self._flushed
        if length >= FLUSH_BYTES:
            start_writeback(self._handle, self._flushed, length)
            self._flushed += length
        return num_written

    def sync(self) -> None:
        with _add_file_name(self._path):
            os.fsync(self._handle)


@contextlib.contextmanager
def _add_file_name(path: Path) -> Iterator[None]:
    """Add the file's name to any `OSError` that is raised within the context."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


_SYNC_FILE_RANGE_WRITE = 2


def start_writeback(handle: int, start: int, length: int) -> None:
    """Ask Linux to start writing a range of a file to the disk, without waiting. Errors are ignored here, because the later fsync
    reports them.

    Args:
        handle: file descriptor.
        start, length: range in bytes.
    """
    _get_linux_function("sync_file_range")(handle, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


_LEFTOVER = re.compile(r"\.(?P<name>iter_\d+)\.(?:(?P<token>[0-9a-f]+)\.)?(?P<what>saving|removing|replaced)")
_TEMPORARY_FILE = re.compile(r"\..+\.[0-9a-f]{16}\.new")
_CHECKPOINT_FILE = re.compile(rf"rank_.*|{re.escape(CONFIG)}|{re.escape(STATE)}")


class LocalStorage(Storage):
    """`Storage` in a local folder, or in a folder of a network file system that is mounted as a local path."""

    def __init__(self, folder: Path) -> None:
        self.local, self.location = folder, str(folder)

    def get_location(self, name: str) -> str:
        return str(self.local / name)

    def get_child(self, name: str) -> LocalStorage:
        return LocalStorage(self.local / name)

    def get_file_size(self, name: str) -> int | None:
        path = self.local / name
        try:
            return path.stat().st_size if path.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list_names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.local / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        with _raise_not_found():
            return read_regular(self.local / name, _MAX_READ_BYTES)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[LocalFileReader]:
        path = self.local / name
        with _raise_not_found():
            file = open_regular(path)
        with file:
            yield LocalFileReader(path, file.fileno())

    def create_folder(self) -> None:
        make_durable_folder(self.local)

    def create(self, name: str) -> contextlib.AbstractContextManager[LocalFileWriter]:
        return self._create(self.local / name, os.O_TRUNC)

    @contextlib.contextmanager
    def _create(self, path: Path, extra_flags: int) -> Iterator[LocalFileWriter]:
        # O_NOFOLLOW: do not follow a link that another user has put there.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | extra_flags, 0o666)
        try:
            file = LocalFileWriter(path, handle)
            yield file
            file.sync()
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(handle)

    def write(self, name: str, data: bytes) -> None:
        path = self.local / name
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        with self._create(temporary, os.O_EXCL) as file:
            file.write(data)
        temporary.replace(path)
        sync_folder(path.parent)

    def remove(self, name: str) -> None:
        path = self.local / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def draft(self, name: str, token: str) -> LocalDraft:
        return LocalDraft(self.local / name, self.local / f".{name}.{token}.saving")

    def remove_checkpoint(self, name: str) -> None:
        with _raise_not_found():
            hidden = rename_to_hidden(self.local / name, "removing")
        with contextlib.suppress(FileNotFoundError):  # another run that claims the folder removes it too
            shutil.rmtree(hidden)

    def remove_unfinished(self, active_token: str) -> None:
        for name in filter(_TEMPORARY_FILE.fullmatch, self.list_names()):
            self.remove(name)
        for leftover in filter(None, map(_LEFTOVER.fullmatch, self.list_names())):
            if leftover["token"] == active_token:
                continue
            with contextlib.suppress(OSError):  # a late writer on another node may still be adding files
                if leftover["what"] == "replaced" and not (self.local / leftover["name"]).exists():
                    (self.local / leftover[0]).rename(self.local / leftover["name"])
                else:
                    self.remove(leftover[0])


class LocalDraft(Draft):
    """Checkpoint that is being written in a hidden folder, next to its final folder."""

    def __init__(self, final: Path, folder: Path) -> None:
        self._final, self._folder = final, folder
        self.storage = LocalStorage(folder)

    def get_file_name(self, name: str) -> str:
        return name

    def create_folder(self) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder)
        make_durable_folder(self._folder.parent)
        self._folder.mkdir()  # its name is not flushed, because training waits here; `publish` flushes the final name

    def ensure_folder(self) -> None:
        make_durable_folder(self._folder.parent)
        self._folder.mkdir(exist_ok=True)

    def publish(self, small_files: Mapping[str, bytes]) -> None:
        """Write the last files, flush all names to the disk, and rename the hidden folder to the final name of the checkpoint."""
        for name, data in small_files.items():
            with self.storage.create(name) as file:
                file.write(data)
        sync_folder(self._folder)
        old = self._move_to_final()
        sync_folder(self._final.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)  # the new checkpoint is complete; `remove_unfinished` removes the remains

    def _move_to_final(self) -> Path | None:
        """Rename the hidden folder to the final name of the checkpoint.

        Returns:
            if an older checkpoint had this name: the path to which it was moved. None otherwise.
        """
        if not self._final.exists():
            self._folder.rename(self._final)
            return None
        file_names = os.listdir(self._final)
        if MANIFEST not in file_names and not all(map(_CHECKPOINT_FILE.fullmatch, file_names)):
            raise FileExistsError(
                f"{self._final} already exists, but is not a checkpoint of this program. Move it to another folder."
            )
        if exchange_names(self._folder, self._final):
            return self._folder
        old = rename_to_hidden(self._final, "replaced")
        self._folder.rename(self._final)
        return old

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _raise_not_found() -> Iterator[None]:
    """Within the context, convert `IsADirectoryError` (a folder is read as a file) and `NotADirectoryError` (a file is used as a
    folder) to `FileNotFoundError`."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
