"""Benchmark of checkpoint saves, compared with writes to the disk and with copies in memory.

1. A complete save, compared with writes and fsyncs of the same bytes by the same number of processes into the same folder.
2. The time for which an asynchronous save blocks training, from the second save on, compared with a copy of the same bytes in
   memory.
3. Training steps of a process with one thread while a save is written, compared with steps without a save; and the memory that
   saves use.

Disks and shared machines are noisy. The two sides of each comparison are therefore measured alternately, and the result is the
median over all repetitions of the ratio between the two sides.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint.global_tensor import GlobalTensor, get_tensor_bytes
from megatron.checkpoint.save_folder import Retention
from megatron.checkpoint.savers import AsyncSaver, SyncSaver
from megatron.checkpoint.storage_url import open_storage
from megatron.parallel.context import SELF_GROUP
from megatron.parallel.tensor_slice import BufferSlice, TensorSlice
from megatron_lab.benchmarks.runner import (
    Durations,
    get_world_group,
    print_comparison,
    run_pair_in_turns,
    select_slowest_rank,
    time_all_ranks,
)
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.benchmarks.single import build_framework_step
from megatron_lab.verification.local_ranks import run_ranks

MIN_DISK_SPEED = 0.8
"""Minimum speed of a save, as a share of the speed of plain writes."""
MAX_COPY_RATIO = 1.4
"""Maximum time for which an asynchronous save blocks training, as a multiple of a copy in memory."""
MAX_STEP_RATIO = 1.1
"""Maximum ratio of a step during a save to a step without one, if a core is free for the writer process."""
MAX_MEMORY_COPIES = 1.0
"""Maximum memory that an asynchronous save uses, in copies of a rank's state, in addition to `WRITER_PROCESS_BYTES`."""
WRITER_PROCESS_BYTES = 64 << 20
"""Memory of the writer process itself: Python and numpy."""

_HIDDEN = 1024
_TIMEOUT_S = 1200.0
_STEP = Shape(layers=2, hidden=256, heads=4, seq=64, batch=2, vocab=1024)
"""Model whose step takes some ten milliseconds, so that many steps run during one save."""


def create_tensors(rank: int, num_ranks: int, megabytes: int) -> list[GlobalTensor]:
    """Create the local rows of float32 matrices that are sharded by rows over the ranks: about `megabytes` MiB on this rank.

    Each matrix has 1024 columns and at most 4096 local rows. The sizes are those of the matrices of GPT blocks.
    """
    tensors: list[GlobalTensor] = []
    remaining_rows = max(1, (megabytes << 20) // (4 * _HIDDEN))
    while remaining_rows:
        rows = min(remaining_rows, (4096, 1024, 3072)[len(tensors) % 3])
        remaining_rows -= rows
        local = torch.randn(rows, _HIDDEN)
        buffer_slice = BufferSlice(TensorSlice((rank * rows, 0), (rows, _HIDDEN)), 0)
        tensors.append(GlobalTensor(f"model.{len(tensors)}.weight", (num_ranks * rows, _HIDDEN), local, [buffer_slice]))
    return tensors


def _write_file(folder: Path, rank: int, tensors: list[GlobalTensor]) -> None:
    fd = os.open(folder / f"plain_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for tensor in tensors:
            remaining = get_tensor_bytes(tensor.local)
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _measure_disk(rank: int, num_ranks: int, megabytes: int, pairs: int, folder: Path) -> tuple[Durations, Durations]:
    """Measure plain writes of files and saves of a checkpoint. In both, all ranks write at the same time.

    Args:
        megabytes: MiB that each rank writes.
        pairs: number of repetitions; each measures one plain write and one save.
        folder: folder for the files and the checkpoint. It is emptied before each measurement.

    Returns:
        The seconds of each plain write, and the seconds of each save.
    """
    tensors = create_tensors(rank, num_ranks, megabytes)
    saver = SyncSaver(open_storage(folder / "save"), get_world_group())

    def clear_folder() -> None:
        dist.barrier()
        if rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()

    def write_files() -> float:
        clear_folder()
        return time_all_ranks(lambda: _write_file(folder, rank, tensors))

    def save() -> float:
        clear_folder()
        return time_all_ranks(lambda: saver.save(1, tensors, {}, {}))

    return run_pair_in_turns(write_files, save, pairs)


def _measure_blocking(rank: int, num_ranks: int, megabytes: int, pairs: int, folder: Path) -> tuple[Durations, Durations]:
    """Measure copies of tensors in memory, and the time for which an asynchronous save of these tensors blocks training.

    All ranks copy, and all ranks save, at the same time. The first save plans and allocates memory, and is not measured.

    Args:
        megabytes: MiB that each rank copies or saves.
        pairs: number of repetitions; each measures one copy and one save.

    Returns:
        The seconds of each copy, and the seconds for which each save blocks.
    """
    tensors = create_tensors(rank, num_ranks, megabytes)
    targets = [torch.zeros_like(tensor.local) for tensor in tensors]
    saver = AsyncSaver(open_storage(folder / "save"), get_world_group(), Retention(1))
    iteration = 0

    def copy() -> float:
        return time_all_ranks(lambda: torch._foreach_copy_(targets, [tensor.local for tensor in tensors]))

    def save() -> float:
        nonlocal iteration
        iteration += 1
        duration = time_all_ranks(lambda: saver.save(iteration, tensors, {}, {}, _ignore_line))
        _wait_until_saved(saver, rank)
        return duration

    try:
        save()  # the first save plans and allocates memory, so it does not count
        return run_pair_in_turns(copy, save, pairs)
    finally:
        saver.finish(_ignore_line)


def _ignore_line(line: str) -> None: ...


def _wait_until_saved(saver: AsyncSaver, rank: int) -> None:
    """Wait on every rank until the first rank has logged that the save is complete."""
    is_complete = rank != 0

    def on_log_line(log_line: str) -> None:
        nonlocal is_complete
        if log_line.startswith("SAVE FAILED"):
            raise RuntimeError(log_line)
        is_complete = True

    while not is_complete:
        time.sleep(0.01)
        saver.poll(on_log_line)
    dist.barrier()


def _measure_steps(megabytes: int, pairs: int, folder: Path) -> tuple[Durations, Durations, int]:
    """Measure training steps of a single process, without a save and while an asynchronous save is written.

    Args:
        megabytes: MiB that each save writes.
        pairs: number of repetitions; each measures steps without a save and steps during one save.

    Returns:
        The seconds per step without a save, the seconds per step during a save, and the bytes of additional memory during saves.
    """
    step = build_framework_step(_STEP, torch.float32, torch.device("cpu"))
    tensors = create_tensors(0, 1, megabytes)
    for _ in range(3):
        step()
    initial_memory = _get_resident_memory()
    saver = AsyncSaver(open_storage(folder / "save"), SELF_GROUP, Retention(1))
    iteration, peak_memory, steps_per_save = 0, 0, 5

    def time_without_save() -> float:
        start = time.perf_counter()
        for _ in range(steps_per_save):
            step()
        return (time.perf_counter() - start) / steps_per_save

    def time_during_save() -> float:
        nonlocal iteration, peak_memory, steps_per_save
        iteration += 1
        log_lines: list[str] = []
        saver.save(iteration, tensors, {}, {}, _ignore_line)
        times: Durations = []
        while not log_lines:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
            saver.poll(log_lines.append)
        if not log_lines[0].startswith("saved"):
            raise RuntimeError(log_lines[0])
        peak_memory = max(peak_memory, _get_resident_memory())
        steps_per_save = max(1, len(times) - 1)
        return statistics.fmean(times[:-1] or times)  # the save ended during the last step

    try:
        return *run_pair_in_turns(time_without_save, time_during_save, pairs), peak_memory - initial_memory
    finally:
        saver.finish(_ignore_line)


def _get_resident_memory() -> int:
    """Return the bytes of physical memory that this process and its child processes use. Memory that they share counts once."""
    pid, total = os.getpid(), 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if pid in (parent, int(path.name)):
                lines = (path / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):  # the process has ended
            continue
    return total


def run(ranks: int = 2, megabytes: int = 256, pairs: int = 15, folder: Path | None = None) -> bool:
    """Print the times of saves and the memory that saves use.

    The function forks processes, so call it before this process has run a backward.

    Args:
        ranks: number of processes that save at the same time, with one thread each.
        megabytes: MiB that each process saves.
        pairs: number of repetitions of each comparison; each measures both sides of the comparison.
        folder: folder in which the checkpoints are written; by default the folder for temporary files.

    Returns:
        Whether speed, times and memory are within `MIN_DISK_SPEED`, `MAX_COPY_RATIO`, `MAX_STEP_RATIO` and `MAX_MEMORY_COPIES`.
    """
    print(f"{ranks} processes, {megabytes} MiB each, median (min to max) of {pairs} pairs")
    violations, num_bytes = [], ranks * (megabytes << 20)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as name:
        root = Path(name)
        rank_times = run_ranks(ranks, lambda rank: _measure_disk(rank, ranks, megabytes, pairs, root), timeout=_TIMEOUT_S)
        relative_speed = 1 / statistics.median(
            print_comparison("to the disk", ("plain writes", "save"), select_slowest_rank(rank_times), num_bytes)
        )
        if relative_speed < MIN_DISK_SPEED:
            violations.append(f"a save has {relative_speed:.2f} x the speed of plain writes; the minimum is {MIN_DISK_SPEED}")
        rank_times = run_ranks(ranks, lambda rank: _measure_blocking(rank, ranks, megabytes, pairs, root), timeout=_TIMEOUT_S)
        ratio = statistics.median(
            print_comparison("blocking", ("copy in memory", "asynchronous save"), select_slowest_rank(rank_times), num_bytes)
        )
        if ratio > MAX_COPY_RATIO:
            violations.append(
                f"an asynchronous save blocks training for {ratio:.2f} x the time of a copy in memory; "
                f"the limit is {MAX_COPY_RATIO}"
            )
        if len(os.sched_getaffinity(0)) > 1:
            # A larger state, so that many steps run during one save.
            (without_save, during_save, memory), state_megabytes = (
                run_ranks(1, lambda _: _measure_steps(2 * megabytes, pairs, root), timeout=_TIMEOUT_S)[0],
                2 * megabytes,
            )
            ratio = statistics.median(
                print_comparison("steps", ("without a save", "while a save is written"), (without_save, during_save))
            )
            if ratio > MAX_STEP_RATIO:
                violations.append(f"a step during a save takes {ratio:.2f} x as long as without; the limit is {MAX_STEP_RATIO}")
            num_copies = max(0, memory - WRITER_PROCESS_BYTES) / (state_megabytes << 20)
            print(
                f"{'memory':12}{memory / 2**20:.0f} MiB for saves of {state_megabytes} MiB: "
                f"{memory / (state_megabytes << 20):.3f} copies of the state"
            )
            if math.ceil(100 * num_copies) > 100 * MAX_MEMORY_COPIES:
                violations.append(
                    f"saves use {memory >> 20} MiB; the limit is one copy of the state plus "
                    f"{WRITER_PROCESS_BYTES >> 20} MiB for the writer process"
                )
        else:
            print("steps       not measured: this machine has only one core, so none is free for the writer process")
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "the bounds hold", flush=True)
    return not violations
