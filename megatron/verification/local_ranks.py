"""Runs a function under several ranks on this machine.

`run_ranks` forks the ranks from this process, which has imported torch already. So eight ranks are ready in a fraction of a second,
and the function may be a closure. Nothing outlives a call: ranks die with their parent, at the timeout and after a failure.
`RankPool` keeps its ranks for the next call, which then costs no fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

GRACE_S = 0.5
"""Seconds after the first failure in which other ranks may still report failures of their own."""

_PR_SET_PDEATHSIG = 1
_STACK_SIGNAL = signal.SIGUSR2


class RanksError(RuntimeError):
    """Ranks failed, died, or did not finish in time (`timed_out` if none failed)."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    init: bool = True,
) -> list[Any]:
    """Call `function(rank, *args)` in `world_size` forked processes that form a process group.

    Each rank has one thread, its own default random seed, and the environment that torchrun would give it (RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        world_size: number of ranks.
        function: called in every rank; may be a closure. What it returns must be picklable.
        args: further arguments; not copied between processes, so anything goes.
        timeout: seconds until all ranks are killed.
        backend: of the process group.
        init: make the default process group first; False for functions that make their own.

    Returns:
        what the ranks returned, in order of rank.

    Call it before this process has run a backward on a machine with CUDA: autograd's threads do not survive a fork.

    Raises:
        RanksError: a rank raised, died, or was not done in time; with every failing rank's traceback, the first failure
            first, and where the other ranks were.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        setup = _Setup(world_size, Path(folder) / "store", backend if init else None, timeout, _free_port())
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                ranks.append(_fork(number, Path(folder), lambda _: [(setup, lambda rank: function(rank, *args))]))
            return _results(ranks, timeout, Path(folder))
        finally:
            _end(ranks)


class RankPool:
    """Ranks that stay from call to call, so that a call costs neither forks nor a first step in a cold process.

    Each call forms a process group of its own. A rank keeps everything else (caches, patched modules), so a function must change
    nothing but its own objects. After a failure the next call forks anew.
    """

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0
        atexit.register(self.close)  # before multiprocessing waits for its processes

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`run_ranks` for a function that can be pickled with its arguments.

        Its module must have been imported before the ranks were forked, or be on their path.

        Raises:
            RanksError: as in `run_ranks`.
        """
        self._calls += 1
        folder = Path(self._folder.name)
        setup = _Setup(world_size, folder / f"store-{self._calls}", "gloo", timeout, _free_port())
        job = pickle.dumps((function, args))
        try:
            for number in range(len(self._ranks), world_size):
                self._ranks.append(_fork(number, folder, lambda connection: iter(connection.recv, None)))
            ranks = self._ranks[:world_size]
            for rank in ranks:
                rank.payload, rank.failure, rank.finished_at = b"", "", 0.0
                rank.connection.send((setup, _PickledCall(job)))
            return _results(ranks, timeout, folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks; a later call forks new ones."""
        _end(self._ranks)
        self._ranks = []


@dataclass(frozen=True)
class _PickledCall:
    """A function and its arguments. They are unpickled where they are called, so that an error in this is reported as any other."""

    job: bytes

    def __call__(self, rank: int) -> Any:
        function, args = pickle.loads(self.job)
        return function(rank, *args)


@dataclass(frozen=True)
class _Setup:
    world_size: int
    store: Path
    backend: str | None
    timeout: float
    port: int


_Job = tuple[_Setup, Callable[[int], Any]]


@dataclass
class _Rank:
    rank: int
    process: Any  # multiprocessing's fork process
    connection: Connection
    payload: bytes = b""
    failure: str = ""
    finished_at: float = 0.0

    @property
    def done(self) -> bool:
        return self.finished_at > 0


def _fork(rank: int, folder: Path, jobs: Callable[[Connection], Iterable[_Job]]) -> _Rank:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(rank, os.getpid(), folder, theirs, jobs), name=f"rank {rank}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside a thread, pytest-timeout's too
        process.start()
    theirs.close()  # so that a later rank does not inherit it, and the end of this one is seen
    return _Rank(rank, process, ours)


def _results(ranks: Sequence[_Rank], timeout: float, folder: Path) -> list[Any]:
    """The results of the ranks, in order of rank."""
    _collect(ranks, timeout)
    failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.finished_at)
    missing = [rank for rank in ranks if not rank.done]
    if failed or missing:
        raise RanksError(_explain(failed, missing, timeout, folder), timed_out=not failed)
    return [pickle.loads(rank.payload) for rank in ranks]


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        kill_group(rank.process.pid)
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.connection.close()


def _child(rank: int, parent: int, folder: Path, connection: Connection, jobs: Callable[[Connection], Iterable[_Job]]) -> NoReturn:
    """The life of one rank. It stays until the parent kills it, so that no peer sees a closed connection before it is done."""
    try:
        os.setpgid(0, 0)  # what the rank starts is killed with it
        die_with(parent, signal.SIGKILL)
        gc.freeze()  # objects made by the parent stay: to collect them would only copy its memory
        with open(_stack_file(folder, rank), "w") as stacks:
            faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)
            for setup, call in jobs(connection):
                message = _outcome(rank, setup, call)
                sys.stdout.flush()
                sys.stderr.flush()
                connection.send_bytes(message)
            while True:
                signal.pause()
    finally:
        os._exit(1)


def _outcome(rank: int, setup: _Setup, call: Callable[[int], Any]) -> bytes:
    """Pickled (True, pickled result) or (False, traceback)."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()  # of the call before, which all ranks have ended
            gc.collect()  # cycles keep its groups, each with threads and sockets
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(setup.world_size),
            "LOCAL_WORLD_SIZE": str(setup.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(setup.port),
        }
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve
        torch.set_num_threads(1)
        torch.manual_seed(1000 + rank)  # a result that leans on the default generator then differs between ranks
        if setup.backend is not None:
            dist.init_process_group(
                setup.backend,
                init_method=f"file://{setup.store}",
                rank=rank,
                world_size=setup.world_size,
                timeout=datetime.timedelta(seconds=setup.timeout),
            )
        return pickle.dumps((True, pickle.dumps(call(rank))))
    except BaseException:  # noqa: BLE001 - the parent judges it; also SystemExit and outcomes of pytest
        return pickle.dumps((False, traceback.format_exc()))


def _collect(ranks: Sequence[_Rank], timeout: float) -> None:
    """Wait until every rank has reported or died, the time is over, or a failure is older than the grace period."""
    deadline = time.monotonic() + timeout
    pending = list(ranks)
    while pending:
        handles = [handle for rank in pending for handle in (rank.connection, rank.process.sentinel)]
        if not multiprocessing.connection.wait(handles, max(0.0, deadline - time.monotonic())):
            return
        for rank in [rank for rank in pending if rank.connection.poll() or not rank.process.is_alive()]:
            pending.remove(rank)
            _read(rank)
            if rank.failure:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _read(rank: _Rank) -> None:
    try:
        if not rank.connection.poll():
            raise EOFError
        good, content = pickle.loads(rank.connection.recv_bytes())
        rank.payload, rank.failure = (content, "") if good else (b"", content)
    except EOFError:
        rank.process.join()
        code = rank.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        rank.failure = f"the process ended without a report ({how})"
    rank.finished_at = time.monotonic()


def _explain(failed: list[_Rank], missing: list[_Rank], timeout: float, folder: Path) -> str:
    numbers = ", ".join(str(rank.rank) for rank in missing)
    lines = [f"rank {rank.rank} failed:\n{rank.failure.rstrip()}" for rank in failed]
    if missing:
        after = "when the others failed" if failed else f"after {timeout:g} s"
        lines.append(f"not done {after}: rank {numbers}")
        lines += [f"rank {rank.rank} was here:\n{stack}" for rank in missing if (stack := _stack(rank, folder))]
    return "\n\n".join(lines)


def _stack(rank: _Rank, folder: Path) -> str:
    """The stack of a rank now, also when it is blocked outside Python."""
    path = _stack_file(folder, rank.rank)
    if not path.exists():  # the signal would end a rank that has not come so far
        return ""
    os.kill(rank.process.pid, _STACK_SIGNAL)
    before, stack = None, ""
    for _ in range(20):
        time.sleep(0.02)
        before, stack = stack, path.read_text()
        if stack and stack == before:  # written to the end
            break
    return stack.rstrip()


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def _free_port() -> int:
    """A port that nobody listens on, below the range from which the system takes ports for outgoing connections."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def die_with(parent: int, death_signal: signal.Signals) -> None:
    """Have the system send this process a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != parent:  # it died before the call took effect
        os._exit(1)


def kill_group(pid: int) -> None:
    """Kill a process that is not yet reaped (so that its number is still its own) and those of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
