"""Which ends of ranks restart them, and which places are left out."""

from __future__ import annotations

import signal

import pytest

from megatron.training.signals import EXIT_LOST_CONTACT
from megatron_lab.resilience.job_state import RankProgress
from megatron_lab.resilience.verdict import NodeSlots, build_report, find_failed_rank, is_slot_failure

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
        ([EXIT_LOST_CONTACT, 88], 0, False, "refused", 88),
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
    found = build_report(dict(enumerate(codes)), running, STOP, is_stopping=stopping)
    assert (found and found.kind, found.code if found else 0) == (kind, code)


def test_a_stop_that_counts_as_success() -> None:
    """--exit-signal-code 0."""
    found = build_report({0: 0, 1: 0}, 0, 0, is_stopping=True)
    assert found is not None and found.kind == "done"


def test_who_is_to_blame() -> None:
    """A rank that a signal ended: the others lost contact with it, even if they were seen first."""
    assert find_failed_rank({3: 1, 1: KILLED, 2: 1}, STOP) == 1
    assert find_failed_rank({3: 1, 2: 7}, STOP) == 3
    assert find_failed_rank({3: EXIT_LOST_CONTACT, 2: 7}, STOP) == 2
    assert find_failed_rank({3: EXIT_LOST_CONTACT, 2: EXIT_LOST_CONTACT}, STOP) == 3 and not is_slot_failure(EXIT_LOST_CONTACT)
    assert find_failed_rank({0: 0, 1: STOP}, STOP) is None


def test_a_place_that_fails_twice_without_a_step_is_left_out() -> None:
    places = NodeSlots(4)
    assert places.record_end(RankProgress(0, 7), [2], num_spare_slots=1) == []
    assert places.record_end(RankProgress(4, 4), [2], num_spare_slots=1) == [2] and places.get_available() == [0, 1, 3]
    assert places.record_end(RankProgress(4, 4), [3], num_spare_slots=0) == []
    assert places.record_end(RankProgress(4, 4), [3], num_spare_slots=0) == [], "the job cannot do without"


def test_a_step_between_clears_a_place() -> None:
    places = NodeSlots(2)
    places.record_end(RankProgress(), [1], num_spare_slots=1)
    assert places.record_end(RankProgress(0, 1), [1], num_spare_slots=1) == []


def test_a_place_that_was_left_out_is_tried_again_after_a_step() -> None:
    places = NodeSlots(2)
    for _ in range(2):
        places.record_end(RankProgress(), [1], num_spare_slots=1)
    assert places.get_available() == [0]
    places.record_end(RankProgress(), [0], num_spare_slots=0)
    assert places.get_available() == [0]
    places.record_end(RankProgress(0, 3), [0], num_spare_slots=0)
    assert places.get_available() == [0, 1]
    assert places.record_end(RankProgress(), [1], num_spare_slots=1) == [1], "one failure is enough now"
