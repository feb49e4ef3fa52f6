"""Rules for paths of files that a user or another program names, and bounded reads of such files.

Only regular files up to a size limit are read. Devices, sockets and pipes are refused, because reading or writing them could wait
forever for another process. Settings may come from a pipe, as in `--config <(command)`.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import stat
import time
from pathlib import Path
from typing import IO, Any

MAX_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 16
_PIPE_TIMEOUT_S = 60.0
"""Seconds within which the writer of a pipe must have written everything."""
_NONBLOCKING = getattr(os, "O_NONBLOCK", 0)
"""Without this flag, opening a pipe waits for the process at its other end."""
_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MAX_SHOWN_CHARS = 120
_WRITABLE_DEVICES = ("/dev/null", "/dev/full", "/dev/tty")


def _get_limit(name: str, default: int) -> int:
    try:
        return os.pathconf("/", name)
    except (OSError, ValueError, AttributeError):  # another operating system, or no limit
        return default


_MAX_NAME_BYTES, _MAX_PATH_BYTES, _MAX_FOLDERS = _get_limit("PC_NAME_MAX", 255), _get_limit("PC_PATH_MAX", 4096), 256


def find_path_problem(path: str) -> str | None:
    """Return why no file or folder can have a path, as the end of a sentence: "it is longer than ...". None if one can.

    The path may also be a URL. A path must leave room for the names of the files that a run creates below it. The path is not
    looked up in the file system.
    """
    try:
        encoded = os.path.abspath(path).encode()
    except UnicodeEncodeError:
        return "it is not text in UTF-8"
    names = encoded.split(b"/")
    if not path.strip():
        return "it is blank"
    if b"\0" in encoded:
        return "it contains the character NUL"
    if max(map(len, names)) > _MAX_NAME_BYTES:
        return f"a name in it is longer than {_MAX_NAME_BYTES} bytes, the limit of the file system"
    if len(encoded) > _MAX_PATH_BYTES - _MAX_NAME_BYTES:
        return f"it is longer than {_MAX_PATH_BYTES - _MAX_NAME_BYTES:,} bytes"
    return f"it has more than {_MAX_FOLDERS} levels of folders" if len(names) > _MAX_FOLDERS else None


def check_output(flag: str, path: str | os.PathLike[str]) -> None:
    """Check that a file can be written, without touching any file. Missing folders are allowed: they will be created.

    Besides regular files, terminals, `/dev/null`, the standard output and other open pipes of this process (`/dev/fd/63`, as in
    `>(command)`) are allowed.

    Args:
        flag: the flag that names the file.

    Raises:
        ValueError: the file cannot be written.
    """
    path = os.fspath(path)
    if problem := find_path_problem(path):
        raise ValueError(f"{flag} {shorten_path(path)} cannot be written: {problem}. Give another path.")
    if os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder. Give the path of a file.")
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {path} cannot be written: {folder} is not a folder. Give another path.")
    # A new file needs write and search permission on its folder.
    allowed = os.access(path, os.W_OK) if os.path.exists(path) else os.access(folder, os.W_OK | os.X_OK)
    if not allowed:
        raise ValueError(f"{flag} {path} cannot be written: permission denied. Give a path in a folder that you may write to.")
    if os.path.exists(path) and not os.path.isfile(path) and not _is_open_stream(path, status := os.stat(path)):
        raise ValueError(
            f"{flag} {path} cannot be written: it is {_describe_type(status.st_mode)}, and writing could wait forever. "
            "Give the path of a file, or /dev/stdout."
        )


def shorten_path(path: str) -> str:
    """Return a path for a message: printable, and if it is long, only its start and its end."""
    text = path.encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS // 2]}...{text[-_MAX_SHOWN_CHARS // 2 :]}"


def _is_open_stream(path: str | os.PathLike[str], status: os.stat_result) -> bool:
    """Return whether a path is a harmless device, or names an open file of this process, whose other end exists.

    Args:
        status: result of `os.stat` for the path.
    """
    if stat.S_ISCHR(status.st_mode):
        devices = [os.stat(device).st_rdev for device in _WRITABLE_DEVICES if os.path.exists(device)]
        if status.st_rdev in devices:
            return True
    folder, name = os.path.split(os.path.abspath(path))
    is_stream = folder in ("/dev/fd", "/proc/self/fd") or (folder == "/dev" and name in ("stdout", "stderr"))
    return is_stream and (stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode))


def _describe_type(mode: int) -> str:
    return _TYPES.get(stat.S_IFMT(mode), "neither a file nor a folder")


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Check that a new file can replace what is at a path by renaming: nothing, a regular file or a link. A device such as
    `/dev/null` would be lost for all programs.

    Raises:
        OSError: something else is at the path.
    """
    if os.path.lexists(path) and not stat.S_ISREG(mode := os.lstat(path).st_mode) and not stat.S_ISLNK(mode):
        raise _build_type_error(path, mode)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for unbuffered reading.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    try:
        return open(path, "rb", buffering=0, opener=_open_regular)
    except ValueError as error:  # a NUL character in the path
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error


def _open_regular(path: str | os.PathLike[str], _flags: int) -> int:
    handle = _open(path)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise _build_type_error(path, mode)
    return handle


def _open(path: str | os.PathLike[str]) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | _NONBLOCKING)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise _build_type_error(path, os.stat(path).st_mode) from error
        raise
    except ValueError as error:  # a NUL character in the path
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error


def _build_type_error(path: str | os.PathLike[str], mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    return OSError(errno.EINVAL, f"it is not a regular file, but {_describe_type(mode)}", os.fspath(path))


def read_regular(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file. The memory that is reserved is proportional to the size of the file.

    Raises:
        OSError: as in `open_regular`, or the file has more than `max_bytes` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, max_bytes)
        data = bytearray()
        # A file that grows, or whose size is unknown (in /proc), has more bytes than its size says.
        while len(data) <= max_bytes and (chunk := file.read(max(size - len(data), _BLOCK_BYTES))):
            data += chunk
    _check_size(path, len(data), max_bytes)
    return bytes(data)


def read_regular_or_pipe(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file, or what another process writes to a pipe, as in `<(command)`.

    Raises:
        OSError: as in `read_regular`; or no process writes to the pipe, or it has not finished within a minute.
    """
    handle = _open(path)
    with os.fdopen(handle, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
        if not stat.S_ISFIFO(os.fstat(handle).st_mode):
            return read_regular(path, max_bytes)
        selector.register(pipe, selectors.EVENT_READ)
        deadline, data = time.monotonic() + _PIPE_TIMEOUT_S, bytearray()
        while len(data) <= max_bytes:
            chunk = pipe.read(_BLOCK_BYTES)
            if chunk is None and not selector.select(max(0.0, deadline - time.monotonic())):
                raise OSError(errno.ETIMEDOUT, f"it is a pipe, whose writer was not done after {_PIPE_TIMEOUT_S:.0f} s")
            if chunk == b"":  # the end of the pipe
                break
            data += chunk or b""
    if not data:
        raise OSError(errno.EINVAL, "it is a pipe to which no process writes", os.fspath(path))
    _check_size(path, len(data), max_bytes)
    return bytes(data)


def _check_size(path: str | os.PathLike[str], num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))


def parse_json(data: str | bytes) -> Any:
    """Parse JSON that a user or another program has written.

    Raises:
        ValueError: the data is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("the values in it are nested too deeply") from error


def read_text(path: Path, max_bytes: int = MAX_BYTES, encoding: str = "utf-8") -> str:
    """Return the content of a text file. Windows line ends are converted to newlines.

    Raises:
        OSError: as in `read_regular`.
        UnicodeDecodeError: the file is not text in this encoding.
    """
    return read_regular(path, max_bytes).decode(encoding).replace("\r\n", "\n")
