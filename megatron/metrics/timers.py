"""Named timers, and the report of their times over all ranks.

timers = Timers(level=1, synchronize=torch.cuda.synchronize)
with timers("forward-backward", level=1):
    ...
times = times_of_ranks(gather(timers.elapsed_ms()))  # on every rank
report = format_times(times, "minmax")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self

TimingOption = Literal["minmax", "max", "all"]


class Timer:
    """Adds up the time between `start` and `stop`. Also a context manager."""

    def __init__(self, synchronize: Callable[[], None] | None, clock: Callable[[], float]) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._elapsed = 0.0
        self._started_at: float | None = None

    def start(self) -> None:
        """Begin an interval."""
        assert self._started_at is None, "the timer is already running"
        self._started_at = self._now()

    def stop(self) -> None:
        """End the interval."""
        assert self._started_at is not None, "the timer is not running"
        self._elapsed += self._now() - self._started_at
        self._started_at = None

    def take_ms(self) -> float:
        """Milliseconds since the last call, the running interval included. Counting starts anew."""
        if self._started_at is not None:
            self.stop()
            self.start()
        elapsed, self._elapsed = self._elapsed, 0.0
        return elapsed * 1000.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _now(self) -> float:
        # Devices work ahead of the host: without waiting, a timer would measure how long it took to ask for the work.
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


class _NoTimer:
    """Takes the place of a timer above the level: does nothing, and never makes the device wait."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


_NO_TIMER = _NoTimer()


class Timers:
    """The timers of one rank.

    Args:
        level: Timers of a higher level do nothing (--timing-log-level).
        synchronize: Waits for the device, at each start and stop; None where work is not asynchronous.
        clock: Seconds, from any origin.
    """

    def __init__(
        self, level: int, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._level = level
        self._synchronize = synchronize
        self._clock = clock
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, level: int = 0) -> Timer | _NoTimer:
        """The timer of that name, made at its first use."""
        if level > self._level:
            return _NO_TIMER
        if name not in self._timers:
            self._timers[name] = Timer(self._synchronize, self._clock)
        return self._timers[name]

    def elapsed_ms(self) -> dict[str, float]:
        """Milliseconds of every timer since the last call. All start anew."""
        return {name: timer.take_ms() for name, timer in self._timers.items()}


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
        dotted = "    " + (name + " ").ljust(48, ".")
        if option == "minmax":
            lines.append(f"{dotted}: ({min(measured.values()):.2f}, {max(measured.values()):.2f})")
        elif option == "max":
            lines.append(f"{dotted}: {max(measured.values()):.2f}")
        else:
            lines.append(f"  {name}:")
            lines.extend(f"     rank {rank:2d}: {ms:.2f}" for rank, ms in measured.items())
    if not lines:
        return ""
    title = {
        "minmax": "(min, max) time across ranks (ms):",
        "max": "max time across ranks (ms):",
        "all": "times across ranks (ms):",
    }
    return "\n".join([title[option], *lines])
