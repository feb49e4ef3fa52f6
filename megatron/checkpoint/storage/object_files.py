"""Files of an object store, read in ranges and written as a stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.storage.protocol import TruncatedError

BLOCK_BYTES = 64 << 20
"""Size of the parts of an upload; stores allow some ten thousand parts to a file."""
RANGE_BYTES = 16 << 20
RANGES_AT_ONCE = 8
"""Large reads are cut into ranges, of which this many are under way together where the store can do that."""


@contextlib.contextmanager
def told(place: str) -> Iterator[None]:
    """Turn the errors of every store into `OSError` that names the place; a missing file stays `FileNotFoundError`."""
    try:
        yield
    except OSError as error:
        if place in str(error):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) else OSError
        raise kind(f"{place}: {error.strerror or error or type(error).__name__}") from error
    except Exception as error:
        raise OSError(f"{place}: {type(error).__name__}: {error}") from error  # every store has errors of its own


class ObjectFile:
    """A `Reading` of a file in an object store.

    Args:
        files: fsspec's file system.
        path: of the file in it.
        url: as a user calls the file.
        size: bytes in it.
    """

    def __init__(self, files: Any, path: str, url: str, size: int) -> None:
        self._files, self._path, self._url, self._size = files, path, url, size

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    def read(self, start: int, length: int) -> bytes:
        """Bytes from `start` on."""
        data = bytearray(length)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with what lies from `start` on, some ranges at a time."""
        ends = [*range(RANGE_BYTES, len(buffer), RANGE_BYTES), len(buffer)] if len(buffer) else []
        ranges = list(zip([0, *ends[:-1]], ends, strict=False))
        for first in range(0, len(ranges), RANGES_AT_ONCE):
            chosen = ranges[first : first + RANGES_AT_ONCE]
            with told(self._url):
                starts, stops = ([start + at for at in places] for places in zip(*chosen, strict=True))
                found = self._files.cat_ranges([self._path] * len(chosen), starts, stops, on_error="raise")
            for (begin, end), data in zip(chosen, found, strict=True):
                if len(data) != end - begin:
                    missing = start + begin + len(data)
                    raise TruncatedError(f"{self._url} has no byte {missing}: it was truncated")
                buffer[begin:end] = data

    def __enter__(self) -> ObjectFile:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is held open."""


class ObjectWriting:
    """A `Writing` of a file in an object store.

    Args:
        file: fsspec's file, open for writing.
        url: as a user calls it.
    """

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Add all of it, at most a block at a time."""
        rest = memoryview(data)
        rest = rest.cast("B") if rest.nbytes else rest
        with told(self._url):
            while rest.nbytes:
                written = self._file.write(rest[:BLOCK_BYTES])
                self.num_bytes += written
                rest = rest[written:]

    def fileno(self) -> None:
        """It has none."""

    def finish(self) -> None:
        """Have the store take the file."""
        with told(self._url):
            self._file.close()

    def give_up(self) -> None:
        """End an upload so that no file comes of it."""
        with contextlib.suppress(Exception):
            self._file.discard()
        try:
            self._file.closed = True  # else it would be finished when the object goes
        except AttributeError:
            self._file.close()
