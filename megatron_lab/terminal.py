"""Texts and tables that fit the width of a terminal.

Only output to a terminal is fitted. Output to a file or a pipe keeps every line complete, so that programs such as grep find it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TextIO

_GAP = "  "
"""Space between two columns of a table."""
_MAX_SHORT_CELL = 20
"""Maximum number of characters of a cell of a table that is not wrapped, such as a number with its unit, or a range."""
_INDENT = 2
"""Number of characters by which the continuation of a wrapped line is indented, in addition to the indent of the line."""
_NO_BREAK_SPACE = "\xa0"
"""Space at which textwrap does not break a line."""
_ARGUMENT = r"(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\])+"
"""Pattern of an argument of a command, with its quoted spaces."""
_COMMAND = re.compile(rf"({_ARGUMENT}(?: {_ARGUMENT})*)(?: {{2,}}(.*))?")
"""Pattern of a command, with an optional comment after two or more spaces."""
_FLAG_WITH_VALUES = re.compile(rf"--[a-z]\S*(?: (?!-[-a-zA-Z]){_ARGUMENT})*(?= |$)|{_ARGUMENT}")
"""Pattern of a flag with its values, or of another argument of a command."""
_PROGRAM = re.compile(r"(?:(?:env|[A-Z_]+=\S+) )*(?:\S*/)?(?:python3?|torchrun|bash|pip|hf|vllm|tensorboard) ")
"""Pattern of the start of a command."""
_COLON = re.compile(r"([^:]+:) +")
"""Pattern of a label that ends with a colon."""
_LABEL = re.compile(r"\S+(?: \S+)* {2,}(?=\S)")
"""Pattern of a label at the start of a line, such as the first cell of a row, with the spaces after it."""


def get_terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the number of characters that fit in a line of the terminal, or None if the stream is not a terminal. One column stays
    free, because some terminals wrap a line that fills all columns.

    Args:
        stream: stream of the output, by default stdout.
    """
    stream = sys.stdout if stream is None else stream
    try:
        if stream is None or not stream.isatty():
            return None
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # the stream is closed, or the terminal does not know its size
        columns = 0
    return max(40, (columns or shutil.get_terminal_size().columns) - 1)


def wrap_line(line: str, width: int | None) -> list[str]:
    """Wrap a line between words.

    Continuation lines are indented. If the line has a label, followed by two or more spaces, they start below the text after these
    spaces. A line of several fields with " | " between them breaks only between fields, and has no label: its indent
    does not depend on the numbers in it. A command is wrapped as by `wrap_command`;
    a label with a colon gets a line before it. A word that is longer than the width, such as a path, stays complete.

    Args:
        width: maximum number of characters of a line; None to keep the line as it is.
    """
    if width is None or len(line) <= width:
        return [line]
    indent = " " * _measure_indent(line)
    text = line[len(indent) :]
    if _is_command(text):
        return wrap_command(line, width)
    if (label := _COLON.match(text)) and _is_command(text[label.end() :]):
        return [indent + label[1], *wrap_command(f"{indent}{' ' * _INDENT}{text[label.end() :]}", width)]
    hanging_indent = indent + " " * _INDENT
    has_fields = text.count(" | ") > 1
    if not has_fields and (label := _LABEL.match(text)):
        value_indent = indent + " " * label.end()
        if len(value_indent) + max(map(len, text[label.end() :].split()), default=0) <= width and len(value_indent) <= width // 2:
            hanging_indent = value_indent
    if has_fields:
        text = re.sub("(?! [|]) ", _NO_BREAK_SPACE, text)
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=hanging_indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK_SPACE, " ") for line in lines] if has_fields else lines


def _is_command(text: str) -> bool:
    """Return whether a line is a command, and not a sentence that starts with the name of a program. Such a sentence has a comma or
    a colon after a word."""
    match = _COMMAND.fullmatch(text) if _PROGRAM.match(text) else None
    return match is not None and not any(argument[-1] in ",:" for argument in re.findall(_ARGUMENT, match[1]))


def wrap_command(line: str, width: int | None) -> list[str]:
    """Wrap a command, or a list of flags, with backslashes, so that it can be pasted into a shell.

    A flag stays in the line of its values, if they fit. A comment after two or more spaces gets its own lines.

    Args:
        width: maximum number of characters of a line; None to keep the line as it is.
    """
    match = _COMMAND.fullmatch(line.strip())
    if width is None or len(line) <= width or match is None:
        return [line]
    indent = " " * _measure_indent(line)
    further_indent = indent + " " * 2 * _INDENT
    lines: list[str] = []
    for arguments in _FLAG_WITH_VALUES.findall(match[1]):
        if lines and len(lines[-1]) + len(arguments) + len("  \\") <= width:
            lines[-1] += f" {arguments}"
        else:
            lines.append((further_indent if lines else indent) + arguments)
    comment = textwrap.wrap(match[2] or "", width, initial_indent=further_indent, subsequent_indent=further_indent)
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1], *comment]


def wrap_text(text: str, width: int | None) -> str:
    """Wrap each line of a text between words. Lines with control characters are kept as they are, because a program that moves the
    cursor has fitted them itself.

    Args:
        width: maximum number of characters of a line; None to keep the text as it is.
    """
    if width is None:
        return text
    return "\n".join(
        fitted
        for line in text.split("\n")
        for fitted in ([line] if any(mark in line for mark in "\r\x1b") else wrap_line(line, width))
    )


def fill_help(text: str, width: int | None = None) -> str:
    """Fit a help text to the terminal. Without a terminal, the text gets 80 columns.

    The lines of a paragraph are joined and wrapped again. An indented line, such as a command or a flag with its description, stays
    a line of its own. Lines that are indented by at least eight more characters continue this line.

    Args:
        width: maximum number of characters of a line; by default the columns of the terminal without two.
    """
    width = shutil.get_terminal_size().columns - 2 if width is None else width
    entries: list[str] = []
    for line in text.splitlines():
        previous = entries[-1] if entries else ""
        indent, previous_indent = _measure_indent(line), _measure_indent(previous)
        continues_paragraph = previous_indent == indent == 0 and not line.startswith("-")
        if line and previous and (continues_paragraph or indent >= previous_indent + 8):
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    return "".join(f"{line}\n" for entry in entries for line in _wrap_help_entry(entry, width))


def _wrap_help_entry(entry: str, width: int) -> list[str]:
    if entry[:1].strip() and not entry.startswith(("-", "usage:")):
        return textwrap.wrap(entry, width, break_long_words=False, break_on_hyphens=False)
    return wrap_line(entry, width)


def _measure_indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def format_table(rows: Sequence[Sequence[str]], right_aligned: Sequence[int] = (), *, width: int | None = None) -> list[str]:
    """Format rows as lines with aligned columns.

    In a table that is wider than `width`, long cells are wrapped between words. If that is not enough, the last columns are moved
    to a second table below, which repeats the first column.

    Args:
        rows: cells of each row, including the row of headings.
        right_aligned: indices of the columns that are aligned to the right.
        width: maximum number of characters of a line; None for no limit.
    """
    columns = list(zip(*rows, strict=True))
    widths, min_widths = [max(map(len, column)) for column in columns], [_compute_min_width(column) for column in columns]
    lines: list[str] = []
    remaining = list(range(len(columns)))
    while remaining:
        block = remaining
        if width is not None:
            while len(block) > 2 and _sum_widths([min_widths[i] for i in block]) > width:
                block = block[:-1]
        lines += _format_block(
            rows, block, right_aligned, _narrow([widths[i] for i in block], [min_widths[i] for i in block], width)
        )
        remaining = [0, *remaining[len(block) :]] if len(block) < len(remaining) else []
    return lines


def _compute_min_width(column: Sequence[str]) -> int:
    """Return the width to which a column can be narrowed: that of its longest word, or of its longest short cell."""
    return max(len(cell) if len(cell) <= _MAX_SHORT_CELL else max(map(len, cell.split())) for cell in column)


def _narrow(widths: Sequence[int], min_widths: Sequence[int], width: int | None) -> list[int]:
    """Narrow the widest columns until a table fits, but not below their minimum width."""
    narrowed = list(widths)
    while width is not None and _sum_widths(narrowed) > width:
        columns = [i for i, column_width in enumerate(narrowed) if column_width > min_widths[i]]
        if not columns:
            break
        narrowed[max(columns, key=lambda i: narrowed[i])] -= 1
    return narrowed


def _sum_widths(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _format_block(
    rows: Sequence[Sequence[str]], columns: Sequence[int], right_aligned: Sequence[int], widths: Sequence[int]
) -> list[str]:
    """Format some columns of a table. A row has as many lines as its longest cell."""
    lines = []
    for row in rows:
        cells = [_wrap_cell(row[column], width) for column, width in zip(columns, widths, strict=True)]
        for texts in zip_longest(*cells, fillvalue=""):
            aligned = [
                text.rjust(width) if column in right_aligned else text.ljust(width)
                for text, column, width in zip(texts, columns, widths, strict=True)
            ]
            lines.append(_GAP.join(aligned).rstrip())
    return lines


def _wrap_cell(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


class TerminalStream:
    """Text stream in front of a terminal that wraps long lines between words (`wrap_text`). Everything else goes to the terminal's
    stream unchanged.

    A line is written when it is complete, when it contains a carriage return, or when the stream is flushed.

    Args:
        stream: stream of the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._pending = stream, ""

    def write(self, text: str) -> int:
        """Write a text. Its last line waits until it is complete."""
        complete, newline, self._pending = (self._pending + text).rpartition("\n")
        if newline:
            self._stream.write(wrap_text(complete, get_terminal_width(self._stream)) + newline)
        if "\r" in self._pending:
            self.flush()
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the incomplete last line too."""
        if self._pending:
            self._stream.write(self._pending)
            self._pending = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fit_output_to_terminal() -> None:
    """Wrap long lines that this process prints from now on, between words. Applies to stdout and stderr, if they are terminals."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, TerminalStream) and get_terminal_width(stream) is not None:
            setattr(sys, name, TerminalStream(stream))
