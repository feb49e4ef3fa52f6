"""Reader of Arrow IPC files (.arrow, .feather), and the columns of Arrow tables that parquet files share with them.

Arrow IPC has two formats: the stream format, which `datasets` writes, and the file format, which is also that of Feather version 2.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from megatron.config.optional_packages import import_optional
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.errors import DamagedFileError
from megatron_lab.data_tools.preprocess.record_keys import iter_key_splits

_FILE_MAGIC, _FEATHER_1_MAGIC = b"ARROW1", b"FEA1"
_END_MARKER = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a complete stream (https://arrow.apache.org/docs/format/Columnar.html, IPC Streaming Format)."""
_MAX_ROWS = 256
"""Number of rows that are converted to Python objects together."""


def check_columns(path: str, columns: Sequence[str], *, requires_strings: bool = True) -> None:
    """Check that an Arrow file has each of `columns` once.

    Args:
        requires_strings: whether these columns must have a string type.

    Raises:
        ValueError: the file is not an Arrow file or is damaged, or a column is missing or has another type.
    """
    with storage.open_binary(path) as file:
        find_columns(path, _open(path, file).schema, columns, requires_strings=requires_strings)


def read_rows(
    path: str, file: BinaryIO, columns: Sequence[str], on_progress: Callable[[], None], optional_columns: Sequence[str] = ()
) -> Iterator[tuple[object, ...]]:
    """Yield the values of all columns for each row of an Arrow file. Memory holds one record batch of these columns.

    A string that is not valid UTF-8 is yielded as bytes.

    Args:
        path: path or URL of the file, for error messages.
        file: the opened file.
        on_progress: called after each record batch.
        optional_columns: columns that the file need not have. Their values are then None.

    Raises:
        DamagedFileError: the file is truncated or damaged.
    """
    import pyarrow

    reader = _open(path, file)
    names = find_columns(path, reader.schema, columns, optional_columns, requires_strings=False)
    indices = sorted({reader.schema.get_field_index(column_names[0]) for column_names in names if column_names})
    file.seek(0)
    reader = _open(path, file, pyarrow.ipc.IpcReadOptions(included_fields=indices))
    num_rows = 0
    try:
        for batch in _iter_batches(reader):
            values = [get_column(batch, column_names) for column_names in names]
            for column in values:
                _check_offsets(column)
            for start in range(0, batch.num_rows, _MAX_ROWS):
                yield from zip(*(to_values(column.slice(start, _MAX_ROWS)) for column in values), strict=True)
            num_rows += batch.num_rows
            on_progress()
        if not hasattr(reader, "num_record_batches") and not _has_end_marker(file):
            raise pyarrow.ArrowInvalid("the end of the stream is missing")
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise DamagedFileError(
            f"{path} is truncated or damaged, after row {num_rows:,} or later: {' '.join(str(error).split())}.\n"
            "  Create or copy the file again."
        ) from error


def _open(path: str, file: BinaryIO, options: Any = None) -> Any:
    """Return pyarrow's reader of a file in either format.

    Raises:
        ValueError: the file is not an Arrow file or is damaged, or pyarrow is not installed.
    """
    ipc = import_optional("pyarrow.ipc", f"{path}: Arrow files are read by pyarrow")
    import pyarrow

    start = file.read(len(_FILE_MAGIC))
    file.seek(0)
    if start.startswith(_FEATHER_1_MAGIC):
        raise ValueError(
            f"{path} is a file of Feather version 1, which is not read.\n  Write it again with pyarrow.feather.write_feather."
        )
    try:
        open_reader = ipc.open_file if start == _FILE_MAGIC else ipc.open_stream
        return open_reader(file, options=options)
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not an Arrow file, or is damaged ({error}).\n  Create or copy the file again.") from error


def _iter_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from reader


def _has_end_marker(file: BinaryIO) -> bool:
    """Return whether a stream ends with the mark of its end. pyarrow accepts a stream that ends after any record batch."""
    position = file.tell()
    file.seek(0)
    is_modern = file.read(4) == _END_MARKER[:4]  # before version 0.15 of Arrow, the mark consisted of zeros only
    marker = _END_MARKER if is_modern else _END_MARKER[4:]
    file.seek(-len(marker), 2)
    ends = file.read(len(marker)) == marker
    file.seek(position)
    return ends


def _check_offsets(column: Any) -> None:
    """Check that the offsets of strings lie within their buffer. Strings that are not valid UTF-8 are no error here."""
    import pyarrow

    types = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    (column.view(types[column.type]) if column.type in types else column).validate(full=True)


def find_columns(
    path: str, schema: Any, keys: Sequence[str], optional_keys: Sequence[str] = (), *, requires_strings: bool
) -> list[list[str]]:
    """Return the names that lead to each column: the name of the column, or for data.text the names of the struct column and of
    its field. The list of names is empty for an optional column that the file does not have.

    Args:
        path: path or URL of the file, for error messages.
        schema: pyarrow schema of the file.
        keys: names of the columns. A column whose name contains the dot precedes a field.
        requires_strings: whether these columns must have a string type.

    Raises:
        ValueError: a column is missing, occurs several times, or has another type.
    """
    from pyarrow import types

    columns = []
    for key in keys:
        fields = _find_fields(list(schema), key)
        if not fields:
            problem = "no column" if key not in schema.names else "more than one column"
            names = ", ".join(map(repr, schema.names[:8]))
            raise ValueError(
                f"{path} has {problem} {key!r} (--json-keys, --column). The columns of the file are: {names}. Choose one that "
                "occurs once."
            )
        column_type = fields[-1].type
        value_type = column_type.value_type if types.is_dictionary(column_type) else column_type
        if requires_strings and not (
            types.is_string(value_type) or types.is_large_string(value_type) or str(value_type) == "string_view"
        ):
            raise ValueError(
                f"{path}: the column {key!r} (--json-keys, --column) has the type {column_type}, not string. Choose a column "
                "of strings"
            )
        columns.append([field.name for field in fields])
    return columns + [[field.name for field in _find_fields(list(schema), key)] for key in optional_keys]


def _find_fields(fields: Sequence[Any], key: str) -> list[Any]:
    """Return the fields that lead to a key: a field with this name, or a struct field with the start of the name up to a dot,
    followed by the fields within it. The list is empty without such fields."""
    from pyarrow import types

    named = [field for field in fields if field.name == key]
    if named:
        return named if len(named) == 1 else []
    for name, inner_key in iter_key_splits(key):
        parents = [field for field in fields if field.name == name and types.is_struct(field.type)]
        if len(parents) == 1 and (found := _find_fields(list(parents[0].type), inner_key)):
            return [parents[0], *found]
    return []


def get_column(batch: Any, names: Sequence[str]) -> Any:
    """Return a column of a record batch, or a field of a struct column, by the names that `find_columns` returns. Without names,
    return a column of None."""
    if not names:
        import pyarrow

        return pyarrow.nulls(batch.num_rows)
    column = batch.column(names[0])
    if len(names) > 1:
        from pyarrow import compute

        for name in names[1:]:
            column = compute.struct_field(column, [name])
    return column


def to_values(column: Any) -> list[object]:
    """Return the values of an Arrow array as Python objects. A string that is not valid UTF-8 is returned as bytes.

    All objects of a struct column have the same fields, so null fields in them are absent fields, which are left out. Values of
    the type arrow.json, with which `datasets` stores objects of different fields, are parsed; their null fields are kept.
    """
    import pyarrow

    try:
        values = list(column.to_pylist())
    except UnicodeDecodeError:  # at least one value is invalid; the others are kept
        values = [_decode_or_keep(value) for value in column.cast(pyarrow.large_binary()).to_pylist()]
    convert = _build_converter(column.type)
    return values if convert is None else [convert(value) for value in values]


def _build_converter(value_type: Any) -> Callable[[Any], object] | None:
    """Return the function that leaves null fields out of a value of an Arrow type, and parses JSON in it. None: there are neither
    fields nor JSON in values of the type."""
    from pyarrow import types

    if getattr(value_type, "extension_name", None) == "arrow.json":
        return _parse_json_value
    if types.is_struct(value_type):
        converters = {field.name: _build_converter(field.type) for field in value_type}
        return functools.partial(_convert_struct, converters=converters)
    if types.is_list(value_type) or types.is_large_list(value_type) or types.is_fixed_size_list(value_type):
        convert = _build_converter(value_type.value_type)
        return None if convert is None else functools.partial(_convert_list, convert=convert)
    return None


def _convert_struct(
    value: dict[str, Any] | None, converters: Mapping[str, Callable[[Any], object] | None]
) -> dict[str, object] | None:
    if value is None:
        return None
    return {
        name: item if (convert := converters[name]) is None else convert(item) for name, item in value.items() if item is not None
    }


def _convert_list(values: list[Any] | None, convert: Callable[[Any], object]) -> list[object] | None:
    return values and [convert(value) for value in values]


def _parse_json_value(text: str | None) -> object:
    """Return the value of a JSON text; a text that is not JSON is returned as it is."""
    try:
        return None if text is None else json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text


def _decode_or_keep(value: bytes | None) -> str | bytes | None:
    try:
        return value.decode() if value is not None else None
    except UnicodeDecodeError:
        return value
