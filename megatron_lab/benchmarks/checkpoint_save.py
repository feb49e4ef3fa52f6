"""Saves of checkpoints against what they cannot do without: writes to the disk, and a copy in memory.

1. A save, until it is complete, against plain writes and fsyncs of the same bytes by as many processes into the same folder.
2. How long a save in the background holds up training, from the second on, against a copy of the same bytes in memory.
3. Training steps of one process of one thread while a save is written, against steps while none is; and the memory that it takes.

The two of each pair take turns, and the ratio is the median over pairs: disks and shared machines are noisy.
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

from megatron.checkpoint.global_tensor import GlobalTensor, bytes_of
from megatron.checkpoint.save_folder import Retention
from megatron.checkpoint.savers import BackgroundSaver, TensorSaver
from megatron.checkpoint.storage_kinds import open_storage
from megatron.parallel.boxes import Box, PlacedBox
from megatron.parallel.context import SELF_GROUP
from megatron_lab.benchmarks.runner import Seconds, all_ranks, in_turns, show, slowest, timed_together
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.benchmarks.single import our_step
from megatron_lab.verification.local_ranks import run_ranks

DISK_BOUND = 0.8
"""Share of the speed of plain writes that a save must reach."""
COPY_BOUND = 1.4
"""Times a copy in memory that a save in the background may hold up training."""
STEP_BOUND = 1.1
"""Times a step without a save that a step during a write may take, with a core left for the writing process."""
MEMORY_BOUND = 1.0
"""Copies of a rank's part that a save in the background may take, beside `PROCESS_BYTES`."""
PROCESS_BYTES = 64 << 20
"""For the writing process itself: Python and numpy."""

_HIDDEN = 1024
_TIMEOUT_S = 1200.0
_STEP = Shape(layers=2, hidden=256, heads=4, seq=64, batch=2, vocab=1024)
"""A step of some ten milliseconds, so that many fall into one write."""


def held_tensors(rank: int, ranks: int, megabytes: int) -> list[GlobalTensor]:
    """About so many megabytes on each rank: rows of float32 matrices of 1024 columns and up to 4096 rows, as of a GPT's blocks."""
    tensors: list[GlobalTensor] = []
    left = max(1, (megabytes << 20) // (4 * _HIDDEN))
    while left:
        rows = min(left, (4096, 1024, 3072)[len(tensors) % 3])
        left -= rows
        local = torch.randn(rows, _HIDDEN)
        box = PlacedBox(Box((rank * rows, 0), (rows, _HIDDEN)), 0)
        tensors.append(GlobalTensor(f"model.{len(tensors)}.weight", (ranks * rows, _HIDDEN), local, [box]))
    return tensors


def _write_plainly(folder: Path, rank: int, tensors: list[GlobalTensor]) -> None:
    handle = os.open(folder / f"plain_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for tensor in tensors:
            rest = bytes_of(tensor.local)
            while rest:
                rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk(rank: int, ranks: int, megabytes: int, pairs: int, folder: Path) -> tuple[Seconds, Seconds]:
    """Seconds of a plain write and of a save by all ranks."""
    tensors = held_tensors(rank, ranks, megabytes)
    saver = TensorSaver(open_storage(folder / "save"), all_ranks())

    def empty() -> None:
        dist.barrier()
        if rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()

    def plain() -> float:
        empty()
        return timed_together(lambda: _write_plainly(folder, rank, tensors))

    def save() -> float:
        empty()
        return timed_together(lambda: saver.save(1, tensors, {}, {}))

    return in_turns(plain, save, pairs)


def _blocking(rank: int, ranks: int, megabytes: int, pairs: int, folder: Path) -> tuple[Seconds, Seconds]:
    """Seconds of a copy in memory, and of what training waits for at a save; all ranks at once."""
    tensors = held_tensors(rank, ranks, megabytes)
    copies = [torch.zeros_like(tensor.local) for tensor in tensors]
    saver = BackgroundSaver(open_storage(folder / "save"), all_ranks(), Retention(1))
    iteration = 0

    def copy() -> float:
        return timed_together(lambda: torch._foreach_copy_(copies, [tensor.local for tensor in tensors]))

    def save() -> float:
        nonlocal iteration
        iteration += 1
        took = timed_together(lambda: saver.save(iteration, tensors, {}, {}, _to_nobody))
        _until_saved(saver, rank)
        return took

    try:
        save()  # the first one plans, and makes the memory
        return in_turns(copy, save, pairs)
    finally:
        saver.finish(_to_nobody)


def _to_nobody(line: str) -> None: ...


def _until_saved(saver: BackgroundSaver, rank: int) -> None:
    """Return on every rank when the first one has said that the save is complete."""
    ended = rank != 0

    def say(line: str) -> None:
        nonlocal ended
        if line.startswith("SAVE FAILED"):
            raise RuntimeError(line)
        ended = True

    while not ended:
        time.sleep(0.01)
        saver.poll(say)
    dist.barrier()


def _steps(megabytes: int, pairs: int, folder: Path) -> tuple[Seconds, Seconds, int]:
    """Seconds of a step without a save and during one, and the bytes of memory that saves take; in one process."""
    step = our_step(_STEP, torch.float32, torch.device("cpu"))
    tensors = held_tensors(0, 1, megabytes)
    for _ in range(3):
        step()
    before = _resident()
    saver = BackgroundSaver(open_storage(folder / "save"), SELF_GROUP, Retention(1))
    iteration, peak, during = 0, 0, 5

    def alone() -> float:
        began = time.perf_counter()
        for _ in range(during):
            step()
        return (time.perf_counter() - began) / during

    def beside() -> float:
        nonlocal iteration, peak, during
        iteration += 1
        lines: list[str] = []
        saver.save(iteration, tensors, {}, {}, _to_nobody)
        times: Seconds = []
        while not lines:
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
            saver.poll(lines.append)
        if not lines[0].startswith("saved"):
            raise RuntimeError(lines[0])
        peak = max(peak, _resident())
        during = max(1, len(times) - 1)
        return statistics.fmean(times[:-1] or times)  # the last step saw its end

    try:
        return *in_turns(alone, beside, pairs), peak - before
    finally:
        saver.finish(_to_nobody)


def _resident() -> int:
    """Bytes of memory of this process and those that it started; what they share counts once."""
    me, total = os.getpid(), 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if me in (parent, int(path.name)):
                lines = (path / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):  # it has ended
            continue
    return total


def run(ranks: int = 2, megabytes: int = 256, pairs: int = 15, folder: Path | None = None) -> bool:
    """Print all; returns whether the bounds hold. Call it before this process has run a backward, since it forks.

    Args:
        ranks: processes that save, of one thread each.
        megabytes: what each of them saves.
        pairs: measurements of each.
        folder: where to write; by default the folder for temporary files.
    """
    print(f"{ranks} processes, {megabytes} MiB each, median (min to max) of {pairs} pairs")
    missed, num_bytes = [], ranks * (megabytes << 20)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as name:
        place = Path(name)
        found = run_ranks(ranks, lambda rank: _disk(rank, ranks, megabytes, pairs, place), timeout=_TIMEOUT_S)
        speed = 1 / statistics.median(show("to the disk", ("plain writes", "save"), slowest(found), num_bytes))
        if speed < DISK_BOUND:
            missed.append(f"a save has {speed:.2f} x the speed of plain writes; at least {DISK_BOUND} is asked for")
        found = run_ranks(ranks, lambda rank: _blocking(rank, ranks, megabytes, pairs, place), timeout=_TIMEOUT_S)
        ratio = statistics.median(show("blocking", ("copy in memory", "save in the background"), slowest(found), num_bytes))
        if ratio > COPY_BOUND:
            missed.append(f"a save in the background holds up training for {ratio:.2f} x a copy; at most {COPY_BOUND} is asked for")
        if len(os.sched_getaffinity(0)) > 1:
            # Larger, so that many steps fall into a write.
            (alone, beside, memory), own = (
                run_ranks(1, lambda _: _steps(2 * megabytes, pairs, place), timeout=_TIMEOUT_S)[0],
                2 * megabytes,
            )
            ratio = statistics.median(show("steps", ("alone", "while a save is written"), (alone, beside)))
            if ratio > STEP_BOUND:
                missed.append(f"a step during a save takes {ratio:.2f} x as long; at most {STEP_BOUND} is asked for")
            copies = max(0, memory - PROCESS_BYTES) / (own << 20)
            print(f"{'memory':12}{memory / 2**20:.0f} MiB for saves of {own} MiB: {memory / (own << 20):.3f} copies")
            if math.ceil(100 * copies) > 100 * MEMORY_BOUND:
                missed.append(f"saves take {memory >> 20} MiB; asked for is one copy and {PROCESS_BYTES >> 20} MiB for the process")
        else:
            print("steps       not measured: this machine has no core to leave free")
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "the bounds hold", flush=True)
    return not missed
