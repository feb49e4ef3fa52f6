"""Runs a function under several ranks on this machine.

`run_ranks` forks the ranks from this process, which has imported torch already. So eight ranks are ready in a fraction of a second,
and the function may be a closure. Nothing outlives a call: ranks die with their parent, at the timeout and after a failure.
"""

from __future__ import annotations

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
from dataclasses import dataclass, field
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
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        world = LocalWorld(world_size, folder / "store" if init else None, timeout, backend)
        ranks: list[LocalRank] = []
        try:
            for number in range(world_size):
                ranks.append(fork_rank(number, folder, lambda _: [(world, lambda rank: function(rank, *args))]))
            return results_of(ranks, timeout, folder)
        finally:
            end_ranks(ranks)


def free_port() -> int:
    """A port that nobody listens on, below the range from which the system takes ports for outgoing connections."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class LocalWorld:
    """The world of one call."""

    size: int
    store: Path | None
    """File by which the default process group is made; None if the function makes its own."""
    timeout: float
    backend: str = "gloo"
    port: int = field(default_factory=free_port)


RankJob = tuple[LocalWorld, Callable[[int], Any]]
"""A world, and the function that each of its ranks calls with its number."""


@dataclass(frozen=True)
class LocalRank:
    """A forked rank."""

    number: int
    process: Any  # multiprocessing's fork process
    connection: Connection


def fork_rank(rank: int, folder: Path, jobs: Callable[[Connection], Iterable[RankJob]]) -> LocalRank:
    """Fork a rank that does one job after the other and reports each; `jobs` makes them of its end of the connection."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(rank, os.getpid(), folder, theirs, jobs), name=f"rank {rank}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside a thread, pytest-timeout's too
        process.start()
    theirs.close()  # so that a later rank does not inherit it, and the end of this one is seen
    return LocalRank(rank, process, ours)


def results_of(ranks: Sequence[LocalRank], timeout: float, folder: Path) -> list[Any]:
    """The results of the ranks' jobs, in order of rank. Waits until every rank has reported or died, the time is over, or a failure
    is older than the grace period.

    Raises:
        RanksError: as in `run_ranks`.
    """
    deadline = time.monotonic() + timeout
    pending, told = list(ranks), []
    results: dict[int, Any] = {}
    while pending:
        handles = [handle for rank in pending for handle in (rank.connection, rank.process.sentinel)]
        if not multiprocessing.connection.wait(handles, max(0.0, deadline - time.monotonic())):
            break
        for rank in [rank for rank in pending if rank.connection.poll() or not rank.process.is_alive()]:
            pending.remove(rank)
            results[rank.number], failure = _report(rank)
            if failure:
                told.append(f"rank {rank.number} failed:\n{failure.rstrip()}")
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if not told and not pending:
        return [results[rank.number] for rank in ranks]
    timed_out = not told
    if pending:
        after = f"after {timeout:g} s" if timed_out else "when the others failed"
        told.append(f"not done {after}: rank {', '.join(str(rank.number) for rank in pending)}")
        told += [f"rank {rank.number} was here:\n{stack}" for rank in pending if (stack := _stack(rank, folder))]
    raise RanksError("\n\n".join(told), timed_out=timed_out)


def _report(rank: LocalRank) -> tuple[Any, str]:
    """(result, "") or (None, how it failed)."""
    try:
        if rank.connection.poll():
            report: tuple[Any, str] = pickle.loads(rank.connection.recv_bytes())
            return report
    except EOFError:
        pass
    rank.process.join()
    code = rank.process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return None, f"the process ended without a report ({how})"


def end_ranks(ranks: Sequence[LocalRank]) -> None:
    """Kill the ranks and what they started."""
    for rank in ranks:
        kill_group(rank.process.pid)
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.connection.close()


def _child(
    rank: int, parent: int, folder: Path, connection: Connection, jobs: Callable[[Connection], Iterable[RankJob]]
) -> NoReturn:
    """The life of one rank. It stays until the parent kills it, so that no peer sees a closed connection before it is done."""
    try:
        os.setpgid(0, 0)  # what the rank starts is killed with it
        die_with(parent, signal.SIGKILL)
        gc.freeze()  # objects made by the parent stay: to collect them would only copy its memory
        with open(_stack_file(folder, rank), "w") as stacks:
            faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)
            for world, call in jobs(connection):
                message = _outcome(rank, world, call)
                sys.stdout.flush()
                sys.stderr.flush()
                connection.send_bytes(message)
            while True:
                signal.pause()
    finally:
        os._exit(1)


def _outcome(rank: int, world: LocalWorld, call: Callable[[int], Any]) -> bytes:
    """Pickled (result, "") or (None, traceback)."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()  # of the job before, which all ranks have ended
            gc.collect()  # cycles keep its groups, each with threads and sockets
            gc.freeze()  # what is left stays: the next collection need not look through it
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_WORLD_SIZE": str(world.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(world.port),
        }
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve
        torch.set_num_threads(1)
        _seed(1000 + rank)  # a result that leans on the default generator then differs between ranks
        if world.store is not None:
            timeout = datetime.timedelta(seconds=world.timeout)
            dist.init_process_group(world.backend, f"file://{world.store}", timeout, world.size, rank)
        return pickle.dumps((call(rank), ""))
    except BaseException:  # noqa: BLE001 - the parent judges it; also SystemExit and outcomes of pytest
        return pickle.dumps((None, traceback.format_exc()))


def _seed(seed: int) -> None:
    """Seed the default generators. No driver is asked, which would not survive a fork.

    Without CUDA this leaves out `torch.manual_seed`, which formats the stack for each kind of device and takes milliseconds.
    """
    if torch.backends.cuda.is_built():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _stack(rank: LocalRank, folder: Path) -> str:
    """The stack of a rank now, also when it is blocked outside Python."""
    path = _stack_file(folder, rank.number)
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
