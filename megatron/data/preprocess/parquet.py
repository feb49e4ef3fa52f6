"""Rows of parquet files, one row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.data.preprocess import storage

_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 1 << 20


def row_groups(path: str, keys: Sequence[str]) -> list[tuple[int, int]]:
    """Bytes in the file and rows of each row group.

    Raises:
        ValueError: no parquet file, a damaged one, or a column is missing or holds no strings.
    """
    import_parquet(path)
    with storage.open_binary(path) as file:
        opened = open_parquet(path, file)
        schema, metadata = opened.schema_arrow, opened.metadata
        for key in keys:
            if key not in schema.names:
                raise ValueError(f"{path}: no column {key!r} (--json-keys); it has: {', '.join(map(repr, schema.names[:8]))}")
            held = str(schema.field(key).type)
            if "string" not in held:
                raise ValueError(f"{path}: the column {key!r} (--json-keys) holds {held}, not strings")
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [(sum(group.column(n).total_compressed_size for n in range(group.num_columns)), group.num_rows) for group in groups]


def rows(path: str, file: Any, keys: Sequence[str], group: int) -> Iterator[tuple[object, ...]]:
    """The values of these columns, row by row; memory holds the row group at most."""
    opened = open_parquet(path, file)
    for batch in opened.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[*keys], use_threads=False):
        columns = [batch.column(key).to_pylist() for key in keys]
        yield from zip(*columns, strict=True)


def import_parquet(path: str) -> Any:
    """pyarrow.parquet."""
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
        return import_parquet(path).ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except pyarrow.lib.ArrowException as error:
        raise ValueError(f"{path} is no parquet file, or a damaged one ({error}).\n  Make or copy it again.") from error
