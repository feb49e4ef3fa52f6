"""Streams the records of a piece of a file, and takes the texts out of them.

Memory holds a buffer and one record; for parquet, one row group.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from megatron.config.extras import optional
from megatron_lab.data_tools.preprocess import csv_records, storage
from megatron_lab.data_tools.preprocess.errors import BadRecordError, DamagedFileError

Kind = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "csv", "text"]

Record = Any
"""A line (bytes), the values of a row, or the content of a text file (bytes); what is wrong with a row that cannot be read."""
Records = Generator[Record, None, None]


@dataclass(frozen=True)
class InputPiece:
    """Records of one file: the lines that begin in a range of bytes, the rows of some row groups, or all of them."""

    path: str
    """Absolute path, or a URL."""
    kind: Kind
    version: str
    """A text that changes with the content of the whole file (`storage.stat`)."""
    begin: int
    end: int
    """The range [begin, end) of bytes, or of row groups."""
    num_bytes: int
    """Bytes of the file that are read for it, packed if it is packed."""
    records_before: int | None
    """Number of records of the file before this piece; None where counting them takes reading."""

    def unchanged(self) -> bool:
        """Whether the file is still the one that was cut."""
        found = storage.stat(self.path)
        return found is not None and found[1] == self.version

    def place(self, number: int) -> str:
        """The place of a record for messages. Records count from 0 in the file; lines are shown from 1, rows from 0."""
        if self.kind == "text":
            return self.path
        return f"{self.path}: row {number}" if self.kind in ("parquet", "csv") else f"{self.path}:{number + 1}"


def records(piece: InputPiece, keys: Sequence[str], at: Callable[[int], None]) -> Records:
    """The records of a piece.

    Args:
        piece: what to read.
        keys: columns to read of parquet and csv.
        at: called now and then with the number of bytes of the piece that have been read.

    Raises:
        DamagedFileError: the file ends too early, or is not of the kind that its name says.
    """
    with storage.open_binary(piece.path) as file:
        if piece.kind == "jsonl":
            yield from _lines(file, piece, at)
        elif piece.kind == "parquet":
            for group in range(piece.begin, piece.end):
                yield from _rows(piece.path, file, keys, group)
                at(piece.num_bytes * (group + 1 - piece.begin) // (piece.end - piece.begin))
        elif piece.kind == "csv":
            if piece.num_bytes:
                yield from csv_records.rows(piece.path, file, keys, at)
        elif piece.kind == "text":
            yield file.read()
        else:
            yield from _unpacked_lines(file, piece, at)


def _lines(file: BinaryIO, piece: InputPiece, at: Callable[[int], None]) -> Records:
    """The lines that begin in the piece's range of bytes."""
    position = piece.begin
    if position:
        file.seek(position - 1)
        position -= 1
        # Do not read beyond the range: one line may be longer than many of them.
        while position < piece.end and (rest := file.readline(storage.BUFFER_BYTES)):
            position += len(rest)
            if rest.endswith(b"\n"):
                break
    while position < piece.end and (line := file.readline()):
        position += len(line)
        yield line
        at(position - piece.begin)


def _unpacked_lines(file: BinaryIO, piece: InputPiece, at: Callable[[int], None]) -> Records:
    number = 0
    try:
        opened = gzip.GzipFile(fileobj=file) if piece.kind == "jsonl.gz" else ZstdReader(piece.path, file)
        with io.BufferedReader(cast(Any, opened), storage.BUFFER_BYTES) as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 - the last one is told
                yield line
                at(file.tell())
    except (EOFError, gzip.BadGzipFile, zlib.error, DamagedFileError) as error:
        raise DamagedFileError(
            f"{piece.path} is truncated or damaged, after line {number:,} or later: {error}.\n  Make or copy it again."
        ) from error


_ROWS_AT_ONCE = 256


def row_groups(path: str, keys: Sequence[str], *, of_text: bool = True) -> list[tuple[int, int]]:
    """(bytes in the file, number of rows) of each row group.

    Args:
        of_text: the columns must hold strings.

    Raises:
        ValueError: no parquet file, a damaged one, or a column is missing or holds no strings.
    """
    with storage.open_binary(path) as file:
        opened = _open_parquet(path, file)
        from pyarrow import types

        schema, metadata = opened.schema_arrow, opened.metadata
        for key in keys:
            if schema.names.count(key) != 1:
                number = "no column" if key not in schema.names else "more than one column"
                names = ", ".join(map(repr, schema.names[:8]))
                raise ValueError(f"{path}: {number} {key!r} (--json-keys, --column); it has: {names}")
            column = schema.field(key).type
            held = column.value_type if types.is_dictionary(column) else column
            if of_text and not (types.is_string(held) or types.is_large_string(held) or str(held) == "string_view"):
                raise ValueError(f"{path}: the column {key!r} (--json-keys, --column) holds {column}, not strings")
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [(sum(group.column(n).total_compressed_size for n in range(group.num_columns)), group.num_rows) for group in groups]


def _rows(path: str, file: BinaryIO, keys: Sequence[str], group: int) -> Iterator[tuple[object, ...]]:
    """The values of these columns, row by row. Memory holds the row group at most.

    A string that is not UTF-8 comes as bytes.

    Raises:
        DamagedFileError: the row group cannot be read.
    """
    import pyarrow

    opened = _open_parquet(path, file)
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


def _open_parquet(path: str, file: BinaryIO) -> Any:
    """An opened file whose footer has been read."""
    parquet = optional("pyarrow.parquet", f"{path}: parquet is read by pyarrow")
    import pyarrow

    try:
        return parquet.ParquetFile(file, pre_buffer=False, buffer_size=storage.BUFFER_BYTES, page_checksum_verification=True)
    except pyarrow.lib.ArrowException as error:
        raise ValueError(f"{path} is no parquet file, or a damaged one ({error}).\n  Make or copy it again.") from error


_LARGEST_WINDOW = 1 << 31  # zstd --long=31; a window is held in memory, and is 8 MB at most without --long and --ultra
_COMPRESSED_AT_ONCE = 1 << 14  # text that is packed a hundredfold then takes 1.6 MB


class ZstdReader(io.RawIOBase):
    """The unpacked bytes. (The stream reader of the library takes a truncated file for a complete one.)

    Raises:
        ValueError: the library is not installed.
        DamagedFileError: while reading.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        super().__init__()
        self._library = optional("zstandard", f"{path}: zstd files are read by zstandard")
        self._file = file
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
            self._frame = self._frame or self._library.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            try:
                self._unpacked = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise DamagedFileError(str(error)) from error
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count


# ---- the values of a record, one for each key

Check = Callable[[Sequence[object], Sequence[str]], list[Any]]
"""Gives back the values of these keys, or raises BadRecordError."""


def parse_values(values: Sequence[object], keys: Sequence[str]) -> list[str]:
    """The texts of a record.

    Raises:
        BadRecordError: one is no string, or none that has a UTF-8 form.
    """
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, bytes):
            raise BadRecordError(f"key {key!r} is not UTF-8: {value[:40]!r}")
        if not isinstance(value, str):
            raise BadRecordError(f"the value of key {key!r} is not a string but {json.dumps(value, default=str)[:40]}")
        check_encodable(value, f"key {key!r}")
    return cast("list[str]", list(values))


def check_encodable(text: str, what: str) -> None:
    """Check that a text has a UTF-8 form.

    Raises:
        BadRecordError: it has none.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError(f"{what} holds half of a surrogate pair, which is no character: {text[error.start]!a}") from error


def parse_line(line: bytes, keys: Sequence[str], check: Check = parse_values) -> list[Any] | None:
    """The values of a JSON line; None if it is blank.

    Raises:
        ValueError: it is not a JSON object that has a good value for each key.
        RecursionError: too many brackets.
    """
    if line.isspace():
        return None
    try:
        # Without a mark at the start this is faster than utf-8-sig.
        found = json.loads(line.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8: byte {error.object[error.start]:#04x} at column {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise BadRecordError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    if not isinstance(found, dict):
        raise BadRecordError(f'not a JSON object like {{"{keys[0]}": "..."}}')
    for key in keys:
        if key not in found:
            raise BadRecordError(
                f"no key {key!r} (--json-keys, --column); the line has: {', '.join(map(repr, [*found][:8])) or 'none'}"
            )
    return check([found[key] for key in keys], keys)


def parse_row(values: Sequence[object] | BadRecordError, keys: Sequence[str], check: Check = parse_values) -> list[Any] | None:
    """The values of a row of a table.

    Raises:
        BadRecordError: they are no texts, or it is no row.
    """
    if isinstance(values, BadRecordError):
        raise values
    return check(values, keys)


def parse_text(content: bytes, keys: Sequence[str], check: Check = parse_values) -> list[Any]:
    """The content of a text file as one text.

    Raises:
        BadRecordError: it is not UTF-8.
    """
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # the mark of UTF-16, in which Windows saves "Unicode"
    try:
        return check([content.decode("utf-16") if wide else content.removeprefix(b"\xef\xbb\xbf").decode()], keys)
    except UnicodeDecodeError as error:
        if wide:
            raise BadRecordError(f"begins like UTF-16, but is none: byte {error.start + 1}") from error
        line = content.count(b"\n", 0, error.start) + 1
        raise BadRecordError(f"not UTF-8: byte {content[error.start]:#04x} in line {line}") from error


PARSERS: dict[Kind, Callable[[Any, Sequence[str], Check], list[Any] | None]] = {
    "jsonl": parse_line,
    "jsonl.gz": parse_line,
    "jsonl.zst": parse_line,
    "parquet": lambda values, keys, check: check(values, keys),
    "csv": lambda values, keys, check: parse_row(values, keys, check),
    "text": parse_text,
}
