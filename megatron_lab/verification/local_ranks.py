"""Run a function on several ranks on this machine.

`run_ranks` forks the ranks from this process, which has already imported torch. So eight ranks start in a fraction of a second, and
the function may be a closure. No rank outlives a call: ranks are killed when their parent dies, at the timeout and after a failure.
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
"""Seconds after the first failure in which other ranks may still report their own failures."""

_PR_SET_PDEATHSIG = 1
_STACK_SIGNAL = signal.SIGQUIT


class RanksError(RuntimeError):
    """A rank of `run_ranks` raised, died or did not finish in time. `timed_out` is True if no rank failed but some did not
    finish."""

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

    Each rank has one thread, its own default random seed, and the environment variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). On a machine with CUDA, call `run_ranks` before this process runs a backward:
    autograd's threads do not survive a fork.

    Args:
        function: called in every rank; may be a closure. Its return value must be picklable.
        args: further arguments. They are inherited by the fork and need not be picklable.
        timeout: seconds until all ranks are killed.
        backend: backend of the process group.
        init: create the default process group before the call; False for functions that create it themselves.

    Returns:
        The return values, in order of rank.

    Raises:
        RanksError: a rank raised, died, or did not finish in time. The message has the traceback of every failing rank, the first
            failure first, and the stacks of the other ranks.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        world = LocalWorld(world_size, folder / "store" if init else None, timeout, backend)
        ranks: list[LocalRank] = []
        try:
            for local_rank in range(world_size):
                ranks.append(fork_rank(local_rank, folder, lambda _: [(world, lambda rank: function(rank, *args))]))
            return collect_results(ranks, timeout, folder)
        finally:
            kill_ranks(ranks)


def find_free_port() -> int:
    """Find a TCP port of this machine on which no process listens, below the range from which the system assigns ports of outgoing
    connections."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class LocalWorld:
    """World size and process-group settings for one function call on all ranks."""

    size: int
    store: Path | None
    """File through which the ranks meet to create the default process group; None if the called function creates the group."""
    timeout: float
    backend: str = "gloo"
    port: int = field(default_factory=find_free_port)


RankJob = tuple[LocalWorld, Callable[[int], Any]]
"""Job for a rank: size and settings of the world, and the function that the rank calls with its rank number."""


@dataclass(frozen=True)
class LocalRank:
    """Forked process that runs one rank, with the connection on which it reports results."""

    rank: int
    process: Any  # ForkProcess of multiprocessing
    connection: Connection


def fork_rank(rank: int, folder: Path, jobs: Callable[[Connection], Iterable[RankJob]]) -> LocalRank:
    """Fork a process that, as one rank, calls functions one after another and reports the result of each to this process.

    Args:
        folder: folder for the file to which the rank writes its stack on request.
        jobs: called in the new process with its end of the connection; returns the functions to call, each with its world size and
            process-group settings.
    """
    parent_end, child_end = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_run_child, args=(rank, os.getpid(), folder, child_end, jobs), name=f"rank {rank}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if any thread runs during a fork
        process.start()
    child_end.close()  # later ranks must not inherit it, so that EOF shows the end of this rank
    return LocalRank(rank, process, parent_end)


def collect_results(ranks: Sequence[LocalRank], timeout: float, folder: Path) -> list[Any]:
    """Return what the function called on the ranks returned on each rank, in order of rank.

    This waits until every rank has reported or died, until the timeout (in seconds), or until `GRACE_S` seconds after the first
    failure.

    Args:
        folder: folder with the files to which ranks write their stacks.

    Raises:
        RanksError: a rank raised, died, or did not finish in time.
    """
    deadline = time.monotonic() + timeout
    pending, failures = list(ranks), []
    results: dict[int, Any] = {}
    while pending:
        handles = [handle for rank in pending for handle in (rank.connection, rank.process.sentinel)]
        if not multiprocessing.connection.wait(handles, max(0.0, deadline - time.monotonic())):
            break
        for rank in [rank for rank in pending if rank.connection.poll() or not rank.process.is_alive()]:
            pending.remove(rank)
            results[rank.rank], failure = _receive_report(rank)
            if failure:
                failures.append(f"rank {rank.rank} failed:\n{failure.rstrip()}")
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if not failures and not pending:
        return [results[rank.rank] for rank in ranks]
    timed_out = not failures
    if pending:
        when = f"after {timeout:g} s" if timed_out else "when the others failed"
        failures.append(f"not done {when}: rank {', '.join(str(rank.rank) for rank in pending)}")
        failures += [f"rank {rank.rank} was here:\n{stack}" for rank in pending if (stack := _read_stack(rank, folder))]
    raise RanksError("\n\n".join(failures), timed_out=timed_out)


def _receive_report(rank: LocalRank) -> tuple[Any, str]:
    """Receive what a rank reports about its function call: (returned value, "") on success, or (None, description of the
    failure)."""
    try:
        if rank.connection.poll():
            report: tuple[Any, str] = pickle.loads(rank.connection.recv_bytes())
            return report
    except EOFError:
        pass
    rank.process.join()
    exit_code = rank.process.exitcode
    reason = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    return None, f"the process ended without a report ({reason})"


def kill_ranks(ranks: Sequence[LocalRank]) -> None:
    """Kill the ranks and the processes that they started."""
    for rank in ranks:
        kill_process_group(rank.process.pid)
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.connection.close()


def _run_child(
    rank: int, parent: int, folder: Path, connection: Connection, jobs: Callable[[Connection], Iterable[RankJob]]
) -> NoReturn:
    """Call the functions of one rank in the forked process and report each result. Afterwards the process waits until the parent
    kills it, so that other ranks do not see a closed connection too early."""
    try:
        os.setpgid(0, 0)  # processes that the rank starts are killed with it
        set_parent_death_signal(parent, signal.SIGKILL)
        gc.freeze()  # do not collect the parent's objects: that would copy its memory pages
        with open(_get_stack_file(folder, rank), "w") as stacks:
            faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)
            for world, function in jobs(connection):
                message = _run_job(rank, world, function)
                sys.stdout.flush()
                sys.stderr.flush()
                connection.send_bytes(message)
            while True:
                signal.pause()
    finally:
        os._exit(1)


def _run_job(rank: int, world: LocalWorld, function: Callable[[int], Any]) -> bytes:
    """Call a function in a rank and return the pickled report: (returned value, "") on success, or (None, traceback)."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()  # of the previous job, which all ranks have finished
            gc.collect()  # reference cycles keep its groups alive, with their threads and sockets
            gc.freeze()  # the next collection need not traverse the remaining objects
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_WORLD_SIZE": str(world.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(world.port),
        }
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name does not resolve
        torch.set_num_threads(1)
        _seed(1000 + rank)  # results that depend on the default generator differ between ranks
        if world.store is not None:
            timeout = datetime.timedelta(seconds=world.timeout)
            dist.init_process_group(world.backend, f"file://{world.store}", timeout, world.size, rank)
        return pickle.dumps((function(rank), ""))
    except BaseException:  # noqa: BLE001 - the parent handles it; includes SystemExit and pytest outcomes
        return pickle.dumps((None, traceback.format_exc()))


def _seed(seed: int) -> None:
    """Seed the default random generators without initializing a CUDA driver, which would not survive a fork.

    Without CUDA the function avoids `torch.manual_seed`, which formats the stack for each device type and takes milliseconds.
    """
    if torch.backends.cuda.is_built():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _read_stack(rank: LocalRank, folder: Path) -> str:
    """Return the current Python stack of a rank, even if the rank is blocked outside Python. Return an empty string if it cannot
    report its stack yet."""
    path = _get_stack_file(folder, rank.rank)
    if not path.exists():  # a rank without a registered handler would die of the signal
        return ""
    os.kill(rank.process.pid, _STACK_SIGNAL)
    previous, stack = None, ""
    for _ in range(20):
        time.sleep(0.02)
        previous, stack = stack, path.read_text()
        if stack and stack == previous:  # the stack is complete
            break
    return stack.rstrip()


def _get_stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def set_parent_death_signal(parent: int, death_signal: signal.Signals) -> None:
    """Ask the system to send this process a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != parent:  # the parent died before prctl took effect
        os._exit(1)


def kill_process_group(pid: int) -> None:
    """Kill a process and the processes of its group. The parent must not have waited for the process yet; otherwise its id may
    already belong to another process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # the process may not have created its group yet
