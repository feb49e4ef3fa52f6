"""Readers of the records of an input file (lines, table rows or a complete text), and parsers that extract the texts from a record.

Memory holds only a buffer and one record (for parquet, one row group).
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from megatron.config.optional_packages import import_optional
from megatron_lab.data_tools.preprocess import csv_records, storage
from megatron_lab.data_tools.preprocess.errors import BadRecordError, DamagedFileError
from megatron_lab.data_tools.preprocess.text_encoding import RecordDecoder, has_one_byte_newlines

FileFormat = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "csv", "text"]
DETECTED_FORMATS: tuple[FileFormat, ...] = ("csv", "text")
"""Formats of files whose encoding is detected from their content."""

Record = Any
"""A line (bytes), the values of a table row, or the content of a text file (bytes). An exception for a row that cannot be read."""
Records = Generator[Record, None, None]
"""Generator of the records of an input range."""


@dataclass(frozen=True)
class InputRange:
    """Range of consecutive records of an input file: the lines that start in a byte range, the rows of some row groups, or all
    records."""

    path: str
    """Absolute path, or a URL."""
    file_format: FileFormat
    version: str
    """String that changes when the content of the file changes. It is compared with the string that `storage.stat` returns."""
    start: int
    end: int
    """End of the range [`start`, `end`): a byte offset of the file, or for parquet the index of a row group."""
    num_bytes: int
    """Number of bytes of the file that must be read for the range. For a compressed file, these are compressed bytes."""
    num_preceding_records: int | None
    """Number of records of the file before this range; None if it is unknown, because counting them would mean reading them."""

    def is_unchanged(self) -> bool:
        """Return whether the file still has the content for which the range was created, according to its `version`."""
        file_stat = storage.stat(self.path)
        return file_stat is not None and file_stat[1] == self.version

    def format_location(self, record_index: int) -> str:
        """Return the location of a record for messages, such as FILE:LINE. Lines are counted from 1, rows of tables from 0.

        Args:
            record_index: index of the record in the file, from 0.
        """
        if self.file_format == "text":
            return self.path
        return f"{self.path}: row {record_index}" if self.file_format in ("parquet", "csv") else f"{self.path}:{record_index + 1}"


def read_records(
    input_range: InputRange,
    columns: Sequence[str],
    on_progress: Callable[[int], None],
    decoder: RecordDecoder,
    optional_columns: Sequence[str] = (),
) -> Records:
    """Yield the records of a file range without parsing them: lines as bytes, table rows as values, or the content of a text file.

    Args:
        columns: columns of parquet and csv files to read.
        optional_columns: columns that are read too. The value of a column that the file does not have is None.
        on_progress: called repeatedly with the number of bytes of the range that have been read.
        decoder: decoder of the records. Its encoding and the offset of the current record are set here.

    Raises:
        DamagedFileError: the file ends too early, or does not have the format of its suffix.
    """
    with storage.open_binary(input_range.path) as file:
        if input_range.file_format == "jsonl":
            if not input_range.start:
                decoder.set_encoding_of_json(file.read(4))
                file.seek(0)
            if has_one_byte_newlines(decoder.encoding):
                yield from _read_lines(file, input_range, on_progress, decoder)
            else:
                yield from _read_encoded_lines(file, lambda: on_progress(file.tell()), decoder)
        elif input_range.file_format == "parquet":
            decoder.set_utf8()
            for group in range(input_range.start, input_range.end):
                yield from _read_rows(input_range.path, file, columns, optional_columns, group)
                on_progress(input_range.num_bytes * (group + 1 - input_range.start) // (input_range.end - input_range.start))
        elif input_range.file_format == "csv":
            if input_range.num_bytes:
                yield from csv_records.read_rows(input_range.path, file, columns, on_progress, decoder, optional_columns)
        elif input_range.file_format == "text":
            yield file.read()
        else:
            yield from _read_compressed_lines(file, input_range, on_progress, decoder)


def _read_lines(file: BinaryIO, input_range: InputRange, on_progress: Callable[[int], None], decoder: RecordDecoder) -> Records:
    """Yield the lines that start in a byte range of a file. The last line may end after the range."""
    position = input_range.start
    if position:
        file.seek(position - 1)
        position -= 1
        # Do not read beyond the range: one line may be longer than many ranges.
        while position < input_range.end and (fragment := file.readline(storage.BUFFER_BYTES)):
            position += len(fragment)
            if fragment.endswith(b"\n"):
                break
    while position < input_range.end and (line := file.readline()):
        decoder.record_offset = position
        position += len(line)
        yield line
        on_progress(position - input_range.start)


def _read_encoded_lines(file: BinaryIO, on_progress: Callable[[], None], decoder: RecordDecoder) -> Records:
    """Yield the lines of a file in which a line does not end with the single byte of ASCII, such as UTF-16.

    Args:
        file: the file, at its start.
        on_progress: called after each line.
        decoder: decoder with the encoding of the file.
    """
    newline = "\n".encode(decoder.encoding)
    buffer, decoder.record_offset = b"", 0
    search_start = 0
    while block := file.read(storage.BUFFER_BYTES):
        buffer += block
        line_start = 0
        while (index := buffer.find(newline, search_start)) >= 0:
            if index % len(newline):  # the end of one character and the start of the next
                search_start = index + 1
                continue
            search_start = index + len(newline)
            yield buffer[line_start:search_start]
            decoder.record_offset += search_start - line_start
            line_start = search_start
            on_progress()
        buffer = buffer[line_start:]
        search_start = max(len(buffer) - len(newline), 0)
    if buffer:
        yield buffer


def _read_compressed_lines(
    file: BinaryIO, input_range: InputRange, on_progress: Callable[[int], None], decoder: RecordDecoder
) -> Records:
    num_lines = 0
    try:
        decompressed = gzip.GzipFile(fileobj=file) if input_range.file_format == "jsonl.gz" else ZstdReader(input_range.path, file)
        with io.BufferedReader(cast(Any, decompressed), storage.BUFFER_BYTES) as lines:
            decoder.set_encoding_of_json(lines.peek(4)[:4])
            if has_one_byte_newlines(decoder.encoding):
                decoder.record_offset = 0
                for num_lines, line in enumerate(lines, start=1):  # noqa: B007 - the error message has the last number
                    yield line
                    decoder.record_offset += len(line)
                    on_progress(file.tell())
            else:
                yield from _read_encoded_lines(cast(BinaryIO, lines), lambda: on_progress(file.tell()), decoder)
    except (EOFError, gzip.BadGzipFile, zlib.error, DamagedFileError) as error:
        raise DamagedFileError(
            f"{input_range.path} is truncated or damaged, after line {num_lines:,} or later: {error}.\n"
            "  Create or copy the file again."
        ) from error


_ROWS_PER_BATCH = 256


def list_row_groups(path: str, columns: Sequence[str], *, requires_strings: bool = True) -> list[tuple[int, int]]:
    """Return (compressed bytes in the file, number of rows) of each row group of a parquet file.

    Args:
        columns: columns that the file must have.
        requires_strings: whether these columns must have a string type.

    Raises:
        ValueError: the file is not a parquet file or is damaged, or a column is missing or has another type.
    """
    with storage.open_binary(path) as file:
        parquet_file = _open_parquet(path, file)
        from pyarrow import types

        schema, metadata = parquet_file.schema_arrow, parquet_file.metadata
        for name in columns:
            if schema.names.count(name) != 1:
                problem = "no column" if name not in schema.names else "more than one column"
                names = ", ".join(map(repr, schema.names[:8]))
                raise ValueError(
                    f"{path} has {problem} {name!r} (--json-keys, --column). The columns of the file are: {names}. Choose one that "
                    "occurs once."
                )
            column_type = schema.field(name).type
            value_type = column_type.value_type if types.is_dictionary(column_type) else column_type
            if requires_strings and not (
                types.is_string(value_type) or types.is_large_string(value_type) or str(value_type) == "string_view"
            ):
                raise ValueError(
                    f"{path}: the column {name!r} (--json-keys, --column) has the type {column_type}, not string. Choose a column "
                    "of strings"
                )
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        return [(sum(group.column(n).total_compressed_size for n in range(group.num_columns)), group.num_rows) for group in groups]


def _read_rows(
    path: str, file: BinaryIO, columns: Sequence[str], optional_columns: Sequence[str], group: int
) -> Iterator[tuple[object, ...]]:
    """Yield the values of all columns for each row of a row group in a parquet file. Memory holds at most one row group.

    A string that is not valid UTF-8 is yielded as bytes.

    Args:
        path: path or URL of the file, for error messages.
        columns: columns of the file.
        optional_columns: columns that the file need not have. Their values are then None.
        group: index of the row group.

    Raises:
        DamagedFileError: the row group cannot be read.
    """
    import pyarrow

    parquet_file = _open_parquet(path, file)
    existing = [*columns, *(name for name in optional_columns if parquet_file.schema_arrow.names.count(name) == 1)]
    try:
        for batch in parquet_file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=existing, use_threads=False):
            values = {name: _to_values(batch.column(name)) for name in existing}
            absent = [None] * batch.num_rows
            yield from zip(*(values.get(name, absent) for name in (*columns, *optional_columns)), strict=True)
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise DamagedFileError(
            f"{path}: row group {group} is damaged: {' '.join(str(error).split())}\n  Create or copy the file again."
        ) from error


def _to_values(column: Any) -> list[object]:
    import pyarrow

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:  # at least one value is invalid; the others are kept
        return [_decode_or_keep(value) for value in column.cast(pyarrow.large_binary()).to_pylist()]


def _decode_or_keep(value: bytes | None) -> str | bytes | None:
    try:
        return value.decode() if value is not None else None
    except UnicodeDecodeError:
        return value


def _open_parquet(path: str, file: BinaryIO) -> Any:
    """Open a parquet file and read its footer, which lists the columns and row groups.

    Args:
        path: path or URL of the file, for error messages.

    Raises:
        ValueError: the file is not a parquet file or is damaged, or pyarrow is not installed.
    """
    parquet = import_optional("pyarrow.parquet", f"{path}: parquet is read by pyarrow")
    import pyarrow

    try:
        return parquet.ParquetFile(file, pre_buffer=False, buffer_size=storage.BUFFER_BYTES, page_checksum_verification=True)
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file, or is damaged ({error}).\n  Create or copy the file again.") from error


_MAX_WINDOW_BYTES = 1 << 31  # zstd --long=31. A window is kept in memory; without --long and --ultra it has at most 8 MB
_COMPRESSED_READ_BYTES = 1 << 14  # text with a compression ratio of 100 then takes 1.6 MB


class ZstdReader(io.RawIOBase):
    """Binary stream of the decompressed content of a zstd file.

    The stream reader of the zstandard library accepts a truncated file as complete; this class raises an error instead.

    Args:
        path: path or URL of the file, for error messages.
        file: the opened compressed file.

    Raises:
        ValueError: the zstandard library is not installed.
        DamagedFileError: from `readinto`, if the file is truncated or damaged.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        super().__init__()
        self._library = import_optional("zstandard", f"{path}: zstd files are read by zstandard")
        self._file = file
        self._frame: Any = None
        self._compressed = b""
        self._decompressed = memoryview(b"")

    def readable(self) -> bool:
        """Return True: the stream supports reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with decompressed bytes. Return the number of bytes, which is 0 only at the end of the file."""
        while not self._decompressed:
            compressed = self._compressed or self._file.read(_COMPRESSED_READ_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise DamagedFileError("the last zstd frame (unit of compressed data) is incomplete")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
            try:
                self._decompressed = memoryview(self._frame.decompress(compressed))
            except self._library.ZstdError as error:
                raise DamagedFileError(str(error)) from error
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._decompressed))
        buffer[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        return count


# ---- parsing of a record: one value per key

ValueCheck = Callable[[Sequence[object], Sequence[str]], list[Any]]
"""Function that checks the values of these keys and returns them, or raises `BadRecordError`."""


def parse_values(values: Sequence[object], keys: Sequence[str]) -> list[str]:
    """Check that the values of a record are texts, and return these texts.

    Args:
        values: value of each key.
        keys: JSON keys of the values, for error messages.

    Raises:
        BadRecordError: a value is not a string, or contains half of a surrogate pair.
    """
    for key, value in zip(keys, values, strict=True):
        if not isinstance(value, str):
            raise BadRecordError(
                f"the value of key {key!r} is not a string but {json.dumps(value, default=str)[:40]}. Correct the value"
            )
        check_encodable(value, f"key {key!r}")
    return cast("list[str]", list(values))


def check_encodable(text: str, label: str) -> None:
    """Check that a text can be encoded as UTF-8.

    Args:
        label: description of the text for the error message, such as "message 2".

    Raises:
        BadRecordError: the text contains half of a surrogate pair.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError(
            f"{label} contains half of a surrogate pair, which is not a character: {text[error.start]!a}. Remove it from the text"
        ) from error


def parse_line(
    line: bytes, keys: Sequence[str], check: ValueCheck, decoder: RecordDecoder, optional_keys: Sequence[str] = ()
) -> list[Any] | None:
    """Parse a line of a JSON lines file. Return the values of all keys, or None if the line is blank.

    Args:
        keys: keys that the line must have.
        check: function that checks these values and returns them, or raises `BadRecordError`.
        decoder: decoder with the encoding of the file.
        optional_keys: keys whose value is None if the line does not have them.

    Raises:
        ValueError: the line is not a JSON object with a valid value for each key.
        RecursionError: the JSON is nested too deeply.
    """
    if line.isspace():
        return None
    text = decoder.decode(line).rstrip("\r\n")
    if not text or text.isspace():
        return None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRecordError(
            f"the line is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}. Correct this line of the input"
        ) from error
    if not isinstance(record, dict):
        raise BadRecordError(f'the line is not a JSON object like {{"{keys[0]}": "..."}}. Correct this line of the input')
    for key in keys:
        if key not in record:
            raise BadRecordError(
                f"the line has no key {key!r} (--json-keys, --column); the keys of the line are: "
                f"{', '.join(map(repr, [*record][:8])) or 'none'}. Choose a key of the line, or correct the line"
            )
    return check([*(record[key] for key in keys), *map(record.get, optional_keys)], [*keys, *optional_keys])


def parse_row(
    values: Sequence[object] | BadRecordError,
    keys: Sequence[str],
    check: ValueCheck,
    decoder: RecordDecoder,
    optional_keys: Sequence[str] = (),
) -> list[Any] | None:
    """Return the values of a table row after decoding and checking them.

    Args:
        values: values of the row, one for each key, or the error of a row that could not be read. A string that is not valid in
            the encoding of the file is given as bytes (parquet), or as a string with marks of `MARK_INVALID` (csv).
        keys: columns of the values, for error messages.
        check: function that checks the values and returns them, or raises `BadRecordError`.
        decoder: decoder with the encoding of the file.
        optional_keys: columns of the values after those of `keys`.

    Raises:
        BadRecordError: a value is not valid, or the row could not be read.
    """
    if isinstance(values, BadRecordError):
        raise values
    all_keys = [*keys, *optional_keys]
    return check([decoder.decode_value(value, key) for key, value in zip(all_keys, values, strict=True)], all_keys)


def parse_text(
    content: bytes, keys: Sequence[str], check: ValueCheck, decoder: RecordDecoder, optional_keys: Sequence[str] = ()
) -> list[Any]:
    """Decode a text file, which is a single record. Return its content as a list with this only value.

    Args:
        keys: the key "text", for error messages.
        check: function that checks the content and returns it, or raises `BadRecordError`.
        decoder: decoder that detects the encoding of the file.
        optional_keys: not used, because the record has no other keys.

    Raises:
        BadRecordError: the file is not valid in its encoding, or its encoding is not recognized.
    """
    decoder.set_encoding(content)
    return check([decoder.decode(content)], keys)


PARSERS: dict[FileFormat, Callable[..., list[Any] | None]] = {
    "jsonl": parse_line,
    "jsonl.gz": parse_line,
    "jsonl.zst": parse_line,
    "parquet": parse_row,
    "csv": parse_row,
    "text": parse_text,
}
"""By file format: function that returns the values of a record for the keys, or None for a blank line."""
