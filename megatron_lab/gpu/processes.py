"""Processes that are ended together with everything that they have started."""

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

_MARK = "MEGATRON_CHECK_GPU"
_SECONDS_TO_END = 15.0
"""A killed process may wait in the driver for as long as it likes. It is then left behind."""


class MarkedProcess:
    """A command that runs in the repository's root, with a mark in its environment that its children inherit."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        self._mark = uuid.uuid4().hex
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        full_environment = {**os.environ, "PYTHONPATH": path, **environment, _MARK: self._mark}
        self.popen = subprocess.Popen(command, cwd=ROOT, env=full_environment, **options)

    def end(self) -> int:
        """Kill the process and all its descendants, whatever group or session they went to; return its exit status.

        It waits a bounded time for them to end.
        """
        ends = time.monotonic() + _SECONDS_TO_END
        if self.popen.poll() is None:
            self.popen.kill()
        while time.monotonic() < ends and (marked := self._marked()):
            for process in marked:
                try:
                    os.kill(int(process.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        try:
            return self.popen.wait(max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def _marked(self) -> list[Path]:
        """Return the folders in /proc of the processes that carry the mark."""
        return [process for process in Path("/proc").iterdir() if process.name.isdigit() and _has(process, self._mark)]


def _has(process: Path, mark: str) -> bool:
    """Whether a process of /proc carries the mark. The environment of a zombie is empty."""
    try:
        return f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
