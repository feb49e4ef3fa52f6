"""Flight record: a small file in memory into which a rank writes its current activity. The watcher process of the node reads it at
any time. Nothing is sent.

A *channel* is a process group with its collectives, or one direction between two of its ranks. A rank counts its communication
calls on each channel. Other ranks wait for a rank whose count is lower than theirs; `diagnosis.py` evaluates this.

Layout of the file:

====== ==============================================================================
offset content
====== ==============================================================================
0      state (`_STATE`)
512    exit code with which the watcher requests the rank to end; 0 for no request
520    request of the watcher for the stacks and torch's trace of calls, and the rank's answers
1,024  number of bytes of the description
1,032  description as JSON: identity of the rank, and its channels
64 KiB two integers per channel: number of calls, and type of the last call
====== ==============================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("starting", "reading data", "in a step", "evaluating", "sampling", "saving", "rewinding", "between steps", "ended")
CALLS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "barrier", "send", "receive", "collective")

_STATE = struct.Struct("<dqqqqqqd")
"""Time of the last change, phase, iteration, completed steps, operation, operations started in this step, nested waits, seconds
waited."""
_INT64, _LENGTH, _CHANNEL = struct.Struct("<q"), struct.Struct("<q"), struct.Struct("<qq")
_EXIT_CODE_OFFSET, _TRACE_OFFSET, _LENGTH_OFFSET, _TEXT_OFFSET, _CHANNELS_OFFSET, _SIZE = 512, 520, 1024, 1032, 1 << 16, 1 << 17
_TRACE_REQUESTED, _STACKS_WRITTEN, _TRACE_WRITTEN = 1, 2, 3
_MAX_CHANNELS = (_SIZE - _CHANNELS_OFFSET) // _CHANNEL.size


@dataclass(frozen=True)
class Channel:
    """Number and type of a rank's communication calls on one channel: a process group with its collectives, or one direction
    between two ranks."""

    group: str
    """Name of the process group."""
    ranks: tuple[int, ...]
    """Global ranks of the process group; (sender, receiver) for messages."""
    directed: bool
    """True for messages from the first to the second of two ranks, False for collectives."""
    calls: int
    last: str
    """Type of the last call, such as "all-gather"."""


@dataclass(frozen=True)
class Snapshot:
    """State of a rank at one time, as the hang watcher reads it from the rank's flight record."""

    rank: int
    host: str
    pid: int
    phase: str
    iteration: int
    steps: int
    """Number of training steps that the rank has completed."""
    op: str
    """Current operation of the pipeline schedule as text; empty outside of operations."""
    num_started_ops: int
    """Number of operations of the pipeline schedule that the rank has started in this step, including the current one."""
    waiting: bool
    """Whether the rank waits for a communication call to complete."""
    quiet_s: float
    """Seconds since the rank last changed its flight record. A rank that makes progress changes the record often."""
    waited_s: float
    """Total seconds that the rank has waited for communication calls to complete."""
    process: str
    """State of the process in the operating system: "gone" if it has ended, "stopped" by a signal, or "in the kernel" if it is
    blocked there; "" if it runs or sleeps."""
    channels: tuple[Channel, ...]


@dataclass(frozen=True)
class RankFiles:
    """Paths of the files through which a rank tells the hang watcher of its node what it does.

    The files are anonymous files in memory. They vanish with the last process that has them open, however it ends. Another process
    opens them by the path `/proc/PID/fd/N` while the rank lives.
    """

    rank: int
    record: str
    """Flight record: the current activity of the rank."""
    stack: str
    """Stacks of the rank's threads, which the rank writes on request."""
    calls: str
    """Last communication calls of the rank as JSON, which the rank writes on request."""

    @classmethod
    def create(cls, rank: int) -> RankFiles:
        """Create the files of a rank in this process."""
        names = [file.name for file in dataclasses.fields(cls) if file.name != "rank"]
        return cls(rank, **{name: f"/proc/{os.getpid()}/fd/{os.memfd_create(f'flight-{name}')}" for name in names})

    def open(self) -> RankFiles:
        """Open the files of another rank, and return their paths in this process.

        Raises:
            OSError: the rank has ended.
        """
        paths = {name: path for name, path in vars(self).items() if name != "rank"}
        return RankFiles(self.rank, **{name: f"/proc/self/fd/{os.open(path, os.O_RDWR)}" for name, path in paths.items()})

    def close(self) -> None:
        """Close the files that this process has created or opened."""
        for path in (self.record, self.stack, self.calls):
            os.close(int(path.rpartition("/")[2]))


def open_files(rank_files: Iterable[RankFiles]) -> list[RankFiles]:
    """Open the files of other ranks, and return their paths in this process. Ranks that have ended are left out."""
    opened = []
    for files in rank_files:
        with contextlib.suppress(OSError):
            opened.append(files.open())
    return opened


class FlightRecord:
    """File in memory into which a rank writes its current activity. The hang watcher of the node reads the file.

    Args:
        path: path of the empty file.
        rank: global rank.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self.path = Path(path)
        with self.path.open("wb+") as file:
            file.truncate(_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self.rank = rank
        self._identity = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._channels: list[dict[str, Any]] = []
        self._calls: list[int] = []
        self._phase = self._iteration = self._steps = self._op_code = self._num_started_ops = self._wait_depth = 0
        self._waited_s = self._wait_start = 0.0
        self._write_description()
        self._write_state()

    def add_channel(self, group: str, ranks: tuple[int, ...], *, directed: bool = False) -> int:
        """Add a channel, on which communication calls are counted, and return its index for `count_call`.

        If the record is full, return the index of the last channel, which then counts the calls of all further channels.

        Args:
            group: name of the process group.
            ranks: global ranks of the process group; (sender, receiver) for messages.
            directed: True for messages from the first to the second of two ranks, False for collectives.
        """
        if len(self._channels) < _MAX_CHANNELS:
            self._channels.append({"group": group, "ranks": ranks, "directed": directed})
            self._calls.append(0)
            if not self._write_description():
                self._channels.pop()
                self._calls.pop()
        return len(self._calls) - 1

    def count_call(self, channel: int, call_type: int) -> None:
        """Count a communication call.

        Args:
            channel: index that `add_channel` has returned.
            call_type: type of the call, as an index into `CALLS`.
        """
        num_calls = self._calls[channel] = self._calls[channel] + 1
        _CHANNEL.pack_into(self._memory, _CHANNELS_OFFSET + channel * _CHANNEL.size, num_calls, call_type)
        self._write_state()

    def set_waiting(self, is_waiting: bool) -> None:
        """Record that this rank begins or ends to wait for a communication call to complete. Waits may be nested.

        Args:
            is_waiting: True at the begin of a wait, False at its end.
        """
        if is_waiting:
            if self._wait_depth == 0:
                self._wait_start = time.monotonic()
            self._wait_depth += 1
        else:
            self._wait_depth -= 1
            if self._wait_depth == 0:
                self._waited_s += time.monotonic() - self._wait_start
        self._write_state()

    def set_phase(self, name: str, iteration: int | None = None) -> None:
        """Record which phase of the run begins.

        Args:
            name: one of `PHASES`, such as "evaluating".
            iteration: iteration to record; None to keep the recorded one.
        """
        self._phase, self._op_code, self._num_started_ops = PHASES.index(name), 0, 0
        self._steps += name == "between steps"
        self._iteration = self._iteration if iteration is None else iteration
        self._write_state()

    def start_op(self, op_type: str, chunk: int, microbatch: int) -> None:
        """Record the start of an operation of the pipeline schedule, such as the forward of a microbatch.

        Args:
            op_type: value of an `OpType`, one letter.
            chunk: model chunk of this pipeline stage.
            microbatch: index of the microbatch.
        """
        self._op_code, self._num_started_ops = ord(op_type) << 48 | chunk << 32 | microbatch, self._num_started_ops + 1
        self._write_state()

    @property
    def waited_s(self) -> float:
        """Total seconds that the rank has waited for communication calls to complete."""
        return self._waited_s

    def get_requested_exit_code(self) -> int:
        """Return the exit code with which the hang watcher requests this rank to exit; 0 if it has made no such request."""
        return int(_INT64.unpack_from(self._memory, _EXIT_CODE_OFFSET)[0])

    def consume_trace_request(self) -> bool:
        """Return whether the hang watcher has called `request_trace` since the last call of this method."""
        is_requested = _INT64.unpack_from(self._memory, _TRACE_OFFSET)[0] == _TRACE_REQUESTED
        _INT64.pack_into(self._memory, _TRACE_OFFSET, 0)
        return is_requested

    def report_stacks(self) -> None:
        """Tell the hang watcher that the requested stacks are written."""
        _INT64.pack_into(self._memory, _TRACE_OFFSET, _STACKS_WRITTEN)

    def report_trace(self) -> None:
        """Tell the hang watcher that the requested content of torch's flight recorder is written."""
        _INT64.pack_into(self._memory, _TRACE_OFFSET, _TRACE_WRITTEN)

    def _write_state(self) -> None:
        now = time.monotonic()
        state = (self._phase, self._iteration, self._steps, self._op_code, self._num_started_ops, self._wait_depth)
        _STATE.pack_into(self._memory, 0, now, *state, self._waited_s)

    def _write_description(self) -> bool:
        text = json.dumps({**self._identity, "channels": self._channels}).encode()
        if len(text) > _CHANNELS_OFFSET - _TEXT_OFFSET:
            return False
        self._memory[_TEXT_OFFSET : _TEXT_OFFSET + len(text)] = text
        _LENGTH.pack_into(self._memory, _LENGTH_OFFSET, len(text))
        return True


def read_record(path: Path) -> Snapshot | None:
    """Read the state of a rank from its flight record.

    Args:
        path: file of the record.

    Returns:
        the state; None if the rank is still writing the file.
    """
    memory = path.read_bytes()
    if len(memory) < _SIZE:
        return None
    length = _LENGTH.unpack_from(memory, _LENGTH_OFFSET)[0]
    try:
        description = json.loads(memory[_TEXT_OFFSET : _TEXT_OFFSET + length])
    except ValueError:  # the rank is adding a channel
        return None
    changed_at, phase, iteration, steps, op_code, num_started_ops, waiting, waited = _STATE.unpack_from(memory, 0)
    counts = [_CHANNEL.unpack_from(memory, _CHANNELS_OFFSET + i * _CHANNEL.size) for i in range(len(description["channels"]))]
    channels = tuple(
        Channel(entry["group"], tuple(entry["ranks"]), entry["directed"], calls, CALLS[call_type])
        for entry, (calls, call_type) in zip(description["channels"], counts, strict=True)
    )
    quiet_s = time.monotonic() - changed_at
    process = get_process_state(description["pid"])
    identity = (
        description["rank"],
        description["host"],
        description["pid"],
        PHASES[phase],
        iteration,
        steps,
        _format_op(op_code),
        num_started_ops,
    )
    return Snapshot(*identity, bool(waiting), quiet_s, waited, process, channels)


def request_exit(path: Path, code: int) -> None:
    """Request a rank to exit with an exit code. The hang watcher calls this function.

    Args:
        path: flight record of the rank.
    """
    _write(path, _EXIT_CODE_OFFSET, code)


def request_trace(path: Path) -> None:
    """Request a rank to write the stacks of its threads, and then the content of torch's flight recorder, which lists its last
    communication calls. The hang watcher calls this function.

    Args:
        path: flight record of the rank.
    """
    _write(path, _TRACE_OFFSET, _TRACE_REQUESTED)


def has_written_stacks(path: Path) -> bool:
    """Return whether the rank has written the stacks that `request_trace` requested.

    Args:
        path: flight record of the rank.
    """
    return bool(_INT64.unpack_from(path.read_bytes(), _TRACE_OFFSET)[0] >= _STACKS_WRITTEN)


def has_written_trace(path: Path) -> bool:
    """Return whether the rank has written all that `request_trace` requested.

    Args:
        path: flight record of the rank.
    """
    return bool(_INT64.unpack_from(path.read_bytes(), _TRACE_OFFSET)[0] == _TRACE_WRITTEN)


def _write(path: Path, offset: int, value: int) -> None:
    with path.open("rb+") as file:
        file.seek(offset)
        file.write(_INT64.pack(value))


def get_process_state(pid: int) -> str:
    """Return the state of a process in the operating system: "gone" if it has ended, "stopped" by a signal, or "in the kernel" if
    it is blocked there; "" if it runs or sleeps."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone", "D": "in the kernel"}.get(letter, "")


_OP_NAMES = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def _format_op(op_code: int) -> str:
    if not op_code:
        return ""
    op_type, chunk, microbatch = chr(op_code >> 48), op_code >> 32 & 0xFFFF, op_code & 0xFFFFFFFF
    return f"{_OP_NAMES.get(op_type, op_type)} of chunk {chunk}, microbatch {microbatch}"
