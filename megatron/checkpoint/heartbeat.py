"""Detection of another live run that saves in the same folder, so that two runs do not overwrite each other's checkpoints. Needs no
torch.

The first rank of a run sends heartbeats: it rewrites `run.alive` every 10 s, with its host, its process and an increasing counter.
It removes the file when the run ends, with or without an error.

If a second run on the same host finds the file, it checks whether the process of the first run still exists. A second run on
another host waits up to 25 s for the file to change. If a run finds the token of another run in `run.json`, the other run has taken
over the folder: the heartbeat stops and the run ends.
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
from megatron.checkpoint.storage_url import open_storage
from megatron.config.regular_file import parse_json

ALIVE_FILE = "run.alive"
BEAT_S = 10.0
PATIENCE_S = 2.5 * BEAT_S
"""Seconds without a heartbeat after which a run on another host is considered dead."""


def check_no_live_owner(storage: Storage, log: Callable[[str], None], patience_s: float = PATIENCE_S) -> None:
    """Check that no live run saves in a folder. Only one rank calls this function.

    Args:
        storage: save folder.
        log: called with a message before the function waits.
        patience_s: seconds to wait for a heartbeat of a run on another host.

    Raises:
        CheckpointError: a live run saves in the folder.
    """
    owner = _read_alive_file(storage)
    if owner is None or not _is_alive(storage, owner, log, patience_s):
        return
    raise CheckpointError(
        f"--save {storage.location}: a run on {owner['host']} (process {owner['pid']}) saves there and is alive ({ALIVE_FILE}). "
        "Wait until it ends, end it, set another folder, or add --take-over, which ends that run."
    )


class Heartbeat:
    """Thread on the first rank that shows other runs that this run is alive: it rewrites `run.alive` in the save folder until the
    run ends.

    Args:
        location: path or URL of the save folder.
        token: hexadecimal digits that identify this run, as in `run.json`.
        interval_s: seconds between two heartbeats.
    """

    def __init__(self, location: str, token: str, interval_s: float = BEAT_S) -> None:
        self._token, self._interval_s = token, interval_s
        self._stop_requested = threading.Event()
        self.successor: str | None = None
        """Description of the run that has taken over the folder, for messages. None while this run owns the folder."""
        self._identity = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": get_process_identity(os.getpid()),
            "token": token,
        }
        storage = open_storage(location)
        _write_alive_file(storage, {**self._identity, "beat": 0})
        self._thread = threading.Thread(target=self._beat, args=(storage,), daemon=True, name="heartbeat")
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeat and remove `run.alive`. The next run in this save folder then need not wait to see whether this run is
        alive."""
        self._stop_requested.set()
        self._thread.join(self._interval_s)  # with a timeout, because the storage may not respond

    def _beat(self, storage: Storage) -> None:
        count = 0
        while not self._stop_requested.wait(self._interval_s):
            count += 1
            try:
                owner = parse_json(storage.read(RUN))
                if owner.get("token", self._token) != self._token:
                    self.successor = f"a run on {owner.get('host', 'another host')} (process {owner.get('pid', 'unknown')})"
                    return
                _write_alive_file(storage, {**self._identity, "beat": count})
            except (OSError, ValueError, AttributeError):
                continue  # the storage does not respond, or the file is being written
        alive = _read_alive_file(storage)
        if alive is not None and alive.get("token") == self._token:
            with suppress(OSError):
                storage.remove(ALIVE_FILE)


def _is_alive(storage: Storage, owner: dict[str, Any], log: Callable[[str], None], patience_s: float) -> bool:
    """Return whether the run that has written `run.alive` is alive. If it runs on another host, wait up to `patience_s` for a
    heartbeat.

    Args:
        owner: content of `run.alive`: host, process and counter of that run.
        log: called with a message before the function waits.
        patience_s: seconds to wait.
    """
    if owner["host"] == socket.gethostname() and owner.get("process", "").partition(" ")[0] == _read_process_namespace():
        return bool(get_process_identity(owner["pid"]) == owner["process"])
    log(
        f"the last run in {storage.location}, on {owner['host']}, did not end by itself: "
        f"waiting up to {patience_s:.0f} s to see whether it is still alive"
    )
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(min(1.0, patience_s / 5))
        latest = _read_alive_file(storage)
        if latest is None:
            return False
        if latest != owner:
            return True
    return False


def _read_alive_file(storage: Storage) -> dict[str, Any] | None:
    """Return the content of `run.alive`, or None if the file is missing or unreadable."""
    try:
        owner = parse_json(storage.read(ALIVE_FILE))
    except (OSError, ValueError):
        return None
    has_host_and_pid = isinstance(owner, dict) and isinstance(owner.get("host"), str) and isinstance(owner.get("pid"), int)
    return owner if has_host_and_pid and isinstance(owner.get("process"), str) else None


def _write_alive_file(storage: Storage, content: dict[str, Any]) -> None:
    storage.write(ALIVE_FILE, json.dumps(content).encode())


def _read_process_namespace() -> str:
    """Return an identifier of this boot of the machine and of the container (PID namespace), within which a PID is unique."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def get_process_identity(pid: int) -> str:
    """Return a string that identifies a process: boot and PID namespace, PID and start time.

    A later process with the same PID has another identity. If the process does not exist, the string has neither PID nor start
    time.
    """
    try:
        stat_fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _read_process_namespace()
    return _read_process_namespace() if stat_fields[0] in "ZX" else f"{_read_process_namespace()} {pid} {stat_fields[19]}"
