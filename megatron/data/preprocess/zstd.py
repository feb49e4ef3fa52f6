"""Reads zstd files of one or several frames, and notices where one is cut off."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from megatron.data.preprocess.errors import DamagedFileError

_LARGEST_WINDOW = 1 << 31  # zstd --long=31; a window is held in memory, and is 8 MB at most without --long and --ultra
_COMPRESSED_AT_ONCE = 1 << 14  # text that is packed a hundredfold then takes 1.6 MB


class ZstdReader(io.RawIOBase):
    """The unpacked bytes. (The stream reader of the library takes a truncated file for a complete one.)

    Args:
        path: For messages.
        file: The packed bytes.

    Raises:
        ValueError: the library is not installed.
        DamagedFileError: while reading.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        super().__init__()
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(
                f"{path}: zstd files are read by zstandard, which is not installed: pip install 'megatron-3d[zstandard]'"
            ) from error
        self._file = file
        self._library = zstandard
        self._frame: Any = None
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes; none at the end."""
        while not self._unpacked:
            packed = self._packed or self._file.read(_COMPRESSED_AT_ONCE)
            if not packed:
                if self._frame is not None:
                    raise DamagedFileError("a frame is cut off")
                return 0
            self._unpack(packed)
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self, packed: bytes) -> None:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
        try:
            self._unpacked = memoryview(self._frame.decompress(packed))
        except self._library.ZstdError as error:
            raise DamagedFileError(str(error)) from error
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
