"""Tables of text: .csv and .tsv files, row by row. The first row names the columns.

Commas, semicolons, tabs and bars are known as separators; that counts under which the wanted columns have names.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, cast

from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.errors import BadRecordError, DamagedFileError

_SEPARATORS = ",;\t|"
_LONGEST_FIELD = 2**31 - 1  # as much as csv takes on every system
_LONGEST_HEADER = 1 << 20


def check_columns(path: str, keys: Sequence[str]) -> None:
    """Look whether a table has these columns.

    Raises:
        ValueError: it lacks one, or names one twice.
    """
    with storage.open_binary(path) as file:
        _header(path, file, keys)


def _header(path: str, file: BinaryIO, keys: Sequence[str]) -> tuple[str, list[str]]:
    """The separator, and the names of the columns; the file is at its beginning again."""
    text = file.read(_LONGEST_HEADER).decode("utf-8-sig", "surrogateescape")
    file.seek(0)
    found = {}
    for separator in _SEPARATORS:
        try:
            found[separator] = next(csv.reader(io.StringIO(text, newline=""), delimiter=separator), [])
        except csv.Error:
            found[separator] = []
    for separator, names in found.items():
        if all(names.count(key) == 1 for key in keys):
            return separator, names
    names = max(found.values(), key=len)
    key = next(key for key in keys if names.count(key) != 1)
    number = "no column" if key not in names else "more than one column"
    raise ValueError(f"{path}: {number} {key!r} (--json-keys, --column); it has: {', '.join(map(repr, names[:8])) or 'none'}")


def rows(path: str, file: BinaryIO, keys: Sequence[str], at: Callable[[int], None]) -> Iterator[Any]:
    """The values of these columns, row by row; for a row that breaks the rules of quoting a `BadRecordError`.

    A string that is not UTF-8 comes as bytes, a value that a short row lacks as None.

    Raises:
        DamagedFileError: a quote is open at the end of the file.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    separator, names = _header(path, file, keys)
    places = [names.index(key) for key in keys]
    text = io.TextIOWrapper(cast(Any, file), "utf-8-sig", "surrogateescape", newline="")
    reader = csv.reader(text, delimiter=separator, strict=True)
    next(reader)
    number = 0
    while True:
        try:
            row = next(reader)
        except StopIteration:
            text.detach()
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise DamagedFileError(
                    f"{path} is truncated or damaged: after row {number:,} a quote opens that is never closed.\n"
                    "  Make or copy it again."
                ) from error
            yield BadRecordError(f"not a row of a table: {error}")
        else:
            if not row:
                continue  # a blank line
            yield tuple(_value(row[place]) if place < len(row) else None for place in places)
        number += 1
        at(file.tell())


def _value(text: str) -> str | bytes:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text
