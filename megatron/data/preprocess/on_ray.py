"""Shards made on a Ray cluster: the same function as a remote task, with retries."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

from megatron.config.data import TOKENIZER_FILES
from megatron.data.preprocess.job import Job
from megatron.data.preprocess.parts import Parts, ShardReport
from megatron.data.preprocess.processes import Listen, ShardError
from megatron.data.preprocess.shards import Shard
from megatron.data.preprocess.work import run_shard

RETRIES = 3
"""Of a shard whose node or worker is lost, or that meets an error of the network or the file system."""

_AT_ONCE = 1000
"""Tasks that are given to the cluster at most before one is done."""


def run_shard_remotely(job: Job, shard: Shard, folder: str) -> ShardReport | ValueError:
    """`run_shard` for a task: what another try would not mend is returned, not raised, so that it is not tried again."""
    if Parts(folder, len(job.keys)).settings() is None:
        return ValueError(
            f"{folder} is not there on the node {platform.node()}.\n"
            "  The folder of --output-prefix must be shared by all nodes, or be a URL."
        )
    try:
        return run_shard(job, shard, folder)
    except ValueError as error:
        return error


def run_on_ray(
    job: Job,
    shards: Sequence[Shard],
    folder: str,
    listen: Listen,
    num_workers: int | None,
    address: str | None,
    task: Callable[[Job, Shard, str], ShardReport | ValueError] = run_shard_remotely,
) -> None:
    """All shards, as tasks of one CPU each.

    Args:
        job: what to do.
        shards: with what; every node must see the input files under these paths.
        folder: for the parts; every node must see it.
        listen: called with each report.
        num_workers: tasks at the same time; None: as many as the cluster has CPUs.
        address: of the cluster; None starts one on this machine that ends with the job.
        task: what runs on the cluster.

    Raises:
        ShardError: a shard cannot be made.
        ValueError: Ray is not installed, or does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("--engine ray needs Ray, which is not installed: pip install 'megatron-3d[ray]'") from error
    connected = ray.is_initialized()
    if not connected:
        _connect(ray, num_workers, address)
    # OSError: errors of connections, time-outs and file systems are its kinds.
    remote: Any = ray.remote(task)
    remote = remote.options(num_cpus=1, max_retries=RETRIES, retry_exceptions=[OSError])
    under_way: dict[Any, int] = {}
    waiting = iter(enumerate(shards))
    try:
        shared_job = ray.put(_from_any_folder(job))
        while True:
            while len(under_way) < (num_workers or _AT_ONCE) and (following := next(waiting, None)) is not None:
                number, shard = following
                under_way[remote.remote(shared_job, shard, folder)] = number
            if not under_way:
                return
            (done,), _ = ray.wait(list(under_way), num_returns=1)
            number = under_way.pop(done)
            found = _result(ray, done, number)
            listen(number, found)
    finally:
        for unfinished in under_way:
            ray.cancel(unfinished, force=True)
        if not connected:
            ray.shutdown()


def _from_any_folder(job: Job) -> Job:
    """The same job with absolute paths: tasks run in other folders."""
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


def _result(ray: Any, done: Any, number: int) -> ShardReport:
    try:
        found: ShardReport | ValueError = ray.get(done)
    except ray.exceptions.RayError as error:
        told = ValueError(
            f"a task failed {RETRIES + 1} times, at last with: {error}\n  Finished shards are kept: go on with --resume."
        )
        raise ShardError(number, told) from error
    if isinstance(found, ValueError):
        raise ShardError(number, found)
    return found
