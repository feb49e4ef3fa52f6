"""A terminal for tests: a pseudo-terminal that a run writes to, and what is then seen on its screen."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
import threading


class Terminal:
    """A pseudo-terminal, whose output is read all the time, as a person's terminal does."""

    def __init__(self, columns: int = 100) -> None:
        self._master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._found = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def take_stdout(self) -> None:
        """In a process that was forked: print to it from now on."""
        self._before = sys.stdout  # which would close the descriptor when it is dropped
        os.dup2(self.slave, 1)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        os.environ["TERM"] = "xterm"

    def text(self) -> str:
        """All that was written to it, once the writers have ended."""
        os.close(self.slave)
        self._reader.join(10)
        return self._found.decode()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # nobody has it open any more
                return
            self._found += data


def seen(text: str) -> list[str]:
    """The lines that a terminal shows of a text, with the movements of the cursor that the log makes.

    Raises:
        AssertionError: there is another escape sequence.
    """
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[J":
            lines[row:] = [lines[row][:column]]
        elif up := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(up[1])
        else:
            assert part[0] != "\x1b", repr(part)
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines
