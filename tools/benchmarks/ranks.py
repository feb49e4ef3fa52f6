"""A function in several processes of this machine, forked from this one, which has imported torch already.

Nothing outlives a call: ranks are killed at its end, at the timeout, and by the system when this process dies.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1

Result = TypeVar("Result")


def run_ranks(world_size: int, function: Callable[[int], Result], timeout: float) -> list[Result]:
    """Call `function(rank)` in processes of one thread each that form a gloo group.

    Call it before this process has run a backward on a machine with CUDA: autograd's threads do not survive a fork.

    Args:
        function: may be a closure; what it returns must be picklable.
        timeout: seconds for all of it, and for every collective.

    Returns:
        what the ranks returned, in order of rank.

    Raises:
        RuntimeError: a rank raised (with its traceback) or died.
        TimeoutError: some were not done in time.
    """
    fork = multiprocessing.get_context("fork")
    deadline = time.monotonic() + timeout
    pending: dict[Connection, int] = {}
    results: dict[int, Result] = {}
    processes = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(world_size):
                reader, writer = fork.Pipe(duplex=False)
                init = f"file://{Path(folder) / 'store'}"
                process = fork.Process(target=_live, args=(rank, world_size, os.getpid(), init, timeout, function, writer))
                process.start()
                processes.append(process)
                pending[reader] = rank
                writer.close()  # so that no later rank inherits it, and the end of this one is seen
            while pending:
                ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {', '.join(map(str, pending.values()))} were not done after {timeout:.0f} s")
                for reader in [reader for reader in pending if reader in ready]:
                    rank = pending.pop(reader)
                    results[rank] = _read(reader, rank)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    return [results[rank] for rank in range(world_size)]


def _read(reader: Connection, rank: int) -> Any:
    try:
        failure, result = reader.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died without a result") from None
    if failure:
        raise RuntimeError(f"rank {rank} failed:\n{failure.rstrip()}")
    return result


def _live(
    rank: int, world_size: int, parent: int, init: str, timeout: float, function: Callable[[int], object], writer: Connection
) -> NoReturn:
    """Life of one rank. It stays until it is killed, so that no peer sees a closed connection before it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the ranks
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve
    if os.getppid() != parent:  # it died before the call took effect
        os._exit(1)
    try:
        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size, timeout=limit)
        writer.send(("", function(rank)))
    except Exception:  # noqa: BLE001 - the parent judges it
        writer.send((traceback.format_exc(), None))
    while True:
        signal.pause()
