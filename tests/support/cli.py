"""Run a command line of the project, plainly or under torchrun, and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing.process
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_lab.verification.local_ranks import kill_process_group, set_parent_death_signal
from tests.support.warm_python import MARK, MARK_LENGTH, warm_python

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


class Finished(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def spawn_cli(argv: Sequence[str], nproc: int | None, timeout: float = 120.0, *, fresh: bool = False) -> Finished:
    """Run `python argv...` from the repository, under torchrun with `nproc` ranks, or plainly with nproc None.

    Args:
        argv: script (relative to the repository) and its arguments.
        nproc: ranks.
        timeout: seconds until everything that the command started is killed.
        fresh: start each interpreter anew; otherwise forks of a warm one run the programs (tests/support/warm_python.py).

    Raises:
        AssertionError: the command was not done in time, or left processes behind; with the end of its output.
    """
    launcher = [] if nproc is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    mark, parent = uuid.uuid4().hex, os.getpid()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, MARK: mark}
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
            preexec_fn=lambda: set_parent_death_signal(parent, signal.SIGTERM),  # noqa: PLW1509 - takes no lock; torchrun then ends its ranks
        )
        try:
            process.wait(timeout)
            left = _left_after_grace(mark)
            assert not left, f"{' '.join(argv)} left processes behind: {left}\n{_tail(output())}"
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{' '.join(argv)} was not done after {timeout:g} s\n{_tail(output())}") from None
        finally:
            if process.poll() is None:
                kill_process_group(process.pid)
                process.wait()
            for pid in _marked(mark):  # torchrun gives every rank a session of its own, so its group does not hold them
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return Finished(process.returncode, *output())


def last_rows(text: str) -> str:
    """What a terminal of 24 rows and 80 columns shows at the end, above the next prompt, without line breaks of the terminal."""
    rows = [line[i : i + 80] for line in text.splitlines(keepends=True) for i in range(0, len(line), 80)]
    return "".join(rows[-23:])


def command_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings by the names of their fields as the words of a command line; None is left out, False is the `no-` form."""
    words: list[str] = []
    for field, value in settings.items():
        name = field.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple | list) else (value,))]
    return words


def fork_program(program: Callable[[], int | None], stdout: Path, stderr: Path) -> int:
    """Fork this process for a program that has a session of its own, writes to files, and dies with this process.

    Returns:
        the process. It ends with the exit code that `program` returns; an error that this raises is printed.
    """
    parent = os.getpid()

    def begin() -> int | None:
        os.setsid()
        set_parent_death_signal(parent, signal.SIGKILL)
        forget_children()
        gc.freeze()  # what the test's process made stays: to look through it would only copy its memory
        for number, path in ((1, stdout), (2, stderr)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        logging.getLogger().handlers.clear()  # pytest's
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        return program()

    stdout.touch()
    stderr.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside pytest-timeout's thread
        pid = os.fork()
    if pid == 0:
        live_as_program(begin)
    return pid


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


def _tail(output: tuple[str, str]) -> str:
    stdout, stderr = output
    return f"--- end of stdout\n{stdout[-4000:]}\n--- end of stderr\n{stderr[-4000:]}"
