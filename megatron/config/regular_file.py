"""Files that a user or a stranger names: read whole, but no device, no pipe that nobody writes to, and nothing without an end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

MOST_BYTES = 1 << 30


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to be read, without a buffer.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # Without O_NONBLOCK the opening of a pipe would wait for its writer.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(kind, os.strerror(kind) if kind == errno.EISDIR else "it is no regular file", os.fspath(path))
    return os.fdopen(handle, "rb", buffering=0)


def read_regular(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The content of a file.

    Raises:
        OSError: as `open_regular`; or it has more than `most` bytes.
    """
    with open_regular(path) as file:
        data = bytearray()
        while len(data) <= most and (read := file.read(most + 1 - len(data))):
            data += read
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
    return bytes(data)


def read_text(path: Path, most: int = MOST_BYTES, encoding: str = "utf-8") -> str:
    """The content of a file of text, with newlines as Python has them.

    Raises:
        OSError: see `read_regular`.
        UnicodeDecodeError: it is no such text.
    """
    return read_regular(path, most).decode(encoding).replace("\r\n", "\n")
