"""Readers of the records of an input file (lines, table rows or a complete text), and parsers that extract the texts from a record.

Memory holds only a buffer and one record (for parquet, one row group).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from megatron.config.optional_packages import import_optional
from megatron_lab.data_tools.preprocess import arrow_records, csv_records, json_arrays, storage
from megatron_lab.data_tools.preprocess.arrow_records import find_columns, get_column, to_values
from megatron_lab.data_tools.preprocess.compression import explain_damage, open_decompressed
from megatron_lab.data_tools.preprocess.errors import BadRecordError, DamagedFileError
from megatron_lab.data_tools.preprocess.file_formats import FileFormat, split_format
from megatron_lab.data_tools.preprocess.record_keys import select_values
from megatron_lab.data_tools.preprocess.text_encoding import RecordDecoder, has_one_byte_newlines

Record = Any
"""A line (bytes), a record of a JSON array as `json_arrays.read_records` yields it, the values of a table row, or the content of a
text file (bytes). An exception for a row that cannot be read."""
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
        """Return the location of a record for messages, such as FILE:LINE. Lines and the records of an array are counted from 1,
        rows of tables from 0.

        Args:
            record_index: index of the record in the file, from 0.
        """
        content_format, _ = split_format(self.file_format)
        if content_format == "text":
            return self.path
        if content_format == "jsonl":
            return f"{self.path}:{record_index + 1}"
        return f"{self.path}: record {record_index + 1}" if content_format == "json" else f"{self.path}: row {record_index}"


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
    content_format, compression = split_format(input_range.file_format)
    path = input_range.path
    with storage.open_binary(path) as file:
        if compression is not None:
            num_records = 0
            unit = _UNITS.get(content_format, "record")
            with (
                explain_damage(path, lambda: f"after {unit} {num_records:,} or later"),
                open_decompressed(path, file, compression) as content,
            ):
                records = _read_content(
                    path, content_format, content, columns, lambda: on_progress(file.tell()), decoder, optional_columns
                )
                for num_records, record in enumerate(records, start=1):  # noqa: B007 - the error message has the last number
                    yield record
        elif content_format == "jsonl":
            if not input_range.start:
                decoder.set_encoding_of_json(file.read(4))
                file.seek(0)
            if has_one_byte_newlines(decoder.encoding):
                yield from _read_lines(file, input_range, on_progress, decoder)
            else:
                yield from _read_encoded_lines(file, lambda: on_progress(file.tell()), decoder)
        elif content_format == "parquet":
            decoder.set_utf8()
            for group in range(input_range.start, input_range.end):
                yield from _read_rows(path, file, columns, optional_columns, group)
                on_progress(input_range.num_bytes * (group + 1 - input_range.start) // (input_range.end - input_range.start))
        elif content_format == "arrow":
            decoder.set_utf8()
            yield from arrow_records.read_rows(path, file, columns, lambda: on_progress(file.tell()), optional_columns)
        else:
            buffered_file = cast(io.BufferedReader, file)
            yield from _read_content(
                path, content_format, buffered_file, columns, lambda: on_progress(file.tell()), decoder, optional_columns
            )


_UNITS = {"jsonl": "line", "csv": "row"}
"""By content format: what a record is in its file. The others consist of records."""


def _read_content(
    path: str,
    content_format: str,
    content: io.BufferedReader,
    columns: Sequence[str],
    on_progress: Callable[[], None],
    decoder: RecordDecoder,
    optional_columns: Sequence[str],
) -> Iterator[Record]:
    """Yield the records of a content that is read from its start to its end.

    Args:
        path: path or URL of the file, for error messages.
        content_format: one of `file_formats.COMPRESSIBLE_FORMATS`.
        content: the opened file, or its decompressed content.
        columns: columns of a table to read.
        on_progress: called repeatedly.
        decoder: decoder of the records. Its encoding and the offset of the current record are set here.
        optional_columns: columns of a table that are read if it has them.
    """
    if content_format == "json":
        yield from json_arrays.read_records(path, content, on_progress, decoder)
    elif content_format == "csv":
        yield from csv_records.read_rows(path, content, columns, on_progress, decoder, optional_columns)
    elif content_format == "text":
        yield content.read()
    else:
        decoder.set_encoding_of_json(content.peek(4)[:4])
        if has_one_byte_newlines(decoder.encoding):
            decoder.record_offset = 0
            for line in content:
                yield line
                decoder.record_offset += len(line)
                on_progress()
        else:
            yield from _read_encoded_lines(content, on_progress, decoder)


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
        find_columns(path, parquet_file.schema_arrow, columns, requires_strings=requires_strings)
        metadata = parquet_file.metadata
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
    names = find_columns(path, parquet_file.schema_arrow, columns, optional_columns, requires_strings=False)
    try:
        selection = [".".join(column_names) for column_names in names if column_names]  # as parquet names fields of struct columns
        for batch in parquet_file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=selection, use_threads=False):
            yield from zip(*(to_values(get_column(batch, column_names)) for column_names in names), strict=True)
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise DamagedFileError(
            f"{path}: row group {group} is damaged: {' '.join(str(error).split())}\n  Create or copy the file again."
        ) from error


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
        if text.strip() == "{":
            raise BadRecordError(
                "the line is only '{', so the file seems to contain JSON over several lines. Write one object per line, such as "
                "with jq -c . FILE, or with jq -c '.data[]' FILE for an object around an array with the name data"
            ) from error
        raise BadRecordError(
            f"the line is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}. Correct this line of the input"
        ) from error
    return check(select_values(record, keys, "line", optional_keys), [*keys, *optional_keys])


def parse_array_record(
    record: Any, keys: Sequence[str], check: ValueCheck, decoder: RecordDecoder, optional_keys: Sequence[str] = ()
) -> list[Any]:
    """Return the values of `keys` and `optional_keys` in a record of a JSON array.

    Args:
        record: JSON value, `MarkedRecord` or error, as `json_arrays.read_records` yields them.
        check: function that checks these values and returns them, or raises `BadRecordError`.
        decoder: decoder with the encoding of the file.
        optional_keys: keys that the record need not have. Their values are then None.

    Raises:
        BadRecordError: the record is not an object with a valid value for each key, or has invalid bytes.
    """
    if isinstance(record, BadRecordError):
        raise record
    if isinstance(record, json_arrays.MarkedRecord):
        record = json.loads(decoder.resolve(record.text, f"character {record.first:,} of the record"))
    return check(select_values(record, keys, "record", optional_keys), [*keys, *optional_keys])


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


_PARSERS: dict[str, Callable[..., list[Any] | None]] = {
    "jsonl": parse_line,
    "json": parse_array_record,
    "parquet": parse_row,
    "arrow": parse_row,
    "csv": parse_row,
    "text": parse_text,
}


def get_parser(file_format: FileFormat) -> Callable[..., list[Any] | None]:
    """Return the function that returns the values of a record for the keys, or None for a blank line, in files of a format. Its
    arguments are those of `parse_line`."""
    return _PARSERS[split_format(file_format)[0]]
