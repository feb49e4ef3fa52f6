"""Output of a launcher to stdout and stderr that never makes the launcher wait. Does not import torch."""

from __future__ import annotations

import os
import selectors
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path

from megatron.metrics.log_line import OutputStatus

STDOUT_FD, STDERR_FD = 1, 2
MAX_QUEUED_BYTES = 1 << 20
"""Maximum number of bytes that wait for a terminal or a pipe."""
_SAFE_WRITE_BYTES = 512
"""Number of bytes that a pipe accepts at once when the system calls the pipe writable (at least; POSIX)."""


class OutputQueue:
    """Output for stdout and stderr of this process, which waits in memory while a terminal or pipe accepts none: after Ctrl-S, or
    if a pager does not read. If too much output waits, the oldest is dropped, and a line says how many lines were dropped.

    Args:
        log_folder: folder of the files that contain the dropped lines.
    """

    def __init__(self, log_folder: Path) -> None:
        self._stdout = _OutputStream(STDOUT_FD, self, log_folder)
        is_same = _describe_stream(STDOUT_FD) == _describe_stream(STDERR_FD) is not None
        self._stderr = self._stdout if is_same else _OutputStream(STDERR_FD, self, log_folder)  # one stream keeps the order

    @property
    def own_fds(self) -> list[int]:
        """File descriptors that this object has opened."""
        return [stream.write_fd for stream in self._streams if stream.write_fd not in (STDOUT_FD, STDERR_FD)]

    @property
    def blocked_fds(self) -> list[int]:
        """File descriptors for which output waits. Call `write_waiting` when a file descriptor is writable."""
        return [stream.write_fd for stream in self._streams if stream.has_waiting]

    def write(self, fd: int, data: bytes, num_lines: int | None = None) -> None:
        """Write a chunk of output, or let it wait.

        Args:
            fd: file descriptor of stdout (1) or stderr (2).
            data: output that is written or dropped as a whole.
            num_lines: number of lines of the log file that the output stands for, by default its number of line ends.
        """
        (self._stdout if fd == STDOUT_FD else self._stderr).add(data, data.count(b"\n") if num_lines is None else num_lines)

    def write_waiting(self) -> None:
        """Write the waiting output that is accepted now."""
        for stream in self._streams:
            stream.write_waiting()

    @property
    def _streams(self) -> list[_OutputStream]:
        return [self._stdout] if self._stderr is self._stdout else [self._stdout, self._stderr]


class _OutputStream:
    """Stdout or stderr of this process, with the output that waits for it."""

    def __init__(self, fd: int, queue: OutputQueue, log_folder: Path) -> None:
        self.write_fd = _open_nonblocking(fd)
        self._is_regular = _describe_stream(fd) is None
        self._log_folder = log_folder
        self._chunks: deque[tuple[bytes, int]] = deque()  # with the number of lines of each
        self._num_bytes = self._num_dropped_lines = 0
        self._is_cut = False  # whether a part of the first chunk has been written
        name = "stdout" if fd == STDOUT_FD else "stderr"
        # A failure of stderr cannot be reported: stdout is for the output of the run.
        self._status = OutputStatus(name, lambda text: queue.write(STDERR_FD, text.encode()) if fd == STDOUT_FD else None)

    @property
    def has_waiting(self) -> bool:
        return bool(self._chunks)

    def add(self, data: bytes, num_lines: int) -> None:
        self._chunks.append((data, num_lines))
        self._num_bytes += len(data)
        while self._num_bytes > MAX_QUEUED_BYTES and len(self._chunks) > 1 + self._is_cut:
            dropped_data, num_dropped = self._chunks[self._is_cut]
            del self._chunks[self._is_cut]
            self._num_bytes -= len(dropped_data)
            self._num_dropped_lines += num_dropped
        self.write_waiting()

    def write_waiting(self) -> None:
        try:
            while self._chunks and self._is_writable():
                self._write_first_chunk()
        except BlockingIOError:
            return
        except OSError as error:
            self._chunks.clear()
            self._num_bytes = self._num_dropped_lines = 0
            self._is_cut = False
            self._status.report_failure(error)

    def _write_first_chunk(self) -> None:
        if self._num_dropped_lines and not self._is_cut:
            notice = f"... {self._num_dropped_lines:,} lines are only in the log files in {self._log_folder}\n".encode()
            self._num_dropped_lines = 0
            self._chunks.appendleft((notice, 0))
            self._num_bytes += len(notice)
        data, num_lines = self._chunks[0]
        is_blocking = not self._is_regular and os.get_blocking(self.write_fd)
        num_written = os.write(self.write_fd, data[:_SAFE_WRITE_BYTES] if is_blocking else data)
        self._status.report_success()
        self._num_bytes -= num_written
        self._is_cut = num_written < len(data)
        if self._is_cut:
            self._chunks[0] = data[num_written:], num_lines
        else:
            self._chunks.popleft()

    def _is_writable(self) -> bool:
        """Return whether the system accepts output now. A regular file always does."""
        with selectors.PollSelector() as selector:  # it accepts all files, unlike epoll
            selector.register(self.write_fd, selectors.EVENT_WRITE)
            return bool(selector.select(0))


def _describe_stream(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of a terminal, pipe or socket; None for a regular file, which never blocks."""
    status = os.fstat(fd)
    return None if stat.S_ISREG(status.st_mode) else (status.st_dev, status.st_ino)


def _open_nonblocking(fd: int) -> int:
    """Open a terminal or pipe for writes that do not block, and return its file descriptor. If that is not possible, return `fd`.

    The mode of `fd` itself must stay, because other processes, such as the shell, share it.
    """
    if _describe_stream(fd) is not None and os.get_blocking(fd):
        with suppress(OSError):  # a socket, or a terminal of another user
            return os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return fd
