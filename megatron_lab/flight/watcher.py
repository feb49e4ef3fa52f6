"""The process of a node that watches its ranks, and tells who keeps the others waiting when nothing moves any more.

    python -P -m megatron_lab.flight.watcher < ORDERS

It is started by the first rank of the node (`watched.py`) and imports no torch. The watchers of other nodes send what they read to
that of the first node, over TCP and outside of the training's groups; that one finds the culprit, tells it once, and says what the
others are to do: write the stacks of their ranks, and later end them. A node that is not heard from any more while nothing moves is
itself what is told; its own watcher, which does not hear the first node either, judges its ranks alone.

How long a stillness is a hang: --hang-warn-s, or three times the longest one that ended by itself in the same phase, whichever is
longer. A phase that no rank has left yet (the start, with its compilation; the first save; the first evaluation) gets ten times
--hang-warn-s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_lab.flight.diagnosis import Departure, find_departed, head_not_heard, listed, never_heard, node_not_heard
from megatron_lab.flight.record import Channel, Snapshot, ask_for_trace, ask_to_end, process_state, read_record

HANG_EXIT_CODE = 86
"""That of a job that is ended because it hangs."""
_LONGEST_LINE = 1 << 24
"""Characters of a message of another node, at the most; a record has some hundred."""
CALLS_SUFFIX = ".calls.json"
"""End of the name of the file with torch's trace of a rank's calls."""
_TRACES_WITHIN_S = 2.0
STACKS = signal.SIGRTMIN + 3
"""The signal on which a rank writes the stacks of its threads."""
_EVERY_S = 0.5
_ANSWER_WITHIN_S = 5.0
_APART = 0.5
"""Share of a stillness for which a node must not have been heard from to be told as its cause; and two seconds in any case."""
_APART_S = 4 * _EVERY_S
_ALL_HEARD_WITHIN_S = 120.0
_UNSEEN, _SEEN = 10.0, 3.0
_ORDINARY = ("in a step", "reading data", "between steps")
"""Phases that last a step, so that --hang-warn-s is right for them from the second step on."""


@dataclass(frozen=True)
class Orders:
    """What a watcher is started with."""

    folder: str
    """Where the records of the node's ranks are, in memory."""
    ranks: int
    """How many of the node there are."""
    world: int
    warn_s: float
    kill_s: float | None
    token: str
    """What a watcher says first to that of the first node."""
    head: str | None = None
    """Address of the first node's watcher; None on that node."""
    stacks: str | None = None
    """Folder in which stacks stay."""


class Judge:
    """Says when a stillness is a hang.

    Args:
        warn_s: see --hang-warn-s.
    """

    def __init__(self, warn_s: float) -> None:
        self._warn_s = warn_s
        self._longest: dict[str, float] = {}
        self._left = set[str]()
        self._stillness, self._phases = 0.0, frozenset[str]()
        self._stepped = False

    def limit_s(self) -> float:
        """Seconds of stillness from which on this is a hang."""
        return max(map(self._limit, self._phases), default=self._warn_s)

    def look(self, snapshots: Sequence[Snapshot]) -> float:
        """Take in what is seen; returns the seconds since anything moved."""
        stillness = min(one.quiet_s for one in snapshots)
        self._stepped = any(one.steps for one in snapshots)
        if stillness < self._stillness:  # it ended by itself
            for phase in self._phases:
                self._longest[phase] = max(self._longest.get(phase, 0.0), self._stillness)
        phases = frozenset(one.phase for one in snapshots)
        self._left |= self._phases - phases
        self._stillness, self._phases = stillness, phases
        return stillness

    def _limit(self, phase: str) -> float:
        if phase in self._left or (phase in _ORDINARY and self._stepped):
            return max(self._warn_s, _SEEN * self._longest.get(phase, 0.0))
        return _UNSEEN * self._warn_s


@dataclass(frozen=True)
class _NodeReport:
    """The last records that another node has sent of its ranks."""

    received_at: float
    """Time at which the report arrived, by `time.monotonic` of this node."""
    delay_s: float
    """Longest time, in seconds, that the report can have spent on the network. A node sends a report `_EVERY_S` after the answer to
    the one before, so this is the interval between the two, less `_EVERY_S`."""
    ranks: list[Snapshot]


class NodeWatcher:
    """Watches the ranks of a node, and on the first node all ranks."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._judge = orders, Judge(orders.warn_s)
        self._folder = Path(orders.folder)
        self._others: dict[str, _NodeReport] = {}
        self._commands: list[dict[str, Any]] = []
        self._still_since: float | None = None
        """Start of the stillness that has been reported, by `time.monotonic`; None while none is reported."""
        self._began, self._missed = time.monotonic(), False

    def run(self) -> None:
        """Watch until all ranks of the node have ended."""
        link = None if self._orders.head is None else _Link(self._orders)
        parent = os.getppid()
        while True:
            mine = self.read()
            complete = len(mine) == self._orders.ranks or os.getppid() != parent  # a rank may end before it has a record
            if complete and all(one.phase == "ended" or one.process == "gone" for one in mine):
                break
            if link is None:
                self._judge_all(mine)
            else:
                for command in link.tell(mine):
                    self._obey(command)
                self._judge_alone(mine, link)
            time.sleep(_EVERY_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def read(self) -> list[Snapshot]:
        """The records of the node's ranks."""
        found = []
        for path in sorted(self._folder.glob("rank-*.record")):
            with contextlib.suppress(OSError):
                found.append(read_record(path))
        return [one for one in found if one is not None]

    def receive(self, node: str, ranks: list[Snapshot]) -> None:
        """Store the records that another node has sent of its ranks."""
        now, last = time.monotonic(), self._others.get(node)
        delay_s = 0.0 if last is None else max(0.0, now - last.received_at - _EVERY_S)
        self._others[node] = _NodeReport(now, delay_s, ranks)

    def serve(self, listener: socket.socket) -> None:
        """Answer the watchers of other nodes, each in a thread."""

        def hear(connection: socket.socket) -> None:
            # What is not as a watcher writes it ends the connection, not the watch.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection, connection.makefile("rw") as lines:
                if not hmac.compare_digest(lines.readline(_LONGEST_LINE).strip().encode(), self._orders.token.encode()):
                    return
                done = 0
                while line := lines.readline(_LONGEST_LINE):
                    message = json.loads(line)
                    self.receive(message["node"], [_snapshot(one) for one in message["ranks"]])
                    lines.write(json.dumps(self._commands[done:]) + "\n")
                    lines.flush()
                    done = len(self._commands)

        def accept() -> None:
            while True:
                threading.Thread(target=hear, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _judge_all(self, mine: list[Snapshot]) -> None:
        """Judge the ranks of all nodes, on the first. What a node said grows old until it says more.

        A report that may be older than the stillness cannot show which rank caused it. The judgement then waits until the node
        sends a newer report, or has been silent for so long that the node itself is the cause.
        """
        now, others = time.monotonic(), [*self._others.values()]
        aged = [
            dataclasses.replace(one, quiet_s=one.quiet_s + now - report.received_at) for report in others for one in report.ranks
        ]
        everyone = [*mine, *aged]
        living = [one for one in everyone if one.phase != "ended"]
        missing = self._orders.world - len(everyone)
        if missing and not self._missed and now - self._began > _ALL_HEARD_WITHIN_S:
            self._missed = True
            self._say(
                f"the records of {missing} of {self._orders.world} ranks are not seen, so no rank can be "
                "told as the cause of a hang. The watchers of the nodes speak over TCP with that of the first node"
            )
        if not living:
            return
        stillness = self._judge.look(living)
        if missing and stillness < _UNSEEN * self._orders.warn_s:  # a node may be slow to begin
            return

        running = [report for report in others if any(one.phase != "ended" for one in report.ranks)]
        silent = [report for report in running if now - report.received_at > max(_APART * stillness, _APART_S)]
        outdated = any(now - report.received_at + report.delay_s >= stillness for report in running)
        unreported = self._still_since is None and stillness >= self._judge.limit_s()
        if unreported and outdated and not (silent or missing):
            return

        def finding() -> Departure:
            if missing:
                return never_heard(missing, living)
            if silent:
                oldest = min(silent, key=lambda report: report.received_at)
                return node_not_heard(now - oldest.received_at, oldest.ranks, living)
            return find_departed(living)

        self._act(stillness, finding)

    def _judge_alone(self, mine: list[Snapshot], link: _Link) -> None:
        """Judge the ranks of this node, which is another, as long as it does not hear the first."""
        living = [one for one in mine if one.phase != "ended"]
        if len(mine) == self._orders.ranks and living:
            stillness, silent = self._judge.look(living), link.silent_s()
            if silent > max(_APART * self._judge.limit_s(), _APART_S):
                self._act(stillness, lambda: head_not_heard(silent, self._orders.head or "", living))
            else:
                self._still_since = None

    def _act(self, stillness: float, find: Callable[[], Departure]) -> None:
        """Tell a stillness that is too long, once, and end one that is far too long."""
        limit = self._judge.limit_s()
        if stillness < limit:
            if self._still_since is not None:
                self._say(f"the run goes on, after {time.monotonic() - self._still_since:.0f} s without a movement")
                self._still_since = None
            return
        if self._still_since is None:
            self._still_since = time.monotonic() - stillness
            self._tell(find(), stillness)
        kill_s = self._orders.kill_s
        if kill_s is not None and stillness >= max(kill_s, limit):
            self._say(f"nothing has moved for {stillness:.0f} s, so the run ends (--hang-kill-s), with exit code {HANG_EXIT_CODE}")
            self._command({"end": HANG_EXIT_CODE})
            time.sleep(2 * _EVERY_S)  # the other nodes ask at least as often

    def _tell(self, finding: Departure, stillness: float) -> None:
        who = f"; {listed(finding.waiting)} wait" + "s" * (len(finding.waiting) == 1) if finding.waiting else ""
        self._say(f"nothing has moved for {stillness:.0f} s. {finding.words}{who}")
        self._command({"stacks": True})
        if finding.culprit is not None:
            for line in self._stack_of(finding.culprit):
                self._say(f"    {line}")
        if self._orders.stacks is not None:
            self._say(f"the stacks and last calls of all ranks are in {self._orders.stacks}")

    def _command(self, command: dict[str, Any]) -> None:
        self._commands.append(command)
        self._obey(command)

    def _obey(self, command: dict[str, Any]) -> None:
        mine = [one for one in self.read() if one.phase != "ended" and one.process != "gone"]
        if command.get("stacks"):
            for one in mine:
                with contextlib.suppress(OSError):
                    os.kill(one.pid, STACKS)
                    ask_for_trace(self._folder / f"rank-{one.rank}.record")
            until = time.monotonic() + _TRACES_WITHIN_S
            while time.monotonic() < until and len([*self._folder.glob(f"*{CALLS_SUFFIX}")]) < len(mine):
                time.sleep(_EVERY_S)
            if self._orders.stacks is not None:
                with contextlib.suppress(OSError):
                    os.makedirs(self._orders.stacks, exist_ok=True)
                    for path in [*self._folder.glob("rank-*.stack"), *self._folder.glob(f"*{CALLS_SUFFIX}")]:
                        shutil.copy(path, self._orders.stacks)
        elif "end" in command:
            for one in mine:
                ask_to_end(self._folder / f"rank-{one.rank}.record", command["end"])
            time.sleep(4.0)
            for one in mine:  # those that cannot: stopped, or held by the kernel
                if process_state(one.pid) != "gone":
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(one.pid, signal.SIGKILL)

    def _stack_of(self, rank: int) -> list[str]:
        """The innermost calls of a rank's main thread, if it is of this node and could write them."""
        try:
            text = (self._folder / f"rank-{rank}.stack").read_text()
        except OSError:
            return []
        main = text.rpartition("Current thread")[2] or text
        return [line.strip() for line in main.splitlines()[1:7] if line.strip().startswith("File")]

    @staticmethod
    def _say(line: str) -> None:
        sys.stderr.write(f"hang: {line}\n")
        sys.stderr.flush()


class _Link:
    """To the watcher of the first node; made again where it broke."""

    def __init__(self, orders: Orders) -> None:
        host, _, port = (orders.head or "").rpartition(":")
        self._address, self._token = (host, int(port)), orders.token
        self._lines: TextIO | None = None
        self._node = orders.folder + socket.gethostname()
        self._heard_at = time.monotonic()

    def tell(self, ranks: Sequence[Snapshot]) -> list[dict[str, Any]]:
        """Send what is read here; returns what is to be done."""
        try:
            if self._lines is None:
                with socket.create_connection(self._address, timeout=_ANSWER_WITHIN_S) as connection:
                    self._lines = connection.makefile("rw")
                self._lines.write(self._token + "\n")
            self._lines.write(json.dumps({"node": self._node, "ranks": [dataclasses.asdict(one) for one in ranks]}) + "\n")
            self._lines.flush()
            if answer := self._lines.readline():
                self._heard_at = time.monotonic()
                found: list[dict[str, Any]] = json.loads(answer)
                return found
        except OSError:
            pass
        with contextlib.suppress(OSError):  # what was not sent is written once more when it is closed
            if self._lines is not None:
                self._lines.close()
        self._lines = None
        return []

    def silent_s(self) -> float:
        """Seconds since the first node's watcher was heard."""
        return time.monotonic() - self._heard_at


def _snapshot(given: dict[str, Any]) -> Snapshot:
    channels = tuple(Channel(**{**one, "ranks": tuple(one["ranks"])}) for one in given.pop("channels"))
    return Snapshot(**given, channels=channels)


def main() -> None:
    """Watch as ordered on the standard input; the first node's watcher prints its port first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks decide
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orders = Orders(**json.load(sys.stdin))
    watcher = NodeWatcher(orders)
    if orders.head is None:
        alone = orders.ranks == orders.world  # then no other node has to reach it
        listener = socket.create_server(("127.0.0.1" if alone else "", 0))
        watcher.serve(listener)
        print(listener.getsockname()[1], flush=True)
    watcher.run()


if __name__ == "__main__":
    main()
