"""Character encodings of input texts: detection of the encoding of a file, decoding of its records, and notes for the user.

A file is UTF-8 unless its content says otherwise. `detect_encoding` recognizes byte order marks and, with the library
charset-normalizer, common encodings of text files. No result is silent: `EncodingNotes` collects the files that are not UTF-8 and
the records with invalid bytes.
"""

from __future__ import annotations

import codecs
import difflib
import encodings.aliases
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron.config.optional_packages import import_optional
from megatron_lab.data_tools.preprocess.errors import UndecodableRecordError

ErrorHandling = Literal["strict", "replace", "ignore", "backslashreplace"]
"""Treatment of bytes that are invalid in the encoding of their file, with the names and meanings of Python's error handlers."""
ERROR_HANDLINGS: tuple[ErrorHandling, ...] = get_args(ErrorHandling)

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark is the start of this mark
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CANDIDATES = tuple(
    "cp1252 cp1251 koi8_r cp866 iso8859_2 cp1250 cp1253 iso8859_7 cp1254 cp1255 cp1256 cp932 euc_jp gb18030 big5 cp949 mac_roman "
    "cp850".split()
)
"""Encodings without a byte order mark that are detected, in order of preference. cp1252 includes the letters of Latin-1."""
_UTF_WITHOUT_MARK = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
_ESCAPES = ("unicode-escape", "raw-unicode-escape", "punycode", "idna")
"""Codecs of strings in source code and in addresses, which are no encodings of files."""
_COMMON_ENCODINGS = "utf-8, utf-16, latin-1, cp1252 (Windows, Western Europe), cp1251, shift_jis, gb18030, big5, euc_kr"
DETECTION_BYTES = 8 << 20
"""Maximum number of bytes at the start of a table from which its encoding is detected. Of a text file, all bytes are used."""
_SAMPLE_BYTES = 1 << 16
_MAX_SAMPLE_LINE_BYTES = 1 << 12
_MAX_CHAOS_DIFFERENCE, _MAX_COHERENCE_DIFFERENCE = 0.02, 0.05
"""Encodings whose measures of charset-normalizer differ by less are equally likely."""
_MIN_WIDE_CHARACTERS = 8
"""Minimum number of characters from which UTF-16 and UTF-32 are detected without a byte order mark."""
_MIN_NUL_SHARE = 0.02
"""Minimum share of characters in UTF-16 with a byte of zero, such as spaces and newlines."""
_MIN_CONTROL_SHARE = 0.7
"""Minimum share of zeros and control characters among the high bytes of UTF-16 text in alphabets such as Latin and Cyrillic."""
_MIN_ERROR_SHARE = 0.1
"""Minimum number of errors of the UTF-8 decoder per byte of UTF-16 text in other scripts, such as Chinese."""
_MAX_INVALID_SHARE = 0.005
"""Maximum share of invalid bytes and control characters in a text of an unknown encoding."""
_BLOCK_BYTES = 1 << 20
_CONTROL_CHARACTERS = bytes({*range(8), *range(14, 26), 28, 29, 30, 31})
_BINARY = "the file looks like binary data, not text"
_BYTE_ORDER_MARK, _REPLACEMENT = "\ufeff", "\N{REPLACEMENT CHARACTER}"
_NON_ASCII_BYTES = bytes(range(0x80, 0x100))
_MAX_LISTED_FILES, _MAX_LISTED_RECORDS = 3, 5
"""Maximum number of files with the same encoding, and of records, that the terminal lists."""


@dataclass(frozen=True)
class TextEncoding:
    """Encoding of the input files, and treatment of invalid bytes."""

    name: str | None = None
    """Python codec of all files (--encoding); None to detect the encoding of each file."""
    errors: ErrorHandling = "strict"
    """Treatment of invalid bytes (--errors). "strict" makes the record invalid; the other values keep the record."""


def normalize_encoding(name: str) -> str:
    """Return Python's name of a text encoding.

    Raises:
        ValueError: Python has no text encoding of this name. The message suggests similar names.
    """
    try:
        codec = codecs.lookup(name)
        "\n".encode(name)  # refuses codecs that are no text encodings, such as hex
        if codec.name in _ESCAPES:
            raise LookupError
    except (LookupError, ValueError):
        known = {alias.replace("_", "-") for pair in encodings.aliases.aliases.items() for alias in pair}
        similar = difflib.get_close_matches(name.lower().replace("_", "-"), sorted(known), 3)
        suggestion = f"Did you mean {' or '.join(similar)}? " if similar else ""
        raise ValueError(
            f"Python has no text encoding named {name!r}. {suggestion}Common names: {_COMMON_ENCODINGS}. Without --encoding, the "
            "encoding of each file is detected"
        ) from None
    return "utf-8" if codec.name == "utf-8-sig" else codec.name  # a byte order mark is always removed


def detect_mark(content: bytes) -> str | None:
    """Return the encoding that the byte order mark at the start of a file names; None without a mark."""
    return next((name for mark, name in _BYTE_ORDER_MARKS if content.startswith(mark)), None)


def has_one_byte_newlines(encoding: str) -> bool:
    r"""Return whether the byte "\n" ends a line and occurs nowhere else, so that a file can be split into lines before decoding."""
    return "\n".encode(encoding) == b"\n"


def detect_encoding(content: bytes, *, is_complete: bool = True) -> tuple[str | None, str]:
    """Detect the encoding of a text.

    The result is UTF-8 if the content is valid UTF-8, or if it has at least as many characters of several bytes as errors of the
    decoder. In texts of other encodings, bytes that form a character of UTF-8 are rare. The exception is UTF-16 and UTF-32: without
    a byte order mark, they are detected if `_detect_wide` finds strong evidence.

    The bytes of the content are counted without a Python function for each of them. Only a sample of bounded size is analyzed
    further.

    Args:
        content: content of a file, or its start.
        is_complete: whether `content` is the complete file. Otherwise its last character may be incomplete.

    Returns:
        The encoding, or None if it is not recognized; and how it was recognized, or why not. For UTF-8 the second value is empty.
    """
    if (encoding := detect_mark(content)) is not None:
        return encoding, "" if encoding == "utf-8" else "byte order mark"
    num_multibyte, num_errors = _count_utf8(content, is_complete=is_complete)
    if b"\0" in content and (encoding := _detect_wide(content, num_errors, is_complete=is_complete)) is not None:
        return encoding, "detected"
    if num_multibyte >= num_errors:
        return "utf-8", ""
    num_controls = len(content) - len(content.translate(None, _CONTROL_CHARACTERS))
    if b"\0" in content or num_controls > _MAX_INVALID_SHARE * len(content):
        return None, _BINARY
    return _recognize(_sample_lines(content))


def _count_utf8(content: bytes, *, is_complete: bool) -> tuple[int, int]:
    """Return the number of characters of several bytes in a text that is read as UTF-8, and the number of errors of the decoder."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_characters = num_replacements = 0
    for start in range(0, len(content), _BLOCK_BYTES):
        is_last = start + _BLOCK_BYTES >= len(content)
        text = decoder.decode(content[start : start + _BLOCK_BYTES], is_complete and is_last)
        num_characters += len(text)
        num_replacements += text.count(_REPLACEMENT)
    num_errors = num_replacements - content.count(_REPLACEMENT.encode())
    num_ascii = len(content.translate(None, _NON_ASCII_BYTES))
    return num_characters - num_ascii - num_errors, num_errors


def _detect_wide(content: bytes, num_utf8_errors: int, *, is_complete: bool) -> str | None:
    """Return the encoding of a text in UTF-16 or UTF-32 without a byte order mark; None for another text.

    Valid UTF-8 may contain zeros, for example between the names of files. So the text must be printable and contain a space or a
    newline, some high bytes of its characters must be zeros, and either most of these bytes are zeros or control characters, or the
    text has many errors as UTF-8.
    """
    for encoding in _UTF_WITHOUT_MARK:
        is_high = [not byte for byte in "a".encode(encoding)]
        width = len(is_high)
        columns = [content[index::width] for index in range(width)]
        high_columns = [column for column, is_high_column in zip(columns, is_high, strict=True) if is_high_column]
        num_characters = len(content) // width
        num_zeros = min(column.count(0) for column in high_columns)
        if num_characters < _MIN_WIDE_CHARACTERS or num_zeros <= _MIN_NUL_SHARE * num_characters:
            continue
        num_controls = min(len(column) - len(column.translate(None, _CONTROL_CHARACTERS)) for column in high_columns)
        if num_controls < _MIN_CONTROL_SHARE * num_characters and num_utf8_errors < _MIN_ERROR_SHARE * len(content):
            continue
        is_final = is_complete and len(content) <= _SAMPLE_BYTES
        sample = codecs.getincrementaldecoder(encoding)("replace").decode(content[:_SAMPLE_BYTES], is_final)
        num_bad = sum(char == _REPLACEMENT or not (char.isprintable() or char.isspace()) for char in sample)
        # In the wrong byte order, U+4E00 (the Chinese one) is the letter N, but no character of a text is a space.
        if num_bad <= _MAX_INVALID_SHARE * len(sample) and (" " in sample or "\n" in sample):
            return encoding
    return None


def _recognize(sample: bytes) -> tuple[str | None, str]:
    """Return the most likely of `_CANDIDATES` for a sample in an unknown encoding, and how it was recognized."""
    library = import_optional("charset_normalizer", "the detection of encodings needs charset-normalizer")
    measures = {
        name: (match.chaos, match.coherence)
        for match in library.from_bytes(sample, cp_isolation=list(_CANDIDATES))
        for name in match.could_be_from_charset
        if name in _CANDIDATES
    }
    if not measures:
        return None, "the file is not UTF-8, and its encoding is not recognized"
    min_chaos = min(chaos for chaos, _ in measures.values())
    coherences = {name: value for name, (chaos, value) in measures.items() if chaos <= min_chaos + _MAX_CHAOS_DIFFERENCE}
    min_coherence = max(coherences.values()) - _MAX_COHERENCE_DIFFERENCE
    return next(name for name in _CANDIDATES if coherences.get(name, -1) >= min_coherence), "detected"


def _sample_lines(content: bytes) -> bytes:
    """Return the first lines of a text that contain bytes outside of ASCII. The start and the end of long lines are cut off."""
    lines: list[bytes] = []
    num_bytes = end = 0
    while num_bytes < _SAMPLE_BYTES and (match := _NON_ASCII.search(content, end)) is not None:
        first = match.start()
        # The bytes between `end` and `first` are ASCII, so no character is cut.
        start = max(content.rfind(b"\n", end, first) + 1, end, first - _MAX_SAMPLE_LINE_BYTES)
        end = content.find(b"\n", first, first + _MAX_SAMPLE_LINE_BYTES) + 1
        if not end:
            # Cut a long line after a space or a digit, which are no bytes of a longer character in almost all encodings.
            limit = first + _MAX_SAMPLE_LINE_BYTES
            separator = _SEPARATOR.search(content, limit, limit + _SAMPLE_BYTES)
            end = separator.end() if separator else min(len(content), limit + _SAMPLE_BYTES)
        lines.append(content[start:end].rstrip(b"\n"))
        num_bytes += end - start
    return b"\n".join(lines)


_NON_ASCII, _SEPARATOR = re.compile(rb"[\x80-\xff]"), re.compile(rb"[\x00-/:-?]")


# ---- invalid bytes

MARK_INVALID = "megatron-mark-invalid"
"""Name of the error handler for codecs that writes invalid bytes as halves of surrogate pairs."""
_FIRST_MARK, _NEXT_MARK = 0xDC00, 0xDD00
_INVALID = re.compile("[\udc00-\udcff][\udd00-\uddff]*")
"""Invalid bytes in a text that was decoded with the error handler `MARK_INVALID`: the bytes of one error of the decoder."""


def _mark_invalid(error: UnicodeError) -> tuple[str, int]:
    """Error handler of codecs. Write invalid bytes as halves of surrogate pairs, which no valid text contains.

    The first byte and the following bytes of an error have different marks, so that "replace" later has the effect that it has in
    Python: one replacement character for each error of the decoder.
    """
    if not isinstance(error, UnicodeDecodeError):
        raise error
    first, *following = error.object[error.start : error.end]
    return chr(_FIRST_MARK + first) + "".join(chr(_NEXT_MARK + byte) for byte in following), error.end


codecs.register_error(MARK_INVALID, _mark_invalid)


def find_invalid(marked: str) -> int | None:
    """Return the index of the first invalid byte in a text that was decoded with the error handler `MARK_INVALID`; None if all
    bytes are valid."""
    first = _INVALID.search(marked)
    return None if first is None else first.start()


_BY_MARK = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}
"""Encodings whose byte order the mark at the start of the file sets, with the encoding of a file without a mark."""


class RecordDecoder:
    """Decoder of the records of an input range, which collects the invalid bytes.

    Attributes:
        encoding: codec of the file. The reader of the file sets it if the settings leave it open.
        note: text about the encoding for the user, such as "read as cp1252 (detected)"; None for UTF-8.
        record_offset: offset of the current record in the file, in bytes.
        replaced: number of invalid bytes in the current record that were replaced, and description of the first; None if all bytes
            are valid.
    """

    def __init__(self, settings: TextEncoding) -> None:
        self.settings = settings
        self.encoding = "utf-8" if settings.name is None else _BY_MARK.get(settings.name, settings.name)
        self.note: str | None = None
        self.record_offset = 0
        self.replaced: tuple[int, str] | None = None
        self._problem = ""
        # A file whose records outside of ASCII are all valid UTF-8 is probably UTF-8, whatever --encoding says.
        self._may_be_utf8 = settings.name not in (None, "utf-8")

    def set_encoding(self, content: bytes, *, is_complete: bool = True) -> None:
        """Detect the encoding of a file, unless --encoding sets it.

        Args:
            content: content of the file, or its start.
            is_complete: whether `content` is the complete file.
        """
        if self.settings.name is not None:
            self.set_encoding_by_mark(content)
            self._compare_with_utf8(content if is_complete else content[: content.rfind(b"\n") + 1])
            return
        detected, origin = detect_encoding(content, is_complete=is_complete)
        self.encoding = detected or "utf-8"
        if detected is None:
            self._problem = origin
        elif origin:
            self.note = f"read as {detected} ({origin})"

    def set_encoding_by_mark(self, content: bytes) -> None:
        """Set the encoding to that of the byte order mark at the start of a file, unless --encoding names another encoding.

        Args:
            content: first bytes of the file, at least 4 unless the file is shorter.
        """
        encoding = detect_mark(content)
        if encoding is None or encoding == "utf-8":
            return
        if self.settings.name is None:
            self.encoding, self.note = encoding, f"read as {encoding} (byte order mark)"
        elif self.settings.name in _BY_MARK and encoding.startswith(self.settings.name):
            self.encoding = encoding

    def set_encoding_of_json(self, content: bytes) -> None:
        """Set the encoding of a file of JSON lines, or of a JSON array: UTF-8, UTF-16 or UTF-32, unless --encoding sets it.

        Args:
            content: first bytes of the file, at least 4 unless the file is shorter.
        """
        self.set_encoding_by_mark(content)
        # Without a mark, the zeros of the first characters, such as '{"', show the encoding. Zeros before a line are no text.
        if self.settings.name is None and self.note is None and (encoding := json.detect_encoding(content)) in _UTF_WITHOUT_MARK:
            start = content.decode(encoding, "ignore")
            if start.isascii() and (start.startswith(("{", "[")) or start[:1].isspace()):
                self.encoding, self.note = encoding, f"read as {encoding} (detected)"

    def set_utf8(self) -> None:
        """Set the encoding to UTF-8, for a file whose format requires it."""
        self.encoding = "utf-8"
        if self.settings.name not in (None, "utf-8"):
            self.note = "always UTF-8 by its format: --encoding has no effect"
        self._may_be_utf8 = False

    def decode(self, content: bytes, unit: str = "") -> str:
        """Decode a record. A byte order mark at its start is removed.

        Args:
            content: bytes of the record.
            unit: part of the record to which offsets in messages refer, such as "of column 'text'"; empty for the file.

        Raises:
            UndecodableRecordError: bytes are invalid and the settings are "strict", or the file is not text.
        """
        if self._may_be_utf8:
            self._compare_with_utf8(content)
        try:
            text = content.decode(self.encoding)
        except UnicodeDecodeError as error:
            if self._problem == _BINARY:
                raise UndecodableRecordError(f"{_BINARY}. If it is text, name its encoding with --encoding NAME") from error
            location = f"offset {self.record_offset + error.start:,}{unit and ' '}{unit}"
            if num_newlines := content[: error.start].decode(self.encoding, "replace").count("\n"):
                location += f" in line {num_newlines + 1:,}"
            # Python's own error handlers are ten times as fast as `MARK_INVALID`.
            escaped, valid = (content.decode(self.encoding, errors) for errors in ("backslashreplace", "ignore"))
            num_invalid = (len(escaped) - len(valid)) // len(r"\xff")
            self._add_invalid(content[error.start : error.end], num_invalid, location)
            text = content.decode(self.encoding, self.settings.errors)
        return text.removeprefix(_BYTE_ORDER_MARK)

    def decode_value(self, value: object, key: str) -> object:
        """Return a value of a table row, with the invalid bytes of a string treated as --errors says.

        Args:
            value: bytes to decode, a string that was decoded with the error handler `MARK_INVALID`, or another value.
            key: column of the value, for messages.

        Raises:
            UndecodableRecordError: bytes are invalid, and the settings are "strict".
        """
        if isinstance(value, bytes):
            return self.decode(value, f"of column {key!r}")
        if not isinstance(value, str) or value.isascii() or (first := find_invalid(value)) is None:
            return value
        return self.resolve(value, f"character {first:,} of column {key!r}")

    def resolve(self, marked: str, location: str) -> str:
        """Return a text with its invalid bytes treated as --errors says.

        Args:
            marked: text that was decoded with the error handler `MARK_INVALID`.
            location: position of the first invalid byte, such as "offset 3 of the file".

        Raises:
            UndecodableRecordError: the text has invalid bytes, and the settings are "strict".
        """
        invalid = _INVALID.findall(marked)
        if not invalid:
            return marked
        self._add_invalid(bytes(ord(mark) & 0xFF for mark in invalid[0]), sum(map(len, invalid)), location)
        replacement = {"replace": _REPLACEMENT, "ignore": ""}.get(self.settings.errors)
        if replacement is not None:
            return _INVALID.sub(replacement, marked)
        return _INVALID.sub(lambda match: "".join(f"\\x{ord(mark) & 0xFF:02x}" for mark in match[0]), marked)

    def _add_invalid(self, first_bytes: bytes, num_invalid: int, location: str) -> None:
        """Add invalid bytes to `replaced`.

        Args:
            first_bytes: bytes of the first error.
            num_invalid: number of all invalid bytes.
            location: position of the first error, such as "offset 3 of the file".

        Raises:
            UndecodableRecordError: the settings are "strict".
        """
        problem = f"byte 0x{first_bytes.hex()} at {location} is not valid {self.encoding.upper()}"
        if self.settings.errors == "strict":
            if self._problem:
                problem = f"{self._problem}: {problem}"
            raise UndecodableRecordError(
                f"{problem}{f' (invalid bytes: {num_invalid:,})' if num_invalid > 1 else ''}. Name the encoding with --encoding, "
                "or set --errors replace to keep the text with U+FFFD for these bytes"
            )
        num_earlier, first_problem = self.replaced or (0, problem)
        self.replaced = num_earlier + num_invalid, first_problem

    def suggest_encoding(self, record: object) -> str:
        """Return advice for the user about a record that is not UTF-8, from its probable encoding.

        The advice is empty for a record that is UTF-8 except for a few bytes, or that is not bytes.
        """
        if not isinstance(record, bytes) or self.encoding != "utf-8" or self.settings.name is not None:
            return ""
        encoding, _ = detect_encoding(record)
        if encoding in (None, "utf-8"):
            return ""
        return f"\n  This text is probably {encoding}. If the whole file is, set --encoding {encoding}."

    def take_replaced(self) -> tuple[int, str] | None:
        """Return `replaced` of the current record, and reset it for the next record."""
        replaced, self.replaced = self.replaced, None
        return replaced

    def _compare_with_utf8(self, content: bytes) -> None:
        """Add a note if all records outside of ASCII so far are valid UTF-8, although --encoding names another encoding."""
        if content.isascii():
            return
        try:
            content.decode()
        except UnicodeDecodeError:
            self._may_be_utf8, self.note = False, None
        else:
            self.note = f"read as {self.encoding} by --encoding, but is valid UTF-8: its text may be wrong"


@dataclass
class EncodingNotes:
    """Notes for the user about files that are not UTF-8, and about records with invalid bytes."""

    num_files: Counter[str] = field(default_factory=Counter)
    """Number of files by note."""
    num_replaced_records: int = 0
    num_replaced_bytes: int = 0
    num_undecodable: int = 0
    """Number of records that were skipped because they have invalid bytes."""
    first_replaced: list[str] = field(default_factory=list)
    """Location and problem of the first records whose invalid bytes were replaced."""
    _first_paths: dict[str, list[str]] = field(default_factory=dict)
    _last_paths: dict[str, str] = field(default_factory=dict)

    def add_file(self, path: str, note: str) -> bool:
        """Add the note about the encoding of a file. Return whether the note is new for this file, of which several ranges may
        have the note."""
        if self._last_paths.get(note) == path:
            return False
        self._last_paths[note] = path
        if len(paths := self._first_paths.setdefault(note, [])) < _MAX_LISTED_FILES:
            paths.append(path)
        self.num_files[note] += 1
        return True

    def add_replaced(self, location: str, num_bytes: int, problem: str) -> None:
        """Add a record whose invalid bytes were replaced.

        Args:
            location: file and line of the record.
            num_bytes: number of invalid bytes.
            problem: description of the first of them.
        """
        self.num_replaced_records += 1
        self.num_replaced_bytes += num_bytes
        if len(self.first_replaced) < _MAX_LISTED_RECORDS:
            self.first_replaced.append(format_replaced(location, num_bytes, problem))

    def format_lines(self, errors: ErrorHandling, list_path: str | None = None) -> Iterator[str]:
        """Yield the lines of the report for the terminal.

        Args:
            errors: treatment of invalid bytes (--errors).
            list_path: path of the file that contains the complete list, if there is one.
        """
        if self.num_files:
            yield f"encoding: {format_count(self.num_files.total(), 'file')} not plain UTF-8"
            for note, count in self.num_files.most_common():
                yield f"  {count:,} {note}"
                yield from (f"    {path}" for path in self._first_paths[note])
                if count > len(self._first_paths[note]):
                    yield f"    and {count - len(self._first_paths[note]):,} more"
            yield "  If that is wrong, name the encoding of the files with --encoding NAME."
        if self.num_replaced_records:
            effect = {"replace": "replaced by U+FFFD", "ignore": "removed"}.get(errors, "written in hexadecimal")
            texts = format_count(self.num_replaced_records, "text")
            yield f"invalid bytes: {self.num_replaced_bytes:,} in {texts}, {effect} (--errors {errors})"
            yield from (f"  {line}" for line in self.first_replaced)
            if self.num_replaced_records > len(self.first_replaced):
                yield f"  and {self.num_replaced_records - len(self.first_replaced):,} more"
            yield "  If these texts have another encoding, name it with --encoding NAME."
        if list_path is not None and (self.num_files or self.num_replaced_records):
            yield f"  complete list: {list_path}"
        if self.num_undecodable:
            yield f"invalid bytes: {format_count(self.num_undecodable, 'text')} left out because of them"
            if errors == "strict":
                yield "  To keep such texts, name their encoding with --encoding NAME, or set"
                yield "  --errors replace, which writes U+FFFD for invalid bytes."
            else:
                yield "  They look like binary data. If they are text, name their encoding with"
                yield "  --encoding NAME."


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, in the singular for 1: `1 file`, `0 files`."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def format_replaced(location: str, num_bytes: int, problem: str) -> str:
    """Return the line about a record whose invalid bytes were replaced. The arguments are those of `EncodingNotes.add_replaced`."""
    return f"{location}: {problem}{f', and {num_bytes - 1:,} more' if num_bytes > 1 else ''}"
