"""Shards on Ray that fail. A module of its own, since a worker of Ray imports it: nothing here imports torch."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_lab.data_tools.preprocess.engines import run_shard_remotely
from megatron_lab.data_tools.preprocess.input_shards import InputShard
from megatron_lab.data_tools.preprocess.part_files import ShardReport
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob


def lost_at_first(job: PreprocessJob, shard: InputShard, folder: str) -> ShardReport | ValueError:
    """A worker that is lost with its first shard, and meets an error of the file system with the second."""
    for name, end in (("lost", lambda: os._exit(1)), ("failed", None)):
        try:
            os.mkdir(Path(folder).parent / name)
        except FileExistsError:
            continue
        if end:
            end()
        raise TimeoutError("stale file handle")
    return run_shard_remotely(job, shard, folder)


def never(job: PreprocessJob, shard: InputShard, folder: str) -> ShardReport | ValueError:
    """A task that fails whenever it is tried."""
    with open(Path(folder).parent / "tries", "a") as file:
        file.write("x")
    raise ConnectionError("unreachable")


def elsewhere(job: PreprocessJob, shard: InputShard, folder: str) -> ShardReport | ValueError:
    """A node that does not see the folder."""
    return run_shard_remotely(job, shard, f"/elsewhere{folder}")
