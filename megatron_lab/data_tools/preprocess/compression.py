"""Readers of compressed files, which are never taken for complete if they are truncated or damaged."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from megatron.config.optional_packages import import_optional
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.errors import DamagedFileError

_MAX_WINDOW_BYTES = 1 << 31  # zstd --long=31. A window is kept in memory; without --long and --ultra it has at most 8 MB
_COMPRESSED_READ_BYTES = 1 << 14  # text with a compression ratio of 100 then takes 1.6 MB


class _DecompressionError(Exception):
    """Raised for compressed data that is incomplete or invalid."""


_DAMAGE_ERRORS = (_DecompressionError, EOFError, gzip.BadGzipFile, zlib.error)


def open_decompressed(path: str, file: BinaryIO, compression: str) -> io.BufferedReader:
    """Return a buffered stream of the decompressed content of a file, which can be set back to its start.

    `explain_damage` converts the errors that reading the stream may raise.

    Args:
        path: path or URL of the file, for error messages.
        file: the opened compressed file.
        compression: one of `file_formats.COMPRESSIONS`.

    Raises:
        ValueError: the library for this compression is not installed.
    """
    raw = gzip.GzipFile(fileobj=file) if compression == "gz" else _StreamReader(_get_decompressor(path, compression), file)
    return io.BufferedReader(cast(Any, raw), storage.BUFFER_BYTES)


@contextmanager
def explain_damage(path: str, get_place: Callable[[], str]) -> Iterator[None]:
    """Context manager that converts the errors of truncated and damaged compressed data to a `DamagedFileError`.

    Args:
        path: path or URL of the file.
        get_place: function that returns the place of the damage for the message, such as "after line 3 or later".
    """
    try:
        yield
    except _DAMAGE_ERRORS as error:
        raise DamagedFileError(
            f"{path} is truncated or damaged, {get_place()}: {error}.\n  Create or copy the file again."
        ) from error


def read_start(path: str, compression: str | None, num_bytes: int) -> bytes:
    """Return the first bytes of the content of a file: `num_bytes`, or fewer if the file is shorter or damaged there.

    Args:
        path: path or URL of a file.
        compression: compression of the file; None for an uncompressed file.
    """
    if compression is None:
        return storage.read_start(path, num_bytes)
    with storage.open_binary(path) as file, open_decompressed(path, file, compression) as content:
        try:
            return content.read(num_bytes)
        except _DAMAGE_ERRORS:
            return b""  # the reader of the records reports the damage


def _get_decompressor(path: str, compression: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return a function that creates the decompressor of one stream (unit of compressed data), and the error for invalid data."""
    if compression == "zst":
        library = import_optional("zstandard", f"{path}: zstd files are read by zstandard")
        return lambda: library.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj(), library.ZstdError
    if compression == "bz2":
        import bz2

        return bz2.BZ2Decompressor, OSError
    import lzma

    return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError


class _StreamReader(io.RawIOBase):
    """Binary stream of the decompressed content of a file that consists of one or more compressed streams.

    The file objects of the libraries accept a truncated zstd file as complete, and ignore whatever follows a stream of a bz2 or xz
    file and is no valid stream. This class raises an error instead.

    Args:
        decompressor: function that creates the decompressor of one stream, and the error that it raises for invalid data.
        file: the opened compressed file.

    Raises:
        _DecompressionError: from `readinto`, if the file is truncated or damaged.
    """

    def __init__(self, decompressor: tuple[Callable[[], Any], type[Exception]], file: BinaryIO) -> None:
        super().__init__()
        self._create, self._error = decompressor
        self._file = file
        self._reset()

    def _reset(self) -> None:
        self._stream: Any = None
        self._compressed = b""
        self._decompressed = memoryview(b"")
        self._position = self._num_finished = 0

    def readable(self) -> bool:
        """Return True: the stream supports reading."""
        return True

    def seekable(self) -> bool:
        """Return True: the stream can be set back to its start."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the stream back to its start, or keep its position. Return the position in the decompressed content."""
        if (offset, whence) == (0, io.SEEK_SET):
            self._file.seek(0)
            self._reset()
        elif (offset, whence) != (0, io.SEEK_CUR):
            raise io.UnsupportedOperation("only the start of compressed content can be sought")
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with decompressed bytes. Return the number of bytes, which is 0 only at the end of the file."""
        while not self._decompressed:
            compressed = b""
            if self._stream is None or getattr(self._stream, "needs_input", True):
                compressed, self._compressed = self._compressed or self._file.read(_COMPRESSED_READ_BYTES), b""
                if not compressed:
                    if self._stream is not None:
                        raise _DecompressionError("the last stream (unit of compressed data) is incomplete")
                    return 0
            if self._stream is None:
                if self._num_finished and not (compressed := compressed.lstrip(b"\0")):
                    continue  # zeros may fill up the space after a stream
                self._stream = self._create()
            self._decompressed = memoryview(self._decompress(compressed))
            if self._stream.eof:
                self._compressed, self._stream = self._stream.unused_data, None
                self._num_finished += 1
        count = min(len(buffer), len(self._decompressed))
        buffer[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        self._position += count
        return count

    def _decompress(self, compressed: bytes) -> bytes:
        try:
            if hasattr(self._stream, "needs_input"):  # bz2 and xz: the size of the result can be limited
                return cast(bytes, self._stream.decompress(compressed, storage.BUFFER_BYTES))
            return cast(bytes, self._stream.decompress(compressed))
        except self._error as error:
            raise _DecompressionError(str(error)) from error
