"""Which ends of ranks restart them, and which places are left out."""

from __future__ import annotations

import signal

import pytest

from megatron.training.signals import LOST_CONTACT
from megatron_lab.resilience.roll import Life
from megatron_lab.resilience.verdict import NodePlaces, blamed, is_of_its_place, judge

STOP = 85
KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "running", "stopping", "kind", "code"),
    [
        ([0, 0], 0, False, "done", 0),
        ([0], 1, False, None, 0),
        ([1], 1, False, "failed", 1),
        ([86], 1, False, "failed", 86),
        ([KILLED], 1, False, "failed", 128 + 9),
        ([2], 1, False, "refused", 2),
        ([1, 2], 0, True, "refused", 2),
        ([LOST_CONTACT, 88], 0, False, "refused", 88),
        ([STOP], 1, True, None, 0),
        ([STOP, STOP], 0, False, "stopped", STOP),
        ([STOP, 1], 0, True, "stopped", STOP),
        ([TERMINATED, 1], 0, True, "stopped", STOP),
        ([KILLED, KILLED], 0, True, "stopped", STOP),
        ([1, 1], 0, True, "stopped", 1),
        ([0, 0], 0, True, "done", 0),
    ],
)
def test_ends(codes: list[int], running: int, stopping: bool, kind: str | None, code: int) -> None:
    found = judge(dict(enumerate(codes)), running, STOP, stopping=stopping)
    assert (found and found.kind, found.code if found else 0) == (kind, code)


def test_a_stop_that_counts_as_success() -> None:
    """--exit-signal-code 0."""
    found = judge({0: 0, 1: 0}, 0, 0, stopping=True)
    assert found is not None and found.kind == "done"


def test_who_is_to_blame() -> None:
    """A rank that a signal ended: the others lost contact with it, even if they were seen first."""
    assert blamed({3: 1, 1: KILLED, 2: 1}, STOP) == 1
    assert blamed({3: 1, 2: 7}, STOP) == 3
    assert blamed({3: LOST_CONTACT, 2: 7}, STOP) == 2
    assert blamed({3: LOST_CONTACT, 2: LOST_CONTACT}, STOP) == 3 and not is_of_its_place(LOST_CONTACT)
    assert blamed({0: 0, 1: STOP}, STOP) is None


def test_a_place_that_fails_twice_without_a_step_is_left_out() -> None:
    places = NodePlaces(4)
    assert places.ended(Life(0, 7), [2], may_lose=1) == []
    assert places.ended(Life(4, 4), [2], may_lose=1) == [2] and places.available() == [0, 1, 3]
    assert places.ended(Life(4, 4), [3], may_lose=0) == []
    assert places.ended(Life(4, 4), [3], may_lose=0) == [], "the job cannot do without"


def test_a_step_between_clears_a_place() -> None:
    places = NodePlaces(2)
    places.ended(Life(), [1], may_lose=1)
    assert places.ended(Life(0, 1), [1], may_lose=1) == []


def test_a_place_that_was_left_out_is_tried_again_after_a_step() -> None:
    places = NodePlaces(2)
    for _ in range(2):
        places.ended(Life(), [1], may_lose=1)
    assert places.available() == [0]
    places.ended(Life(), [0], may_lose=0)
    assert places.available() == [0]
    places.ended(Life(0, 3), [0], may_lose=0)
    assert places.available() == [0, 1]
    assert places.ended(Life(), [1], may_lose=1) == [1], "one failure is enough now"
