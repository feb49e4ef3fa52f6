"""`loss.png` in the folder of a run, drawn of its record by a process of its own while training goes on, and `report.html` at its
end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron.config.launcher import module_start
from megatron.config.outputs import run_folder
from megatron.training.features import Feature, RunParts
from megatron.training.startup import PICTURE, REPORT, missing_library

EVERY_S, FIRST_S = 60.0, 15.0
"""Seconds between pictures, and before the first."""
_AT_MOST_S, _AT_END_S = 120.0, 60.0
"""Seconds that a picture may take, and for which the end of the run waits for the last one and the report."""
_REST = 20
"""Times as long as a picture took nothing is drawn."""


class LossPicture:
    """Has the picture drawn, and the report made. A thread waits for the process that draws, so that neither can hold up a step or
    end the run; what goes wrong is told once, on stderr.

    Args:
        command: draws the picture of the record of a run, whose folder is given as its last word. It ends with 0, or with a line on
            stderr that says what is wrong. None draws none.
        report: makes the report likewise, when the run ends.
        environment: of these programs, by default that of this process.
    """

    def __init__(
        self,
        command: Sequence[str] | None,
        folder: str | Path,
        report: Sequence[str] | None = None,
        *,
        every_s: float = EVERY_S,
        first_s: float = FIRST_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._commands = {PICTURE: command, REPORT: report}
        self._folder, self._every_s, self._first_s = folder, every_s, first_s
        self._environment = environment
        self._ending = threading.Event()
        self._told = set[str]()
        self._thread = threading.Thread(target=self._draw_often, name="loss picture", daemon=True)

    def start(self) -> None:
        """From now on it is drawn."""
        self._thread.start()

    def close(self) -> None:
        """Have the last one drawn and the report made, and wait a while for them."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(_AT_END_S)

    def leave(self) -> None:
        """Have the last one drawn and the report made without waiting for them, where the run ends by a failure."""
        for command in self._commands.values():
            with suppress(OSError):
                self._begin(command, subprocess.DEVNULL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.leave()

    def _begin(self, command: Sequence[str] | None, stderr: int) -> subprocess.Popen[bytes] | None:
        if command is None:
            return None
        # Ctrl-C in the terminal is for the run alone; the run's cores are not for the picture.
        environment = {**(os.environ if self._environment is None else self._environment), "OMP_NUM_THREADS": "1"}
        nothing = subprocess.DEVNULL
        return subprocess.Popen(
            [*command, str(self._folder)], stdin=nothing, stdout=nothing, stderr=stderr, start_new_session=True, env=environment
        )

    @staticmethod
    def _reason(process: subprocess.Popen[bytes] | None) -> str | None:
        """Wait for the process. Returns why there is no picture, if there is none."""
        if process is None:
            return None
        try:
            _, said = process.communicate(timeout=_AT_MOST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"it took more than {_AT_MOST_S:g} s"
        lines = said.decode(errors="replace").strip().splitlines()
        return None if process.returncode == 0 else lines[-1] if lines else f"exit status {process.returncode}"

    def _draw_often(self) -> None:
        pause = self._first_s
        while not self._ending.wait(pause):
            began = time.monotonic()
            self._draw(PICTURE)
            pause = max(self._every_s, _REST * (time.monotonic() - began))  # the record of a long run takes a while to draw
        self._draw(PICTURE)
        self._draw(REPORT)

    def _draw(self, name: str) -> None:
        try:
            reason = self._reason(self._begin(self._commands[name], subprocess.PIPE))
        except OSError as error:
            reason = str(error)
        if reason is not None and name not in self._told:
            self._told.add(name)
            with suppress(OSError, ValueError):  # stderr may be gone
                sys.stderr.write(f"{self._folder}/{name} cannot be made ({reason}): training goes on without it\n")
                sys.stderr.flush()


class PictureFeature(Feature):
    """loss.png while the run goes on, and report.html at its end."""

    def around_run(self, run: RunParts) -> AbstractContextManager[object]:
        """Have the first rank start the programs that make them."""
        logging, folder = run.config.logging, run_folder(run.config.checkpoint, run.config.logging)
        if run.context.rank != 0 or folder is None:
            return nullcontext()
        draw, environment = module_start("megatron_lab", "plot_loss")
        report, _ = module_start("megatron_lab", "report")
        draws = logging.loss_picture and missing_library() is None
        if not draws and not logging.report:
            return nullcontext()
        return LossPicture(draw if draws else None, folder, report if logging.report else None, environment=environment)
