"""Keyboard and screen of a dialogue: entries of the user, streamed answers, and Ctrl-C during an answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

from megatron_lab.terminal import get_terminal_width

_INTERRUPT_MARK = "^C"
_BLOCK_MARK = '"""'
_WORDS = re.compile(r"\n|[^\S\n]+|\S+")
_INTERRUPTS_TO_ABORT = 3
"""Number of Ctrl-C during one answer after which the program ends at once, even within a forward pass."""


def replace_control_characters(text: str) -> str:
    """Replace control characters, which could steer a terminal, by U+FFFD. Keep line ends and tabs."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def uses_colour(stream: TextIO) -> bool:
    """Return whether to print colours to a stream: only to a terminal, and not if NO_COLOR is set (no-color.org) or TERM is
    dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class EntryReader:
    """Reader of what the user enters, from a terminal or a pipe.

    On a terminal, an entry has several lines if a line ends with a backslash, or between two lines of three quotation marks. From a
    pipe, every line is an entry.

    Args:
        reads_keys: whether Ctrl-C is a key and not a signal (see `interrupt_key`).
    """

    def __init__(self, *, reads_keys: bool) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._uses_readline = self.is_terminal and sys.stdout.isatty()
        self._reads_keys = reads_keys
        if self._uses_readline:
            with contextlib.suppress(ImportError):
                import readline  # gives `input` a history and keys for editing

                if reads_keys:  # Ctrl-C replaces the line by a mark, and enters it
                    readline.parse_and_bind(rf'"\C-c": "\C-e\C-u{_INTERRUPT_MARK}\C-m"')

    def read(self) -> str | None:
        """Return the next entry; None at the end of the input.

        Raises:
            KeyboardInterrupt: the user has pressed Ctrl-C.
        """
        line = self._read_line("> ")
        if self._reads_keys and line is not None and line.strip() in (_INTERRUPT_MARK, "\x03"):
            raise KeyboardInterrupt
        if line is None or not self.is_terminal:
            return line
        if line.strip().startswith(_BLOCK_MARK):
            return self._read_block(line.strip().removeprefix(_BLOCK_MARK))
        while line.endswith("\\"):
            continuation = self._read_line(". ")
            line = line[:-1] + "\n" + (continuation or "")
            if continuation is None:
                break
        return line

    def _read_block(self, line: str | None) -> str:
        lines = []
        while line is not None and not line.rstrip().endswith(_BLOCK_MARK):
            lines.append(line)
            line = self._read_line(". ")
        return "\n".join([*lines, *([] if line is None else [line.rstrip().removesuffix(_BLOCK_MARK)])]).strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        if self._uses_readline:
            sys.stdout.flush()
            try:
                # The characters 1 and 2 tell readline that what is between them takes no space on the screen.
                return input(f"\1\033[1;32m\2{prompt}\1\033[0m\2" if uses_colour(sys.stdout) else prompt)
            except EOFError:
                return None
            except UnicodeDecodeError:
                return ""
        if self.is_terminal:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        if line and not self.is_terminal:
            sys.stderr.write(prompt + line.decode("utf-8", errors="replace").rstrip("\r\n") + "\n")
            sys.stderr.flush()
        return line.decode("utf-8", errors="replace").rstrip("\r\n") if line else None


class AnswerWriter:
    """Writer of a streamed answer to stdout.

    On a terminal, a word appears when it is complete, lines break between words, and control characters are replaced. Indented
    lines, such as code, do not break."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._column, self._pending, self._spaces, self._is_indented = 0, "", "", False
        self._ends_with_newline = True

    def write(self, text: str) -> None:
        """Write a new part of the answer."""
        if not self._is_terminal:
            self._emit(text)
            return
        width = get_terminal_width() or 79
        *words, self._pending = _WORDS.findall(self._pending + replace_control_characters(text)) or [""]
        if self._pending and (self._pending.isspace() or len(self._pending) > width):
            words, self._pending = [*words, self._pending], ""
        self._emit("".join(self._wrap(word, width) for word in words))

    def finish(self) -> None:
        """Write the last word, and end the line."""
        if self._pending:
            pending, self._pending = self._pending, ""
            self._emit(self._wrap(pending, get_terminal_width() or 79))
        if not self._ends_with_newline:
            self._emit("\n")
        self._column, self._spaces, self._is_indented, self._ends_with_newline = 0, "", False, True

    def _wrap(self, word: str, width: int) -> str:
        """Return what to print for a word, a line end or the spaces between two words. Spaces are printed with the next word."""
        if word == "\n":
            self._column, self._spaces, self._is_indented = 0, "", False
            return word
        if word.isspace():
            self._is_indented = self._is_indented or (self._column == 0 and word != " ")
            self._spaces += word
            return ""
        text, self._spaces = self._spaces + word, ""
        num_columns = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
        if self._column and not self._is_indented and self._column + num_columns > width:
            self._column = num_columns
            return "\n" + word
        self._column += num_columns
        return text

    def _emit(self, text: str) -> None:
        if text:
            self._ends_with_newline = text.endswith("\n")
            sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def interrupt_key() -> Iterator[None]:
    """Context manager in which Ctrl-C on the terminal is an ordinary key, and sends no signal. Ctrl-\\ still ends the program.

    A launcher of several ranks, such as torchrun, gets the signal too, and would end all ranks.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    saved: list[Any] = termios.tcgetattr(descriptor)
    characters = list(saved[6])
    characters[termios.VINTR] = bytes([os.fpathconf(descriptor, "PC_VDISABLE") & 0xFF])
    termios.tcsetattr(descriptor, termios.TCSANOW, [*saved[:6], characters])
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, saved)


class AnswerInterrupt:
    """Ctrl-C during an answer. It asks the generation to stop, instead of ending the program.

    Args:
        reads_keys: whether Ctrl-C is a key and not a signal (see `interrupt_key`).
    """

    def __init__(self, *, reads_keys: bool) -> None:
        self._reads_keys = reads_keys and sys.stdin.isatty()
        self.count = 0
        """Number of times that the user has pressed Ctrl-C during this answer."""

    @contextlib.contextmanager
    def watch(self) -> Iterator[Callable[[], bool]]:
        """Context manager of one answer. It returns a function that tells whether the answer should stop."""
        self.count = 0
        previous = signal.signal(signal.SIGINT, self._handle_signal)
        try:
            with self._read_keys() if self._reads_keys else contextlib.nullcontext():
                yield self._should_stop
        finally:
            signal.signal(signal.SIGINT, previous)

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count >= _INTERRUPTS_TO_ABORT:
            raise KeyboardInterrupt

    def _should_stop(self) -> bool:
        if self._reads_keys:
            self.count += os.read(sys.stdin.fileno(), 64).count(b"\x03")
        return self.count > 0

    @contextlib.contextmanager
    def _read_keys(self) -> Iterator[None]:
        """Context manager in which the terminal passes keys on at once, and reading does not wait for a key."""
        import termios

        descriptor = sys.stdin.fileno()
        saved: list[Any] = termios.tcgetattr(descriptor)
        changed = [*saved[:3], saved[3] & ~(termios.ICANON | termios.ECHO), *saved[4:6], list(saved[6])]
        changed[6][termios.VMIN], changed[6][termios.VTIME] = 0, 0
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)
        try:
            yield
        finally:
            termios.tcsetattr(descriptor, termios.TCSANOW, saved)
