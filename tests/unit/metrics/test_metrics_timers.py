"""Timers with a clock of the test's own, and the format of their report."""

from __future__ import annotations

import pytest

from megatron.metrics.measures import Timers, TimingOption, format_times, merge_rank_times


class Clock:
    """Seconds that pass only when told; remembers how often the device was waited for."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.waits = 0

    def __call__(self) -> float:
        return self.seconds

    def wait(self) -> None:
        self.waits += 1


def test_timer_adds_intervals_and_counts_anew_after_reading() -> None:
    clock = Clock()
    timers = Timers(level=0, clock=clock)
    for _ in range(2):
        with timers("forward"):
            clock.seconds += 0.25
        clock.seconds += 7.0
    assert timers.reset_elapsed_ms() == {"forward": 500.0}
    assert timers.reset_elapsed_ms() == {"forward": 0.0}


def test_timers_above_the_level_do_nothing_and_never_wait_for_the_device() -> None:
    clock = Clock()
    timers = Timers(level=1, synchronize=clock.wait, clock=clock)
    for level in (0, 1, 2):
        for _ in range(2):
            with timers(f"level {level}", level):
                clock.seconds += 1.0
    assert timers.reset_elapsed_ms() == {"level 0": 2000.0, "level 1": 2000.0}
    assert clock.waits == 8


def test_times_of_ranks_joins_different_timers() -> None:
    ranks = [{"forward": 2.0, "send": 3.0}, {"forward": 1.0, "loss": 5.0}]
    assert merge_rank_times(ranks) == {"forward": [2.0, 1.0], "send": [3.0, 0.0], "loss": [0.0, 5.0]}


TIMES = {"forward-backward": [1234.567, 1000.0, 1100.0], "loss": [0.0, 0.0, 3.14159], "never": [0.0, 0.0, 0.0]}


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "minmax",
            "(min, max) time across ranks (ms):\n"
            "    forward-backward ...............................: (1000.00, 1234.57)\n"
            "    loss ...........................................: (3.14, 3.14)",
        ),
        (
            "max",
            "max time across ranks (ms):\n"
            "    forward-backward ...............................: 1234.57\n"
            "    loss ...........................................: 3.14",
        ),
        (
            "all",
            "times across ranks (ms):\n"
            "  forward-backward:\n     rank  0: 1234.57\n     rank  1: 1000.00\n     rank  2: 1100.00\n"
            "  loss:\n     rank  2: 3.14",
        ),
    ],
)
def test_report(option: TimingOption, expected: str) -> None:
    assert format_times(TIMES, option) == expected


def test_report_of_nothing_is_empty() -> None:
    assert format_times({}, "minmax") == "" == format_times({"never": [0.0]}, "all")
