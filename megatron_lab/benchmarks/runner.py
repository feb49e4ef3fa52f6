"""The runner of all benchmarks: it measures things in turns, since disks and shared machines are noisy. What counts is the median
ratio over turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.parallel.context import Group

T = TypeVar("T")
Seconds = list[float]


def all_in_turns(
    measurements: Mapping[str, Callable[[], T]], turns: int, before_turn: Callable[[], object] = lambda: None
) -> dict[str, list[T]]:
    """Make measurements in turns, after one turn to warm up. Every other turn goes backwards.

    Args:
        before_turn: called before each turn, that to warm up included.

    Returns:
        what each measurement returned, turn by turn.
    """
    found: dict[str, list[T]] = {name: [] for name in measurements}
    for turn in range(-1, turns):
        before_turn()
        for name in measurements if turn % 2 else reversed([*measurements]):
            result = measurements[name]()
            if turn >= 0:
                found[name].append(result)
    return found


def timed(action: Callable[[], object], ready: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """Make an action a measurement of its seconds.

    Args:
        ready: called before the clock starts; it waits for a device, or for other processes.
    """

    def measure() -> float:
        ready()
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    return measure


def in_turns(first: Callable[[], float], second: Callable[[], float], pairs: int) -> tuple[Seconds, Seconds]:
    """Make two measurements in turns; see `all_in_turns`."""
    found = all_in_turns({"first": first, "second": second}, pairs)
    return found["first"], found["second"]


def all_ranks() -> Group:
    """All ranks, as one of them sees them."""
    return Group("all", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def timed_together(action: Callable[[], object]) -> float:
    """Seconds until all ranks are through."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def of_slowest_rank(action: Callable[[], object]) -> Callable[[], float]:
    """Make an action of all ranks, which begin it together, a measurement of the seconds of the slowest. All get the same."""

    def measure() -> float:
        dist.barrier()
        began = time.perf_counter()
        action()
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    return measure


def slowest(found: Sequence[tuple[Seconds, Seconds]]) -> tuple[Seconds, Seconds]:
    """Of each measurement the rank that took longest."""
    first, second = ([max(values) for values in zip(*(times[which] for times in found), strict=True)] for which in (0, 1))
    return first, second


def show(what: str, names: tuple[str, str], times: tuple[Seconds, Seconds], num_bytes: int = 0) -> list[float]:
    """Print medians and spreads, and return the second one's ratio to the first in each pair."""
    for name, seconds in zip(names, times, strict=True):
        middle = statistics.median(seconds)
        speed = f"   {num_bytes / middle / 1e9:.2f} GB/s" if num_bytes else ""
        print(f"{what:12}{name:32}{1e3 * middle:9.1f} ms ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}){speed}")
    ratios = [second / first for first, second in zip(*times, strict=True)]
    print(f"{what:12}{names[1]} / {names[0]}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)
    return ratios
