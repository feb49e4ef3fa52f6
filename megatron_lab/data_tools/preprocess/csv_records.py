"""Reader of .csv and .tsv files, row by row. The first row contains the names of the columns.

The separator is a comma, semicolon, tab or vertical bar: the first one with which the header has the requested columns.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, cast

from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.compression import explain_damage, open_decompressed
from megatron_lab.data_tools.preprocess.errors import BadRecordError, DamagedFileError
from megatron_lab.data_tools.preprocess.text_encoding import DETECTION_BYTES, MARK_INVALID, RecordDecoder, TextEncoding

_SEPARATORS = ",;\t|"
_MAX_FIELD_SIZE = 2**31 - 1  # the largest limit that the csv module accepts on every system
_MAX_HEADER_BYTES = 1 << 20


def check_columns(path: str, compression: str | None, columns: Sequence[str], text_encoding: TextEncoding) -> None:
    """Check that a csv or tsv file has each of `columns` exactly once, unless it is empty.

    Args:
        compression: compression of the file; None for an uncompressed file.
        text_encoding: settings that select the encoding of the file.

    Raises:
        ValueError: a column is missing, or its name occurs several times in the header.
    """
    with storage.open_binary(path) as file:
        if compression is None:
            _read_header(path, file, columns, RecordDecoder(text_encoding))
            return
        with explain_damage(path, lambda: "in its first rows"), open_decompressed(path, file, compression) as content:
            _read_header(path, content, columns, RecordDecoder(text_encoding))


def _read_header(path: str, file: BinaryIO, columns: Sequence[str], decoder: RecordDecoder) -> tuple[str, list[str]]:
    """Find the encoding and the separator of a csv or tsv file, and read its header. Set the file position back to the start.

    Args:
        decoder: decoder whose encoding is set.

    Returns:
        The separator, and the names of all columns: none if the file is empty. Without `columns`, it is the separator with the
        most columns.

    Raises:
        ValueError: no separator gives each of `columns` exactly once.
    """
    content = file.read(DETECTION_BYTES)
    file.seek(0)
    if not content:
        return _SEPARATORS[0], []
    decoder.set_encoding(content, is_complete=len(content) < DETECTION_BYTES)
    text = content[:_MAX_HEADER_BYTES].decode(decoder.encoding, "replace").removeprefix("\ufeff")
    headers = {}
    for separator in _SEPARATORS:
        try:
            headers[separator] = next(csv.reader(io.StringIO(text, newline=""), delimiter=separator), [])
        except csv.Error:
            headers[separator] = []
    if not columns:
        return max(headers.items(), key=lambda item: len(item[1]))
    for separator, names in headers.items():
        if all(names.count(column) == 1 for column in columns):
            return separator, names
    names = max(headers.values(), key=len)
    column = next(column for column in columns if names.count(column) != 1)
    problem = "no column" if column not in names else "more than one column"
    raise ValueError(
        f"{path} has {problem} {column!r} (--json-keys, --column). The columns of the file are: "
        f"{', '.join(map(repr, names[:8])) or 'none'}. Choose one that occurs once."
    )


def read_rows(
    path: str,
    file: BinaryIO,
    columns: Sequence[str],
    on_progress: Callable[[], None],
    decoder: RecordDecoder,
    optional_columns: Sequence[str] = (),
) -> Iterator[Any]:
    """Yield the values of all columns for each row. For a row with invalid quoting, yield a `BadRecordError` instead.

    Invalid bytes are marked by the error handler `MARK_INVALID`. A value that is missing in a short row is None.

    Args:
        path: path or URL of the file, for error messages.
        file: the opened file.
        columns: names of the columns, in the order of the yielded values.
        on_progress: called after each row.
        decoder: decoder whose encoding is set.
        optional_columns: names of columns that the file need not have. Their values are then None.

    Raises:
        DamagedFileError: a quotation is still open at the end of the file.
    """
    csv.field_size_limit(_MAX_FIELD_SIZE)
    separator, names = _read_header(path, file, columns, decoder)
    if not names:
        return
    optional_indices = (names.index(column) if names.count(column) == 1 else len(names) for column in optional_columns)
    column_indices = [*map(names.index, columns), *optional_indices]
    text = io.TextIOWrapper(cast(Any, file), decoder.encoding, MARK_INVALID, newline="")
    if text.read(1) != "\ufeff":
        text.seek(0)
    reader = csv.reader(text, delimiter=separator, strict=True)
    next(reader)
    num_rows = 0
    while True:
        try:
            row = next(reader)
        except StopIteration:
            text.detach()
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise DamagedFileError(
                    f"{path} is truncated or damaged: after row {num_rows:,} a quotation is never closed.\n"
                    "  Create or copy the file again."
                ) from error
            yield BadRecordError(f"the row is not valid CSV: {error}. Correct this row")
        else:
            if not row:
                continue  # a blank line
            yield tuple(row[column_index] if column_index < len(row) else None for column_index in column_indices)
        num_rows += 1
        on_progress()
