"""Streams the records of a piece. Memory holds a buffer and one record; for parquet, one row group."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, BinaryIO, cast

from megatron.data.preprocess import packed_files, storage
from megatron.data.preprocess.input_shards import InputPiece, Kind
from megatron.data.preprocess.packed_files import ZstdReader
from megatron.data.preprocess.storage import BadRecordError, DamagedFileError

Record = Any
"""A line (bytes), the values of a row, or the content of a text file (bytes)."""
Records = Generator[Record, None, None]


def records(piece: InputPiece, keys: Sequence[str], at: Callable[[int], None]) -> Records:
    """The records of a piece.

    Args:
        piece: what to read.
        keys: columns to read of parquet.
        at: called now and then with the number of bytes of the piece that have been read.

    Raises:
        DamagedFileError: the file ends too early, or is not of the kind that its name says.
    """
    with storage.open_binary(piece.path) as file:
        if piece.kind == "jsonl":
            yield from _lines(file, piece, at)
        elif piece.kind == "parquet":
            for group in range(piece.begin, piece.end):
                yield from packed_files.rows(piece.path, file, keys, group)
                at(piece.num_bytes * (group + 1 - piece.begin) // (piece.end - piece.begin))
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


# ---- the texts of a record, one for each key


def parse_line(line: bytes, keys: Sequence[str]) -> list[str] | None:
    """The texts of a JSON line; None if it is blank.

    Raises:
        ValueError: it is not a JSON object that has a text for each key.
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
            raise BadRecordError(f"no key {key!r} (--json-keys); the line has: {', '.join(map(repr, [*found][:8])) or 'none'}")
    return parse_values([found[key] for key in keys], keys)


def parse_values(values: Sequence[object], keys: Sequence[str]) -> list[str]:
    """The texts of a parquet row.

    Raises:
        BadRecordError: one is no string, or none that has a UTF-8 form.
    """
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, bytes):
            raise BadRecordError(f"key {key!r} is not UTF-8: {value[:40]!r}")
        if not isinstance(value, str):
            raise BadRecordError(f"the value of key {key!r} is not a string but {json.dumps(value, default=str)[:40]}")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise BadRecordError(
                    f"key {key!r} holds half of a surrogate pair, which is no character: {error.object[error.start]!a}"
                ) from error
    return cast("list[str]", list(values))


def parse_text(content: bytes, keys: Sequence[str]) -> list[str]:
    """The content of a text file as one text.

    Raises:
        BadRecordError: it is not UTF-8.
    """
    try:
        return [content.removeprefix(b"\xef\xbb\xbf").decode()]
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadRecordError(f"not UTF-8: byte {content[error.start]:#04x} in line {line}") from error


PARSERS: dict[Kind, Callable[[Any, Sequence[str]], list[str] | None]] = {
    "jsonl": parse_line,
    "jsonl.gz": parse_line,
    "jsonl.zst": parse_line,
    "parquet": parse_values,
    "text": parse_text,
}


def place(path: str, kind: Kind, number: int) -> str:
    """A record's place for messages. Records are numbered from 0 in their file; lines are shown from 1, rows from 0."""
    if kind == "text":
        return path
    return f"{path}: row {number}" if kind == "parquet" else f"{path}:{number + 1}"
