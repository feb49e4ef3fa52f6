"""Checkpoints in a local folder, or one of a file system that all nodes share.

A checkpoint is written under a temporary name and renamed when its data is on the disk::

    <save>/iter_0000100/                        a complete checkpoint
    <save>/.iter_0000200.<token>.saving/        being written, or left by a save that was killed
    <save>/.iter_0000050.removing/              being removed, or left by a removal that was killed
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megatron.checkpoint.storage.local_files import LocalFile, LocalWriting

_LEFT = re.compile(r"\.iter_\d+\.(?:(?P<token>[0-9a-f]+)\.)?(?:saving|removing)")


class LocalStorage:
    """A `Storage` in a local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self._folder)

    @property
    def local(self) -> Path:
        """The folder."""
        return self._folder

    def at(self, name: str) -> str:
        """The path of a file in it."""
        return str(self._folder / name)

    def child(self, name: str) -> LocalStorage:
        """A folder in it."""
        return LocalStorage(self._folder / name)

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is no such file."""
        path = self._folder / name
        try:
            return path.stat().st_size if path.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str = "") -> list[str]:
        """What is directly in a folder."""
        try:
            return sorted(os.listdir(self._folder / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        """A whole file."""
        with _missing_is_missing():
            return (self._folder / name).read_bytes()

    def open(self, name: str) -> LocalFile:
        """A file, opened for reading."""
        with _missing_is_missing():
            return LocalFile(self._folder / name)

    def make(self) -> None:
        """Make the folder and those above it, and bring their names to the disk."""
        _make_folder(self._folder)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[LocalWriting]:
        """A new file as a stream."""
        path = self._folder / name
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            yield LocalWriting(handle)
            os.fsync(handle)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(handle)

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file in one step."""
        path = self._folder / name
        new = path.with_name(f".{path.name}.new")
        with self.create(str(new)) as file:
            file.write(data)
        new.replace(path)
        sync_folder(path.parent)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all in it, if it exists."""
        path = self._folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def check_writable(self) -> None:
        """Make the folder, then write and remove a file in it."""
        self.make()
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".writable.") as file:
            file.write(b"x")
            file.flush()

    def draft(self, name: str, token: str) -> LocalDraft:
        """The place where the checkpoint `name` is written."""
        return LocalDraft(self._folder / name, self._folder / f".{name}.{token}.saving")

    def retire(self, name: str) -> None:
        """Take its name from a checkpoint, then remove it."""
        with _missing_is_missing():
            shutil.rmtree(_set_aside(self._folder / name))

    def sweep(self, names: Iterable[str], keep: str | None = None) -> list[str]:
        """Remove folders with temporary names."""
        removed = []
        for name in self.names():
            left = _LEFT.fullmatch(name)
            if left is None or (keep is not None and left["token"] == keep):
                continue
            with contextlib.suppress(OSError):  # a late writer on another node may still be adding files
                self.remove(name)
                removed.append(name)
        return removed


class LocalDraft:
    """A `Draft` in a folder beside the final one."""

    def __init__(self, final: Path, folder: Path) -> None:
        self._final, self._folder = final, folder
        self._storage = LocalStorage(folder)

    @property
    def storage(self) -> LocalStorage:
        """The folder with the temporary name."""
        return self._storage

    def file_name(self, name: str) -> str:
        """The name itself."""
        return name

    def make(self) -> None:
        """Make the folder anew."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._storage.make()

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write the last files, bring all names to the disk, rename."""
        for name, data in files.items():
            with self._storage.create(name) as file:
                file.write(data)
        sync_folder(self._folder)
        replaced = _set_aside(self._final) if self._final.exists() else None
        self._folder.rename(self._final)
        sync_folder(self._final.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)  # the new one is complete; a sweep removes what may be left

    def abandon(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    _make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:  # another process was faster, or it is a file
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync_folder(path.parent)


def _set_aside(path: Path) -> Path:
    """Take the final name from a checkpoint that is to be removed, so that half of one is never taken for one."""
    removing = path.with_name(f".{path.name}.removing")
    if removing.exists():
        shutil.rmtree(removing)
    path.rename(removing)
    return removing


@contextlib.contextmanager
def _missing_is_missing() -> Iterator[None]:
    """A file below something that is no folder is not there either."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
