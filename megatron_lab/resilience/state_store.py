"""Stores through which the nodes of a job share its state (`JobState`).

A job of one node keeps its state in this process. Otherwise a server holds the state, which survives the loss of any other node.
The server is a TCPStore of torch. Its keys are:

roll        the state as JSON, changed only by compare-and-set
changes     count of changes, so that polling transfers only a few bytes
beat/NAME   count of heartbeats of a node, which adds one each second
beats       count of heartbeats of all nodes
"""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch.distributed as dist

from megatron_lab.resilience.job_state import JobState, from_json, to_json

HEARTBEAT_INTERVAL_S = 1.0
_REFRESH_INTERVAL_S = 2.0
"""Maximum age in seconds of a cached state. `changes` can miss a change: a node may die between the change and its count."""
_CONNECT_S = 3.0


T = TypeVar("T")


class StoreUnavailableError(Exception):
    """The store through which the nodes share the state of the job does not answer."""


class StateStore(Protocol):
    """Interface of the store through which the nodes share the state of a job (`JobState`) and their heartbeats. All nodes use one
    store."""

    def read(self) -> JobState:
        """Return the current state of the job."""

    def compare_and_swap(self, old: JobState, new: JobState) -> bool:
        """Replace the stored state of the job, unless another node has changed it since `old` was read. Return whether it was
        replaced.

        Args:
            old: state that this node has read.
            new: state to store.
        """

    def get_heartbeats(self, name: str) -> int:
        """Return how many heartbeats a node has sent so far. The node is lost if the number stops growing."""

    def start_heartbeat(self, name: str) -> None:
        """Start to send heartbeats for a node, one each second."""


def update_state(store: StateStore, transition: Callable[[JobState], JobState]) -> JobState:
    """Change the stored state of a job and return the new state. If another node changes the stored state at the same time, try
    again.

    Args:
        transition: function from the current to the new state.
    """
    while True:
        old = store.read()
        new = transition(old)
        if new == old or store.compare_and_swap(old, new):
            return new


class LocalStateStore:
    """State store for a job with a single node, in the memory of this process."""

    def __init__(self) -> None:
        self._state = JobState()

    def read(self) -> JobState:
        """Return the current state of the job."""
        return self._state

    def compare_and_swap(self, old: JobState, new: JobState) -> bool:
        """Replace the state of the job and return True. No other process can have changed it."""
        self._state = new
        return True

    def get_heartbeats(self, name: str) -> int:
        """Return 0, because the job has no other node."""
        return 0

    def start_heartbeat(self, name: str) -> None:
        """Do nothing, because the job has no other node that would watch this node."""


class TCPStateStore:
    """State store for a job with several nodes, on a server (TCPStore of torch).

    If the server is lost and a new server answers at its address, the first node that connects writes the last state that the node
    has read.

    Args:
        run_id: name that separates this job from other jobs on the same server.

    Raises:
        StoreUnavailableError: by every method while the server does not answer.
    """

    def __init__(self, host: str, port: int, run_id: str) -> None:
        self._host, self._port, self._run_id = host, port, run_id
        self._tcp_store: dist.Store | None = None
        self._state, self._num_changes, self._read_at = JobState(), -1, 0.0

    def read(self) -> JobState:
        """Return the current state of the job."""
        num_changes = self._call(lambda store: store.add("changes", 0))
        if num_changes != self._num_changes or time.monotonic() > self._read_at + _REFRESH_INTERVAL_S:
            text = self._call(lambda store: store.compare_set("roll", "", to_json(self._state)))
            self._state, self._num_changes, self._read_at = from_json(text.decode()), num_changes, time.monotonic()
        return self._state

    def compare_and_swap(self, old: JobState, new: JobState) -> bool:
        """Replace the stored state of the job, unless another node has changed it since `old` was read. Return whether it was
        replaced.

        Args:
            old: state that this node has read.
            new: state to store.
        """
        new_text = to_json(new)
        is_swapped = bool(self._call(lambda store: store.compare_set("roll", to_json(old), new_text)).decode() == new_text)
        self._num_changes = -1
        self._call(lambda store: store.add("changes", int(is_swapped)))
        return is_swapped

    def get_heartbeats(self, name: str) -> int:
        """Return how many heartbeats a node has sent so far."""
        return int(self._call(lambda store: store.add(f"beat/{name}", 0)))

    def start_heartbeat(self, name: str) -> None:
        """Send heartbeats for a node, one each second, until this process ends. A background thread sends them over a separate
        connection."""

        def send_heartbeats() -> None:
            own_store = TCPStateStore(self._host, self._port, self._run_id)
            while True:
                with suppress(StoreUnavailableError):
                    own_store._call(lambda store: store.add(f"beat/{name}", 1) + store.add("beats", 1))
                time.sleep(HEARTBEAT_INTERVAL_S)

        threading.Thread(target=send_heartbeats, daemon=True, name="beat").start()

    def _call(self, action: Callable[[dist.Store], T]) -> T:
        try:
            if self._tcp_store is None:
                self._tcp_store = dist.PrefixStore(self._run_id, connect(self._host, self._port, _CONNECT_S))
            return action(self._tcp_store)
        except (RuntimeError, OSError) as error:
            self._tcp_store = None
            raise StoreUnavailableError(str(error).splitlines()[0]) from None


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to a TCPStore server (torch's key-value store).

    Args:
        timeout_s: seconds to wait for the server.

    Raises:
        RuntimeError: no server answers in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:  # torch would wait long for a host that refuses connections, and print warnings
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"no state store of a launcher answers at {host}:{port} within {timeout_s:g} s: {error.strerror or error}. "
                    "Check this address, and that the launcher there runs"
                ) from None
            time.sleep(0.1)
    return dist.TCPStore(host, port, None, False, datetime.timedelta(seconds=30), wait_for_workers=False)


def serve_store(port: int) -> dist.TCPStore:
    """Serve a TCPStore (torch's key-value store) on all addresses of this host, in a thread of this process.

    Raises:
        RuntimeError: the port is in use.
    """
    return dist.TCPStore("localhost", port, None, True, datetime.timedelta(seconds=30), wait_for_workers=False)


def is_local_host(host: str) -> bool:
    """Return whether a host name or IP address belongs to this machine."""
    try:
        with socket.socket(socket.getaddrinfo(host, 0)[0][0]) as probe:
            probe.bind((host, 0))
            return True
    except OSError:
        return False
