"""Named timers, and the report of their times over all ranks.

timers = Timers(level=1, synchronize=torch.cuda.synchronize)
with timers("forward-backward", level=1):
    ...
times = times_of_ranks(gather(timers.elapsed_ms()))  # on every rank
report = format_times(times, "minmax")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

TimingOption = Literal["minmax", "max", "all"]


class Timers:
    """The timers of one rank.

    Args:
        level: Timers of a higher level do nothing (--timing-log-level), and never make the device wait.
        synchronize: Waits for the device, at each start and stop; None where work is not asynchronous.
        clock: Seconds, from any origin.
    """

    def __init__(
        self, level: int, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._level = level
        self._synchronize = synchronize
        self._clock = clock
        self._elapsed: dict[str, float] = {}

    def __call__(self, name: str, level: int = 0) -> AbstractContextManager[None]:
        """While it is entered, the time counts for the timer of that name."""
        return self._timed(name) if level <= self._level else nullcontext()

    def elapsed_ms(self) -> dict[str, float]:
        """Milliseconds of every timer since the last call. All start anew."""
        elapsed = {name: seconds * 1000.0 for name, seconds in self._elapsed.items()}
        self._elapsed = dict.fromkeys(elapsed, 0.0)
        return elapsed

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._elapsed.setdefault(name, 0.0)
        started = self._now()
        try:
            yield
        finally:
            self._elapsed[name] += self._now() - started

    def _now(self) -> float:
        # Devices work ahead of the host: without waiting, a timer would measure how long it took to ask for the work.
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


def times_of_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Times of all ranks by name, in the order in which the names first occur.

    Args:
        ranks: Milliseconds of each rank. Ranks may have different timers (only the last stage has a loss).

    Returns:
        For each name one time a rank, 0 where the rank has no such timer.
    """
    names = dict.fromkeys(name for times in ranks for name in times)
    return {name: [times.get(name, 0.0) for times in ranks] for name in names}


def format_times(times: Mapping[str, Sequence[float]], option: TimingOption) -> str:
    """The report of --timing-log-option, in Megatron's format.

    Args:
        times: Milliseconds by name, one for each rank; 0 means that the rank has no such timer and is left out.
        option: The least and the greatest time, the greatest only, or the time of each rank.

    Returns:
        Lines without a newline at the end; nothing at all when there are no times.
    """
    lines = []
    for name, ranks in times.items():
        measured = {rank: ms for rank, ms in enumerate(ranks) if ms > 0.0}
        if not measured:
            continue
        least, greatest = min(measured.values()), max(measured.values())
        dotted = "    " + (name + " ").ljust(48, ".")
        if option == "minmax":
            lines.append(f"{dotted}: ({least:.2f}, {greatest:.2f})")
        elif option == "max":
            lines.append(f"{dotted}: {greatest:.2f}")
        else:
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {ms:.2f}" for rank, ms in measured.items())]
    title = {"minmax": "(min, max) time", "max": "max time", "all": "times"}[option]
    return "\n".join([f"{title} across ranks (ms):", *lines]) if lines else ""
