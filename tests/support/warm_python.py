"""A `python` that starts programs of the repository in a fraction of a second, for tests that are not about the start itself.

An interpreter with torch takes some three seconds of processor time until a program begins, and torchrun starts one for each rank.
Here a server process has imported everything once. The executable `warm_python()` hands its command line, folder, environment,
standard streams and other inherited files to the server, which forks; the fork runs the script as `__main__`. Signals, the exit
code and death by a signal pass through in both directions. What is no program of the repository (`-c`, options, a copy of the tree)
runs in a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from megatron_lab.verification.local_ranks import kill_process_group, set_parent_death_signal
from tests.support.huge_pages import collapse_pages

ROOT = Path(__file__).resolve().parents[2]
MARK = "TEST_SPAWN_CLI_ID"
"""Variable of the environment that marks the processes of a command."""
MARK_LENGTH = 15
"""Characters of the name of a process. To the system a fork has the environment of its server, so it bears the mark as its name."""
_PR_SET_NAME = 15
_IMPORTED = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tests.support.runs",
    "torch.distributed.run",
    "megatron_lab.commands.bench",
    "megatron_lab.commands.check_cluster",
    "megatron_lab.commands.checkpoint",
    "megatron_lab.commands.generate_text",
    "megatron_lab.commands.plot_loss",
    "megatron_lab.commands.preprocess_data",
    "megatron_lab.commands.report",
    "megatron_lab.commands.verify_layout",
)


@functools.cache
def warm_python() -> str:
    """Path of the executable. Its server starts with the first call and ends with this process.

    All workers of a test run share one server, and the worker that has started it waits at its end for the others.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    name = f"{run}-{os.getppid()}" if run else secrets.token_hex(8)
    folder = Path(tempfile.gettempdir()) / f"warm-python-{name}"
    folder.mkdir(mode=0o700, exist_ok=bool(run))
    executable = folder / "python"
    users = os.open(folder / "users", os.O_CREAT | os.O_RDWR)  # is open until this process ends
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        if not executable.exists():
            server = _start(folder)
            atexit.register(_end, server, folder, users)
            (folder / "about.json").write_text(json.dumps({"root": str(ROOT), "python": sys.executable}))
            executable.write_text(f"#!{sys.executable} -IS\n" + (ROOT / "tests/support/warm_client.py").read_text())
            executable.chmod(0o755)
    return str(executable)


def _start(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "said").open("w") as said:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_python", str(folder), str(os.getpid())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    while not (folder / "socket").exists():
        assert server.poll() is None, (folder / "said").read_text()
        time.sleep(0.02)
    return server


def _end(server: subprocess.Popen[bytes], folder: Path, users: int) -> None:
    fcntl.flock(users, fcntl.LOCK_EX)  # when no other worker has it any more
    server.kill()
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


class _Server:
    """Forks for each command line, and tells how it has ended."""

    def __init__(self, folder: Path) -> None:
        self._running: dict[int, socket.socket] = {}
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / "unnamed"))
        self._listening.listen(128)
        (folder / "unnamed").rename(folder / "socket")
        self._ended, self._wakes = socket.socketpair()
        for end in (self._ended, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        """Until it is killed."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._begin(self._listening.accept()[0])
                elif key.fileobj is self._ended:
                    with contextlib.suppress(BlockingIOError):
                        self._ended.recv(4096)
                    self._reap()
                else:  # its client was killed
                    self._selector.unregister(key.fileobj)
                    kill_process_group(key.data)

    def _begin(self, connection: socket.socket) -> None:
        try:
            job, streams = _receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run(job, streams, server)
        for stream in streams:
            os.close(stream)
        self._running[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            connection.sendall(f"{pid}\n".encode())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            connection = self._running.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
    begin, streams, _, _ = socket.recv_fds(connection, 1, 16)
    return json.loads(begin + connection.recv(size - 1, socket.MSG_WAITALL)), streams


def _run(job: dict[str, Any], streams: list[int], server: int) -> NoReturn:
    """Life of a fork: that of a fresh interpreter with this command line."""
    code = 70
    try:
        os.setsid()
        set_parent_death_signal(server, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        above = max(256, *job["numbers"]) + 1
        held = [fcntl.fcntl(stream, fcntl.F_DUPFD, above) for stream in streams]
        os.closerange(3, above)
        for number, stream in zip(job["numbers"], held, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(job["env"])
        if (mark := os.environ.get(MARK)) and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, mark[:MARK_LENGTH].encode())
        os.chdir(job["cwd"])
        words = job["words"]
        unbuffered = words[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
        is_safe = words[0] == "-P"
        words = words[words[0] in ("-u", "-P") :]
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w", buffering=1 if unbuffered or os.isatty(1) else -1)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
        sys.executable = job["executable"]
        own = {str(ROOT), "", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))}
        first = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
        given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [*([] if is_safe else [first]), *given, *(path for path in sys.path if path not in own)]
        code = _program(words)
    except BaseException:  # noqa: BLE001 - told as an interpreter tells it
        traceback.print_exc()
    finally:
        os._exit(code)


def _program(words: list[str]) -> int:
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.modules.pop(words[1], None)  # else runpy warns that it was imported
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does at its end
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = 120
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    return code & 0xFF


def main() -> None:
    """Serve: python -m tests.support.warm_python FOLDER PARENT"""
    set_parent_death_signal(int(sys.argv[2]), signal.SIGKILL)
    for name in _IMPORTED:
        importlib.import_module(name)
    atexit._clear()
    gc.collect()
    gc.freeze()
    collapse_pages()
    _Server(Path(sys.argv[1])).serve()


if __name__ == "__main__":
    main()
