"""Run a command line of the project, plainly or under torchrun, and leave nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron.verification.local_ranks import die_with, kill_group
from tests.support.warm_python import MARK, MARK_LENGTH, warm_python

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


class Finished(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def spawn_cli(
    argv: Sequence[str], nproc: int | None, timeout: float = 120.0, env: dict[str, str] | None = None, *, fresh: bool = False
) -> Finished:
    """Run `python argv...` from the repository, under torchrun with `nproc` ranks, or plainly with nproc None.

    Args:
        argv: script (relative to the repository) and its arguments.
        nproc: ranks.
        timeout: seconds until everything that the command started is killed.
        env: variables added to this process's.
        fresh: start each interpreter anew; otherwise forks of a warm one run the programs (tests/support/warm_python.py).

    Raises:
        AssertionError: the command was not done in time, or left processes behind; with the end of its output.
    """
    launcher = [] if nproc is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    mark, parent = uuid.uuid4().hex, os.getpid()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {}), MARK: mark}
    # Files, not pipes: a process left behind would hold a pipe open for ever.
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:

        def output() -> tuple[str, str]:
            stdout.seek(0)
            stderr.seek(0)
            return stdout.read(), stderr.read()

        process = subprocess.Popen(
            [sys.executable if fresh else warm_python(), *launcher, *argv],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: die_with(parent, signal.SIGTERM),  # noqa: PLW1509 - takes no lock; torchrun then ends its ranks
        )
        try:
            process.wait(timeout)
            left = _left_after_grace(mark)
            assert not left, f"{' '.join(argv)} left processes behind: {left}\n{_tail(output())}"
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{' '.join(argv)} was not done after {timeout:g} s\n{_tail(output())}") from None
        finally:
            if process.poll() is None:
                kill_group(process.pid)
                process.wait()
            for pid in _marked(mark):  # torchrun gives every rank a session of its own, so its group does not hold them
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return Finished(process.returncode, *output())


def forget_children() -> None:
    """In a fork of the test's process that runs a program: the ranks of the test are not its own to end when it is interrupted."""
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]


def live_as_program(program: Callable[[], int | None]) -> NoReturn:
    """Call a function in a fork of a test's process, and end this with its exit code; print an error that it raises."""
    code = 1
    try:
        code = program() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - shown as an interpreter shows it
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _left_after_grace(mark: str) -> list[int]:
    """Processes that do not end on their own within a second."""
    for _ in range(20):
        if not (left := list(_marked(mark))):
            break
        time.sleep(0.05)
    return left


def _marked(mark: str) -> Iterator[int]:
    """Processes that carry the mark in their environment or, forks of a warm interpreter, as their name (Linux; elsewhere none)."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = (folder / "comm").read_text().strip() == mark[:MARK_LENGTH]
            if named or wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _tail(output: tuple[str, str], characters: int = 4000) -> str:
    stdout, stderr = output
    return f"--- end of stdout\n{stdout[-characters:]}\n--- end of stderr\n{stderr[-characters:]}"


def ranks_of(launcher: int) -> list[int]:
    """Processes that train, below one that launched them."""

    def below(pid: int) -> list[int]:
        try:
            children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:  # it has ended
            return []
        return [*children, *(grandchild for child in children for grandchild in below(child))]

    found = []
    for pid in below(launcher):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if re.search(rb"\0-u\0[^\0]*pretrain_gpt\.py\0", words) and b"torch.distributed.run" not in words:
            found.append(pid)
    return found
