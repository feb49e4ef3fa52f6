"""Signals that ask a run to exit: SIGTERM, which schedulers send some time before they kill a job, and SIGUSR1, which they can
be told to send. While training goes on they are noted, and the loop saves and exits; at any other time the rank leaves at once.

When the launcher ends in whatever way, its ranks end too: they get SIGTERM, and are ended if they do not end in 30 s, as by
torchrun itself.
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

from megatron.config.launcher import is_first_rank, launched

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 30.0
"""Seconds in which a rank must save and exit when its launcher has ended."""
_LOOK_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1


class ExitSignals:
    """Takes the signals from where it is entered, in the main thread, to where it is left. Children that are forked meanwhile
    get the default action back.

    Args:
        code: exit code of a run that a signal ended (--exit-signal-code).
    """

    def __init__(self, code: int) -> None:
        self.code = code
        self.seen: signal.Signals | None = None
        """The last one that this rank got within `noted`. Only some ranks may have got it, so they must agree."""
        self._noted = False
        self._entered_by: int | None = None
        self._launcher: int | None = None

    def __enter__(self) -> Self:
        self._entered_by = os.getpid()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._launcher = os.getppid()
            if sys.platform == "linux":  # elsewhere only the look at the parent, once a second, tells
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        # A handler of Python's runs when the main thread comes back to Python. That may be minutes away, as while it waits for
        # other ranks to start. What is written to this pipe is read at once, by another thread.
        self._hears, self._tells = os.pipe()
        os.set_blocking(self._tells, False)
        self._previous_pipe = signal.set_wakeup_fd(self._tells, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="exit signals").start()
        os.register_at_fork(after_in_child=self._forget)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._previous_pipe)
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python; it cannot be put back.
            signal.signal(number, handler or signal.SIG_DFL)
        self._entered_by = None
        os.close(self._tells)  # the thread ends

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within the block a signal ends nothing: who is in it asks `seen`, between two steps."""
        self._noted = True
        try:
            yield
        finally:
            self._noted = False

    def words(self) -> str:
        """Why all ranks stop, once they have agreed to."""
        return "on a signal to another rank" if self.seen is None else f"on {self.seen.name}"

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Nothing more: a handler that prints or saves can interrupt another print or save.
        if self._noted:
            self.seen = signal.Signals(number)

    def _listen(self) -> None:
        while True:
            heard, _, _ = select.select([self._hears], [], [], None if self._launcher is None else _LOOK_EVERY_S)
            if heard and not (told := os.read(self._hears, 1)):
                break
            if heard and told[0] in SIGNALS and not self._noted and self._entered_by is not None:
                self._leave(f"{signal.Signals(told[0]).name} before training: there is nothing to save")
            if self._launcher not in (None, os.getppid()):
                self._launcher = None
                self.seen = signal.SIGTERM
                threading.Timer(GRACE_S, self._leave, ("the launcher has ended, and this rank could not in time",)).start()
        os.close(self._hears)

    def _leave(self, text: str) -> None:
        if is_first_rank():
            with suppress(OSError):
                sys.stderr.write(f"pretrain_gpt.py: {text}\n")
                sys.stderr.flush()
        os._exit(self.code)

    def _forget(self) -> None:
        if self._entered_by is not None:
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self._entered_by = None


# ---- What a start of the run has made so far, for a launcher that starts ranks again. Needs no torch.
#
# The launcher names a file in the environment. The first rank of the node writes two numbers into it: the iteration of the state
# from which the start began, and the last iteration that it finished. Any rank may add a third (`tell_end`).

LIFE_FILE = "MEGATRON_LIFE_FILE"
"""Variable of the environment with its path."""
LOST_CONTACT = 87
"""Exit code with which a rank tells such a launcher that it only lost contact with another; any other launcher gets 1."""
REFUSED, DIVERGED = 2, 88
"""Exit codes of ranks that another start would end in the same way: for settings that are wrong or do not go with the checkpoint;
for numbers that are not finite, or loss spikes that come again. Any other launcher gets 1 for all but wrong settings."""
_FORM, _END = struct.Struct("<qq"), struct.Struct("<q")


class LifeNote:
    """Writes the file, where there is one.

    Args:
        began: the iteration from which the run goes on.
    """

    def __init__(self, began: int) -> None:
        path = os.environ.get(LIFE_FILE) if launched().local_rank == 0 else None
        self._began = began
        self._file = None if path is None else os.open(path, os.O_WRONLY)
        self.finished(began)

    def finished(self, iteration: int) -> None:
        """An iteration is finished."""
        if self._file is not None:
            os.pwrite(self._file, _FORM.pack(self._began, iteration), 0)


def tell_end(code: int) -> None:
    """A rank ends with a code that every other start would end with: a third number, for launchers that see no codes of ranks."""
    path = os.environ.get(LIFE_FILE)
    if path is not None and code in (REFUSED, DIVERGED):
        with suppress(OSError):
            file = os.open(path, os.O_WRONLY)
            os.pwrite(file, _END.pack(code), _FORM.size)
            os.close(file)


def read_life(path: str) -> tuple[int, int] | None:
    """Both numbers; None if training has not begun."""
    with open(path, "rb") as file:
        found = file.read(_FORM.size)
    return None if len(found) < _FORM.size else _FORM.unpack(found)  # type: ignore[return-value]
