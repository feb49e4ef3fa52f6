"""Output of the ranks of one node: a log file for each rank, and the part of the output that the terminal shows. Does not import
torch."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.metrics.log_line import ERASE_TO_SCREEN_END, OutputStatus
from megatron_lab.resilience.output_queue import STDERR_FD, STDOUT_FD, OutputQueue
from megatron_lab.terminal import get_terminal_width, wrap_text

_DELAY_S = 0.3
_PROGRESS_DELAY_S = 5.0
"""Seconds between two states of a progress bar on stderr that overwrites its line. The log file contains all states."""
_READ_BYTES = _MAX_LINE_BYTES = 1 << 16
_MAX_PENDING_BYTES = 1 << 20
"""Maximum number of bytes of stderr that wait for their delay."""
_MAX_RECENT_ROWS, _COLUMNS = 16, 80
"""Size of the output, in rows and columns, that a small terminal still shows together with the last lines of the launcher."""
_MAX_SEEN_LINES = 10_000
_RANK_PREFIXES = re.compile(r"^(\[rank\d+\]:?\s*|[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ (\d+ )?)+|\[[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ ")
"""Rank, time and process at the start of the log lines of torch. They differ between the ranks that print a line."""


class RankOutput:
    """Output of the ranks of one node. The log file of a rank gets its complete stdout and stderr.

    The terminal shows stdout of the first rank. If this process has a terminal, the first rank has one too, so that it can show its
    progress. The terminal also shows stderr of all ranks, but a line that several ranks print is shown once.

    Args:
        folder: folder of the log files, which are named `rank_N.log`. Files that exist are continued.
        num_ranks: number of ranks of the node.

    Raises:
        LogFileInUseError: another launcher writes to a log file.
        OSError: a log file cannot be opened.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder = folder
        self.is_muted = False
        """Whether stderr is only written to the log files from now on."""
        self.delay_s = _DELAY_S
        """Seconds until a line of stderr is shown. If a rank fails in this time, the terminal shows only the reason."""
        self._has_terminal = sys.stdout.isatty()
        self._terminal_fd: int | None = None
        self._rank_streams: list[tuple[int, int]] = []
        self._sources: dict[int, _Source] = {}
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()  # what this process has printed precedes the output of the ranks
        self._queue = OutputQueue(folder)
        self._pending: deque[_PendingLine] = deque()
        self._num_pending_bytes = 0
        self._printed_by: dict[int, int] = {}  # rank that has printed a line, by the hash of the line
        self._recent_rows: deque[str] = deque(maxlen=_MAX_RECENT_ROWS)
        for local_rank in range(num_ranks):
            log = _LogFile(get_log_file(folder, local_rank), self.print_message)
            stdout = self._open_terminal() if local_rank == 0 and self._has_terminal else os.pipe()
            stderr = os.pipe()
            self._rank_streams.append((stdout[1], stderr[1]))
            self._sources[stdout[0]] = _Source(local_rank, log, is_stderr=False)
            self._sources[stderr[0]] = _Source(local_rank, log, is_stderr=True)
        for fd in self._sources:
            os.set_blocking(fd, False)

    @property
    def rank_streams(self) -> list[tuple[int, int]]:
        """File descriptors for stdout and stderr of each rank, by local rank."""
        return self._rank_streams

    @property
    def read_fds(self) -> list[int]:
        """File descriptors from which this process reads the output."""
        return list(self._sources)

    @property
    def own_fds(self) -> list[int]:
        """File descriptors that only this process uses. A rank must close them."""
        log_fds = [source.log.fd for source in self._sources.values() if source.is_stderr]
        return [*self._sources, *log_fds, *self._queue.own_fds]

    @property
    def blocked_fds(self) -> list[int]:
        """File descriptors of the terminal or pipe that did not accept all output of this process. Call `write_waiting` when a file
        descriptor is writable."""
        return self._queue.blocked_fds

    def write_waiting(self) -> None:
        """Write the output for the terminal or pipe that is accepted now."""
        self._queue.write_waiting()

    def close_rank_streams(self) -> None:
        """Close the descriptors of the ranks in this process, after the ranks were forked."""
        for fds in self._rank_streams:
            for fd in fds:
                os.close(fd)
        self._rank_streams = []

    def read(self, fd: int) -> int | None:
        """Read the output that is available at a file descriptor, write it to the log file, and show or store it for the terminal.

        Returns:
            number of bytes, or None if all processes that could write have ended.
        """
        source = self._sources[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # the last process with the terminal of the first rank has ended
            return None
        if not data:
            return None
        if source.is_stderr:
            source.log.write(data)
            for line in source.last_line.add(data):
                self._add_pending(source, line)
            return len(data)
        is_terminal = source.local_rank == 0 and self._has_terminal
        text = source.screen.keep_lines(data) if is_terminal else data
        source.log.write(text)
        if source.local_rank == 0:
            self._queue.write(STDOUT_FD, data, text.count(b"\n"))
            self._record_rows(text.decode(errors="replace"))
        return len(data)

    def _add_pending(self, source: _Source, line: bytes) -> None:
        """Store a line of stderr until it is shown. If too many lines wait, show them; if the output is muted, drop the first."""
        self._pending.append(_PendingLine(time.monotonic(), source.local_rank, line.decode(errors="replace")))
        self._num_pending_bytes += len(line)
        while self._num_pending_bytes > _MAX_PENDING_BYTES:
            if not self.is_muted:
                return self.show_all_lines()
            self._num_pending_bytes -= len(self._pending.popleft().line.encode())

    def _take_pending(self) -> list[_PendingLine]:
        pending = list(self._pending)
        self._pending.clear()
        self._num_pending_bytes = 0
        return pending

    def read_all(self) -> None:
        """Read all output that is available. Called after the ranks have ended. Processes that they have started may still run."""
        for fd, source in self._sources.items():
            while self.read(fd):
                pass
            source.log.write(source.screen.take_last_line())
            if source.last_line.started_at is not None:
                self._add_pending(source, source.last_line.take())

    def get_wait_s(self) -> float | None:
        """Return the seconds until a line of stderr must be shown; None if no line waits."""
        if self.is_muted:
            return None
        times = [source.last_line.due_at for source in self._sources.values() if source.last_line.due_at is not None]
        if self._pending:
            times.append(self._pending[0].time + self.delay_s)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def show_due_lines(self) -> None:
        """Show the stored lines of stderr if the first of them has waited for the delay. A line without an end is shown too, so
        that a question or a row of dots is visible."""
        if self.get_wait_s() != 0.0:
            return
        now = time.monotonic()
        for source in self._sources.values():
            if (due_at := source.last_line.due_at) is not None and due_at <= now:
                self._add_pending(source, source.last_line.take())
        self.show_all_lines()

    def show_all_lines(self) -> None:
        """Show the stored lines of stderr, beginning with the first rank. A line that another rank has printed is left out."""
        for item in sorted(self._take_pending(), key=lambda item: item.local_rank != 0):
            text = _RANK_PREFIXES.sub("", item.line).strip()
            if len(self._printed_by) > _MAX_SEEN_LINES:
                self._printed_by.clear()
            if (not text and item.local_rank) or self._printed_by.setdefault(hash(text), item.local_rank) != item.local_rank:
                continue
            has_name = item.local_rank == 0 or f"rank {item.local_rank}" in item.line
            self.print_message(item.line if has_name else f"[rank {item.local_rank}] {item.line}")

    def take_last_lines(self, local_rank: int, max_lines: int) -> list[str]:
        """Return the last lines of a rank's stderr that were not shown, and forget all lines that were not shown."""
        return [item.line for item in self._take_pending() if item.local_rank == local_rank][-max_lines:]

    def has_shown(self, message: str) -> bool:
        """Return whether the last rows of the terminal contain a message, with any line breaks between its words."""
        return _join_words(message) in _join_words("".join(self._recent_rows))

    def print_message(self, text: str) -> None:
        """Print a text to stderr of this process. On a terminal, it replaces the status lines of the first rank."""
        self._record_rows(f"{text}\n")
        width = get_terminal_width(sys.stderr)
        erase = "" if width is None or not self._has_terminal else ERASE_TO_SCREEN_END
        self._queue.write(STDERR_FD, f"{erase}{wrap_text(text, width)}\n".encode(errors="replace"))

    def _record_rows(self, text: str) -> None:
        """Record output as the rows that it fills on a terminal. A row ends with a line break only if its line does."""
        for line in text.splitlines(keepends=True):
            self._recent_rows += [line[i : i + _COLUMNS] for i in range(0, len(line), _COLUMNS)]

    def copy_terminal_size(self) -> None:
        """Give the terminal of the first rank the size of the terminal of this process."""
        if self._terminal_fd is not None:
            with suppress(OSError):
                size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(self._terminal_fd, termios.TIOCSWINSZ, size)

    def _open_terminal(self) -> tuple[int, int]:
        """Open a terminal for stdout of the first rank. Return the descriptors of this process and of the rank."""
        try:
            self._terminal_fd, rank_fd = pty.openpty()
        except OSError:  # the system has no more terminals, or a container has none
            self._has_terminal = False
            return os.pipe()
        tty.setraw(rank_fd)  # the terminal of this process translates line ends
        self.copy_terminal_size()
        return self._terminal_fd, rank_fd


class LogFileInUseError(OSError):
    """Error for a log file to which another launcher writes."""


def get_log_file(folder: Path, local_rank: int) -> Path:
    """Return the path of a rank's log file."""
    return folder / f"rank_{local_rank}.log"


def _join_words(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class _PendingLine:
    """Line of a rank's stderr that was not shown yet, with the time at which it was read (time.monotonic(), in s)."""

    time: float
    local_rank: int
    line: str


class _LogFile:
    """Log file of one rank. Text that cannot be written is lost, and the error is reported once.

    Args:
        path: path of the file.
        print_message: function that prints a message about such an error.

    Raises:
        LogFileInUseError: another launcher writes to the file.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, print_message: Callable[[str], None]) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.fd)
            raise LogFileInUseError(f"{path}: another launcher writes to this file") from None
        except OSError:  # the file system has no locks
            pass
        self._status = OutputStatus(f"the log file {path}", lambda text: print_message(text.rstrip("\n")))

    def write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError as error:
            self._status.report_failure(error)
        else:
            self._status.report_success()


class _Screen:
    """Filter that keeps the lines of a terminal's output that stay on the screen, and removes status lines that are erased later
    (`Printer` in `megatron/metrics/log_line.py`)."""

    def __init__(self) -> None:
        self._incomplete = b""
        self._line = bytearray()

    def keep_lines(self, data: bytes) -> bytes:
        """Return the complete lines in the output that stay on the screen, and the parts of a line that is longer than 64 KiB.

        Args:
            data: next bytes of the output. The status lines below the log are in one call, as the printer writes them at once.
        """
        data = (self._incomplete + data).replace(b"\r\n", b"\n")
        self._incomplete = b""
        if match := _PARTIAL_SEQUENCE.search(data):
            data, self._incomplete = data[: match.start()], match[0]
        lines: list[bytes] = []
        for token in _TOKENS.findall(data):
            if token == b"\n":
                self._line += token
                lines.append(self.take_last_line())
            elif match := _CURSOR_UP.fullmatch(token):  # the lines below the new position are status lines
                del lines[max(0, len(lines) - int(match[1] or 1)) :]
                self._line.clear()
            elif token in (b"\r", b"\x1b[J"):
                self._line.clear()
            elif token[:1] != b"\x1b":
                self._line += token
                if len(self._line) > _MAX_LINE_BYTES:
                    lines.append(self.take_last_line())
        return b"".join(lines)

    def take_last_line(self) -> bytes:
        """Return the line that was not ended yet, and forget it."""
        line = bytes(self._line)
        self._line.clear()
        return line


class _LastLine:
    """Last line of a stream, which was not ended yet. Only its visible text is stored: what follows the last carriage return."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._is_progress = False  # whether the line was overwritten
        self._is_continued = False  # whether the start of the line was taken already
        self.started_at: float | None = None
        """Time at which the first byte was read (time.monotonic(), in s); None for an empty line."""

    @property
    def due_at(self) -> float | None:
        """Time at which the line is shown although it was not ended; None for an empty line."""
        if self.started_at is None:
            return None
        return self.started_at + (_PROGRESS_DELAY_S if self._is_progress else _DELAY_S)

    def add(self, data: bytes) -> list[bytes]:
        """Add the next bytes of the stream. Return the lines that they end, and the parts of a line that is longer than 64 KiB."""
        lines = []
        *ended, last = data.split(b"\n")
        for line in ended:
            self._append(line)
            is_continuation, text = self._is_continued, self.take()
            self._is_continued = False
            if text or not is_continuation:
                lines.append(text)
        self._append(last)
        if self._num_bytes > _MAX_LINE_BYTES:
            lines.append(self.take())
        return lines

    def take(self) -> bytes:
        """Return the visible text of the line, and forget it. The rest of the line becomes a line too, unless it is empty."""
        text = b"".join(self._chunks).rstrip(b"\r")
        self._chunks, self._num_bytes, self._is_progress, self.started_at = [], 0, False, None
        self._is_continued = True
        return text[text.rfind(b"\r") + 1 :]

    def _append(self, data: bytes) -> None:
        if not data:
            return
        if self.started_at is None:
            self.started_at = time.monotonic()
        self._chunks.append(data)
        self._num_bytes += len(data)
        if b"\r" in data:
            text = b"".join(self._chunks)
            text = text[text.rstrip(b"\r").rfind(b"\r") + 1 :]
            self._is_progress |= len(text) < self._num_bytes
            self._chunks, self._num_bytes = [text], len(text)


_TOKENS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|[\r\n\x1b]|[^\x1b\r\n]+")
_CURSOR_UP = re.compile(rb"\x1b\[(\d*)A")
_PARTIAL_SEQUENCE = re.compile(rb"\x1b(\[[0-9;?]{0,32})?$")


@dataclass
class _Source:
    """One stream of one rank: its log file, and the state of what was read of it."""

    local_rank: int
    log: _LogFile
    is_stderr: bool
    last_line: _LastLine = field(default_factory=_LastLine)
    screen: _Screen = field(default_factory=_Screen)
