"""Goodput: each moment has one use, over restarts and rewinds. The clock is the test's."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.progress import Progress
from megatron_lab.monitoring.goodput import TIME_USES, Goodput, GoodputCallback, TimeUse
from megatron_lab.monitoring.idle_time import limit_gap, sum_idle_seconds


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def _spend(account: Goodput, clock: Clock, *spans: tuple[TimeUse, float]) -> None:
    for use, passed in spans:
        clock.now += passed
        account.record(use)


def test_a_run_of_two_starts() -> None:
    """The steps that were lost with the first start are time between starts: the checkpoint does not know them."""
    clock = Clock()
    first = Goodput(clock=clock, wall_clock=clock)
    _spend(first, clock, ("start-up", 10.0), ("steps", 60.0))
    saved = json.loads(json.dumps(first.to_json()))
    _spend(first, clock, ("saves", 5.0), ("steps", 15.0))  # lost
    clock.now += 10.0
    second = Goodput(saved, start_time=clock.now - 2.0, clock=clock, wall_clock=clock, gap_s=28.0)
    _spend(second, clock, ("start-up", 8.0), ("steps", 50.0), ("evaluations", 20.0), ("steps that do not count", 10.0))
    assert second.seconds == {
        "steps": 110.0,
        "start-up": 20.0,
        "saves": 0.0,
        "evaluations": 20.0,
        "steps that do not count": 10.0,
        "between starts": 28.0,
    }
    assert math.fsum(second.seconds.values()) == clock.now - 1000.0 and second.share == 110.0 / 188.0
    assert second.format_summary() == (
        "goodput 58.5% of 0.0522 hours since the first start; start-up 10.6%, evaluations 10.6%, steps that do not count 5.3%, "
        "between starts 14.9%"
    )


def _record(time: float, event: str = "", **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "event": event, "time": time, **fields} if event else {"kind": "start", "time": time}


def test_a_finished_run_loses_no_time_until_it_is_extended() -> None:
    """Finished at 100 and saved at 90; the pause ends with the next start, even if that start fails. A run that was ended by a
    signal, or that left no end, loses the pause."""
    finished = [_record(0.0), _record(90.0, "save"), _record(100.0, "end", complete=True, words="")]
    assert sum_idle_seconds(finished, 90.0, 1000.0) == 900.0
    assert sum_idle_seconds(finished, 20.0, 1000.0) == 900.0, "it goes back to an earlier checkpoint: its steps since then are lost"
    failed = [*finished, _record(700.0), _record(710.0, "end", words="no GPU")]
    assert sum_idle_seconds(failed, 90.0, 1000.0) == 600.0
    again = [*failed, _record(720.0), _record(800.0, "end", complete=True, words="")]
    assert sum_idle_seconds(again, 90.0, 1000.0) == 800.0
    assert sum_idle_seconds(again, 790.0, 1000.0) == 200.0, "only what follows the checkpoint"
    evaluated = [_record(700.0), _record(710.0, "end", complete=None, words="evaluated after 20 iterations")]
    assert sum_idle_seconds([*finished, *evaluated], 90.0, 1000.0) == 890.0, "as complete as before"
    killed = [_record(0.0), *evaluated, _record(720.0)]
    assert sum_idle_seconds(killed, 90.0, 1000.0) == 0.0
    before = [_record(0.0), _record(100.0, "end", words="done after 20 iterations")]
    assert sum_idle_seconds(before, 90.0, 1000.0) == 900.0, "as earlier versions wrote it"
    for words, complete in (
        ("exiting on SIGTERM", {"complete": False}),
        ("done after 20 iterations", {"complete": False}),
        ("x", {}),
    ):
        assert sum_idle_seconds([_record(0.0), _record(100.0, "end", words=words, **complete)], 90.0, 1000.0) == 0.0
    assert sum_idle_seconds([_record(0.0)], 90.0, 1000.0) == 0.0
    assert sum_idle_seconds(finished, 90.0, 50.0) == 0.0, "on a machine whose clock is behind"


@pytest.mark.parametrize(("gap_s", "idle_s", "lost"), [(60.0, 0.0, 60.0), (60.0, 50.0, 10.0), (-60.0, 0.0, 0.0), (1e9, 0.0, 0.0)])
def test_a_gap_counts_without_idle_time_and_wrong_clocks(gap_s: float, idle_s: float, lost: float) -> None:
    assert limit_gap(gap_s, idle_s) == lost


def test_a_clock_that_is_set_while_the_run_trains_changes_nothing() -> None:
    clock, wall_clock = Clock(), Clock(5000.0)
    account = Goodput(clock=clock, wall_clock=wall_clock)
    _spend(account, clock, ("start-up", 3.0))
    wall_clock.now += 3600.0
    _spend(account, clock, ("steps", 7.0))
    assert account.share == 0.7 and account.to_json()["at"] == 8600.0


def test_what_a_rewind_undid_does_not_count() -> None:
    clock = Clock()
    account = Goodput(clock=clock, wall_clock=clock)
    _spend(account, clock, ("steps", 60.0))
    saved = account.to_json()
    _spend(account, clock, ("saves", 4.0), ("steps", 30.0))
    clock.now += 6.0
    account.rewind(saved)
    assert account.seconds["steps"] == 60.0 and account.seconds["steps that do not count"] == 36.0
    assert account.share == 0.6 and math.fsum(account.seconds.values()) == 100.0
    account.rewind(None)
    assert account.seconds["steps"] == 60.0, "an older checkpoint does not say"


@given(st.lists(st.tuples(st.sampled_from(TIME_USES), st.floats(-1.0, 1e4)), max_size=20))
def test_no_time_is_lost_and_no_share_is_above_one(spans: list[tuple[Any, float]]) -> None:
    """Also with a clock that is set back."""
    clock, before = Clock(), 0.0
    account = Goodput(clock=clock, wall_clock=clock)
    assert account.share == 0.0
    for use, passed in spans:
        clock.now += passed
        account.record(use)
        total = math.fsum(account.seconds.values())
        assert total >= before and 0.0 <= account.share <= 1.0
        before = total
    assert before == pytest.approx(sum(max(0.0, passed) for _, passed in spans))


@pytest.mark.parametrize(
    "change",
    [
        {"at": None},
        {"at": math.nan},
        {"at": True},
        {"seconds": {}},
        {"seconds": 3},
        {"seconds": dict.fromkeys(TIME_USES, -1.0)},
        {"seconds": dict.fromkeys(TIME_USES, math.inf)},
        {"seconds": dict.fromkeys(TIME_USES, "1")},
    ],
)
def test_an_account_that_is_none_is_begun_anew(change: dict[str, Any]) -> None:
    saved = {"at": 900.0, "seconds": dict.fromkeys(TIME_USES, 1.0)}
    assert Goodput(saved, clock=Clock()).seconds["steps"] == 1.0
    assert Goodput({**saved, **change}, clock=Clock()).seconds == dict.fromkeys(TIME_USES, 0.0)


class Told:
    """A result of a step, as far as the account asks."""

    def __init__(self, *, skipped: bool = False) -> None:
        self.skipped = skipped


def test_the_phases_of_a_run_are_accounted_for() -> None:
    """Start-up, steps of each kind, an evaluation, a save, a pause between two calls of `fit`, a rewind, and the end."""
    clock, said = Clock(), list[str]()
    account, progress = Goodput(clock=clock, wall_clock=clock), Progress()
    saved: dict[str, Any] = {}
    watcher = GoodputCallback(account, lambda: saved, said.append)

    def step(seconds: float, result: Any) -> None:
        watcher.on_phase("reading data", 1)
        watcher.on_phase("in a step")
        clock.now += seconds
        watcher.on_result(progress, result, 4)
        watcher.on_phase("between steps")

    clock.now += 5.0
    with watcher.around_steps():
        step(10.0, Told())
        step(3.0, Told(skipped=True))
        step(1.0, None)  # --iterations-to-skip
        watcher.on_phase("evaluating")
        clock.now += 20.0
        step(10.0, Told())
        watcher.on_phase("saving")
        saved |= json.loads(json.dumps(account.to_json()))
        clock.now += 2.0
    clock.now += 7.0  # the user's, between two calls of `fit`
    with watcher.around_steps():
        step(30.0, Told())
        watcher.on_phase("rewinding")
        clock.now += 6.0
        watcher.after_rewind(progress)
        step(10.0, Told())
    watcher.on_phase("saving")
    clock.now += 2.0
    watcher.on_phase("evaluating")
    clock.now += 4.0
    watcher.on_end()
    assert account.seconds == {
        "steps": 30.0,
        "start-up": 12.0,
        "saves": 4.0,
        "evaluations": 24.0,
        "steps that do not count": 40.0,
        "between starts": 0.0,
    }
    assert watcher.log_values(None) == {"goodput": 30.0 / 110.0} and watcher.record_values()["spent"] is account.seconds
    assert len(said) == 1 and said[0].startswith("goodput 27.3% of ")
