"""Backends that process the shards (parts of the input) of a preprocessing job.

A backend is this process, forked worker processes that share the tokenizer's memory, or a Ray cluster.
"""

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

from megatron.config.data import TOKENIZER_FILE_SETTINGS
from megatron.config.optional_packages import import_optional
from megatron_lab.data_tools.preprocess.input_shards import InputShard
from megatron_lab.data_tools.preprocess.part_files import JobFolder, ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob, get_tokenizer, run_shard

ShardCallback = Callable[[int, ShardCounts | ShardReport], None]
"""Callback that gets the index of a shard and either its progress so far or its report."""

_PR_SET_PDEATHSIG = 1
_PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that the system may send to all processes of a job. Workers ignore them, because the parent ends its workers."""


def run_in_processes(
    job: PreprocessJob, shards: Sequence[InputShard], folder: str, on_update: ShardCallback, num_workers: int
) -> None:
    """Process all shards of the input in worker processes. Each shard goes to the next idle worker.

    The workers end when this process ends, even if this process is killed.

    Args:
        folder: job folder, to which the workers write the converted shards.
        on_update: called repeatedly with the index of a shard and its progress, and at the end of the shard with its index and
            report.

    Raises:
        ValueError: a shard cannot be processed, or a worker was killed.
    """
    get_tokenizer(job)  # before the fork, so that workers share it
    context = multiprocessing.get_context("fork")
    workers: dict[Connection, ForkProcess] = {}
    remaining, busy = iter(range(len(shards))), list[Connection]()

    def send_next_shard(worker: Connection) -> None:
        if (shard_index := next(remaining, None)) is None:
            busy.remove(worker)
        else:
            with contextlib.suppress(BrokenPipeError):  # the worker has died; the next `recv` reports it
                worker.send(shard_index)

    try:
        for _ in range(min(num_workers, len(shards))):
            parent_end, worker_end = context.Pipe()
            process = context.Process(
                target=_run_worker, args=(job, shards, folder, worker_end, [*workers, parent_end], os.getpid()), daemon=True
            )
            # A signal during the fork could be lost in a hook of the fork, or leave a worker half-initialized.
            signal.pthread_sigmask(signal.SIG_BLOCK, _PARENT_SIGNALS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENT_SIGNALS)
            worker_end.close()
            workers[parent_end] = process
            busy.append(parent_end)
            send_next_shard(parent_end)
        while busy:
            for worker in wait(busy):
                assert isinstance(worker, Connection)
                try:
                    shard_index, result = worker.recv()
                except (EOFError, ConnectionResetError):
                    raise ValueError(_describe_exit(workers[worker], num_workers)) from None
                if isinstance(result, ValueError | OSError):
                    raise result
                if isinstance(result, str):
                    raise RuntimeError(f"internal error in a worker process:\n{result}\nPlease report this.")
                on_update(shard_index, result)
                if isinstance(result, ShardReport):
                    send_next_shard(worker)
    finally:
        # Without waiting: unfinished files have temporary names, and the caller removes them.
        for worker, process in workers.items():
            process.kill()
            process.join()
            worker.close()


def _describe_exit(process: ForkProcess, num_workers: int) -> str:
    """Return the error message for a worker process that ended before it finished its shard."""
    process.join()
    code = process.exitcode or 0
    cause = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        cause += ", probably because the system ran out of memory"
    return (
        f"a worker process {cause} before its shard was done.\n"
        f"  Finished shards are kept: continue with --resume, and with fewer workers than {num_workers} if memory is short."
    )


def _run_worker(
    job: PreprocessJob,
    shards: Sequence[InputShard],
    folder: str,
    connection: Connection,
    inherited_connections: Sequence[Connection],
    parent_pid: int,
) -> None:
    """Run a worker process: receive indices of shards, process these shards, and send their progress and results back.

    Args:
        connection: connection to the parent process.
        inherited_connections: the parent's ends of all connections, which the fork copied and the worker closes.
        parent_pid: id of the parent process. The worker ends with it.
    """
    die_with_parent(parent_pid)
    for signal_number in _PARENT_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENT_SIGNALS)
    for inherited in inherited_connections:
        inherited.close()  # otherwise the parent's end would stay open in this worker after the parent has ended
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            shard_index = connection.recv()
            result: object
            try:
                result = run_shard(job, shards[shard_index], folder, lambda counts: connection.send((shard_index, counts)))  # noqa: B023
            except BrokenPipeError:
                raise
            except (ValueError, OSError) as error:
                result = error
            except Exception:  # noqa: BLE001 - the parent raises it
                result = traceback.format_exc()
            connection.send((shard_index, result))


def die_with_parent(parent_pid: int) -> None:
    """Let the operating system kill this process when its parent ends.

    This works only on Linux. On other systems, a worker notices the closed connection after its current shard, and ends then.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent_pid:  # the parent ended before prctl
            os._exit(1)


MAX_RETRIES = 3
"""Number of retries of a shard after its node or worker is lost, or after an error of the network or the file system."""

_MAX_SUBMITTED_TASKS = 1000
"""Maximum number of tasks that are submitted to the cluster at the same time."""


def run_shard_remotely(job: PreprocessJob, shard: InputShard, folder: str) -> ShardReport | ValueError:
    """Convert a shard in a Ray task, with `run_shard`.

    Errors that a retry cannot solve are returned instead of raised, because Ray would repeat a task that raises them.
    """
    if JobFolder(folder, len(job.dataset_suffixes)).read_settings() is None:
        return ValueError(
            f"{folder} does not exist on the node {platform.node()}.\n"
            "  The folder of --output-prefix must be shared by all nodes, or be a URL."
        )
    try:
        return run_shard(job, shard, folder)
    except ValueError as error:
        return error


def run_on_ray(
    job: PreprocessJob,
    shards: Sequence[InputShard],
    folder: str,
    on_update: ShardCallback,
    num_workers: int | None,
    address: str | None,
) -> None:
    """Process all shards of the input as Ray tasks of one CPU each.

    Every node must have access to the input files and the job folder under the same paths.

    Args:
        folder: job folder, to which the tasks write the converted shards.
        on_update: called with the index and the report of each finished shard.
        num_workers: maximum number of tasks at the same time; None for as many as the cluster has CPUs.
        address: address of the Ray cluster; None starts a cluster on this machine that ends with the job.

    Raises:
        ValueError: a shard cannot be processed, Ray is not installed, or the cluster does not respond.
    """
    ray = import_optional("ray", "--engine ray needs Ray")
    was_initialized = ray.is_initialized()
    if not was_initialized:
        _connect(ray, num_workers, address)
    # OSError includes connection errors, timeouts and file system errors.
    task: Any = ray.remote(run_shard_remotely)
    task = task.options(num_cpus=1, max_retries=MAX_RETRIES, retry_exceptions=[OSError])
    running: dict[Any, int] = {}
    remaining = iter(enumerate(shards))
    try:
        shared_job = ray.put(_with_absolute_paths(job))
        while True:
            while len(running) < (num_workers or _MAX_SUBMITTED_TASKS) and (next_item := next(remaining, None)) is not None:
                shard_index, shard = next_item
                running[task.remote(shared_job, shard, folder)] = shard_index
            if not running:
                return
            (finished,), _ = ray.wait(list(running), num_returns=1)
            shard_index = running.pop(finished)
            try:
                result: ShardReport | ValueError = ray.get(finished)
            except ray.exceptions.RayError as error:
                raise ValueError(
                    f"a Ray task failed {MAX_RETRIES + 1} times, the last time with: {error}\n"
                    "  Finished shards are kept: continue with --resume."
                ) from error
            if isinstance(result, ValueError):
                raise result
            on_update(shard_index, result)
    finally:
        for unfinished in running:
            ray.cancel(unfinished, force=True)
        if not was_initialized:
            ray.shutdown()


def _with_absolute_paths(job: PreprocessJob) -> PreprocessJob:
    """Return a copy of the job with absolute paths of the tokenizer files, because Ray tasks run in another working directory."""
    names = [name for name in TOKENIZER_FILE_SETTINGS if getattr(job.tokenizer, name) is not None]
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
    """Backend that processes the shards of the input, with its number of workers. The datasets do not depend on the choice."""

    backend: Literal["processes", "ray"] = "processes"
    num_workers: int | None = None
    """Number of worker processes for the backend "processes" (None or 1 uses this process), or maximum number of concurrent
    tasks for "ray" (None: one task per CPU)."""
    ray_address: str | None = None

    def run(self, job: PreprocessJob, shards: Sequence[InputShard], folder: str, on_update: ShardCallback) -> None:
        """Process all shards of the input with the selected backend.

        Args:
            folder: job folder, to which the converted shards are written.
            on_update: called repeatedly with the index of a shard and its progress, and at the end of the shard with its index and
                report.

        Raises:
            BadShardError: a shard has an invalid record.
            ValueError: a shard cannot be processed, or the backend does not work.
        """
        if self.backend == "ray":
            run_on_ray(job, shards, folder, on_update, self.num_workers, self.ray_address)
        elif self.num_workers is not None and self.num_workers > 1:
            run_in_processes(job, shards, folder, on_update, self.num_workers)
        else:
            for shard_index, shard in enumerate(shards):
                on_update(shard_index, run_shard(job, shard, folder, lambda counts: on_update(shard_index, counts)))  # noqa: B023 - called within this iteration
