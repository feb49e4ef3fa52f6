"""Signals that ask a run to exit: SIGTERM, which schedulers send some time before they kill a job, and SIGUSR1, which they can be
configured to send.

During training a signal is only recorded, and the training loop then saves and exits. At any other time a signal ends the rank at
once.

If the launcher dies, its ranks end too: they receive SIGTERM, and are ended if they do not exit within 30 s. torchrun does the
same.

This module also writes and reads the progress file, with which ranks report their progress to a launcher that restarts them.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

from megatron.config.launcher import is_first_rank, read_process_info

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 30.0
"""Seconds in which a rank must save and exit after its launcher has died."""
_PARENT_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


class ExitSignals:
    """Handler of the signals that ask a run to exit (SIGTERM, SIGUSR1). It is a context manager and must be entered in the main
    thread. Forked child processes get the default handlers back.

    Args:
        code: exit code of a run that a signal ended (--exit-signal-code).
    """

    def __init__(self, code: int) -> None:
        self.code = code
        self.received: signal.Signals | None = None
        """Latest signal that this rank received within `deferred`. Other ranks may not have received it, so the ranks must vote."""
        self._is_deferred = False
        self._owner_pid: int | None = None
        self._launcher_pid: int | None = None

    def __enter__(self) -> Self:
        self._owner_pid = os.getpid()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._launcher_pid = os.getppid()
            if sys.platform == "linux":  # on other systems only the listener thread detects it
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        self._previous_handlers = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        # Python runs a signal handler only when the main thread returns to Python code. That can take minutes, for example while
        # the thread waits for other ranks to start. The wakeup pipe lets another thread react at once.
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="exit signals").start()
        os.register_at_fork(after_in_child=self._reset_in_child)
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        for signum, handler in self._previous_handlers.items():
            # None means that the handler was not installed from Python. It cannot be restored.
            signal.signal(signum, handler or signal.SIG_DFL)
        self._owner_pid = None
        os.close(self._write_fd)  # this ends the listener thread

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the `with` block, store an exit signal in `received` instead of exiting. The training loop reads `received`
        between two steps."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def describe(self) -> str:
        """Return the reason for the exit as a text for the log, such as "on SIGTERM". Called when all ranks have agreed to stop."""
        return "on a signal to another rank" if self.received is None else f"on {self.received.name}"

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # Only record the signal: a handler that prints or saves can interrupt another print or save.
        if self._is_deferred:
            self.received = signal.Signals(signum)

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._read_fd], [], [], None if self._launcher_pid is None else _PARENT_POLL_S)
            if ready and not (data := os.read(self._read_fd, 1)):
                break
            if ready and data[0] in SIGNALS and not self._is_deferred and self._owner_pid is not None:
                self._exit(f"{signal.Signals(data[0]).name} before training: there is nothing to save")
            if self._launcher_pid not in (None, os.getppid()):
                self._launcher_pid = None
                self.received = signal.SIGTERM
                threading.Timer(
                    GRACE_S, self._exit, ("the launcher has ended, and this rank did not save and exit in time",)
                ).start()
        os.close(self._read_fd)

    def _exit(self, reason: str) -> None:
        if is_first_rank():
            with suppress(OSError):
                sys.stderr.write(f"pretrain_gpt.py: {reason}\n")
                sys.stderr.flush()
        os._exit(self.code)

    def _reset_in_child(self) -> None:
        if self._owner_pid is not None:
            signal.set_wakeup_fd(-1)
            for signum in SIGNALS:
                signal.signal(signum, signal.SIG_DFL)
            self._owner_pid = None


# ---- Progress file of a run, for a launcher that restarts ranks. This part does not need torch.
#
# The launcher passes the path of the file in the environment. The first rank of the node writes two numbers into the file: the
# iteration from which the run continued, and the last finished iteration. Any rank may append an exit code (`write_exit_code`).

PROGRESS_FILE_VARIABLE = "MEGATRON_LIFE_FILE"
"""Environment variable with the path of the progress file."""
EXIT_LOST_CONTACT = 87
"""Exit code of a rank that only lost contact with another rank. It is used with a launcher that sets a progress file; any other
launcher gets 1."""
EXIT_REFUSED, EXIT_DIVERGED = 2, 88
"""Exit codes for failures that every restart would repeat. EXIT_REFUSED: the settings are wrong or do not fit the checkpoint.
EXIT_DIVERGED: values are not finite, or loss spikes recur. A launcher without a progress file gets 1 for all failures except wrong
settings."""
_ITERATIONS, _EXIT_CODE = struct.Struct("<qq"), struct.Struct("<q")


class ProgressFile:
    """File in which the first rank of each node reports its progress to a launcher that restarts ranks. Nothing is written if the
    launcher has not set the path of the file.

    Args:
        start_iteration: iteration from which the run continues.
    """

    def __init__(self, start_iteration: int) -> None:
        path = os.environ.get(PROGRESS_FILE_VARIABLE) if read_process_info().local_rank == 0 else None
        self._start_iteration = start_iteration
        self._file = None if path is None else os.open(path, os.O_WRONLY)
        self.record(start_iteration)

    def record(self, iteration: int) -> None:
        """Write to the file that `iteration` is the last finished iteration."""
        if self._file is not None:
            os.pwrite(self._file, _ITERATIONS.pack(self._start_iteration, iteration), 0)


def write_exit_code(code: int) -> None:
    """Write an exit code to the progress file, if every restart of the run would end with the same code. Launchers that do not see
    the exit codes of ranks read the file."""
    path = os.environ.get(PROGRESS_FILE_VARIABLE)
    if path is not None and code in (EXIT_REFUSED, EXIT_DIVERGED):
        with suppress(OSError):
            file = os.open(path, os.O_WRONLY)
            os.pwrite(file, _EXIT_CODE.pack(code), _ITERATIONS.size)
            os.close(file)


def read_progress_file(path: str) -> tuple[int, int] | None:
    """Return two iterations from a progress file: the one at which the run started, and the last finished one. Return None if
    training has not started."""
    with open(path, "rb") as file:
        data = file.read(_ITERATIONS.size)
    return None if len(data) < _ITERATIONS.size else _ITERATIONS.unpack(data)  # type: ignore[return-value]
