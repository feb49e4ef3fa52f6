"""Processes that can be killed together with all their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lab.gpu.context import ROOT

_MARK_VARIABLE = "MEGATRON_CHECK_GPU"
_KILL_TIMEOUT_S = 15.0
"""Seconds to wait for killed processes. A process that is blocked in the driver may stay longer; it is then left behind."""


class MarkedProcess:
    """Process that can be killed together with all its descendants.

    The process runs in the repository's root. Its environment has a variable with a unique value, the mark. Descendants inherit
    this variable, by which they are found.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        self._mark = uuid.uuid4().hex
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        full_environment = {**os.environ, "PYTHONPATH": path, **environment, _MARK_VARIABLE: self._mark}
        self.popen = subprocess.Popen(command, cwd=ROOT, env=full_environment, **options)

    def end(self) -> int:
        """Kill the process and all its descendants, and return the exit status of the process.

        Descendants in other process groups and sessions are killed too. The method waits at most `_KILL_TIMEOUT_S` seconds for all
        of them to end.
        """
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        if self.popen.poll() is None:
            self.popen.kill()
        while time.monotonic() < deadline and (marked := self._list_marked_processes()):
            for process_folder in marked:
                try:
                    os.kill(int(process_folder.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        try:
            return self.popen.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def _list_marked_processes(self) -> list[Path]:
        """Return the folders in /proc of the process and its descendants: of all processes whose environment contains the mark."""
        return [
            process_folder
            for process_folder in Path("/proc").iterdir()
            if process_folder.name.isdigit() and _has_mark(process_folder, self._mark)
        ]


def _has_mark(process_folder: Path, mark: str) -> bool:
    """Return whether the environment of a process contains the mark, a value that is unique to the process and its descendants. A
    process that has ended has an empty environment.

    Args:
        process_folder: folder of the process in /proc.
    """
    try:
        return f"{_MARK_VARIABLE}={mark}".encode() in (process_folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
