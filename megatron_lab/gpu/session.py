"""Session that runs checks in order within a time budget, and reports each result as soon as it is available."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
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
"""States of checks that a resumed session runs again."""
_SLACK_S = 40.0
"""Seconds that a check may take in addition to its estimate. If three times the estimate is more, that is the limit.

The first use of a library reads hundreds of megabytes from a disk that may be slow.
"""
_STACK_DUMP_WAIT_S = 0.3
"""Seconds to wait until a worker has printed the stacks of its threads."""
_LOG_LINES = 30
"""Number of lines at the end of a worker's output that the result of a failed check includes."""


class Interrupted(BaseException):
    """Raised when a signal such as Ctrl-C asks the program to stop."""


class Worker:
    """Child process that runs checks (`megatron_lab.gpu.worker`), as seen by the parent process. The parent sends it checks and
    reads their results.

    Args:
        device: "cuda" or "cpu".
        folder: folder for the files of the checks and for the output of the process.
    """

    def __init__(self, device: str, folder: Path) -> None:
        read_fd, write_fd = os.pipe()
        self._results_fd, self._buffer = read_fd, b""
        self._log = folder / f"log-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self._process = MarkedProcess(
                [sys.executable, "-u", "-m", "megatron_lab.gpu.worker", device, str(folder), str(write_fd)],
                {},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
            )
        os.close(write_fd)

    def run(self, check: Check, data: Mapping[str, Any], limit: float) -> tuple[Result, bool]:
        """Run a check in the child process for at most `limit` seconds.

        Args:
            data: measured values of earlier checks, by the name of the check.

        Returns:
            the result of the check, and whether the child process can run more checks.
        """
        partial: Result = {}
        deadline = time.monotonic() + limit
        try:
            stdin = self._process.popen.stdin
            assert stdin is not None
            stdin.write(json.dumps({"name": check.name, "data": data}).encode() + b"\n")
            stdin.flush()
            while (message := self._read_message(deadline)) is not None:
                if not message.pop("partial", False):
                    usable = message.pop("usable")
                    figure = message["figure"] or partial.get("figure", "")
                    return {**message, "figure": figure, "data": {**partial.get("data", {}), **message["data"]}}, usable
                partial = message
        except (BrokenPipeError, EOFError):
            status = self._process.end()
            outcome = {"state": "crash", "message": f"exit status {status}: {self._find_reason()}"}
        else:
            outcome = {"state": "too slow", "message": f"ended after {limit:.0f} s"}
            self._process.popen.send_signal(signal.SIGUSR1)
            time.sleep(_STACK_DUMP_WAIT_S)
        return {**partial, **outcome, "data": {**partial.get("data", {}), "log": self._read_log()[-_LOG_LINES:]}}, False

    def _read_message(self, deadline: float) -> Result | None:
        """Return the next message of the child process, or None if none arrives before the deadline.

        Raises:
            EOFError: the child process has ended.
        """
        while b"\n" not in self._buffer:
            if not multiprocessing.connection.wait([self._results_fd], max(0.0, deadline - time.monotonic())):
                return None
            if not (data := os.read(self._results_fd, 1 << 16)):
                raise EOFError
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\n")
        message: Result = json.loads(text)
        return message

    def _find_reason(self) -> str:
        """Return the line of the child process's output that most likely explains why the process ended."""
        log_lines = [line.strip() for line in self._read_log()]
        error_lines = [line for line in log_lines if "out of memory" in line.lower() or line.startswith("Fatal Python error")]
        return (error_lines or log_lines or ["no output"])[-1][:300]

    def _read_log(self) -> list[str]:
        """Return the non-empty lines that the child process has printed."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]

    def close(self) -> None:
        """End the child process and all its descendants."""
        self._process.end()
        os.close(self._results_fd)


def create_result(check: Check) -> Result:
    """Return the initial result of a check as a dict, with the state "not run" and no measured values."""
    return {"name": check.name, "proves": check.proves, "state": NOT_RUN, "figure": "", "message": "", "seconds": 0.0, "data": {}}


def run_checks(
    checks: Sequence[Check],
    results: dict[str, Result],
    device: str,
    budget_s: float,
    on_result: Callable[[Result], None],
) -> None:
    """Run those checks in order that have not run yet, were interrupted, or had no time left. `REPEATABLE` lists these states.

    Args:
        results: results by check name, changed in place.
        device: "cuda" or "cpu".
        budget_s: seconds for all checks. If the estimate of a check exceeds the remaining time, the check is skipped, and later,
            shorter checks are still tried.
        on_result: called with the result of each check of this session.

    Raises:
        Interrupted: a signal arrived. The running check gets the state "interrupted".
    """
    deadline = time.monotonic() + budget_s
    worker: Worker | None = None
    with tempfile.TemporaryDirectory(prefix="check_gpu_", ignore_cleanup_errors=True) as folder:
        try:
            for check in checks:
                result = results[check.name]
                if result["state"] not in REPEATABLE:
                    continue
                estimate, remaining = check.estimate(device), deadline - time.monotonic()
                result.update(create_result(check))
                if check.needs_cuda and device != "cuda":
                    result["state"] = "needs CUDA"
                elif estimate > remaining:
                    result.update(
                        state="no time left", message=f"takes about {estimate:.0f} s, {max(0.0, remaining):.0f} s were left"
                    )
                else:
                    start = time.monotonic()
                    result["state"] = "interrupted"
                    limit = min(remaining, max(3 * estimate, estimate + _SLACK_S))
                    worker = worker or Worker(device, Path(folder))
                    data = {name: earlier_result["data"] for name, earlier_result in results.items() if earlier_result["data"]}
                    try:
                        outcome, usable = worker.run(check, data, limit)
                    finally:
                        result["seconds"] = round(time.monotonic() - start, 1)
                    result.update(outcome)
                    if outcome["state"] == "too slow" and limit == remaining:
                        result["state"] = "no time left"
                    if not usable:
                        worker.close()
                        worker = None
                on_result(result)
        finally:
            if worker is not None:
                worker.close()
