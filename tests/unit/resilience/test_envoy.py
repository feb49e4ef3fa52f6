"""What an envoy tells its supervisor, over a pipe, and how nodes share a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megatron_lab.resilience.envoy import Envoy, plan_start
from megatron_lab.resilience.job_state import JobLimits, JobState, NodeOffer, NodeReport, RankProgress, StartPlan
from megatron_lab.resilience.messages import (
    EndRanksCommand,
    EnvoyConfig,
    JobEnded,
    RanksEnded,
    RanksRequest,
    StartCommand,
    StopRequest,
)
from megatron_lab.resilience.state_store import LocalStateStore, StoreUnavailableError, TCPStateStore, serve_store, update_state
from tests.support.runs import arguments

LIMITS = JobLimits(nodes=(1, 2), ranks=(1, 4), max_restarts=1, last_call_s=30.0)
FAILED, DONE = NodeReport("failed", 7, "rank 0 failed"), NodeReport("done", 0, "done")


def orders(limits: JobLimits, **settings: Any) -> EnvoyConfig:
    """Of a node called `a` with the tiny run."""
    argv = arguments(train_iters=9, micro_batch_size=1, **settings)
    return EnvoyConfig("a", "127.0.0.1", tuple(argv), limits, 5.0, 600.0, False)


@pytest.fixture
def alone() -> Iterator[Connection]:
    """The supervisor's end of the pipe to the envoy of a job of one node."""
    ours, its = Pipe()
    limits = JobLimits((1, 1), (1, 4), 1, 30.0)
    thread = threading.Thread(target=Envoy(orders(limits), LocalStateStore(), its, RankProgress).run, daemon=True)
    thread.start()
    yield ours
    if thread.is_alive():
        ours.send(StopRequest(85))
        thread.join(10)
    assert not thread.is_alive()


def heard(pipe: Connection) -> object:
    """The next message."""
    assert pipe.poll(20), "nothing is said"
    return pipe.recv()


def test_a_job_of_one_node(alone: Connection) -> None:
    """It is started again with fewer ranks and the same global batch, and given up when there was no newer state."""
    alone.send(RanksRequest(4))
    start = heard(alone)
    assert (
        isinstance(start, StartCommand)
        and start.num_spare_slots == 3
        and dict(start.plan.counts) == {"a": 4}
        and not start.plan.flags
    )
    alone.send(RanksEnded(1, FAILED, RanksRequest(3)))
    again = heard(alone)
    assert isinstance(again, StartCommand) and again.generation == 2 and dict(again.plan.counts) == {"a": 2}
    assert again.plan.port != start.plan.port and "the unchanged global batch of 8" in again.plan.notes[0]
    alone.send(RanksEnded(2, FAILED, RanksRequest(3)))
    over = heard(alone)
    assert isinstance(over, JobEnded) and over.code == 7 and "--max-restarts" in over.reason


def test_a_job_that_is_done(alone: Connection) -> None:
    alone.send(RanksRequest(2))
    assert isinstance(heard(alone), StartCommand)
    alone.send(RanksEnded(1, DONE, None))
    assert heard(alone) == JobEnded(0, "done")


def test_no_place_is_left(alone: Connection) -> None:
    alone.send(RanksRequest(1))
    assert isinstance(heard(alone), StartCommand)
    alone.send(RanksEnded(1, FAILED, RanksRequest(0)))
    over = heard(alone)
    assert isinstance(over, JobEnded) and over.code == 7 and "no layout" in over.reason


def test_wrong_settings_are_refused_once() -> None:
    ours, its = Pipe()
    limits = JobLimits((1, 1), (2, 2), 1, 30.0)
    ours.send(RanksRequest(2))
    Envoy(orders(limits, num_attention_heads=3), LocalStateStore(), its, RankProgress).run()
    over = heard(ours)
    assert isinstance(over, JobEnded) and over.code == 2 and "--num-attention-heads" in over.reason


def test_the_batch_of_the_first_start_is_kept_and_a_new_head_takes_over() -> None:
    asked = orders(LIMITS, global_batch_size=None, save="somewhere", load="somewhere")
    first = plan_start(asked, JobState(), {"b": 2, "a": 2})
    assert first is not None and first[1] == 4 and "--take-over" not in first[0].flags
    roll = JobState(generation=1, plan=first[0], batch=first[1])
    second = plan_start(asked, roll, {"a": 2})
    assert second is not None and second[0].flags == ("--global-batch-size", "4", "--take-over")


def test_two_nodes_share_a_store() -> None:
    """One fails, and the other is told to halt; both start again. A stop at one ends both."""
    store = serve_store(0)
    pipes, threads = {}, []
    for name in ("a", "b"):
        pipes[name], its = Pipe()
        own = EnvoyConfig(name, "127.0.0.1", orders(LIMITS).argv, LIMITS, 5.0, 600.0, False)
        book = TCPStateStore("127.0.0.1", store.port, "job")
        threads.append(threading.Thread(target=Envoy(own, book, its, RankProgress).run, daemon=True))
        threads[-1].start()
        pipes[name].send(RanksRequest(2))
    starts = [heard(pipe) for pipe in pipes.values()]
    assert all(isinstance(start, StartCommand) and start.plan.world_size == 4 for start in starts)
    pipes["a"].send(RanksEnded(1, FAILED, RanksRequest(2)))
    assert heard(pipes["b"]) == EndRanksCommand("rank 0 failed", False)
    pipes["b"].send(RanksRequest(2))
    starts = [heard(pipe) for pipe in pipes.values()]
    assert all(isinstance(start, StartCommand) and start.generation == 2 for start in starts)
    pipes["a"].send(StopRequest(85))
    stopped = NodeReport("stopped", 85, "stopped")
    pipes["a"].send(RanksEnded(2, stopped, None))
    heard(pipes["b"])
    pipes["b"].send(RanksEnded(2, stopped, None))
    for pipe, thread in zip(pipes.values(), threads, strict=True):
        found = heard(pipe)
        while not isinstance(found, JobEnded):
            found = heard(pipe)
        assert found.code == 85
        thread.join(10)


def test_a_store_that_is_lost_comes_back_with_what_nodes_know() -> None:
    store = serve_store(0)
    port, books = store.port, []
    for _ in range(2):
        books.append(TCPStateStore("127.0.0.1", port, "job"))
    roll = update_state(books[0], lambda roll: roll.add_node("a", NodeOffer(1, "x"), LIMITS))
    assert books[1].read() == roll
    assert not books[1].compare_and_swap(JobState(), roll.end_job(0, "")), "somebody else was there before"
    roll = update_state(books[1], lambda roll: roll.start_ranks(StartPlan({"a": 1}, (), "x", 1), 8))
    assert books[0].read() == roll
    del store
    with pytest.raises(StoreUnavailableError):
        books[0].read()
    store = serve_store(port)
    with pytest.raises(StoreUnavailableError):
        books[1].read()  # it still has the old connection
    assert books[0].read() == roll == books[1].read() and store.port == port
