"""Signals that ask a run to exit: SIGTERM, SIGUSR1, SIGUSR2 and SIGXCPU, which schedulers send some time before they kill a job,
SIGHUP of a closed terminal, SIGINT (Ctrl-C), and the signal that --exit-signal names.

During training a signal is only recorded, and the training loop then saves and exits. At any other time a signal ends the rank at
once. A second Ctrl-C always does.

If the launcher dies, its ranks end too: they receive SIGTERM, and are ended if they do not exit within 30 s. torchrun does the
same.

This module also writes and reads the progress file, with which ranks report their progress to a launcher that restarts them.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

from megatron.config.config import Config
from megatron.config.launcher import (
    EXIT_SIGNALS,
    has_failed_neighbor,
    is_first_rank,
    is_under_torchrun,
    read_process_info,
    write_error_file,
    write_message,
)

GRACE_S = 30.0
"""Seconds in which a rank must save and exit after its launcher has died."""
EXIT_INTERRUPTED = 130
"""Exit code of a run that Ctrl-C ended without a save: 128 + number of SIGINT, as in a shell."""
SAME_KEY_PRESS_S = 1.0
"""Seconds in which repeated signals count as one request to stop. One Ctrl-C can reach a process twice: from the terminal, and from
a launcher that passes the signal on."""
_PARENT_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


def get_exit_signals(exit_signal: str | None = None) -> tuple[signal.Signals, ...]:
    """Return the signals that end a run early, without SIGHUP if this process ignores it, because `nohup` makes it do so.

    Args:
        exit_signal: name of an additional signal (--exit-signal), or None.
    """
    signals = dict.fromkeys((*EXIT_SIGNALS, *(() if exit_signal is None else (signal.Signals[exit_signal],))))
    return tuple(signum for signum in signals if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN)


def create_exit_signals(config: Config) -> ExitSignals:
    """Create the handler of exit signals that the settings of a run describe."""
    training = config.training
    return ExitSignals(training.exit_signal_code, get_exit_signals(training.exit_signal), saves=config.checkpoint.save is not None)


class ExitSignals:
    """Handler of the signals that ask a run to exit. It is a context manager and must be entered in the main thread. Forked child
    processes get the default handlers back.

    Args:
        code: exit code of a run that a signal ended (--exit-signal-code).
        signals: signals to handle, by default those of `get_exit_signals`.
        saves: whether the run has a save folder, for messages.
    """

    def __init__(self, code: int, signals: tuple[signal.Signals, ...] | None = None, *, saves: bool = True) -> None:
        self.code = code
        self.received: signal.Signals | None = None
        """Latest signal that this rank received within `deferred`. Other ranks may not have received it, so the ranks must vote."""
        self._signals, self._saves = get_exit_signals() if signals is None else signals, saves
        self._is_deferred = self._has_trained = self._has_failed = False
        self._has_caught_up = threading.Event()
        """Set when the listener thread has handled all signals before a zero byte in the pipe."""
        self._interrupted_at: float | None = None
        """Time of the first SIGINT within `deferred`, by time.monotonic()."""
        self._owner_pid: int | None = None
        self._launcher_pid: int | None = None

    def __enter__(self) -> Self:
        self._owner_pid = os.getpid()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._launcher_pid = os.getppid()
            if sys.platform == "linux":  # on other systems only the listener thread detects it
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        self._previous_handlers = {signum: signal.signal(signum, self._handle) for signum in self._signals}
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
        between two steps.

        If this handler was not entered, as in a notebook or a program that trains with `megatron.api`, only SIGINT is handled, and
        only while the block runs in the main thread. There a second Ctrl-C raises KeyboardInterrupt.
        """
        self._is_deferred, self._has_failed = True, False
        is_own_program = self._owner_pid is None and threading.current_thread() is threading.main_thread()
        handles_interrupt = is_own_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if handles_interrupt:
            self.received, self._interrupted_at = None, None
            signal.signal(signal.SIGINT, self._handle_in_program)
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise
        finally:
            if handles_interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self._wait_for_listener()
            self._is_deferred, self._has_trained = False, True

    def describe(self) -> str:
        """Return the reason for the exit as a text for the log, such as "on SIGTERM". Called when all ranks have agreed to stop."""
        return "on a signal to another rank" if self.received is None else f"on {self.received.name}"

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # Only record the signal: a handler that prints or saves can interrupt another print or save.
        if self._is_deferred:
            self.received = signal.Signals(signum)

    def _handle_in_program(self, signum: int, frame: FrameType | None) -> None:
        self._handle(signum, frame)
        if self._is_repeated_interrupt(signal.SIGINT):
            raise KeyboardInterrupt
        self._announce(signal.SIGINT)

    def _listen(self) -> None:
        announced: set[signal.Signals] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            while True:
                ready = selector.select(None if self._launcher_pid is None else _PARENT_POLL_S)
                if ready and not (data := os.read(self._read_fd, 1)):
                    break
                if ready and not data[0]:
                    self._has_caught_up.set()
                if ready and data[0] in self._signals and self._owner_pid is not None:
                    signum = signal.Signals(data[0])
                    if self._has_failed and signum != signal.SIGINT:
                        continue  # the main thread is about to exit with the reason of its failure
                    if not self._is_deferred:
                        self._exit_outside_training(signum)
                    if self._is_repeated_interrupt(signum):
                        self._exit("second Ctrl-C: exiting without waiting for the step or the save", EXIT_INTERRUPTED)
                    if signum not in announced:
                        announced.add(signum)
                        self._announce(signum)
                if self._launcher_pid not in (None, os.getppid()):
                    self._launcher_pid = None
                    self.received = signal.SIGTERM
                    reason = "the launcher has ended, and this rank did not save and exit in time"
                    threading.Timer(GRACE_S, self._exit, (reason, self.code)).start()
        os.close(self._read_fd)

    def _wait_for_listener(self) -> None:
        """Wait until the listener thread has handled all signals that have arrived. Otherwise it could handle a signal of the
        training after the training, and end a complete run with the exit code of a signal."""
        if self._owner_pid == os.getpid():
            self._has_caught_up.clear()
            os.write(self._write_fd, b"\0")
            self._has_caught_up.wait(1.0)

    def _is_repeated_interrupt(self, signum: signal.Signals) -> bool:
        """Return whether the signal is a second Ctrl-C, and not the first one that arrives twice. After the first Ctrl-C, torchrun
        sends SIGTERM in place of the second."""
        now = time.monotonic()
        if self._interrupted_at is None and signum == signal.SIGINT:
            self._interrupted_at = now
        if self._interrupted_at is None or not (signum == signal.SIGINT or (signum == signal.SIGTERM and is_under_torchrun())):
            return False
        return now - self._interrupted_at > SAME_KEY_PRESS_S

    def _announce(self, signum: signal.Signals) -> None:
        """Print what the run does next, on the first rank. After Ctrl-C, also on the first rank of the node, whose terminal the
        user watches."""
        is_interrupt = signum == signal.SIGINT
        if (is_first_rank() or (is_interrupt and read_process_info().local_rank == 0)) and not has_failed_neighbor():
            action = ", saves and exits" if self._saves else " and exits (without --save nothing is saved)"
            hint = ". A second Ctrl-C exits at once." if is_interrupt else ""
            write_message(f"{'Ctrl-C' if is_interrupt else signum.name}: the run finishes this step{action}{hint}")

    def _exit_outside_training(self, signum: signal.Signals) -> None:
        phase = "after training" if self._has_trained else "before training: there is nothing to save"
        self._exit(f"{signum.name} {phase}", EXIT_INTERRUPTED if signum == signal.SIGINT else self.code)

    def _exit(self, reason: str, code: int) -> None:
        is_ended_by_launcher = has_failed_neighbor()
        if is_first_rank() and not is_ended_by_launcher:
            write_message(reason)
        write_error_file(reason, is_consequence=is_ended_by_launcher)
        os._exit(code)

    def _reset_in_child(self) -> None:
        if self._owner_pid is not None:
            signal.set_wakeup_fd(-1)
            for signum in self._signals:
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
