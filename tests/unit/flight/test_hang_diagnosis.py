"""Who keeps the others waiting, in hundreds of hangs that are played: any rank departs at any call of any layout."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import json
import math
import os
import random
import signal
import subprocess
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.config.launcher import build_module_command
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron.spec.schedules import build_schedule
from megatron_lab.flight import watcher
from megatron_lab.flight.diagnosis import diagnose_ranks
from megatron_lab.flight.rank_monitor import _poll_requests
from megatron_lab.flight.record import Channel, FlightRecord, RankFiles, Snapshot, open_files, read_record
from megatron_lab.flight.watcher import STACK_SIGNAL, HangDetector, NodeWatcher, WatcherConfig
from megatron_lab.verification.local_ranks import set_parent_death_signal

STEPS = 2


class Call(NamedTuple):
    """What a rank does next: enter a channel, and perhaps wait until the call is done."""

    group: str
    ranks: tuple[int, ...]
    directed: bool
    enters: bool
    waits: bool


@functools.cache
def program(topology: Topology, rank: int, schedule: str) -> tuple[Call, ...]:
    """The calls of some steps of a rank."""
    return tuple(_calls(topology, rank, schedule))


def _calls(topology: Topology, rank: int, schedule: str) -> Iterator[Call]:
    """The calls of some steps: messages posted one operation ahead, sums over tensor ranks, gradients that are waited for at the
    end, the sum of the world."""
    stage = topology.get_coordinates(rank)["pp"]
    made = build_schedule(schedule, topology.pp, 2 * topology.pp, 2 if schedule == "interleaved" else 1)
    pipeline, tensor = topology.group(rank, "pp"), topology.group(rank, "tp")
    for _ in range(STEPS):
        linked = made.linked_ops[stage]
        sources = [
            None if needs is None else made.stage_of_chunk[needs.chunk + (1 if needs.is_gradient else -1)] for _, needs, _ in linked
        ]
        arriving = [None if source in (None, stage) else (pipeline[source], rank) for source in sources]  # type: ignore[index]
        posted = -1
        for number, (_, _, gives) in enumerate(linked):
            for ahead in range(posted + 1, min(number + 2, len(linked))):
                if (ends := arriving[ahead]) is not None:
                    yield Call("pp", ends, directed=True, enters=True, waits=False)
                posted = ahead
            if (ends := arriving[number]) is not None:
                yield Call("pp", ends, directed=True, enters=False, waits=True)
            if len(tensor) > 1:
                yield Call("tp", tensor, directed=False, enters=True, waits=True)
            if gives is not None and (to := made.stage_of_chunk[gives.chunk]) != stage:
                yield Call("pp", (rank, pipeline[to]), directed=True, enters=True, waits=False)
        data = topology.group(rank, *GRADIENT_AXES)
        if len(data) > 1:
            for waits in (False, False, True):
                yield Call("dp", data, directed=False, enters=True, waits=waits)
        yield Call("world", tuple(range(topology.world_size)), directed=False, enters=True, waits=True)


def hang(topology: Topology, schedule: str, culprit: int, departs_at: int) -> list[Snapshot]:
    """Play all ranks until nothing moves, of which one stops before a call of its program."""
    programs = {rank: program(topology, rank, schedule) for rank in range(topology.world_size)}
    programs[culprit] = programs[culprit][: departs_at % len(programs[culprit])]
    entered: dict[int, Counter[tuple[str, tuple[int, ...], bool]]] = defaultdict(Counter)
    waited: dict[int, Counter[tuple[str, tuple[int, ...], bool]]] = defaultdict(Counter)
    place, waiting, moved = dict.fromkeys(programs, 0), dict.fromkeys(programs, False), True
    while moved:
        moved = False
        for rank, calls in programs.items():
            while place[rank] < len(calls):
                call = calls[place[rank]]
                key = (call.group, call.ranks, call.directed)
                if call.enters and not waiting[rank]:
                    entered[rank][key] += 1
                    moved = True
                waiting[rank] = call.waits
                number = waited[rank][key] + 1 if call.directed else entered[rank][key]
                others = call.ranks[:1] if call.directed else call.ranks
                if call.waits and any(entered[other][key] < number for other in others):
                    break
                waited[rank][key] += call.waits
                waiting[rank] = False
                place[rank] += 1
                moved = True
    channels = {
        rank: tuple(Channel(*key, calls, "all-reduce") for key, calls in counts.items()) for rank, counts in entered.items()
    }
    return [
        Snapshot(
            rank, f"node{rank // 4}", 100 + rank, "in a step", 7, 3, "", 0, waiting[rank], 40.0, 0.0, "", channels.get(rank, ())
        )
        for rank in programs
    ]


def test_whoever_departs_is_named_wherever_it_was() -> None:
    """Every layout kind; the rest of the ranks are those that wait for it."""
    draw = random.Random(5)
    worlds = [
        (Topology(dp=2), "1f1b"),
        (Topology(tp=2, dp=2), "1f1b"),
        (Topology(pp=4), "1f1b"),
        (Topology(pp=2, dp=3), "zb-h1"),
        (Topology(tp=2, pp=2, dp=2), "1f1b"),
        (Topology(tp=2, pp=4), "interleaved"),
        (Topology(tp=2, cp=2, pp=2, dp=2), "gpipe"),
    ]
    for _ in range(600):
        topology, schedule = draw.choice(worlds)
        culprit = draw.randrange(topology.world_size)
        snapshots = hang(topology, schedule, culprit, draw.randrange(1, 100_000))
        found = diagnose_ranks(snapshots)
        assert found.culprit == culprit, (topology, schedule, found.message)
        assert found.message.startswith(f"rank {culprit} (node node{culprit // 4}, process {100 + culprit}): did not enter ")
        assert set(found.waiting) == {*range(topology.world_size)} - {culprit}


def test_what_the_operating_system_knows_goes_first() -> None:
    """A process that is gone or stopped need not be behind in any call."""
    snapshots = hang(Topology(tp=2, pp=2, dp=2), "1f1b", 3, 11)
    for state in ("gone", "stopped"):
        told = [replace(one, process=state if one.rank == 6 else "") for one in snapshots]
        found = diagnose_ranks(told)
        assert found.culprit == 6 and state in found.message and found.waiting == (0, 1, 2, 3, 4, 5, 7)


def test_where_nobody_is_behind_nobody_is_accused() -> None:
    """A message is lost, or a device does not finish; or the one rank that waits for nothing has the rest wait."""
    whole = [replace(one, waiting=True) for one in hang(Topology(dp=2), "1f1b", 0, -1)]
    level = [replace(one, channels=whole[0].channels) for one in whole]
    assert diagnose_ranks(level).culprit is None and "a message is lost" in diagnose_ranks(level).message
    (waits, busy) = level[0], replace(level[1], waiting=False, phase="saving")
    found = diagnose_ranks([waits, busy])
    assert found.culprit == 1 and "saving" in found.message and found.waiting == (0,)
    idle = [replace(one, waiting=False) for one in level]
    assert diagnose_ranks(idle).culprit is None and "wait for their devices" in diagnose_ranks(idle).message


def test_of_a_circle_the_message_is_named_that_was_left_out() -> None:
    """Rank 0 did not send to rank 2, and waits for what that would send back; so it does not come to the sum with rank 1 either."""

    def rank(number: int, place: int, *channels: Channel) -> Snapshot:
        return Snapshot(number, "node", 100 + number, "in a step", 7, 3, "", place, True, 40.0, 0.0, "", channels)

    sums = [Channel("dp", (0, 1), False, calls, "reduce-scatter") for calls in (4, 5)]
    sent, arrived = (Channel("pp_up", (0, 2), True, calls, "receive") for calls in (7, 8))
    back, awaited = (Channel("pp_down", (2, 0), True, calls, "receive") for calls in (7, 8))
    products = [Channel("tp", (2, 3), False, calls, "all-reduce") for calls in (4, 5)]
    third = replace(rank(3, 3, products[1]), quiet_s=41.0)  # it got its message, and waits for the product of rank 2
    found = diagnose_ranks([rank(0, 5, sums[0], sent, awaited), rank(1, 8, sums[1]), rank(2, 3, arrived, back, products[0]), third])
    assert found.culprit == 0 and "did not enter message 8 from rank 0 to rank 2" in found.message


def test_the_watcher_of_the_first_node_hears_those_of_the_others(tmp_path: Path) -> None:
    """Two nodes with a rank each, played by this process: the rank of the second one is named, and its stacks are written there."""
    records, watchers, port = [], [], ""
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(STACK_SIGNAL, file)
        try:
            for node in range(2):
                files = RankFiles.create(node)
                record = FlightRecord(files.record, node)
                channel = record.add_channel("dp", (0, 1))
                for name in ("in a step", "between steps", "in a step"):
                    record.set_phase(name, 5)
                for _ in range(2 - node):
                    record.count_call(channel, 0)
                if node == 0:
                    record.set_waiting(True)
                records.append(record)
                head = f"127.0.0.1:{port}" if node else None
                orders = WatcherConfig((files,), 1, 2, 1.0, None, "secret", head, str(tmp_path / f"kept{node}"))
                command, environment = build_module_command("megatron_lab.flight.watcher")
                watchers.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        env=environment,
                    )
                )
                assert watchers[-1].stdin is not None and watchers[-1].stdout is not None and watchers[0].stderr is not None
                with watchers[-1].stdin as orders_in:
                    orders_in.write(json.dumps(dataclasses.asdict(orders)))
                port = port or watchers[0].stdout.readline().strip()  # type: ignore[union-attr]
            told = watchers[0].stderr.readline()  # type: ignore[union-attr]
            assert ". rank 1 (node " in told and "did not enter call 2 of the group dp of 2 ranks (all-reduce)" in told, told
            assert told.rstrip().endswith("; rank 0 waits")
            while not (tmp_path / "kept1").exists():
                time.sleep(0.05)
        finally:
            for record in records:
                record.set_phase("ended")
            for one in watchers:
                one.stdin = None
                one.communicate(timeout=30.0)
            faulthandler.unregister(STACK_SIGNAL)
    assert [one.returncode for one in watchers] == [0, 0]


def _answer_requests(record: FlightRecord, files: RankFiles) -> None:
    """Run the thread that answers the watcher, while the main thread runs a Python loop."""
    threading.Thread(target=_poll_requests, args=(record, files), daemon=True).start()
    while True:
        math.sqrt(2.0)


def _stop(record: FlightRecord, files: RankFiles) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)


def _keep_the_lock(record: FlightRecord, files: RankFiles) -> None:
    """Block in a C call that keeps the global interpreter lock."""
    threading.Thread(target=_poll_requests, args=(record, files), daemon=True).start()
    ctypes.PyDLL(None).pause()


@pytest.mark.parametrize(
    ("behave", "signalled"),
    [(_answer_requests, False), (_stop, False), (_keep_the_lock, True)],
    ids=["answers", "stopped", "blocked"],
)
def test_only_a_rank_that_cannot_answer_gets_the_signal_for_its_stacks(
    behave: Callable[[FlightRecord, RankFiles], None], signalled: bool, tmp_path: Path
) -> None:
    """The handler of that signal may crash a rank whose threads run. Here no handler is set, so that the signal ends the rank."""
    files = RankFiles.create(0)
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        set_parent_death_signal(parent, signal.SIGKILL)
        behave(FlightRecord(files.record, 0), files)
    try:
        limit = time.monotonic() + 30
        while (
            (found := read_record(Path(files.record))) is None
            or found.pid != pid
            or (behave is _stop and found.process != "stopped")
        ):
            assert time.monotonic() < limit
            time.sleep(0.02)
        NodeWatcher(WatcherConfig((files,), 1, 1, 1.0, None, "", None, str(tmp_path)))._execute({"stacks": True})
        os.kill(pid, signal.SIGCONT)
        if behave is _answer_requests:
            stack = (tmp_path / "rank-0.stack").read_text()
            assert stack.startswith("Current thread") and f'File "{__file__}", line ' in stack and stack.endswith("\n")
            assert "in _answer_requests\n" in stack and "_poll_requests" not in stack
            os.kill(pid, signal.SIGKILL)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < limit, "it has not received the signal"
            time.sleep(0.02)
        status = os.waitstatus_to_exitcode(ended[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        files.close()
    assert status == (-STACK_SIGNAL if signalled else -signal.SIGKILL if behave is _answer_requests else 0)


@pytest.mark.parametrize("enters", [True, False])
def test_a_rank_is_not_named_by_what_is_older_than_the_stillness(
    enters: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 enters a call at 1.6 s. What its node has heard of rank 1 is older, and comes late, since the link is slow."""
    now = 0.0
    monkeypatch.setattr(watcher, "time", types.SimpleNamespace(monotonic=lambda: now))
    watching = NodeWatcher(WatcherConfig((), 1, 2, 0.6, None, ""))

    def rank(number: int, calls: int, quiet_s: float) -> Snapshot:
        channel = Channel("dp", (0, 1), False, calls, "all-reduce")
        return Snapshot(number, f"node{number}", 100, "in a step", 7, 3, "", 0, True, quiet_s, 0.0, "", (channel,))

    def judged(at: float) -> str:
        nonlocal now
        now = at
        watching._check_all_nodes([rank(0, 2, at - 1.6) if at >= 1.6 else rank(0, 1, 0.0)])
        return capsys.readouterr().err

    for now in (0.5, 1.0, 1.5):
        watching.receive("1", [rank(1, 1, 0.0)])
        assert judged(now) == ""
    assert judged(2.3) == "", "0.7 s without a movement, but node 1 was heard 0.8 s ago"
    now = 3.0
    watching.receive("1", [rank(1, 2 if enters else 1, 0.9)])
    assert judged(3.05) == "", "it may have been on its way for a second"
    now = 3.6
    watching.receive("1", [rank(1, 2 if enters else 1, 1.4)])
    there = "rank 1 (node node1, process 100): did not enter call 2"
    assert ("a link between nodes node0, node1 is slow" if enters else there) in judged(3.7)
    assert judged(4.2) == "", "said once"
    now = 7.5
    watching.receive("1", [rank(1, 3, 0.0)])
    assert "the run continues after 5 s without progress" in judged(7.5)


def test_a_node_that_stays_silent_is_told_though_what_it_said_is_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(watcher, "time", types.SimpleNamespace(monotonic=lambda: now))
    watching = NodeWatcher(WatcherConfig((), 1, 2, 0.6, None, ""))
    one = Snapshot(0, "node0", 100, "in a step", 7, 3, "", 0, True, 0.0, 0.0, "", ())
    watching.receive("1", [replace(one, rank=1, host="node1")])
    said = []
    for now in (1.0, 1.9, 2.1, 3.0):
        watching._check_all_nodes([replace(one, quiet_s=now)])
        said.append(capsys.readouterr().err)
    assert "node node1 (rank 1) has sent no report for 2 s" in said[2] and said[:2] == ["", ""] and said[3] == ""


def test_a_stillness_that_has_happened_before_is_no_hang() -> None:
    """Nor the first step, or the first save, as long as they take no ten times the limit."""
    judge, (one,) = HangDetector(10.0), hang(Topology(), "1f1b", 0, 3)

    def limit(phase: str, iteration: int, quiet_s: float) -> float:
        judge.update([replace(one, phase=phase, iteration=iteration, steps=max(0, iteration - 1), quiet_s=quiet_s)])
        return judge.get_limit_s()

    assert limit("starting", 0, 0.0) == limit("starting", 0, 0.4) == limit("starting", 0, 0.0) == 100.0, "it only drew breath"
    assert limit("in a step", 1, 60.0) == 100.0
    assert limit("in a step", 2, 0.5) == 180.0, "the first step stood still for a minute"
    assert limit("reading data", 3, 1.0) == 10.0 and limit("saving", 3, 50.0) == 100.0
    assert limit("in a step", 4, 0.0) == 180.0 and limit("saving", 5, 0.0) == 150.0


def test_nothing_remains_of_a_rank_that_was_killed() -> None:
    """Its files have no name in any folder. Whoever has opened them reads them after its end, and learns that it is gone."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        files = RankFiles.create(3)
        FlightRecord(files.record, 3).set_phase("saving", 7)
        os.write(writing, json.dumps(dataclasses.asdict(files)).encode())
        signal.pause()
    files = RankFiles(**json.loads(os.read(reading, 1000)))
    named = [os.readlink(path) for path in (files.record, files.stack, files.calls)]
    assert all(name.startswith("/memfd:flight-") and name.endswith("(deleted)") for name in named), named
    (opened,) = open_files([files])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    snapshot = read_record(Path(opened.record))
    assert snapshot is not None
    assert (snapshot.rank, snapshot.phase, snapshot.iteration, snapshot.process) == (3, "saving", 7, "gone")
    assert open_files([files]) == [], "who comes later finds nothing"
    opened.close()
