"""Where the roll lies: in this process for a job of one node, else in a store that outlives every node but its own.

The store is torch's TCPStore. Its keys: `roll`, changed by compare-and-set alone; `changes`, counted up with each change, so that a
look costs a few bytes; `beat/NAME`, counted up by each node every second, and `beats` by all.
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

from megatron_lab.resilience.roll import Roll, from_text, to_text

BEAT_S = 1.0
_LOOK_AGAIN_S = 2.0
"""A node may have died between its change and the count."""
_CONNECT_S = 3.0


T = TypeVar("T")


class StoreAway(Exception):
    """The store does not answer."""


class Book(Protocol):
    """A place for the roll that all nodes see."""

    def read(self) -> Roll:
        """The roll as it is now."""

    def swap(self, old: Roll, new: Roll) -> bool:
        """Put a roll in place of another, unless somebody else has changed that; returns whether it is done."""

    def beats(self, name: str) -> int:
        """Count of a node's beats."""

    def begin(self, name: str) -> None:
        """Beat for a node from now on."""


def update(book: Book, change: Callable[[Roll], Roll]) -> Roll:
    """Change the roll, whatever others do to it at the same time. Returns the result."""
    while True:
        old = book.read()
        new = change(old)
        if new == old or book.swap(old, new):
            return new


class OwnBook:
    """The book of a job of one node. Nobody else looks into it."""

    def __init__(self) -> None:
        self._roll = Roll()

    def read(self) -> Roll:
        """The roll as it is now."""
        return self._roll

    def swap(self, old: Roll, new: Roll) -> bool:
        """Put a roll in place of another."""
        self._roll = new
        return True

    def beats(self, name: str) -> int:
        """Count of a node's beats: there is no other node."""
        return 0

    def begin(self, name: str) -> None:
        """Nobody listens for beats."""


class StoreBook:
    """The book in a TCPStore.

    After the store was lost and another one serves at its address, the first node to come writes the last roll that it knew.

    Args:
        run_id: tells this job from others in the same store.

    Raises:
        StoreAway: from every method, while the store does not answer.
    """

    def __init__(self, host: str, port: int, run_id: str) -> None:
        self._host, self._port, self._run_id = host, port, run_id
        self._store: dist.Store | None = None
        self._known, self._changes, self._read_at = Roll(), -1, 0.0

    def read(self) -> Roll:
        """The roll as it is now."""
        changes = self._ask(lambda store: store.add("changes", 0))
        if changes != self._changes or time.monotonic() > self._read_at + _LOOK_AGAIN_S:
            text = self._ask(lambda store: store.compare_set("roll", "", to_text(self._known)))
            self._known, self._changes, self._read_at = from_text(text.decode()), changes, time.monotonic()
        return self._known

    def swap(self, old: Roll, new: Roll) -> bool:
        """Put a roll in place of another, unless somebody else has changed that; returns whether it is done."""
        wanted = to_text(new)
        done = bool(self._ask(lambda store: store.compare_set("roll", to_text(old), wanted)).decode() == wanted)
        self._changes = -1
        self._ask(lambda store: store.add("changes", int(done)))
        return done

    def beats(self, name: str) -> int:
        """Count of a node's beats."""
        return int(self._ask(lambda store: store.add(f"beat/{name}", 0)))

    def begin(self, name: str) -> None:
        """Beat for a node from now on, in a thread with a connection of its own, as long as this process lives."""

        def beat() -> None:
            other = StoreBook(self._host, self._port, self._run_id)
            while True:
                with suppress(StoreAway):
                    other._ask(lambda store: store.add(f"beat/{name}", 1) + store.add("beats", 1))
                time.sleep(BEAT_S)

        threading.Thread(target=beat, daemon=True, name="beat").start()

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        try:
            if self._store is None:
                self._store = dist.PrefixStore(self._run_id, connected(self._host, self._port, _CONNECT_S))
            return question(self._store)
        except (RuntimeError, OSError) as error:
            self._store = None
            raise StoreAway(str(error).splitlines()[0]) from None


def connected(host: str, port: int, within_s: float) -> dist.TCPStore:
    """A connection to a store.

    Raises:
        RuntimeError: none answers.
    """
    until = time.monotonic() + within_s
    while True:  # torch itself waits long for a host that refuses, and complains on the screen
        try:
            socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic())).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise RuntimeError(f"{host}:{port} does not answer: {error.strerror or error}") from None
            time.sleep(0.1)
    return dist.TCPStore(host, port, None, False, datetime.timedelta(seconds=30), wait_for_workers=False)


def serve(port: int) -> dist.TCPStore:
    """Serve a store on all addresses of this host, in a thread of this process.

    Raises:
        RuntimeError: the port is taken.
    """
    return dist.TCPStore("localhost", port, None, True, datetime.timedelta(seconds=30), wait_for_workers=False)


def is_here(host: str) -> bool:
    """Whether a name or address is this host's."""
    try:
        with socket.socket(socket.getaddrinfo(host, 0)[0][0]) as probe:
            probe.bind((host, 0))
            return True
    except OSError:
        return False
