"""Reader of JSON files that contain an array of records, record by record. Memory holds a buffer and one record."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron_lab.data_tools.preprocess.errors import BadRecordError, DamagedFileError
from megatron_lab.data_tools.preprocess.text_encoding import MARK_INVALID, RecordDecoder, find_invalid

DETECTION_BYTES = 1 << 12
"""Number of bytes at the start of a file from which an array is detected. At most this much white space may precede it."""
_READ_BYTES = 1 << 20
_MAX_TOKEN_CHARACTERS = 16
"""More characters than the longest token of JSON outside of strings that is not a number (-Infinity, a surrogate pair)."""
_WHITESPACE = " \t\r\n"
_SKIP_WHITESPACE = re.compile(f"[{_WHITESPACE}]*").match
_DECODER = json.JSONDecoder()
_BOUNDARY_DECODER = json.JSONDecoder(parse_int=len)
"""Decoder that finds the end of a record with an integer of more digits than Python converts."""


@dataclass(frozen=True)
class MarkedRecord:
    """JSON text of a record that contains invalid bytes, marked by the error handler `MARK_INVALID`."""

    text: str
    first: int
    """Index of the first invalid byte in the text."""


def starts_array(start: bytes, decoder: RecordDecoder) -> bool:
    """Return whether a JSON file contains an array, instead of JSON lines.

    Args:
        start: first bytes of the file.
        decoder: decoder whose encoding is set.
    """
    decoder.set_encoding_of_json(start[:4])
    return start.decode(decoder.encoding, "ignore").removeprefix("\ufeff").lstrip(_WHITESPACE).startswith("[")


def read_records(path: str, file: BinaryIO, on_progress: Callable[[], None], decoder: RecordDecoder) -> Iterator[Any]:
    """Yield the records of an array: parsed JSON values, a `MarkedRecord` for a record with invalid bytes, or a `BadRecordError`
    for a record with a number that Python does not convert.

    Args:
        path: path or URL of the file, for error messages.
        file: the file, at its start.
        on_progress: called after each record.
        decoder: decoder whose encoding is set.

    Raises:
        DamagedFileError: the array is incomplete or is not valid JSON, or something follows it.
    """
    start = file.read(DETECTION_BYTES)
    decoder.set_encoding_of_json(start[:4])
    text = _TextBuffer(file, start, decoder.encoding)
    num_records = 0
    try:
        text.take("[")
        if text.peek() != "]":
            while True:
                record = text.read_value()
                num_records += 1
                yield record
                on_progress()
                if text.peek() != ",":
                    break
                text.take(",")
        text.take("]")
        if text.peek():
            raise _SyntaxError("the array ends, but the file continues. A file holds one array of records, or one record per line")
    except _SyntaxError as error:
        raise DamagedFileError(
            f"{path} is truncated or damaged, in or after record {num_records:,}: {error}.\n"
            "  Correct the file, or create or copy it again."
        ) from error


class _SyntaxError(Exception):
    """Raised for an array that is incomplete or not valid JSON."""


class _TextBuffer:
    """Part of the text of a file that has been read and not been parsed yet.

    Args:
        file: the opened file.
        start: first bytes of the file, which have been read.
        encoding: codec of the file.
    """

    def __init__(self, file: BinaryIO, start: bytes, encoding: str) -> None:
        self._file, self._encoding = file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)(MARK_INVALID)
        self._text = self._decoder.decode(start).removeprefix("\ufeff")
        self._position = 0
        self._num_dropped = 0
        self._has_marks = _has_invalid(self._text)

    def peek(self) -> str:
        """Return the next character that is not white space, without taking it; an empty text at the end of the file."""
        while True:
            self._position = _SKIP_WHITESPACE(self._text, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._text) or not self._read():
                return self._text[self._position : self._position + 1]

    def take(self, character: str) -> None:
        """Take a character after white space.

        Raises:
            _SyntaxError: the next character is another one.
        """
        if (found := self.peek()) != character:
            place = self._describe_offset(self._position)
            raise _SyntaxError(f"{found!r} stands in place of {character!r}{place}" if found else "the array is not closed")
        self._position += 1

    def read_value(self) -> Any:
        """Return the next JSON value, or a `MarkedRecord` or `BadRecordError` as `read_records` yields them.

        Raises:
            _SyntaxError: the value is incomplete or is not valid JSON.
        """
        if not self.peek():
            raise _SyntaxError("the array is not closed")
        value: Any
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                is_incomplete = error.msg.startswith("Unterminated string") or len(self._text) - error.pos < _MAX_TOKEN_CHARACTERS
                place = self._describe_offset(error.pos)
                if is_incomplete and self._read():
                    continue
                raise _SyntaxError(f"{error.msg.removesuffix(' at')}{place}") from error
            except RecursionError as error:
                raise _SyntaxError(f"the record{self._describe_offset(self._position)} is nested too deeply") from error
            except ValueError as error:  # an integer of too many digits
                try:
                    _, end = _BOUNDARY_DECODER.raw_decode(self._text, self._position)
                except ValueError as boundary_error:
                    if self._read():
                        continue
                    raise _SyntaxError(str(boundary_error)) from boundary_error
                value = BadRecordError(str(error))
            # A number may continue after the text that has been read.
            if end < len(self._text) or not self._read():
                break
        if self._has_marks and (first := find_invalid(text := self._text[self._position : end])) is not None:
            value = MarkedRecord(text, first)
        self._position = end
        return value

    def _read(self) -> bool:
        """Append text of the file: as much as the buffer contains, so that the time for a long record is proportional to its
        length. Return whether the file had more."""
        self._num_dropped += self._position
        self._text, self._position = self._text[self._position :], 0
        while block := self._file.read(max(_READ_BYTES, len(self._text))):
            if added := self._decoder.decode(block):
                self._has_marks = self._has_marks or _has_invalid(added)
                self._text += added
                return True
        added = self._decoder.decode(b"", final=True)
        self._has_marks = self._has_marks or _has_invalid(added)
        self._text += added
        return bool(added)

    def _describe_offset(self, position: int) -> str:
        return f" at character {self._num_dropped + position + 1:,}"


def _has_invalid(text: str) -> bool:
    """Return whether a text contains marks of invalid bytes. They are the only characters that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
