"""Bounded reads of files that a user or another program names. Only regular files up to a size limit are read. Devices and pipes
are refused, because reading a pipe could wait forever for its writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

MAX_BYTES = 1 << 30


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for unbuffered reading.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        error_code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(
            error_code, os.strerror(error_code) if error_code == errno.EISDIR else "it is not a regular file", os.fspath(path)
        )
    return os.fdopen(handle, "rb", buffering=0)


def read_regular(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as in `open_regular`, or the file has more than `max_bytes` bytes.
    """
    with open_regular(path) as file:
        data = bytearray()
        while len(data) <= max_bytes and (chunk := file.read(max_bytes + 1 - len(data))):
            data += chunk
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return bytes(data)


def read_text(path: Path, max_bytes: int = MAX_BYTES, encoding: str = "utf-8") -> str:
    """Return the content of a text file. Windows line ends are converted to newlines.

    Raises:
        OSError: as in `read_regular`.
        UnicodeDecodeError: the file is not text in this encoding.
    """
    return read_regular(path, max_bytes).decode(encoding).replace("\r\n", "\n")
