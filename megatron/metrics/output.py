"""Output of a run that may fail without ending it: a full disk, a closed pipe. What fails is told once, on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import Protocol, TextIO


class Sink(Protocol):
    """Takes numbers by name. Only the rank that logs opens one.

    Names are those of the metrics file: lm_loss, z_loss, mtp_loss, load_balancing_loss, moe_z_loss, busiest_expert, dropped_share,
    grad_norm, learning_rate, loss_scale, skipped, spikes, elapsed_ms, tokens_per_s, tflops_per_device, global_batch_size,
    num_zeros, params_norm, gradient_noise, context_imbalance, max_attention_logit, validation_loss, validation_mtp_loss, test_loss,
    test_mtp_loss, goodput, and any other.
    """

    def scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Record values of step `iteration`, after `samples` sequences."""

    def close(self) -> None:
        """Write what is still in memory."""


class Output:
    """Whether one output of the run works.

    Args:
        name: what a user knows it by.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed = False

    def failed(self, error: Exception) -> None:
        """Tell that something could not be written, unless it was told before."""
        if self._failed:
            return
        self._failed = True
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        with suppress(OSError, ValueError):  # stderr may be gone too
            sys.stderr.write(f"{self._name} cannot be written ({reason}): training goes on, what comes meanwhile is lost there\n")
            sys.stderr.flush()

    def works(self) -> None:
        """Something was written."""
        if self._failed:
            self._failed = False
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{self._name} is written again\n")
                sys.stderr.flush()


class LineFile:
    """A file of lines, each written at once and whole. A line that cannot be written is lost; those before stay as they are.

    Args:
        flag: the flag that names it.
        path: its folder is made.
        append: keep what is there (a resumed run) instead of beginning a new file.

    Raises:
        ValueError: it cannot be opened.
    """

    def __init__(self, flag: str, path: str | Path, *, append: bool) -> None:
        path = Path(path)
        self._output = Output(f"{flag} {path}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            inside_line = append and _ends_inside_line(path)
            if not append:
                path.open("wb").close()
            self._file = path.open("ab", buffering=0)  # so that it goes on at the end, also after what is cut off
        except OSError as error:
            raise ValueError(
                f"{flag} {path} cannot be written ({error.strerror}). Give a path in a folder that you may write to."
            ) from error
        if inside_line:  # a run was killed while it wrote
            self._write(b"\n")

    def write(self, line: str) -> None:
        """Add a line."""
        self._write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            if written:
                with suppress(OSError):  # half a line would make the next one unreadable
                    self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
            self._output.failed(error)
        else:
            self._output.works()


class Printer:
    """Prints lines of a run's log, each at once; on a terminal with lines below them that change.

    What Python keeps in the buffer of a stream that fails, it would try to write again at the end, and turn the exit code to 120.
    So a line goes past that buffer.

    The cursor stays before the lines that change. So what others print goes over these, and is not itself printed over.
    """

    def __init__(self) -> None:
        self._output = Output("stdout")
        self._below = ""

    @property
    def on_terminal(self) -> bool:
        """Whether people look at what is printed, on a terminal that can move its cursor."""
        try:
            return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        except ValueError:  # it is closed
            return False

    @property
    def width(self) -> int:
        """Characters of a line on the terminal."""
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    @property
    def plain(self) -> bool:
        """Whether ASCII alone can be printed."""
        return "utf" not in (sys.stdout.encoding or "").lower()

    def say(self, line: str) -> None:
        """Print a line."""
        self._write(f"{_ERASE}{line}\n{self._below}" if self._below else f"{line}\n")

    def show(self, lines: Sequence[str]) -> None:
        """On a terminal: show these lines below what was printed, in place of those that were shown before."""
        erase = _ERASE if self._below else ""
        room = self.width - 1  # a full line would take two
        self._below = "\n".join(line[:room] for line in lines) + (f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else "") + "\r"
        self._below = self._below if lines else ""
        if erase or self._below:
            self._write(erase + self._below)

    def _write(self, text: str) -> None:
        stream: TextIO = sys.stdout
        try:
            stream.flush()
            try:
                file = stream.fileno()
            except UnsupportedOperation:  # a stand-in, as in a notebook
                print(text, end="", flush=True)
                return
            data = text.encode(stream.encoding or "utf-8", "backslashreplace")
            while data:
                data = data[os.write(file, data) :]
        except OSError as error:
            self._output.failed(error)
        else:
            self._output.works()


_ERASE = "\r\x1b[J"
"""From the beginning of the cursor's line to the end of the screen (ECMA-48)."""


def _ends_inside_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
