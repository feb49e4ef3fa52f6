"""Checkpoints in a local folder, or one of a file system that all nodes share.

A checkpoint is written under a temporary name and renamed when its data is on the disk, so a loss of power leaves one state or the
other::

    <save>/iter_0000100/                        a complete checkpoint
    <save>/.iter_0000200.<token>.saving/        being written, or left by a save that was killed
    <save>/.iter_0000050.removing/              being removed, or left by a removal that was killed
    <save>/.iter_0000100.replaced/              for a moment, while another takes its name, where names cannot be exchanged
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
from megatron.checkpoint.storage import CONFIG, MANIFEST, STATE, Draft, Reading, Storage, Writing
from megatron.config.regular_file import open_regular, read_regular

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and missing ones above it, and write their names to the disk."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:  # another process was faster, or it is a file
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync_folder(path.parent)


def set_aside(path: Path, suffix: str) -> Path:
    """Give a folder a hidden name, and remove what has that name already. Returns the new path."""
    aside = path.with_name(f".{path.name}.{suffix}")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    return aside


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step. Returns whether the file system can (many network file systems cannot)."""
    return _of_linux("renameat2")(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


@functools.cache
def _of_linux(name: str) -> Callable[..., int]:
    """A function of the C library of Linux; where there is none, one that fails."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return function or (lambda *arguments: -1)


_MOST_BYTES = 8 << 30
"""A file that is read whole has no more; the manifest of a large run has megabytes."""
FLUSH_BYTES = 4 << 20
"""After this many bytes the disk is asked to begin with them, while the next ones are prepared and written. So the fsync at the end
waits for little. (256 MiB with checksums took 0.12 s so, 0.18 s without, and 0.15 s without checksums.)"""


class LocalFile(Reading):
    """A `Reading` of a local file."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle, self.size = path, handle, os.fstat(handle).st_size

    def read_into(self, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):  # the system reads at most 2 GiB at a time
            read = os.preadv(self._handle, [buffer[done:]], start + done)
            if not read:
                raise TruncatedError(f"{self._path} has no byte {start + done}: it was truncated")
            done += read


class LocalWriting(Writing):
    """A `Writing` to a local file, without a buffer of its own."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle, self._begun = path, handle, 0

    def write_some(self, data: memoryview) -> int:
        with _named(self._path):
            written = os.write(self._handle, data[:FLUSH_BYTES])
        length = self.num_bytes + written - self._begun
        if length >= FLUSH_BYTES:
            begin_to_sync(self._handle, self._begun, length)
            self._begun += length
        return written

    def sync(self) -> None:
        with _named(self._path):
            os.fsync(self._handle)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add a file's name to errors."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


_SYNC_FILE_RANGE_WRITE = 2


def begin_to_sync(handle: int, start: int, length: int) -> None:
    """Ask Linux to begin with the writing of a range of a file. What it cannot do is left to fsync, and so are its errors."""
    _of_linux("sync_file_range")(handle, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


_LEFT = re.compile(r"\.(?P<name>iter_\d+)\.(?:(?P<token>[0-9a-f]+)\.)?(?P<what>saving|removing|replaced)")
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.new")
_PART_OF_ONE = re.compile(rf"rank_.*|{re.escape(CONFIG)}|{re.escape(STATE)}")


class LocalStorage(Storage):
    """A `Storage` in a local folder."""

    def __init__(self, folder: Path) -> None:
        self.local, self.location = folder, str(folder)

    def at(self, name: str) -> str:
        return str(self.local / name)

    def child(self, name: str) -> LocalStorage:
        return LocalStorage(self.local / name)

    def size(self, name: str) -> int | None:
        path = self.local / name
        try:
            return path.stat().st_size if path.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.local / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        with _missing_is_missing():
            return read_regular(self.local / name, _MOST_BYTES)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[LocalFile]:
        path = self.local / name
        with _missing_is_missing():
            file = open_regular(path)
        with file:
            yield LocalFile(path, file.fileno())

    def make(self) -> None:
        make_folder(self.local)

    def create(self, name: str) -> contextlib.AbstractContextManager[LocalWriting]:
        return self._create(self.local / name, os.O_TRUNC)

    @contextlib.contextmanager
    def _create(self, path: Path, how: int) -> Iterator[LocalWriting]:
        # O_NOFOLLOW: a link that another user puts there does not lead the write elsewhere.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | how, 0o666)
        try:
            file = LocalWriting(path, handle)
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
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        with self._create(new, os.O_EXCL) as file:
            file.write(data)
        new.replace(path)
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

    def retire(self, name: str) -> None:
        with _missing_is_missing():
            aside = set_aside(self.local / name, "removing")
        with contextlib.suppress(FileNotFoundError):  # a run that takes over the folder sweeps it away too
            shutil.rmtree(aside)

    def sweep(self, keep: str) -> None:
        for name in filter(_UNFINISHED.fullmatch, self.names()):
            self.remove(name)
        for left in filter(None, map(_LEFT.fullmatch, self.names())):
            if left["token"] == keep:
                continue
            with contextlib.suppress(OSError):  # a late writer on another node may still be adding files
                if left["what"] == "replaced" and not (self.local / left["name"]).exists():
                    (self.local / left[0]).rename(self.local / left["name"])
                else:
                    self.remove(left[0])


class LocalDraft(Draft):
    """A `Draft` in a folder beside the final one."""

    def __init__(self, final: Path, folder: Path) -> None:
        self._final, self._folder = final, folder
        self.storage = LocalStorage(folder)

    def file_name(self, name: str) -> str:
        return name

    def make(self) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder)
        make_folder(self._folder.parent)
        self._folder.mkdir()  # not written to the disk, since training waits; `publish` does that for the final name

    def join(self) -> None:
        make_folder(self._folder.parent)
        self._folder.mkdir(exist_ok=True)

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write the last files, write all names to the disk, rename."""
        for name, data in files.items():
            with self.storage.create(name) as file:
                file.write(data)
        sync_folder(self._folder)
        old = self._put_in_place()
        sync_folder(self._final.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)  # the new one is complete; a sweep removes what may be left

    def _put_in_place(self) -> Path | None:
        """Give the folder its final name. Returns where the checkpoint is now that had the name before, if there was one."""
        if not self._final.exists():
            self._folder.rename(self._final)
            return None
        there = os.listdir(self._final)
        if MANIFEST not in there and not all(map(_PART_OF_ONE.fullmatch, there)):
            raise FileExistsError(f"{self._final} is there already, and is no checkpoint of this program: move it away")
        if exchange(self._folder, self._final):
            return self._folder
        old = set_aside(self._final, "replaced")
        self._folder.rename(self._final)
        return old

    def abandon(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _missing_is_missing() -> Iterator[None]:
    """Treat a folder that is read as a file, or a file below something that is no folder, as missing."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
