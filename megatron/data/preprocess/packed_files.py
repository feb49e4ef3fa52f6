"""Reads packed files: rows of parquet, one row group at a time, and the bytes that zstd packed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from megatron.data.preprocess import storage
from megatron.data.preprocess.storage import DamagedFileError

_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 1 << 20


def row_groups(path: str, keys: Sequence[str]) -> list[tuple[int, int]]:
    """(bytes in the file, number of rows) of each row group.

    Raises:
        ValueError: no parquet file, a damaged one, or a column is missing or holds no strings.
    """
    import_parquet(path)
    with storage.open_binary(path) as file:
        opened = open_parquet(path, file)
        schema, metadata = opened.schema_arrow, opened.metadata
        for key in keys:
            if schema.names.count(key) != 1:
                number = "no column" if key not in schema.names else "more than one column"
                names = ", ".join(map(repr, schema.names[:8]))
                raise ValueError(f"{path}: {number} {key!r} (--json-keys); it has: {names}")
            if not _holds_strings(schema.field(key).type):
                raise ValueError(f"{path}: the column {key!r} (--json-keys) holds {schema.field(key).type}, not strings")
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [(sum(group.column(n).total_compressed_size for n in range(group.num_columns)), group.num_rows) for group in groups]


def rows(path: str, file: Any, keys: Sequence[str], group: int) -> Iterator[tuple[object, ...]]:
    """The values of these columns, row by row. Memory holds the row group at most.

    A string that is not UTF-8 comes as bytes.

    Raises:
        DamagedFileError: the row group cannot be read.
    """
    import pyarrow

    opened = open_parquet(path, file)
    try:
        for batch in opened.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[*keys], use_threads=False):
            yield from zip(*(_values(batch.column(key)) for key in keys), strict=True)
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise DamagedFileError(
            f"{path}: row group {group} is damaged: {' '.join(str(error).split())}\n  Make or copy the file again."
        ) from error


def _values(column: Any) -> list[object]:
    import pyarrow

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:  # only one value is bad; the others are good
        return [_text(value) for value in column.cast(pyarrow.large_binary()).to_pylist()]


def _text(value: bytes | None) -> str | bytes | None:
    try:
        return value.decode() if value is not None else None
    except UnicodeDecodeError:
        return value


def _holds_strings(column: Any) -> bool:
    from pyarrow import types

    held = column.value_type if types.is_dictionary(column) else column
    return bool(types.is_string(held) or types.is_large_string(held) or str(held) == "string_view")


def import_parquet(path: str) -> Any:
    """The module pyarrow.parquet."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: parquet is read by pyarrow, which is not installed: pip install 'megatron-3d[pyarrow]'"
        ) from error
    return pyarrow.parquet


def open_parquet(path: str, file: Any) -> Any:
    """An opened file whose footer has been read."""
    import pyarrow

    try:
        return import_parquet(path).ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True)
    except pyarrow.lib.ArrowException as error:
        raise ValueError(f"{path} is no parquet file, or a damaged one ({error}).\n  Make or copy it again.") from error


_LARGEST_WINDOW = 1 << 31  # zstd --long=31; a window is held in memory, and is 8 MB at most without --long and --ultra
_COMPRESSED_AT_ONCE = 1 << 14  # text that is packed a hundredfold then takes 1.6 MB


class ZstdReader(io.RawIOBase):
    """The unpacked bytes. (The stream reader of the library takes a truncated file for a complete one.)

    Args:
        path: The name for messages.
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
        """Always true."""
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
