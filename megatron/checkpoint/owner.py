"""Whether the run that saves in a folder lives, so that a second start does not destroy it. Needs no torch.

The first rank of a run beats: it writes `run.alive` every 10 s, with its host, its process and a number that grows, and removes it
when the run ends, well or with an error. Another start on the same host looks whether that process lives. On another host it waits
for the next beats, for 25 s at most. A run that finds another one's token in `run.json` has been taken over: it beats no more, and
ends.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.save_folder import RUN
from megatron.checkpoint.storage import Storage
from megatron.checkpoint.storage_kinds import open_storage

ALIVE = "run.alive"
BEAT_S = 10.0
PATIENCE_S = 2.5 * BEAT_S
"""Seconds after which a run on another host that was not seen to beat is taken for dead."""


def refuse_living_owner(storage: Storage, tell: Callable[[str], None], patience_s: float = PATIENCE_S) -> None:
    """Check that no other run saves in a folder. One rank calls it.

    Args:
        tell: called with a line before it waits.
        patience_s: seconds to wait for a beat of a run on another host.

    Raises:
        CheckpointError: one does.
    """
    found = _read(storage)
    if found is None or not _lives(storage, found, tell, patience_s):
        return
    raise CheckpointError(
        f"--save {storage.location}: a run on {found['host']} (process {found['pid']}) saves there and is alive ({ALIVE}). "
        "Wait for its end or end it, give another folder, or --take-over, which ends that run."
    )


class Heartbeat:
    """The beats of this run, on its first rank.

    Args:
        location: of the save folder.
        token: this run's, as in `run.json`.
    """

    def __init__(self, location: str, token: str, every_s: float = BEAT_S) -> None:
        self._token, self._every_s = token, every_s
        self._ended = threading.Event()
        self.taken_by: str | None = None
        """Who has taken the folder over, in words."""
        self._who = {"host": socket.gethostname(), "pid": os.getpid(), "process": process_of(os.getpid()), "token": token}
        storage = open_storage(location)
        _write(storage, {**self._who, "beat": 0})
        self._thread = threading.Thread(target=self._beat, args=(storage,), daemon=True, name="heartbeat")
        self._thread.start()

    def end(self) -> None:
        """The run ends: nobody need wait for a beat."""
        self._ended.set()
        self._thread.join(self._every_s)  # not for ever: the storage may not answer

    def _beat(self, storage: Storage) -> None:
        number = 0
        while not self._ended.wait(self._every_s):
            number += 1
            try:
                owner = json.loads(storage.read(RUN))
                if owner.get("token", self._token) != self._token:
                    self.taken_by = f"a run on {owner.get('host', 'another host')} (process {owner.get('pid', 'unknown')})"
                    return
                _write(storage, {**self._who, "beat": number})
            except (OSError, ValueError, AttributeError):
                continue  # the storage is away, or the file is being written
        found = _read(storage)
        if found is not None and found.get("token") == self._token:
            with suppress(OSError):
                storage.remove(ALIVE)


def _lives(storage: Storage, found: dict[str, Any], tell: Callable[[str], None], patience_s: float) -> bool:
    if found["host"] == socket.gethostname() and found.get("process", "").partition(" ")[0] == _namespace():
        return bool(process_of(found["pid"]) == found["process"])
    tell(
        f"the last run in {storage.location}, on {found['host']}, did not end by itself: "
        f"waiting up to {patience_s:.0f} s to see whether it lives"
    )
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        time.sleep(min(1.0, patience_s / 5))
        now = _read(storage)
        if now is None:
            return False
        if now != found:
            return True
    return False


def _read(storage: Storage) -> dict[str, Any] | None:
    """What the owner wrote last; None where there is none, or nothing that can be understood."""
    try:
        found = json.loads(storage.read(ALIVE))
    except (OSError, ValueError):
        return None
    known = isinstance(found, dict) and isinstance(found.get("host"), str) and isinstance(found.get("pid"), int)
    return found if known and isinstance(found.get("process"), str) else None


def _write(storage: Storage, content: dict[str, Any]) -> None:
    storage.write(ALIVE, json.dumps(content).encode())


def _namespace() -> str:
    """What numbers of processes mean here: they are counted anew after a boot, and in each container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_of(pid: int) -> str:
    """A process so that no later one of the same number is taken for it; the namespace alone where there is none."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _namespace()
    return _namespace() if started[0] in "ZX" else f"{_namespace()} {pid} {started[19]}"
