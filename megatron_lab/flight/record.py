"""What a rank does now: a few numbers in a file in memory, which the watcher of its node reads at any time. Nothing is sent.

A *channel* is what ranks call together: a group for collectives, or one direction between two ranks of it. The rank counts its
calls on each. A rank whose count is behind is what others wait for; `diagnosis.py` makes use of that.

Layout of the file: the state at 0, the exit code that the watcher asks for at 512, whether it asks for torch's trace of calls at
520, the number of bytes of the description (JSON: who the rank is, and its channels) at 1,024 with that description behind it, and
from 64 KiB on two numbers for each channel: calls, and what the last one was.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("starting", "reading data", "in a step", "evaluating", "saving", "rewinding", "between steps", "ended")
CALLS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "barrier", "send", "receive", "collective")

_STATE = struct.Struct("<dqqqqqqd")
"""Time of the last change, phase, iteration, steps done, operation, its place, waiting, seconds waited."""
_CODE, _LENGTH, _CHANNEL = struct.Struct("<q"), struct.Struct("<q"), struct.Struct("<qq")
_CODE_AT, _TRACE_AT, _LENGTH_AT, _TEXT_AT, _CHANNELS_AT, _SIZE = 512, 520, 1024, 1032, 1 << 16, 1 << 17
_MOST_CHANNELS = (_SIZE - _CHANNELS_AT) // _CHANNEL.size


@dataclass(frozen=True)
class Channel:
    """Calls of a rank on one channel."""

    group: str
    """The group's name."""
    ranks: tuple[int, ...]
    """Who calls together: the group; or (sender, receiver)."""
    directed: bool
    """Whether it goes from the first of these ranks to the second."""
    calls: int
    last: str
    """What the last call was."""


@dataclass(frozen=True)
class Snapshot:
    """A rank as its record shows it."""

    rank: int
    host: str
    pid: int
    phase: str
    iteration: int
    steps: int
    """How many steps it has done."""
    operation: str
    """What it does of the schedule, in words; empty outside of operations."""
    place: int
    """Number of operations that it has begun in this step, with this one."""
    waiting: bool
    """Whether it waits for what it has called."""
    quiet_s: float
    """Seconds since anything changed."""
    waited_s: float
    """Seconds that it has waited in all."""
    process: str
    """As the operating system has it: "" where it runs or sleeps, else "gone", "stopped" or "in the kernel"."""
    channels: tuple[Channel, ...]


class FlightRecord:
    """The record of this rank, as it writes it.

    Args:
        path: a file in memory, such as in /dev/shm.
        rank: number of the rank.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        with path.open("xb+") as file:
            file.truncate(_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self.rank = rank
        self._who = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._channels: list[dict[str, Any]] = []
        self._calls: list[int] = []
        self._phase = self._iteration = self._steps = self._operation = self._place = self._waiting = 0
        self._waited = self._since = 0.0
        self._describe()
        self._put()

    def channel(self, group: str, ranks: tuple[int, ...], *, directed: bool = False) -> int:
        """Enter a new channel; returns its number, by which calls are counted. Of too many the last one stands for the rest."""
        if len(self._channels) < _MOST_CHANNELS:
            self._channels.append({"group": group, "ranks": ranks, "directed": directed})
            self._calls.append(0)
            if not self._describe():
                self._channels.pop()
                self._calls.pop()
        return len(self._calls) - 1

    def call(self, channel: int, kind: int) -> None:
        """Count a call of a kind (an index into `CALLS`)."""
        calls = self._calls[channel] = self._calls[channel] + 1
        _CHANNEL.pack_into(self._memory, _CHANNELS_AT + channel * _CHANNEL.size, calls, kind)
        self._put()

    def wait(self, waits: bool) -> None:
        """Say that the rank waits for what it has called, or waits no longer. Waits may lie in each other."""
        if waits:
            if self._waiting == 0:
                self._since = time.monotonic()
            self._waiting += 1
        else:
            self._waiting -= 1
            if self._waiting == 0:
                self._waited += time.monotonic() - self._since
        self._put()

    def phase(self, name: str, iteration: int | None = None) -> None:
        """Say what the rank is about."""
        self._phase, self._operation, self._place = PHASES.index(name), 0, 0
        self._steps += name == "between steps"
        self._iteration = self._iteration if iteration is None else iteration
        self._put()

    def operation(self, kind: str, chunk: int, microbatch: int) -> None:
        """Say which operation of the schedule it begins; `kind` is one letter."""
        self._operation, self._place = ord(kind) << 48 | chunk << 32 | microbatch, self._place + 1
        self._put()

    @property
    def waited_s(self) -> float:
        """Seconds that the rank has waited in all."""
        return self._waited

    def code_asked_for(self) -> int:
        """The exit code with which the watcher asks the rank to end; 0 as long as it does not."""
        return int(_CODE.unpack_from(self._memory, _CODE_AT)[0])

    def trace_asked_for(self) -> bool:
        """Whether the watcher has asked for torch's trace of calls since this was asked last."""
        asked = bool(_CODE.unpack_from(self._memory, _TRACE_AT)[0])
        _CODE.pack_into(self._memory, _TRACE_AT, 0)
        return asked

    def _put(self) -> None:
        now = time.monotonic()
        state = (self._phase, self._iteration, self._steps, self._operation, self._place, self._waiting)
        _STATE.pack_into(self._memory, 0, now, *state, self._waited)

    def _describe(self) -> bool:
        text = json.dumps({**self._who, "channels": self._channels}).encode()
        if len(text) > _CHANNELS_AT - _TEXT_AT:
            return False
        self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
        _LENGTH.pack_into(self._memory, _LENGTH_AT, len(text))
        return True


def read_record(path: Path) -> Snapshot | None:
    """The rank as its record shows it now; None while the file is being made."""
    memory = path.read_bytes()
    if len(memory) < _SIZE:
        return None
    length = _LENGTH.unpack_from(memory, _LENGTH_AT)[0]
    try:
        who = json.loads(memory[_TEXT_AT : _TEXT_AT + length])
    except ValueError:  # a channel is being entered
        return None
    changed, phase, iteration, steps, operation, place, waiting, waited = _STATE.unpack_from(memory, 0)
    counts = [_CHANNEL.unpack_from(memory, _CHANNELS_AT + number * _CHANNEL.size) for number in range(len(who["channels"]))]
    channels = tuple(
        Channel(one["group"], tuple(one["ranks"]), one["directed"], calls, CALLS[kind])
        for one, (calls, kind) in zip(who["channels"], counts, strict=True)
    )
    quiet = time.monotonic() - changed
    process = process_state(who["pid"])
    where = (who["rank"], who["host"], who["pid"], PHASES[phase], iteration, steps, _in_words(operation), place)
    return Snapshot(*where, bool(waiting), quiet, waited, process, channels)


def ask_to_end(path: Path, code: int) -> None:
    """Ask a rank to end with an exit code."""
    _write(path, _CODE_AT, code)


def ask_for_trace(path: Path) -> None:
    """Ask a rank to write torch's trace of its calls."""
    _write(path, _TRACE_AT, 1)


def _write(path: Path, at: int, number: int) -> None:
    with path.open("rb+") as file:
        file.seek(at)
        file.write(_CODE.pack(number))


def process_state(pid: int) -> str:
    """What the operating system says of a process: "" where it runs or sleeps, else "gone", "stopped" or "in the kernel"."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone", "D": "in the kernel"}.get(letter, "")


_OPERATIONS = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def _in_words(operation: int) -> str:
    if not operation:
        return ""
    kind, chunk, microbatch = chr(operation >> 48), operation >> 32 & 0xFFFF, operation & 0xFFFFFFFF
    return f"{_OPERATIONS.get(kind, kind)} of chunk {chunk}, microbatch {microbatch}"
