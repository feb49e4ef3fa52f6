"""Picture of the loss curve (`loss.png`) in the folder of a run, and `report.html` at the end of the run.

Separate processes create these files from the history file of the run while training continues. The end of a run waits for them,
except after a signal or a time limit, because the job may be killed soon.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron.config.launcher import build_module_command
from megatron.config.outputs import get_run_folder
from megatron.training.features import Feature, RunComponents
from megatron.training.startup import PICTURE_FILE, REPORT_FILE, describe_missing_library

INTERVAL_S, FIRST_DELAY_S = 60.0, 15.0
"""Seconds between pictures, and before the first one."""
_PROCESS_TIMEOUT_S, _CLOSE_TIMEOUT_S = 120.0, 60.0
"""Maximum seconds for one picture, and maximum seconds that the end of a run waits for the last picture and the report."""
_PAUSE_FACTOR = 20
"""Minimum pause between pictures, as a multiple of the time that a picture takes."""
_TOOLS = {PICTURE_FILE: "tools/plot_loss.py", REPORT_FILE: "tools/report.py"}
"""Programs with which a user can create the files later."""


class LossPicture:
    """Writer of a picture of a run's loss curve, at intervals, and of a report at the end of the run, in separate processes.

    A thread waits for the processes, so that they can neither delay a step nor end the run. An error is reported once, on stderr.

    Args:
        command: command line that draws the picture from the history file of a run. The folder of the run is appended as its last
            argument. On failure the process must exit with a nonzero status and write a line with the reason to stderr. None draws
            no picture.
        folder: folder of the run.
        report: command line that creates the report when the run ends, with the same last argument and exit status. None creates no
            report.
        interval_s: minimum seconds between two pictures.
        first_delay_s: seconds from the start of the thread to the first picture.
        environment: environment variables of these processes; by default those of this process.
        log: function that writes a line to the log of the run.
        is_time_short: function that returns, at the end of a run without an error, whether the job may be killed soon. The last
            picture and the report are then left out.
    """

    def __init__(
        self,
        command: Sequence[str] | None,
        folder: str | Path,
        report: Sequence[str] | None = None,
        *,
        interval_s: float = INTERVAL_S,
        first_delay_s: float = FIRST_DELAY_S,
        environment: Mapping[str, str] | None = None,
        log: Callable[[str], None] = print,
        is_time_short: Callable[[], bool] = lambda: False,
    ) -> None:
        files = {PICTURE_FILE: command, REPORT_FILE: report}
        self._commands = {name: file_command for name, file_command in files.items() if file_command is not None}
        self._folder, self._interval_s, self._first_delay_s = folder, interval_s, first_delay_s
        self._environment, self._log, self._is_time_short = environment, log, is_time_short
        self._ending, self._is_cancelled = threading.Event(), False
        self._reported = set[str]()
        self._thread = threading.Thread(target=self._run, name="loss picture", daemon=True)

    def start(self) -> None:
        """Start the thread that runs the processes which draw the loss curve and create the report."""
        self._thread.start()

    def close(self) -> None:
        """Draw the loss curve for the last time and create the report of the run. Wait for both processes, but at most 60 s."""
        self._ending.set()
        if self._thread.ident is None:
            return
        self._log(f"writing {' and '.join(self._commands)} into {self._folder} ...")
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._log(f"this takes more than {_CLOSE_TIMEOUT_S:g} s, so the run ends without it. {self._describe_commands()}")

    def cancel(self) -> None:
        """Neither draw the loss curve for the last time nor create the report of the run. Log the command that creates the files
        later."""
        self._is_cancelled = True
        self._ending.set()
        self._log(f"to end quickly, the run leaves out {' and '.join(self._commands)}. {self._describe_commands()}")

    def _describe_commands(self) -> str:
        """Return a text with the command line that creates the files later."""
        commands = (f"python {_TOOLS[name]} {shlex.quote(str(self._folder))}" for name in self._commands)
        return f"To write them:\n  {'; '.join(commands)}"

    def close_without_waiting(self) -> None:
        """Start the processes that draw the loss curve for the last time and create the report of the run, without waiting for
        them. Called after a failed run."""
        for command in self._commands.values():
            with suppress(OSError):
                self._start_process(command, subprocess.DEVNULL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.close_without_waiting()
        elif self._is_time_short():
            self.cancel()
        else:
            self.close()

    def _start_process(self, command: Sequence[str], stderr: int) -> subprocess.Popen[bytes]:
        # A new session, so that Ctrl-C only stops the run; a single thread, so that the run keeps its cores.
        environment = {**(os.environ if self._environment is None else self._environment), "OMP_NUM_THREADS": "1"}
        nothing = subprocess.DEVNULL
        return subprocess.Popen(
            [*command, str(self._folder)], stdin=nothing, stdout=nothing, stderr=stderr, start_new_session=True, env=environment
        )

    @staticmethod
    def _wait_for_process(process: subprocess.Popen[bytes]) -> str | None:
        """Wait for a process that draws the loss curve or creates the report. If it failed or took too long, return the reason,
        else None."""
        try:
            _, error_output = process.communicate(timeout=_PROCESS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"it took more than {_PROCESS_TIMEOUT_S:g} s"
        lines = error_output.decode(errors="replace").strip().splitlines()
        return None if process.returncode == 0 else lines[-1] if lines else f"exit status {process.returncode}"

    def _run(self) -> None:
        pause = self._first_delay_s
        while not self._ending.wait(pause):
            start = time.monotonic()
            if PICTURE_FILE in self._commands:
                self._make_file(PICTURE_FILE)
            pause = max(self._interval_s, _PAUSE_FACTOR * (time.monotonic() - start))  # a long run has a long record
        for name in () if self._is_cancelled else self._commands:
            self._make_file(name)

    def _make_file(self, name: str) -> None:
        try:
            reason = self._wait_for_process(self._start_process(self._commands[name], subprocess.PIPE))
        except OSError as error:
            reason = str(error)
        if reason is not None and name not in self._reported:
            self._reported.add(name)
            with suppress(OSError, ValueError):  # stderr may be closed
                sys.stderr.write(f"{self._folder}/{name} cannot be created ({reason}): training continues without it\n")
                sys.stderr.flush()


class PictureFeature(Feature):
    """Feature that draws a picture of the loss during the run, and creates a report at its end."""

    def around_run(self, run: RunComponents) -> AbstractContextManager[object]:
        """On the first rank, start the thread that draws the loss curve at intervals. At the end of the run, the thread draws it
        for the last time and creates the report, unless the job may be killed soon."""
        logging, folder = run.config.logging, get_run_folder(run.config.checkpoint, run.config.logging)
        if run.context.rank != 0 or folder is None:
            return nullcontext()
        picture_command, environment = build_module_command("megatron_lab", "plot_loss")
        report_command, _ = build_module_command("megatron_lab", "report")
        makes_picture = logging.loss_picture and describe_missing_library() is None
        if not makes_picture and not logging.report:
            return nullcontext()
        return LossPicture(
            picture_command if makes_picture else None,
            folder,
            report_command if logging.report else None,
            environment=environment,
            log=run.reporter.log,
            is_time_short=lambda: run.control.is_time_short,
        )
