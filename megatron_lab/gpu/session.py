"""Runs checks in order within a time budget, and keeps a file of results that is complete after every check."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lab.gpu.checks import Check
from megatron_lab.gpu.processes import MarkedProcess

Result = dict[str, Any]
NOT_RUN = "not run"
REPEATABLE = (NOT_RUN, "no time left", "interrupted")
"""States of checks that a resumed session runs."""
_SLACK = 40.0
"""Seconds that a check may take beyond its estimate; more if three times the estimate is more. The first use of a library reads
hundreds of megabytes from a disk that may be slow."""
_SECONDS_TO_PRINT = 0.3
"""Time for a worker to print where its threads are."""
_LOG_LINES = 30
"""Last lines of a worker's output that the result of a crash keeps."""


class Interrupted(BaseException):
    """A signal asked the program to stop."""


class Worker:
    """A process of `megatron_lab.gpu.worker`."""

    def __init__(self, device: str, folder: Path) -> None:
        read_end, write_end = os.pipe()
        self._results, self._buffer = read_end, b""
        self._log = folder / f"log-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self._process = MarkedProcess(
                [sys.executable, "-u", "-m", "megatron_lab.gpu.worker", device, str(folder), str(write_end)],
                {},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
            )
        os.close(write_end)

    def run(self, check: Check, data: Mapping[str, Any], limit: float) -> tuple[Result, bool]:
        """Run a check for at most `limit` seconds. Returns its result, and whether the process can run more checks."""
        partial: Result = {}
        ends = time.monotonic() + limit
        try:
            stdin = self._process.popen.stdin
            assert stdin is not None
            stdin.write(json.dumps({"name": check.name, "data": data}).encode() + b"\n")
            stdin.flush()
            while (message := self._message(ends)) is not None:
                if not message.pop("partial", False):
                    usable = message.pop("usable")
                    figure = message["figure"] or partial.get("figure", "")
                    return {**message, "figure": figure, "data": {**partial.get("data", {}), **message["data"]}}, usable
                partial = message
        except (BrokenPipeError, EOFError):
            status = self._process.end()
            ended = {"state": "crash", "message": f"exit status {status}: {self._last_line()}"}
        else:
            ended = {"state": "too slow", "message": f"ended after {limit:.0f} s"}
            self._process.popen.send_signal(signal.SIGUSR1)
            time.sleep(_SECONDS_TO_PRINT)
        return {**partial, **ended, "data": {**partial.get("data", {}), "log": self._lines()[-_LOG_LINES:]}}, False

    def _message(self, ends: float) -> Result | None:
        """Return the next line of the worker, None when the time is over.

        Raises:
            EOFError: the worker has ended.
        """
        while b"\n" not in self._buffer:
            if not select.select([self._results], [], [], max(0.0, ends - time.monotonic()))[0]:
                return None
            if not (part := os.read(self._results, 1 << 16)):
                raise EOFError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Result = json.loads(line)
        return message

    def _last_line(self) -> str:
        """Return the line of the worker's output that tells why it ended."""
        lines = [line.strip() for line in self._lines()]
        telling = [line for line in lines if "out of memory" in line.lower() or line.startswith("Fatal Python error")]
        return (telling or lines or ["no output"])[-1][:300]

    def _lines(self) -> list[str]:
        """Return the lines that the worker has printed, without empty ones."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]

    def close(self) -> None:
        """End the process and what it has started."""
        self._process.end()
        os.close(self._results)


def blank(check: Check) -> Result:
    """Return the result of a check before it runs."""
    return {"name": check.name, "proves": check.proves, "state": NOT_RUN, "figure": "", "message": "", "seconds": 0.0, "data": {}}


def run_checks(
    checks: Sequence[Check],
    results: dict[str, Result],
    device: str,
    seconds: float,
    after_each: Callable[[Result], None],
) -> None:
    """Run the checks that `results` has not ended, in order.

    Args:
        results: by check name, changed in place. Those in a state of `REPEATABLE` are run.
        seconds: budget. A check whose estimate does not fit into the rest is left out, and later, shorter ones are tried.
        after_each: called with the result of each check of this session.

    Raises:
        Interrupted: a signal came. The check that ran has the state "interrupted".
    """
    ends = time.monotonic() + seconds
    worker: Worker | None = None
    with tempfile.TemporaryDirectory(prefix="check_gpu_", ignore_cleanup_errors=True) as folder:
        try:
            for check in checks:
                result = results[check.name]
                if result["state"] not in REPEATABLE:
                    continue
                estimate, left = check.estimate(device), ends - time.monotonic()
                result.update(blank(check))
                if check.needs_cuda and device != "cuda":
                    result["state"] = "needs CUDA"
                elif estimate > left:
                    result.update(state="no time left", message=f"takes about {estimate:.0f} s, {max(0.0, left):.0f} s were left")
                else:
                    began = time.monotonic()
                    result["state"] = "interrupted"
                    limit = min(left, max(3 * estimate, estimate + _SLACK))
                    worker = worker or Worker(device, Path(folder))
                    data = {name: other["data"] for name, other in results.items() if other["data"]}
                    try:
                        ended, usable = worker.run(check, data, limit)
                    finally:
                        result["seconds"] = round(time.monotonic() - began, 1)
                    result.update(ended)
                    if ended["state"] == "too slow" and limit == left:
                        result["state"] = "no time left"
                    if not usable:
                        worker.close()
                        worker = None
                after_each(result)
        finally:
            if worker is not None:
                worker.close()
