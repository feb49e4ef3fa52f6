"""Benchmark of checkpoint loads, compared with plain reads of the same files from the page cache.

In a load, the ranks open the files, agree on what each rank reads, and read into the tensors. They also verify the checksum of
every stored slice, and compare the content hashes of all loaded tensors. A plain read calls `readinto` on memory that has been
touched before.

1. Load at the layout of the save: every stored slice is read directly into its tensor.
2. Load at another layout: the ranks load columns of matrices that were saved as rows, so every rank reads a part of each stored
slice.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import torch

from megatron.checkpoint.global_tensor import GlobalTensor, get_tensor_bytes
from megatron.checkpoint.load import load_tensors
from megatron.checkpoint.save_folder import get_checkpoint_name
from megatron.checkpoint.savers import SyncSaver
from megatron.checkpoint.storage_url import open_storage
from megatron.parallel.tensor_slice import BufferSlice, TensorSlice
from megatron_lab.benchmarks.checkpoint_save import create_tensors
from megatron_lab.benchmarks.runner import (
    Durations,
    get_world_group,
    print_comparison,
    run_pair_in_turns,
    select_slowest_rank,
    time_all_ranks,
)
from megatron_lab.verification.local_ranks import run_ranks

MIN_RELATIVE_SPEED = 0.7
"""Minimum speed of a load at the layout of the save, as a share of the speed of plain reads."""

_TIMEOUT_S = 1200.0


def shard_by_columns(tensors: list[GlobalTensor], rank: int, num_ranks: int) -> list[GlobalTensor]:
    """Return zero-filled tensors with the same global shapes, of which this rank has columns instead of rows.

    Args:
        tensors: tensors that are sharded by rows.
        rank: rank whose columns the returned tensors contain.
        num_ranks: number of ranks over which the columns are divided.
    """
    column_tensors = []
    for tensor in tensors:
        rows, columns = tensor.global_shape
        local_slice = TensorSlice((0, rank * columns // num_ranks), (rows, columns // num_ranks))
        column_tensors.append(
            GlobalTensor(tensor.name, tensor.global_shape, torch.zeros(local_slice.sizes), [BufferSlice(local_slice, 0)])
        )
    return column_tensors


def _measure_rank(rank: int, num_ranks: int, megabytes: int, pairs: int, folder: Path) -> list[tuple[Durations, Durations]]:
    """Save a checkpoint, and measure on this rank plain reads and loads of it, at the layout of the save and at another layout.

    Args:
        megabytes: MiB that each rank loads.
        pairs: number of repetitions; each measures one plain read and one load.
        folder: folder in which the checkpoint is written.

    Returns:
        For each of the two layouts: the seconds of each plain read, and the seconds of each load.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)  # as a launcher sets it, so that the ranks share the cores
    tensors = create_tensors(rank, num_ranks, megabytes)
    storage = open_storage(folder)
    SyncSaver(storage, get_world_group()).save(1, tensors, {}, {})
    path = storage.get_location(get_checkpoint_name(1))
    file = Path(path) / f"rank_{rank:05d}.safetensors"
    buffer = get_tensor_bytes(torch.ones(file.stat().st_size, dtype=torch.uint8))

    def read_file() -> None:
        with open(file, "rb", buffering=0) as stream:
            remaining = buffer
            while remaining:
                remaining = remaining[stream.readinto(remaining) :]

    results = []
    for targets in (tensors, shard_by_columns(tensors, rank, num_ranks)):

        def load(targets: list[GlobalTensor] = targets) -> None:
            load_tensors(path, targets, get_world_group())

        results.append(run_pair_in_turns(lambda: time_all_ranks(read_file), lambda load=load: time_all_ranks(load), pairs))  # type: ignore[misc]
    return results


def run(ranks: int = 2, megabytes: int = 256, pairs: int = 15, folder: Path | None = None) -> bool:
    """Print the times of plain reads and of loads of a checkpoint.

    The function forks processes, so call it before this process has run a backward.

    Args:
        ranks: number of processes that load at the same time. They share the CPU cores.
        megabytes: MiB that each process loads.
        pairs: number of repetitions; each measures one plain read and one load.
        folder: folder in which the checkpoint is written; by default the folder for temporary files.

    Returns:
        Whether loads at the layout of the save reach `MIN_RELATIVE_SPEED` times the speed of plain reads.
    """
    violations = []
    for num_ranks in dict.fromkeys((1, ranks)):
        print(f"{num_ranks} processes, {megabytes} MiB each, median (min to max) of {pairs} pairs")
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as name:
            rank_results = run_ranks(
                num_ranks,
                lambda rank: _measure_rank(rank, num_ranks, megabytes, pairs, Path(name)),  # noqa: B023
                timeout=_TIMEOUT_S,
            )
        for case_index, names in enumerate((("plain reads", "load"), ("plain reads", "load at another layout"))):
            ratios = print_comparison(
                "from cache",
                names,
                select_slowest_rank([results[case_index] for results in rank_results]),
                num_ranks * (megabytes << 20),
            )
            relative_speed = 1 / statistics.median(ratios)
            if case_index == 0 and relative_speed < MIN_RELATIVE_SPEED:
                violations.append(
                    f"{num_ranks} processes load at {relative_speed:.2f} x the speed of plain reads; "
                    f"the minimum is {MIN_RELATIVE_SPEED}"
                )
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "the bound holds", flush=True)
    return not violations
