"""Shards made by this process, or by several that are forked from it and share the memory of its tokenizer."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from megatron.data.preprocess.job import Job, tokenizer_of
from megatron.data.preprocess.parts import ShardReport
from megatron.data.preprocess.shards import Shard
from megatron.data.preprocess.work import Counts, run_shard

Listen = Callable[[int, Counts | ShardReport], None]
"""Told the number of a shard, and how far it is or what it became."""

_PR_SET_PDEATHSIG = 1
_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
"""Signals that all processes of a job may get; the parent ends its workers."""


class ShardError(ValueError):
    """What went wrong with a shard.

    Args:
        shard: Its number.
        error: What its maker raised.
    """

    def __init__(self, shard: int, error: Exception) -> None:
        super().__init__(str(error))
        self.shard, self.error = shard, error


def run_here(job: Job, shards: Sequence[Shard], folder: str, listen: Listen) -> None:
    """All shards, one after another in this process.

    Raises:
        ShardError: one cannot be made.
    """
    for number, shard in enumerate(shards):
        try:
            listen(number, run_shard(job, shard, folder, lambda counts: listen(number, counts)))  # noqa: B023 - called within the turn
        except ValueError as error:
            raise ShardError(number, error) from error


def run_in_processes(job: Job, shards: Sequence[Shard], folder: str, listen: Listen, num_workers: int) -> None:
    """All shards, each by the first process that is free; they end when this one ends, however it does.

    Raises:
        ShardError: a shard cannot be made.
        ValueError: a process was killed.
    """
    tokenizer_of(job)  # before the fork
    context = multiprocessing.get_context("fork")
    workers: dict[Connection, ForkProcess] = {}
    waiting = iter(range(len(shards)))
    try:
        for _ in range(min(num_workers, len(shards))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(job, shards, folder, theirs, [*workers, ours], os.getpid()), daemon=True)
            # A signal in the midst of this would be lost in a hook, or end a worker in disorder.
            signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_PARENT)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_THE_PARENT)
            theirs.close()
            workers[ours] = process
        at_work = [worker for worker in workers if _give_next(worker, waiting)]
        while at_work:
            for worker in wait(at_work):
                assert isinstance(worker, Connection)
                try:
                    number, found = worker.recv()
                except (EOFError, ConnectionResetError):
                    raise ValueError(_how_it_ended(workers[worker], num_workers)) from None
                if isinstance(found, ValueError | OSError):
                    raise ShardError(number, found)
                if isinstance(found, str):
                    raise RuntimeError(f"a worker failed:\n{found}")
                listen(number, found)
                if isinstance(found, ShardReport) and not _give_next(worker, waiting):
                    at_work.remove(worker)
    finally:
        # At once: what they were writing has temporary names, and is removed by the caller.
        for worker, process in workers.items():
            process.kill()
            process.join()
            worker.close()


def _give_next(worker: Connection, waiting: object) -> bool:
    """Send the number of the next shard to a worker; False if there is none."""
    number = next(waiting, None)  # type: ignore[call-overload]
    if number is not None:
        # If it has died meanwhile, the next look at its connection tells.
        with contextlib.suppress(BrokenPipeError):
            worker.send(number)
    return number is not None


def _how_it_ended(process: ForkProcess, num_workers: int) -> str:
    process.join()
    code = process.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        cause = f"was killed by {name}"
        if name == "SIGKILL":
            cause += ", as the system does for want of memory"
    else:
        cause = f"ended with status {code}"
    return (
        f"a worker process {cause} before its shard was done.\n"
        f"  Finished shards are kept: go on with --resume, and fewer workers than {num_workers} if memory is short."
    )


def _work(
    job: Job, shards: Sequence[Shard], folder: str, connection: Connection, others: Sequence[Connection], parent: int
) -> None:
    """A worker: makes the shards whose numbers it is sent."""
    die_with(parent)
    for number in _TO_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_THE_PARENT)
    for other in others:
        other.close()  # so that the parent's end is closed when the parent has ended
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number = connection.recv()
            found: object
            try:
                found = run_shard(job, shards[number], folder, lambda counts: connection.send((number, counts)))  # noqa: B023
            except BrokenPipeError:
                raise
            except (ValueError, OSError) as error:
                found = error
            except Exception:  # noqa: BLE001 - the parent raises it
                found = traceback.format_exc()
            connection.send((number, found))


def die_with(parent: int) -> None:
    """Have the system end this process when its parent ends (Linux; elsewhere the closed connection ends it after its shard)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it had ended before
            os._exit(1)
