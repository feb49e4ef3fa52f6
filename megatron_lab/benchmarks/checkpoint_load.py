"""Loads of checkpoints against plain reads of the same files, which lie in the page cache.

A load opens the files, agrees among the ranks on what is read, reads into the tensors, takes the checksum of every box, and
compares the content sums of all that lies in memory afterwards. A plain read is a `readinto` memory that has been touched before.

1. At the layout that saved: every box goes straight into its tensor.
2. At another layout: the ranks hold columns of what was saved in rows, so every box is cut.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import torch

from megatron.checkpoint.global_tensor import GlobalTensor, bytes_of
from megatron.checkpoint.load import load_tensors
from megatron.checkpoint.save_folder import checkpoint_name
from megatron.checkpoint.savers import TensorSaver
from megatron.checkpoint.storage_kinds import open_storage
from megatron.parallel.boxes import Box, PlacedBox
from megatron_lab.benchmarks.checkpoint_save import held_tensors
from megatron_lab.benchmarks.runner import Seconds, all_ranks, in_turns, show, slowest, timed_together
from megatron_lab.verification.local_ranks import run_ranks

READ_BOUND = 0.7
"""Share of the speed of plain reads that a load must reach at the layout that saved."""

_TIMEOUT_S = 1200.0


def in_columns(tensors: list[GlobalTensor], rank: int, ranks: int) -> list[GlobalTensor]:
    """The same global tensors, cut by columns instead of rows; not filled."""
    found = []
    for tensor in tensors:
        rows, columns = tensor.global_shape
        own = Box((0, rank * columns // ranks), (rows, columns // ranks))
        found.append(GlobalTensor(tensor.name, tensor.global_shape, torch.zeros(own.sizes), [PlacedBox(own, 0)]))
    return found


def _read(rank: int, ranks: int, megabytes: int, pairs: int, folder: Path) -> list[tuple[Seconds, Seconds]]:
    """Seconds of a plain read and of a load: at the layout that saved, and at another."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)  # as a launcher does: ranks share the cores
    tensors = held_tensors(rank, ranks, megabytes)
    storage = open_storage(folder)
    TensorSaver(storage, all_ranks()).save(1, tensors, {}, {})
    path = storage.at(checkpoint_name(1))
    file = Path(path) / f"rank_{rank:05d}.safetensors"
    buffer = bytes_of(torch.ones(file.stat().st_size, dtype=torch.uint8))

    def plain() -> None:
        with open(file, "rb", buffering=0) as opened:
            rest = buffer
            while rest:
                rest = rest[opened.readinto(rest) :]

    found = []
    for targets in (tensors, in_columns(tensors, rank, ranks)):

        def load(targets: list[GlobalTensor] = targets) -> None:
            load_tensors(path, targets, all_ranks())

        found.append(in_turns(lambda: timed_together(plain), lambda load=load: timed_together(load), pairs))  # type: ignore[misc]
    return found


def run(ranks: int = 2, megabytes: int = 256, pairs: int = 15, folder: Path | None = None) -> bool:
    """Print all; returns whether the bound holds. Call it before this process has run a backward, since it forks.

    Args:
        ranks: processes that load, each with its share of the cores.
        megabytes: what each of them loads.
        pairs: measurements of each.
        folder: where the checkpoint is written; by default the folder for temporary files.
    """
    missed = []
    for count in dict.fromkeys((1, ranks)):
        print(f"{count} processes, {megabytes} MiB each, median (min to max) of {pairs} pairs")
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as name:
            found = run_ranks(count, lambda rank: _read(rank, count, megabytes, pairs, Path(name)), timeout=_TIMEOUT_S)  # noqa: B023
        for which, names in enumerate((("plain reads", "load"), ("plain reads", "load at another layout"))):
            ratios = show("from cache", names, slowest([one[which] for one in found]), count * (megabytes << 20))
            speed = 1 / statistics.median(ratios)
            if which == 0 and speed < READ_BOUND:
                missed.append(
                    f"{count} processes load at {speed:.2f} x the speed of plain reads; at least {READ_BOUND} is asked for"
                )
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "the bound holds", flush=True)
    return not missed
