"""Timers and comparisons that all benchmarks share.

Shared machines and disks are noisy. So the variants of a comparison are measured in turns (repetitions), each of which measures
every variant once. The result is the median over the turns of the ratio between two variants.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.parallel.context import Group

T = TypeVar("T")
Durations = list[float]


def run_in_turns(
    measurements: Mapping[str, Callable[[], T]], turns: int, before_turn: Callable[[], object] = lambda: None
) -> dict[str, list[T]]:
    """Run every measurement once per turn (repetition), after one warm-up turn. Every second turn runs the measurements in reverse
    order.

    Args:
        measurements: functions by name. Each measures one variant and returns the measured value, such as seconds.
        turns: number of turns, without the warm-up turn.
        before_turn: called before each turn, including the warm-up turn.

    Returns:
        The measured values by the name of the measurement, one value per turn.
    """
    results: dict[str, list[T]] = {name: [] for name in measurements}
    for turn in range(-1, turns):
        before_turn()
        for name in measurements if turn % 2 else reversed([*measurements]):
            result = measurements[name]()
            if turn >= 0:
                results[name].append(result)
    return results


def make_timer(action: Callable[[], object], setup: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """Return a function that runs `action` and returns its duration in seconds.

    Args:
        action: function to time.
        setup: called before the clock starts, for example to wait for a device or for other processes.
    """

    def timer() -> float:
        setup()
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return timer


def run_pair_in_turns(first: Callable[[], float], second: Callable[[], float], pairs: int) -> tuple[Durations, Durations]:
    """Run two measurements alternately, after one warm-up run of each. Return the values of the first and the values of the second.

    Args:
        first, second: functions that return the measured value, such as seconds.
        pairs: number of repetitions; each runs both measurements.
    """
    results = run_in_turns({"first": first, "second": second}, pairs)
    return results["first"], results["second"]


def get_world_group() -> Group:
    """Return the process group of all ranks."""
    return Group("all", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def time_all_ranks(action: Callable[[], object]) -> float:
    """Run `action` on all ranks. Return the seconds until all ranks have finished."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def make_slowest_rank_timer(action: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs `action` on all ranks and returns its duration on the slowest rank, in seconds.

    All ranks must call the returned function. They start the action at the same time and get the same duration.
    """

    def timer() -> float:
        dist.barrier()
        start = time.perf_counter()
        action()
        duration = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(duration, dist.ReduceOp.MAX)
        return duration.item()

    return timer


def select_slowest_rank(rank_times: Sequence[tuple[Durations, Durations]]) -> tuple[Durations, Durations]:
    """Return the durations of the slowest rank in each repetition, for each of two measurements.

    Args:
        rank_times: for each rank, the durations of the first measurement and the durations of the second one, in seconds.
    """
    first, second = ([max(values) for values in zip(*(times[i] for times in rank_times), strict=True)] for i in (0, 1))
    return first, second


def print_comparison(label: str, names: tuple[str, str], times: tuple[Durations, Durations], num_bytes: int = 0) -> list[float]:
    """Print the medians and ranges of two measurements. Return the ratio of the second to the first for each repetition.

    Args:
        label: first column of the printed lines.
        names: names of the two measurements.
        times: durations of the two measurements in seconds, one value per repetition.
        num_bytes: bytes that each measurement moves, from which a speed is printed; 0 prints no speed.
    """
    for name, durations in zip(names, times, strict=True):
        median = statistics.median(durations)
        speed = f"   {num_bytes / median / 1e9:.2f} GB/s" if num_bytes else ""
        print(f"{label:12}{name:32}{1e3 * median:9.1f} ms ({1e3 * min(durations):.1f} to {1e3 * max(durations):.1f}){speed}")
    ratios = [second / first for first, second in zip(*times, strict=True)]
    print(
        f"{label:12}{names[1]} / {names[0]}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True
    )
    return ratios
