"""Helper processes of a run as forks of its ranks, for tests that are not about their start.

A writer of checkpoints and a keeper of state import their modules again, which takes longer than their work in a
test. A fork of a rank has the modules already.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO

from megatron.checkpoint import rank_writer
from megatron_lab.node_memory import keeper
from tests.support.cli import live_as_program


def fork_modules() -> None:
    """Start keepers and writers of this process as forks from now on."""
    for starter in (keeper, rank_writer):
        starter.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _Forked})  # type: ignore[attr-defined]


class _Forked:
    """Stand-in for `subprocess.Popen` with a command of `build_module_command`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        start_new_session: bool,
        stdin: int,
        stdout: int,
        pass_fds: Sequence[int] = (),
    ) -> None:
        assert start_new_session and stdout in (subprocess.DEVNULL, 2)
        reads, writes = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        said = os.open(os.devnull, os.O_WRONLY) if stdout == subprocess.DEVNULL else os.dup(stdout)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            words = command[command.index("-m") + 1 :]
            live_as_program(lambda: _run(words, env, {0: reads, 1: said}, pass_fds))
        os.close(reads)
        os.close(said)
        self.stdin: IO[bytes] | None = None if writes is None else os.fdopen(writes, "wb")

    def poll(self) -> int | None:
        """Exit code, None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, once the process has ended. A timeout is given only after a kill, and does not matter then."""
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, options)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _run(words: Sequence[str], env: Mapping[str, str], streams: Mapping[int, int], pass_fds: Sequence[int]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for descriptor, stream in streams.items():
        os.dup2(stream, descriptor)
    kept = sorted({0, 1, 2, *pass_fds})
    for low, high in zip(kept, [*kept[1:], 4096], strict=True):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
