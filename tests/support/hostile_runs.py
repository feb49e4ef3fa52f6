"""Runs of a program on damaged files or with bad values, and what becomes of them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from megatron_lab.verification.local_ranks import kill_process_group
from tests.support.cli import fork_program

_MEMORY_BYTES, _FILE_BYTES = 4 << 30, 1 << 28
"""Limits of a program: address space beyond that of this process, and the size of a file that it writes."""
_MAX_SHOWN = 3000  # characters


class Outcome(StrEnum):
    """What may become of a program."""

    REFUSED = "refused with a message"
    ANNOUNCED = "went on, and said so"
    SAME = "same result"
    ACCEPTED = "valid, although odd"
    BUSY = "still computing at the time limit"


class WrongError(AssertionError):
    """A program ended in a way that is not allowed. `kind` is the same for those that end in the same way."""

    def __init__(self, kind: str, ended: Ended) -> None:
        output = ended.output.replace("\0", "\\0")
        super().__init__(f"{kind}; exit code {ended.code}\n{output[-_MAX_SHOWN:]}")
        lines = [line for line in ended.output.splitlines() if re.match(r"\w+(\.\w+)*(Error|Exception)\b", line)]
        self.kind = f"{kind} {lines[-1][:80] if lines else ''}"


class Ended(NamedTuple):
    """How a program ended: exit code (negative for a signal; None at the time limit), output, and whether it used the processor."""

    code: int | None
    output: str
    is_busy: bool


@dataclass(frozen=True)
class Command:
    """Command line of a program that reads files."""

    name: str
    program: str
    """Name of a module with a function `main`."""
    argv: tuple[str, ...]
    """Words; paths are relative to the folder in which the program runs."""
    files: tuple[str, ...] = ()
    """Patterns of the files that it reads."""
    results: tuple[str, ...] = ()
    """Patterns of the files that it writes, whose content is the result besides the output."""
    is_protected: bool = False
    """Whether checksums cover the files, so that every change of a content must be noticed."""
    signs: tuple[str, ...] = ()
    """Texts that say, besides the name of a file, what is wrong with its content."""


def run_program(
    command: Command, folder: Path, timeout: float, words: Sequence[str] = (), memory_bytes: int = _MEMORY_BYTES
) -> Ended:
    """Run a command in a folder, with more words, as a user who may not read every file; and end what it leaves behind.

    Args:
        timeout: seconds.
        memory_bytes: limit of the address space, beyond what this process has.
    """
    logs = Path(tempfile.mkdtemp(prefix="logs-"))

    def program() -> int | None:
        _limit(memory_bytes)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0)
        os.environ |= {"HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        argv = [*command.argv, *words]
        sys.argv = [f"{command.program.rpartition('.')[2]}.py", *argv]
        sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # as an interpreter does
        _drop_privileges()
        try:
            code: int | None = importlib.import_module(command.program).main(argv)
        except SystemExit as end:
            if isinstance(end.code, str):  # as an interpreter does
                print(end.code, file=sys.stderr)
            raise
        return code

    try:
        pid = fork_program(program, logs / "out", logs / "err")
        code, is_busy = _wait(pid, timeout)
        texts = [(logs / name).read_text(errors="replace") for name in ("out", "err")]
        return Ended(code, "".join(texts).replace(str(folder) + "/", ""), is_busy)
    finally:
        shutil.rmtree(logs)


def _wait(pid: int, timeout: float) -> tuple[int | None, bool]:
    """The exit code, None at the time limit, and whether the program has used the processor."""
    descriptor = os.pidfd_open(pid)
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                kill_process_group(pid)
                return os.waitstatus_to_exitcode(status), True
            wait([descriptor], max(0.0, deadline - time.monotonic()))
        kill_process_group(pid)
        _, _, usage = os.wait4(pid, 0)
        return None, usage.ru_utime + usage.ru_stime > timeout / 8
    finally:
        os.close(descriptor)


def _limit(memory_bytes: int) -> None:
    status = Path("/proc/self/statm").read_text().split()
    size = int(status[0]) * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _drop_privileges() -> None:
    """Without its capabilities root too may read and write only what the permissions allow. (Linux)"""
    if sys.platform == "linux" and os.geteuid() == 0:
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capset(header, none)


def put_bad_paths(folder: Path) -> None:
    """The files and folders that `bad_values.BAD_PATHS` names."""
    (folder / "file").write_text("x\n")
    for name in ("folder", "locked", "readonly"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("missing")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(".", os.O_RDONLY)
        os.chdir(folder)
        listener.bind("socket")
        os.fchdir(here)
        os.close(here)
    (folder / "locked").chmod(0)
    (folder / "readonly").chmod(0o500)


def copy_workspace(workspace: Path, folder: Path) -> Path:
    """A copy, whose files may be changed."""
    shutil.copytree(
        workspace, folder, symlinks=True, ignore=lambda _, names: [name for name in names if name in ("pipe", "socket")]
    )
    return folder


def remove_workspace(folder: Path) -> None:
    """Remove a copy with whatever is in it."""
    for path in (folder / "locked", folder / "readonly"):
        with contextlib.suppress(OSError):
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def normalize(output: str) -> str:
    """The output without what differs from run to run: times, rates and memory."""
    output = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\r", "", output)
    output = re.sub(r"\[[^]]*\d\d:\d\d:\d\d[^]]*\]|\d+-\d+-\d+ \d+:\d+(:\d+)?|pid \d+", "", output)
    return re.sub(r"[\d.,]+ ?(ms|s|min|h|us|%|[kMG]?B|GiB|MiB|KiB|tokens/s|TFLOP/s)?\b", "", output)


def read_result(command: Command, folder: Path, ended: Ended) -> tuple[object, ...]:
    """What a command gave: its exit code, what it printed, and the files that it wrote."""
    files = sorted(path for pattern in command.results for path in folder.glob(pattern) if path.is_file())
    contents = [_strip_times(path) for path in files]
    return (ended.code, normalize(ended.output) if not command.results else "", *contents)


def _strip_times(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        return b"\n".join(
            b" ".join(re.findall(rb'"(?:iteration|loss|lm_loss|grad_norm)": [^,}]*', line)) for line in data.splitlines()
        )
    return data


def judge_damage(
    command: Command,
    folder: Path,
    ended: Ended,
    baseline: tuple[object, ...],
    baseline_output: str,
    file: Path,
    *,
    is_gone: bool,
    is_signed: bool,
) -> Outcome:
    """What became of a command one of whose files was damaged.

    Args:
        baseline, baseline_output: result and output without damage.
        file: the damaged file, relative to the folder.
        is_gone: whether nothing of its content is left.
        is_signed: whether the checksums fit the damage.

    Raises:
        WrongError: what must not be.
    """
    new_lines = "\n".join(set(ended.output.splitlines()) - set(baseline_output.splitlines()))
    names = {file.name, file.stem, str(file), file.parent.name, *command.signs} - {""}
    check_end(ended)
    if ended.code is None:
        raise WrongError("hang" if not ended.is_busy else "endless", ended)
    is_named = any(name in new_lines for name in names)
    if ended.code:
        if not is_named:
            raise WrongError("the message does not name the file", ended)
        return Outcome.REFUSED
    if read_result(command, folder, ended) == baseline:
        return Outcome.SAME
    if is_named:
        return Outcome.ANNOUNCED
    if is_gone or (command.is_protected and not is_signed):
        raise WrongError("another result, and no word about the file", ended)
    return Outcome.ACCEPTED


def judge_value(ended: Ended, words: Sequence[str], *, must_refuse: bool) -> Outcome:
    """What became of a command with a bad value.

    Args:
        words: flag and value.
        must_refuse: whether the value cannot be valid.

    Raises:
        WrongError: what must not be.
    """
    check_end(ended)
    name = words[0].partition("=")[0]
    if ended.code is None:
        if ended.is_busy and not must_refuse:
            return Outcome.BUSY
        raise WrongError("hang", ended)
    if ended.code:
        given = [*words[0].split("=", 1)[1:], *words[1:]]
        shown = [
            name,
            name.lstrip("-"),
            name.lstrip("-").replace("-", " "),
            *(word[:40] if len(word) > 1 else f" {word}" for word in given),
        ]
        is_blank = any(not word.strip() for word in given)  # a message shows it, but cannot be searched for it
        # With a valid but extreme number, the run may fail as it goes.
        shown += [] if must_refuse else ["not finite", "out of memory"]
        shown = [text.encode(errors="backslashreplace").decode() for text in shown]
        if not is_blank and not any(text in ended.output for text in shown):
            raise WrongError("the message does not name the flag", ended)
        return Outcome.REFUSED
    if must_refuse:
        raise WrongError("accepted", ended)
    return Outcome.ACCEPTED


def check_end(ended: Ended) -> None:
    """Raise WrongError for a traceback, a signal, or a failure without a word."""
    for sign in (
        "Traceback (most recent call last)",
        "Exception ignored",
        "Fatal Python error",
        "sys.excepthook",
        "internal error",
    ):
        if sign in ended.output:
            raise WrongError("traceback", ended)
    if ended.code is not None and ended.code < 0:
        raise WrongError(f"signal {-ended.code}", ended)
    if ended.code and not ended.output.strip():
        raise WrongError("no message", ended)
