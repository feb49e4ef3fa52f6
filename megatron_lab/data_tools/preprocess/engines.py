"""Runs shards: in this process, in several that are forked from it and share its tokenizer's memory, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Literal

from megatron.config.data import TOKENIZER_FILES
from megatron.config.extras import optional
from megatron_lab.data_tools.preprocess.input_shards import InputShard
from megatron_lab.data_tools.preprocess.part_files import PartFolder, ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob, run_shard, tokenizer_of

Listen = Callable[[int, ShardCounts | ShardReport], None]
"""Called with the index of a shard, and its progress or its report."""

_PR_SET_PDEATHSIG = 1
_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
"""Signals that all processes of a job may get; the parent ends its workers."""


def run_in_processes(job: PreprocessJob, shards: Sequence[InputShard], folder: str, listen: Listen, num_workers: int) -> None:
    """Make all shards, each in the first process that is free. The processes end when this one ends, however it does.

    Raises:
        ValueError: a shard cannot be made, or a process was killed.
    """
    tokenizer_of(job)  # before the fork
    context = multiprocessing.get_context("fork")
    workers: dict[Connection, ForkProcess] = {}
    waiting, at_work = iter(range(len(shards))), list[Connection]()

    def give_next(worker: Connection) -> None:
        if (number := next(waiting, None)) is None:
            at_work.remove(worker)
        else:
            with contextlib.suppress(BrokenPipeError):  # it died meanwhile, which the next look at its connection shows
                worker.send(number)

    try:
        for _ in range(min(num_workers, len(shards))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(job, shards, folder, theirs, [*workers, ours], os.getpid()), daemon=True)
            # A signal in the midst of this would be lost in a hook, or leave a worker in disorder.
            signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_PARENT)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_THE_PARENT)
            theirs.close()
            workers[ours] = process
            at_work.append(ours)
            give_next(ours)
        while at_work:
            for worker in wait(at_work):
                assert isinstance(worker, Connection)
                try:
                    number, found = worker.recv()
                except (EOFError, ConnectionResetError):
                    raise ValueError(_how_it_ended(workers[worker], num_workers)) from None
                if isinstance(found, ValueError | OSError):
                    raise found
                if isinstance(found, str):
                    raise RuntimeError(f"a worker failed:\n{found}")
                listen(number, found)
                if isinstance(found, ShardReport):
                    give_next(worker)
    finally:
        # At once: what they were writing has temporary names, and the caller removes it.
        for worker, process in workers.items():
            process.kill()
            process.join()
            worker.close()


def _how_it_ended(process: ForkProcess, num_workers: int) -> str:
    process.join()
    code = process.exitcode or 0
    cause = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        cause += ", as the system does for want of memory"
    return (
        f"a worker process {cause} before its shard was done.\n"
        f"  Finished shards are kept: go on with --resume, and fewer workers than {num_workers} if memory is short."
    )


def _work(
    job: PreprocessJob, shards: Sequence[InputShard], folder: str, connection: Connection, others: Sequence[Connection], parent: int
) -> None:
    """The loop of a worker: it makes the shards whose indices it is sent."""
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


RETRIES = 3
"""How often a shard is tried again after its node or worker is lost, or after an error of the network or the file system."""

_AT_ONCE = 1000
"""The most tasks that are given to the cluster at once."""


def run_shard_remotely(job: PreprocessJob, shard: InputShard, folder: str) -> ShardReport | ValueError:
    """`run_shard` for a task. Errors that another try would not mend are returned, not raised, so that it is not tried again."""
    if PartFolder(folder, len(job.datasets)).settings() is None:
        return ValueError(
            f"{folder} is not there on the node {platform.node()}.\n"
            "  The folder of --output-prefix must be shared by all nodes, or be a URL."
        )
    try:
        return run_shard(job, shard, folder)
    except ValueError as error:
        return error


def run_on_ray(
    job: PreprocessJob, shards: Sequence[InputShard], folder: str, listen: Listen, num_workers: int | None, address: str | None
) -> None:
    """Make all shards, as tasks of one CPU each.

    Every node must see the files of the shards and the folder under these paths.

    Args:
        num_workers: tasks at the same time; None: as many as the cluster has CPUs.
        address: address of the cluster; None starts one on this machine that ends with the job.

    Raises:
        ValueError: a shard cannot be made, or Ray is not installed, or does not answer.
    """
    ray = optional("ray", "--engine ray needs Ray")
    connected = ray.is_initialized()
    if not connected:
        _connect(ray, num_workers, address)
    # OSError includes errors of connections, time-outs and file systems.
    task: Any = ray.remote(run_shard_remotely)
    task = task.options(num_cpus=1, max_retries=RETRIES, retry_exceptions=[OSError])
    under_way: dict[Any, int] = {}
    waiting = iter(enumerate(shards))
    try:
        shared_job = ray.put(_from_any_folder(job))
        while True:
            while len(under_way) < (num_workers or _AT_ONCE) and (following := next(waiting, None)) is not None:
                number, shard = following
                under_way[task.remote(shared_job, shard, folder)] = number
            if not under_way:
                return
            (done,), _ = ray.wait(list(under_way), num_returns=1)
            number = under_way.pop(done)
            try:
                found: ShardReport | ValueError = ray.get(done)
            except ray.exceptions.RayError as error:
                raise ValueError(
                    f"a task failed {RETRIES + 1} times, at last with: {error}\n  Finished shards are kept: go on with --resume."
                ) from error
            if isinstance(found, ValueError):
                raise found
            listen(number, found)
    finally:
        for unfinished in under_way:
            ray.cancel(unfinished, force=True)
        if not connected:
            ray.shutdown()


def _from_any_folder(job: PreprocessJob) -> PreprocessJob:
    """The same job with absolute paths, since tasks run in other folders."""
    names = [name for name in TOKENIZER_FILES if getattr(job.tokenizer, name) is not None]
    paths = {name: os.path.abspath(getattr(job.tokenizer, name)) for name in names}
    return dataclasses.replace(job, tokenizer=dataclasses.replace(job.tokenizer, **paths))


def _connect(ray: Any, num_workers: int | None, address: str | None) -> None:
    try:
        if address is None:
            ray.init(address="local", num_cpus=num_workers, include_dashboard=False, log_to_driver=False)
        else:
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray-address {address}: {error}\n  Start Ray on the nodes (ray start) and give the address of its head, or auto."
        ) from error


@dataclass(frozen=True)
class Engine:
    """What makes the shards. It has no influence on the result."""

    kind: Literal["processes", "ray"] = "processes"
    num_workers: int | None = None
    """Number of processes (None: 1, which works in this process), or of tasks at the same time (None: one for each CPU)."""
    ray_address: str | None = None

    def run(self, job: PreprocessJob, shards: Sequence[InputShard], folder: str, listen: Listen) -> None:
        """Make all shards.

        Raises:
            BadShardError: a shard has a bad record.
            ValueError: a shard cannot be made, or the engine does not work.
        """
        if self.kind == "ray":
            run_on_ray(job, shards, folder, listen, self.num_workers, self.ray_address)
        elif self.num_workers is not None and self.num_workers > 1:
            run_in_processes(job, shards, folder, listen, self.num_workers)
        else:
            for number, shard in enumerate(shards):
                listen(number, run_shard(job, shard, folder, lambda counts: listen(number, counts)))  # noqa: B023 - called within the turn
