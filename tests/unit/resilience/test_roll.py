"""The roll of a job: when a round closes and with whom, and what follows when ranks end or nodes are lost."""

from __future__ import annotations

import dataclasses
import random

import pytest

from megatron_lab.resilience.job_state import (
    EndType,
    JobLimits,
    JobState,
    NodeOffer,
    NodeReport,
    RankProgress,
    StartPlan,
    from_json,
    to_json,
)

LIMITS = JobLimits(nodes=(2, 3), ranks=(2, 6), max_restarts=2, last_call_s=30.0)

NO_STEP = RankProgress(0, 0)


def entered(roll: JobState, *names: str, limits: JobLimits = LIMITS) -> JobState:
    """With these nodes ready."""
    for name in names:
        roll = roll.add_node(name, NodeOffer(2, name), limits)
    return roll


def closed(roll: JobState, limits: JobLimits = LIMITS) -> JobState:
    """Closed with all that are ready."""
    order = roll.order_nodes(limits.nodes[1])
    return roll.start_ranks(StartPlan(dict.fromkeys(order, 2), (), order[0], 1), 8)


def running(*names: str) -> JobState:
    """A job that runs on these nodes."""
    return closed(entered(JobState(), *names))


def told(roll: JobState, name: str, kind: EndType, code: int, life: RankProgress = NO_STEP) -> JobState:
    """With a report of a node."""
    return roll.add_report(name, roll.generation, NodeReport(kind, code, f"{name} {kind}"), life, LIMITS)


def test_a_first_round_waits_for_all_nodes_and_then_for_a_last_call() -> None:
    assert not entered(JobState(), "a").can_start(LIMITS, 1000.0)
    two = entered(JobState(), "a", "b")
    assert not two.can_start(LIMITS, 29.0) and two.can_start(LIMITS, 30.0)
    assert entered(two, "c").can_start(LIMITS, 0.0)


def test_a_later_round_closes_once_all_known_nodes_are_there() -> None:
    again = told(running("a", "b"), "a", "failed", 1)
    assert again.phase == "gathering" and not entered(again, "a").can_start(LIMITS, 1000.0)
    assert entered(again, "a", "b").can_start(LIMITS, 0.0)
    three = told(running("a", "b", "c"), "a", "failed", 1)
    waiting = entered(three, "a", "b")
    assert not waiting.can_start(LIMITS, 0.0), "c lives, and has not ended its ranks"
    assert waiting.can_start(LIMITS, 30.0)
    assert waiting.remove_lost_node("c", RankProgress(), LIMITS).can_start(LIMITS, 0.0)


def test_too_few_places_are_not_enough() -> None:
    roll = JobState().add_node("a", NodeOffer(1, "a"), LIMITS).add_node("b", NodeOffer(0, "b"), LIMITS)
    assert not roll.can_start(LIMITS, 1000.0)


def test_newcomers_take_the_place_of_lost_nodes() -> None:
    roll = running("a", "b", "c")
    spare = entered(roll, "d")
    assert spare.phase == "running" and spare.ready == ("d",)
    lost = spare.remove_lost_node("a", RankProgress(), LIMITS)
    assert lost.phase == "gathering" and lost.why == "a is lost"
    ready = entered(lost, "c", "b")
    assert ready.order_nodes(3) == ("d", "b", "c") and ready.can_start(LIMITS, 0.0)
    assert entered(ready, "e").order_nodes(3) == ("d", "b", "c"), "at most three"


def test_a_joining_node_may_ask_for_a_restart() -> None:
    roll = running("a", "b").add_node("c", NodeOffer(2, "c"), LIMITS, requests_restart=True)
    assert (roll.phase, roll.gentle, roll.stale, roll.ready) == ("gathering", True, 0, ("c",))
    full = running("a", "b", "c").add_node("d", NodeOffer(2, "d"), LIMITS, requests_restart=True)
    assert full.phase == "running"


def test_restarts_without_a_newer_state_are_counted() -> None:
    """And the exit code is that of the first failure since there was one."""
    roll = running("a", "b")
    for code, began in ((7, 0), (8, 0)):
        roll = told(roll, "a", "failed", code, RankProgress(began, began + 3))
        assert roll.phase == "gathering"
        roll = closed(entered(roll, "a", "b"))
    over = told(roll, "b", "failed", 9, RankProgress(0, 3))
    assert (over.phase, over.code) == ("over", 7) and "--max-restarts" in over.words
    newer = told(roll, "b", "failed", 9, RankProgress(10, 10))
    assert (newer.phase, newer.stale, newer.code) == ("gathering", 1, 9)
    never = closed(entered(told(newer, "a", "failed", 1), "a", "b"))
    assert (
        told(closed(entered(told(never, "a", "failed", 5, RankProgress()), "a", "b")), "a", "failed", 6, RankProgress()).phase
        == "over"
    )


def test_what_is_done_and_what_is_not_started_again() -> None:
    roll = told(running("a", "b"), "a", "done", 0)
    assert roll.phase == "running" and told(roll, "b", "done", 0).code == 0 and told(roll, "b", "done", 0).phase == "over"
    assert told(roll, "b", "failed", 1).phase == "gathering", "a waits, and starts again too"
    refused = told(running("a", "b"), "b", "refused", 2)
    assert (refused.phase, refused.code) == ("over", 2)
    stopped = told(running("a", "b"), "a", "stopped", 85)
    assert stopped.phase == "running"
    over = told(stopped, "b", "failed", 1)
    assert (over.phase, over.code) == ("over", 85), "b only lost contact"


def test_ranks_that_end_with_their_lost_supervisor_do_not_stop_the_job() -> None:
    """They get SIGTERM and ask all others to save and end. Nobody has asked for that."""
    roll = told(running("a", "b", "c"), "b", "stopped", 85)
    roll = told(roll, "c", "stopped", 85)
    assert roll.phase == "running"
    again = roll.remove_lost_node("a", RankProgress(0, 5), LIMITS)
    assert again.phase == "gathering" and again.why == "a is lost"
    asked = roll.request_stop(85).remove_lost_node("a", RankProgress(0, 5), LIMITS)
    assert (asked.phase, asked.code) == ("over", 85)


def test_a_node_that_leaves_lets_all_save_and_does_not_count() -> None:
    roll = running("a", "b", "c").remove_leaving_node("a")
    assert (roll.phase, roll.gentle, roll.stale, set(roll.members)) == ("gathering", True, 0, {"b", "c"})
    assert entered(roll, "b", "c").can_start(LIMITS, 0.0)
    assert entered(running("a", "b"), "d").remove_leaving_node("d").phase == "running", "a spare"


def test_a_stop_while_nothing_runs() -> None:
    assert entered(JobState(), "a").request_stop(85).code == 85


def test_a_job_of_the_same_name_begins_when_all_have_left() -> None:
    over = running("a", "b").end_job(0, "done")
    assert entered(over, "c") == over
    left = over.remove_lost_node("a", RankProgress(), LIMITS).remove_lost_node("b", RankProgress(), LIMITS)
    assert entered(left, "c") == entered(JobState(), "c")


def test_the_cause_counts_where_another_node_lost_contact_first() -> None:
    roll = told(running("a", "b"), "a", "failed", 87)
    cause = told(roll, "b", "failed", 7)
    assert (cause.phase, cause.code, cause.why, cause.stale) == ("gathering", 7, "b failed", 1)


def test_late_reports_say_nothing() -> None:
    roll = running("a", "b")
    assert roll.add_report("a", 0, NodeReport("failed", 1, ""), RankProgress(), LIMITS) == roll
    assert roll.add_report("c", 1, NodeReport("failed", 1, ""), RankProgress(), LIMITS) == roll


@pytest.mark.parametrize("seed", range(100))
def test_no_history_leaves_a_node_waiting_or_a_start_with_the_dead(seed: int) -> None:
    """Nodes come, fail and are lost at random. A start has only living nodes; where all that live are ready, the round closes."""
    draw = random.Random(seed)
    limits = dataclasses.replace(LIMITS, max_restarts=1000)
    roll, number = JobState(), 0
    names: list[str] = []
    for _ in range(60):
        choice = draw.random()
        if choice < 0.2 and len(names) < 5:
            names.append(f"n{number}")
            number += 1
            roll = roll.add_node(names[-1], NodeOffer(draw.randint(1, 2), "x"), limits, requests_restart=draw.random() < 0.3)
        elif choice < 0.4 and names:
            gone = names.pop(draw.randrange(len(names)))
            roll = roll.remove_lost_node(gone, RankProgress(), limits)
        elif choice < 0.7 and roll.phase == "running":
            kind: EndType = draw.choice(("failed", "done")) if any(name in roll.members for name in roll.order) else "failed"
            roll = roll.add_report(draw.choice(roll.order), roll.generation, NodeReport(kind, 1, ""), RankProgress(), limits)
        elif roll.phase == "gathering":
            waiting = [name for name in names if name not in roll.ready]
            if waiting:
                roll = roll.add_node(draw.choice(waiting), NodeOffer(2, "x"), limits)
            elif roll.can_start(limits, 100.0):
                order = roll.order_nodes(3)
                assert set(order) <= set(names) and len(order) <= 3 and len(order) == min(3, len(names))
                kept = [name for name in roll.order if name in order]
                assert [name for name in order if name in kept] == kept, "the order is stable"
                roll = closed(roll, limits)
        elif roll.phase == "over":
            break
        assert from_json(to_json(roll)) == roll
    assert roll.code == 0 or roll.phase != "over"
