"""Local folders: made, renamed and exchanged so that a loss of power at any moment leaves one state or the other."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and those above it where they are missing, and bring their names to the disk."""
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
    """Give a folder a hidden name, in place of what has that name already. Returns the new path."""
    aside = path.with_name(f".{path.name}.{suffix}")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    return aside


def exchange(one: Path, other: Path) -> bool:
    """Have two folders change their names in one step. Returns whether the file system can (many of a network cannot)."""
    return _renameat2()(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


@functools.cache
def _renameat2() -> Callable[..., int]:
    function = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return function or (lambda *arguments: -1)
