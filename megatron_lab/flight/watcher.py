"""Watcher process of a node: monitors the ranks of the node, and reports the rank that keeps the others waiting when no rank makes
progress.

    python -P -m megatron_lab.flight.watcher < CONFIG

CONFIG is a `WatcherConfig` as JSON. The first rank of the node starts the process (`rank_monitor.py`), which does not import torch.
The watchers of the other nodes send the state of their ranks to the watcher of the first node. They use TCP connections of their
own, independent of the training's process groups. The watcher of the first node finds the culprit and reports it once. Then it
sends commands to the other watchers: first to write the stack traces of their ranks, and later to end the ranks. If a node sends no
reports during a stall, the node itself is reported as the cause. If a node receives no answer from the first node, its own watcher
diagnoses only the ranks of this node.

A *stall* is a time in which no rank makes progress. It counts as a hang if it lasts longer than --hang-warn-s. It must also last
longer than three times the longest earlier stall in the same phase after which the run continued. A phase that no rank has
completed yet (the start with its compilation, the first save, the first evaluation) may take ten times --hang-warn-s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron.config.launcher import EXIT_SIGNALS, write_error_file
from megatron_lab.flight.diagnosis import (
    HangDiagnosis,
    diagnose_missing_ranks,
    diagnose_ranks,
    diagnose_silent_first_node,
    diagnose_silent_node,
    format_rank_list,
)
from megatron_lab.flight.record import (
    Channel,
    RankFiles,
    Snapshot,
    get_process_state,
    has_written_stacks,
    has_written_trace,
    open_files,
    read_record,
    request_exit,
    request_trace,
)

HANG_EXIT_CODE = 86
"""Exit code of a job that is ended because of a hang."""
_MAX_LINE_CHARS = 1 << 24
"""Maximum length of a message from another node, in characters. One record has a few hundred."""
CALLS_SUFFIX = ".calls.json"
"""File name suffix of torch's trace of a rank's calls."""
_TRACE_TIMEOUT_S = 2.0
STACK_SIGNAL = signal.SIGRTMIN + 3
"""Signal on which a rank writes the stacks of its threads although none of them can run Python code.

The signal handler reads the frames of all threads without Python's global interpreter lock, and crashes the process if a thread
changes them meanwhile. The watcher therefore sends the signal only to a rank that does not answer `request_trace`: one of its
threads keeps the lock in a blocking call, and no frame changes.
"""
_SIGNALLED_STACKS_WAIT_S = 0.5
"""Seconds to wait until ranks have written their stacks on `STACK_SIGNAL`."""
MAIN_THREAD_HEADER = "Current thread"
"""Begin of the line that precedes the stack of the main thread. `faulthandler` writes the same text."""
_POLL_INTERVAL_S = 0.5
_REPLY_TIMEOUT_S = 5.0
_SILENCE_RATIO = 0.5
"""A node is reported as the cause of a stall if it has been silent for more than this fraction of the stall, and for more than
`_MIN_SILENCE_S` seconds."""
_MIN_SILENCE_S = 4 * _POLL_INTERVAL_S
_REPORT_TIMEOUT_S = 120.0
_NEW_PHASE_FACTOR, _STALL_FACTOR = 10.0, 3.0
_STEP_PHASES = ("in a step", "reading data", "between steps")
"""Phases that occur in every step, so that --hang-warn-s applies to them from the second step on."""


@dataclass(frozen=True)
class WatcherConfig:
    """Configuration of a watcher process, which reads it as JSON from its standard input."""

    files: tuple[RankFiles, ...]
    """Files of the node's ranks, among them their flight records (files with their current activity)."""
    num_ranks: int
    """Number of ranks of this node."""
    world_size: int
    warn_s: float
    kill_s: float | None
    token: str
    """Secret that a watcher sends first when it connects to the watcher of the first node."""
    first_node_address: str | None = None
    """Address of the first node's watcher; None on the first node."""
    stack_folder: str | None = None
    """Folder to which stack traces are copied when a hang is found; None to copy none."""


class HangDetector:
    """Decides how long a stall (a time in which no rank makes progress) may last until it counts as a hang.

    Args:
        warn_s: value of --hang-warn-s, in seconds.
    """

    def __init__(self, warn_s: float) -> None:
        self._warn_s = warn_s
        self._longest_stall_s: dict[str, float] = {}
        self._left_phases = set[str]()
        self._stall_s, self._phases = 0.0, frozenset[str]()
        self._has_stepped = False

    def get_limit_s(self) -> float:
        """Return the number of seconds after which a stall counts as a hang, for the phases in which the ranks are now."""
        return max(map(self._get_phase_limit_s, self._phases), default=self._warn_s)

    def update(self, snapshots: Sequence[Snapshot]) -> float:
        """Update the detector with the current state of the ranks. Return the seconds since any rank made progress."""
        stall_s = min(snapshot.quiet_s for snapshot in snapshots)
        self._has_stepped = any(snapshot.steps for snapshot in snapshots)
        if stall_s < self._stall_s:  # the stall ended by itself
            for phase in self._phases:
                self._longest_stall_s[phase] = max(self._longest_stall_s.get(phase, 0.0), self._stall_s)
        phases = frozenset(snapshot.phase for snapshot in snapshots)
        self._left_phases |= self._phases - phases
        self._stall_s, self._phases = stall_s, phases
        return stall_s

    def _get_phase_limit_s(self, phase: str) -> float:
        if phase in self._left_phases or (phase in _STEP_PHASES and self._has_stepped):
            return max(self._warn_s, _STALL_FACTOR * self._longest_stall_s.get(phase, 0.0))
        return _NEW_PHASE_FACTOR * self._warn_s


@dataclass(frozen=True)
class _NodeReport:
    """Latest report of another node about the state of its ranks."""

    received_at: float
    """Time at which the report arrived, by `time.monotonic` of this node."""
    delay_s: float
    """Upper bound of the seconds that the report spent on the network: the interval between the previous report and this
    report, minus `_POLL_INTERVAL_S`. A node sends a report `_POLL_INTERVAL_S` after the answer to its previous report."""
    ranks: list[Snapshot]


class NodeWatcher:
    """Watcher that monitors the ranks of a node for hangs. The watcher of the first node monitors the ranks of all nodes."""

    def __init__(self, config: WatcherConfig) -> None:
        self._config, self._detector = config, HangDetector(config.warn_s)
        self._files = open_files(config.files)
        self._node_reports: dict[str, _NodeReport] = {}
        self._commands: list[dict[str, Any]] = []
        self._stall_start: float | None = None
        """Start of the reported stall, by `time.monotonic`; None while no stall is reported."""
        self._cause = ""
        """Text of the last report of a hang."""
        self._start_time, self._has_reported_missing = time.monotonic(), False

    def run(self) -> None:
        """Monitor the ranks for hangs until all ranks of this node have ended."""
        link = None if self._config.first_node_address is None else _Link(self._config)
        parent = os.getppid()
        while True:
            snapshots = self.read_records()
            is_complete = (
                len(snapshots) == self._config.num_ranks or os.getppid() != parent
            )  # a rank may end before it has a record
            if is_complete and all(snapshot.phase == "ended" or snapshot.process == "gone" for snapshot in snapshots):
                break
            if link is None:
                self._check_all_nodes(snapshots)
            else:
                for command in link.exchange(snapshots):
                    self._execute(command)
                self._check_local_node(snapshots, link)
            time.sleep(_POLL_INTERVAL_S)

    def read_records(self) -> list[Snapshot]:
        """Read the current state of this node's ranks from their flight records."""
        records = [read_record(Path(files.record)) for files in self._files]
        return [record for record in records if record is not None]

    def receive(self, node: str, ranks: list[Snapshot]) -> None:
        """Store a report of another node about the state of its ranks."""
        now, previous = time.monotonic(), self._node_reports.get(node)
        delay_s = 0.0 if previous is None else max(0.0, now - previous.received_at - _POLL_INTERVAL_S)
        self._node_reports[node] = _NodeReport(now, delay_s, ranks)

    def serve(self, listener: socket.socket) -> None:
        """Receive the reports of other nodes and answer each with new commands. Each node has its own thread. Returns immediately.

        Args:
            listener: socket to which the watchers of other nodes connect.
        """

        def handle_connection(connection: socket.socket) -> None:
            # Invalid data ends the connection, but not the watcher.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection, connection.makefile("rw") as stream:
                if not hmac.compare_digest(stream.readline(_MAX_LINE_CHARS).strip().encode(), self._config.token.encode()):
                    return
                num_answered = 0
                while line := stream.readline(_MAX_LINE_CHARS):
                    message = json.loads(line)
                    self.receive(message["node"], [_parse_snapshot(snapshot) for snapshot in message["ranks"]])
                    stream.write(json.dumps(self._commands[num_answered:]) + "\n")
                    stream.flush()
                    num_answered = len(self._commands)

        def accept() -> None:
            while True:
                threading.Thread(target=handle_connection, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _check_all_nodes(self, local_snapshots: list[Snapshot]) -> None:
        """Check the ranks of all nodes for a hang. Called on the first node.

        For ranks of other nodes, the age of their report is added to the time since their last activity. A report that may be older
        than the stall cannot show which rank caused the stall. The diagnosis then waits for a newer report. If the node sends none
        for a long time, the node itself is the cause.

        Args:
            local_snapshots: state of the ranks of this node.
        """
        now, reports = time.monotonic(), [*self._node_reports.values()]
        remote_snapshots = [
            dataclasses.replace(snapshot, quiet_s=snapshot.quiet_s + now - report.received_at)
            for report in reports
            for snapshot in report.ranks
        ]
        all_snapshots = [*local_snapshots, *remote_snapshots]
        alive = [snapshot for snapshot in all_snapshots if snapshot.phase != "ended"]
        num_missing = self._config.world_size - len(all_snapshots)
        if num_missing and not self._has_reported_missing and now - self._start_time > _REPORT_TIMEOUT_S:
            self._has_reported_missing = True
            self._log(
                f"no records of {num_missing} of {self._config.world_size} ranks have arrived, so no rank can be named as the "
                "cause of a hang. Check that all nodes can connect to the first node over TCP"
            )
        if not alive:
            return
        stall_s = self._detector.update(alive)
        if num_missing and stall_s < _NEW_PHASE_FACTOR * self._config.warn_s:  # a node may start slowly
            return

        running_reports = [report for report in reports if any(snapshot.phase != "ended" for snapshot in report.ranks)]
        silent_reports = [
            report for report in running_reports if now - report.received_at > max(_SILENCE_RATIO * stall_s, _MIN_SILENCE_S)
        ]
        has_outdated_report = any(now - report.received_at + report.delay_s >= stall_s for report in running_reports)
        is_unreported = self._stall_start is None and stall_s >= self._detector.get_limit_s()
        if is_unreported and has_outdated_report and not (silent_reports or num_missing):
            return

        def diagnose() -> HangDiagnosis:
            if num_missing:
                return diagnose_missing_ranks(num_missing, alive)
            if silent_reports:
                oldest = min(silent_reports, key=lambda report: report.received_at)
                return diagnose_silent_node(now - oldest.received_at, oldest.ranks, alive)
            return diagnose_ranks(alive)

        self._handle_stall(stall_s, diagnose)

    def _check_local_node(self, local_snapshots: list[Snapshot], link: _Link) -> None:
        """Check the ranks of this node for a hang if the first node, which normally checks all ranks, does not answer. Called on
        the other nodes.

        Args:
            local_snapshots: state of the ranks of this node.
            link: connection to the first node.
        """
        alive = [snapshot for snapshot in local_snapshots if snapshot.phase != "ended"]
        if len(local_snapshots) == self._config.num_ranks and alive:
            stall_s, silence_s = self._detector.update(alive), link.get_silence_s()
            if silence_s > max(_SILENCE_RATIO * self._detector.get_limit_s(), _MIN_SILENCE_S):
                self._handle_stall(
                    stall_s, lambda: diagnose_silent_first_node(silence_s, self._config.first_node_address or "", alive)
                )
            else:
                self._stall_start = None

    def _handle_stall(self, stall_s: float, diagnose: Callable[[], HangDiagnosis]) -> None:
        """Report a stall once if it is long enough to count as a hang. End the run if the stall is longer than --hang-kill-s.

        Args:
            stall_s: seconds in which no rank has made progress.
            diagnose: finds the cause. It is called only if the stall is reported.
        """
        limit_s = self._detector.get_limit_s()
        if stall_s < limit_s:
            if self._stall_start is not None:
                self._log(f"the run continues after {time.monotonic() - self._stall_start:.0f} s without progress")
                self._stall_start = None
            return
        if self._stall_start is None:
            self._stall_start = time.monotonic() - stall_s
            self._report_hang(diagnose(), stall_s)
        kill_s = self._config.kill_s
        if kill_s is not None and stall_s >= max(kill_s, limit_s):
            self._log(
                f"no rank has made progress for {stall_s:.0f} s, so the run ends with exit code {HANG_EXIT_CODE} (--hang-kill-s)"
            )
            self._send_command({"end": HANG_EXIT_CODE, "reason": f"hang (--hang-kill-s {kill_s:g}): {self._cause}"})
            time.sleep(2 * _POLL_INTERVAL_S)  # time for the other nodes to fetch the command

    def _report_hang(self, diagnosis: HangDiagnosis, stall_s: float) -> None:
        waiting_text = (
            f"; {format_rank_list(diagnosis.waiting)} wait" + "s" * (len(diagnosis.waiting) == 1) if diagnosis.waiting else ""
        )
        self._cause = f"no rank has made progress for {stall_s:.0f} s. {diagnosis.message}{waiting_text}"
        self._log(self._cause)
        self._send_command({"stacks": True})
        if diagnosis.culprit is not None:
            for line in self._read_stack(diagnosis.culprit):
                self._log(f"    {line}")
        if self._config.stack_folder is not None:
            self._log(f"the stacks and last calls of all ranks are in {self._config.stack_folder}")

    def _send_command(self, command: dict[str, Any]) -> None:
        self._commands.append(command)
        self._execute(command)

    def _execute(self, command: dict[str, Any]) -> None:
        snapshots = [snapshot for snapshot in self.read_records() if snapshot.phase != "ended" and snapshot.process != "gone"]
        records = {files.rank: Path(files.record) for files in self._files}
        if command.get("stacks"):
            self._request_stacks({snapshot.pid: records[snapshot.rank] for snapshot in snapshots})
            if self._config.stack_folder is not None:
                with contextlib.suppress(OSError):
                    self._copy_stacks(Path(self._config.stack_folder))
        elif "end" in command:
            write_error_file(command["reason"])  # in place of the rank that started this watcher
            for snapshot in snapshots:
                request_exit(records[snapshot.rank], command["end"])
            time.sleep(4.0)
            for snapshot in snapshots:  # ranks that are stopped, or blocked in the kernel, cannot exit by themselves
                if get_process_state(snapshot.pid) != "gone":
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(snapshot.pid, signal.SIGKILL)

    @staticmethod
    def _request_stacks(records: dict[int, Path]) -> None:
        """Let ranks of this node write their stacks and last calls, and wait until they have done it, for at most
        `_TRACE_TIMEOUT_S`. Then send `STACK_SIGNAL` to the ranks that have written no stacks, except for stopped ones.

        A stopped rank would receive the signal when it continues, while its threads run.

        Args:
            records: flight records of the ranks, by process id.
        """
        for path in records.values():
            request_trace(path)
        deadline = time.monotonic() + _TRACE_TIMEOUT_S
        while time.monotonic() < deadline and not all(has_written_trace(path) for path in records.values()):
            time.sleep(_POLL_INTERVAL_S / 2)
        blocked = [pid for pid, path in records.items() if not has_written_stacks(path) and get_process_state(pid) != "stopped"]
        for pid in blocked:
            with contextlib.suppress(OSError):
                os.kill(pid, STACK_SIGNAL)
        if blocked:
            time.sleep(_SIGNALLED_STACKS_WAIT_S)

    def _copy_stacks(self, folder: Path) -> None:
        """Copy the stacks and the last calls of this node's ranks to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for files in self._files:
            (folder / f"rank-{files.rank}.stack").write_bytes(Path(files.stack).read_bytes())
            if calls := Path(files.calls).read_bytes():
                (folder / f"rank-{files.rank}{CALLS_SUFFIX}").write_bytes(calls)

    def _read_stack(self, rank: int) -> list[str]:
        """Return the innermost calls of a rank's main thread, one string per call. The list is empty if the rank is on another node
        or has written no stack trace."""
        text = "".join(Path(files.stack).read_text() for files in self._files if files.rank == rank)
        main_thread = text.rpartition(MAIN_THREAD_HEADER)[2] or text
        return [line.strip() for line in main_thread.splitlines()[1:7] if line.strip().startswith("File")]

    @staticmethod
    def _log(line: str) -> None:
        sys.stderr.write(f"hang: {line}\n")
        sys.stderr.flush()


class _Link:
    """Connection of a watcher to the watcher of the first node. It reconnects after an error."""

    def __init__(self, config: WatcherConfig) -> None:
        host, _, port = (config.first_node_address or "").rpartition(":")
        self._address, self._token = (host, int(port)), config.token
        self._stream: TextIO | None = None
        self._node = socket.gethostname() + secrets.token_hex(8)
        self._last_heard_at = time.monotonic()

    def exchange(self, ranks: Sequence[Snapshot]) -> list[dict[str, Any]]:
        """Send the state of this node's ranks to the watcher of the first node.

        Returns:
            commands of the first node, which this node must execute. Empty if the first node does not answer.
        """
        try:
            if self._stream is None:
                with socket.create_connection(self._address, timeout=_REPLY_TIMEOUT_S) as connection:
                    self._stream = connection.makefile("rw")
                self._stream.write(self._token + "\n")
            self._stream.write(
                json.dumps({"node": self._node, "ranks": [dataclasses.asdict(snapshot) for snapshot in ranks]}) + "\n"
            )
            self._stream.flush()
            if reply := self._stream.readline():
                self._last_heard_at = time.monotonic()
                commands: list[dict[str, Any]] = json.loads(reply)
                return commands
        except OSError:
            pass
        with contextlib.suppress(OSError):  # closing writes buffered data, which fails again
            if self._stream is not None:
                self._stream.close()
        self._stream = None
        return []

    def get_silence_s(self) -> float:
        """Return the seconds since the last answer of the first node's watcher."""
        return time.monotonic() - self._last_heard_at


def _parse_snapshot(fields: dict[str, Any]) -> Snapshot:
    channels = tuple(Channel(**{**channel, "ranks": tuple(channel["ranks"])}) for channel in fields.pop("channels"))
    return Snapshot(**fields, channels=channels)


def main() -> None:
    """Run a watcher with the configuration from the standard input. When the watcher has opened the files of the ranks, it prints
    the port at which it listens, or 0 if it is not the watcher of the first node."""
    for signum in EXIT_SIGNALS:  # the watcher ends with its ranks, not by a signal
        signal.signal(signum, signal.SIG_IGN)
    values = json.load(sys.stdin)
    config = WatcherConfig(**{**values, "files": tuple(RankFiles(**files) for files in values["files"])})
    watcher = NodeWatcher(config)
    if config.first_node_address is None:
        is_single_node = config.num_ranks == config.world_size  # no other node has to connect
        listener = socket.create_server(("127.0.0.1" if is_single_node else "", 0))
        watcher.serve(listener)
    port = listener.getsockname()[1] if config.first_node_address is None else 0
    print(port, flush=True)
    watcher.run()


if __name__ == "__main__":
    main()
