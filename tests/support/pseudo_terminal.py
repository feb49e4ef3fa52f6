"""A program at a terminal: what it prints, and keys that a user presses."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.support.cli import ROOT

_TIMEOUT_SECONDS = 90


class PseudoTerminal:
    """Program whose standard streams are a terminal of `columns` x `rows`, which is also its controlling terminal."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], columns: int = 80, rows: int = 24) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(ROOT)
                os.execve(words[0], [*words], {"TERM": "xterm", **environment})
            finally:
                os._exit(127)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.output = ""
        """All that the program has printed, with the keys that the terminal echoes."""
        self._num_read, self._bytes = 0, b""
        self._first_settings = termios.tcgetattr(self._descriptor)

    def is_restored(self) -> bool:
        """Return whether the settings of the terminal, such as echo and the key that interrupts, are those before the start."""
        return termios.tcgetattr(self._descriptor) == self._first_settings

    def press(self, keys: str) -> None:
        """Press keys: text, "\\n" for Enter, "\\x03" for Ctrl-C, "\\x04" for Ctrl-D."""
        os.write(self._descriptor, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """Wait until a pattern appears in what was printed since the last call. Return the text up to its end."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while (match := re.search(pattern, self.output[self._num_read :])) is None:
            assert self._read(deadline), f"{pattern!r} does not appear in {self.output[self._num_read :]!r}"
        start, self._num_read = self._num_read, self._num_read + match.end()
        return self.output[start : self._num_read]

    def wait_for_end(self) -> int:
        """Wait until the program ends, and return its status."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while self._read(deadline):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self, deadline: float) -> bool:
        """Read what the program has printed. Return False if it has ended."""
        assert time.monotonic() < deadline, f"nothing more comes after {self.output!r}"
        os.set_blocking(self._descriptor, False)
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            time.sleep(0.01)
            return True
        except OSError:  # the last process at the terminal has ended
            return False
        self._bytes += data
        self.output = self._bytes.decode(errors="ignore").replace("\r\n", "\n")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)
