"""Lets the nodes of a job meet at one of them, the head, which keeps a store of texts. No wait is longer than its limit."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from typing import Any

import torch.distributed as dist

_POLL_S = 0.05


class MeetingError(Exception):
    """The nodes do not find each other; the message says which is missing, or what was tried."""


class Meeting:
    """One node's seat.

    Args:
        head: name or address of the node that keeps the store.
        port: on it.
        num_nodes: how many are to come.
        host: this node's name.
        patience_s: for the head to answer.

    Raises:
        MeetingError: the head's name does not resolve, its port is taken, or it does not answer in time.
    """

    def __init__(self, head: str, port: int, num_nodes: int, host: str, patience_s: float) -> None:
        self.num_nodes, self.host = num_nodes, host
        timeout = datetime.timedelta(seconds=patience_s)

        def store(is_head: bool) -> dist.TCPStore:
            return dist.TCPStore(head, port, is_master=is_head, wait_for_workers=False, timeout=timeout)

        self.is_head = any(map(_is_ours, _addresses(head, host)))
        if self.is_head:
            try:
                self.store = store(True)
            except (RuntimeError, ValueError) as error:
                if num_nodes == 1:
                    raise MeetingError(f"{host}: cannot listen at port {port}: {str(error).splitlines()[0]}") from error
                self.is_head = False  # another node of the job on this machine was first
        if not self.is_head:
            _wait_for(head, port, host, patience_s)
            try:
                self.store = store(False)
            except (RuntimeError, ValueError) as error:
                raise MeetingError(f"{host}: what listens at port {port} of {head} is no node of this job") from error
        self.index = 0 if self.is_head else self.store.add("joined", 1)
        """This node's number; the head's is 0."""
        if self.index >= num_nodes:
            raise MeetingError(f"{host}: more than {num_nodes} nodes came to port {port} of {head}; another job may use it")

    def put(self, topic: str, value: Any) -> None:
        """Say something about a topic."""
        self.store.set(f"{topic}/{self.index}", json.dumps(value))

    def gather(self, topic: str, deadline: float) -> dict[int, Any]:
        """For the head: what each node said about a topic, by number, as soon as all have or when the time is up.

        Args:
            deadline: by time.monotonic().
        """
        found: dict[int, Any] = {}
        while True:
            for node in range(self.num_nodes):
                if node not in found and self.store.check([f"{topic}/{node}"]):
                    found[node] = json.loads(self.store.get(f"{topic}/{node}"))
            if len(found) == self.num_nodes or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_S)

    def tell(self, topic: str, value: Any) -> None:
        """For the head: say something to all."""
        self.store.set(topic, json.dumps(value))

    def hear(self, topic: str, patience_s: float) -> Any:
        """What the head says to all.

        Raises:
            MeetingError: it says nothing in time, or is gone.
        """
        try:
            self.store.wait([topic], datetime.timedelta(seconds=patience_s))
            return json.loads(self.store.get(topic))
        except (RuntimeError, ValueError) as error:
            raise MeetingError(f"{self.host}: the head said nothing for {patience_s:.0f} s, or has ended") from error

    def leave(self, patience_s: float) -> None:
        """The last thing: the head stays until all that came have heard it, for the store goes with it."""
        with contextlib.suppress(RuntimeError):
            self.store.add("left", 1)
            end = time.monotonic() + patience_s
            while self.is_head and self.store.add("left", 0) <= self.store.add("joined", 0) and time.monotonic() < end:
                time.sleep(_POLL_S)


def _addresses(head: str, host: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(head, None, type=socket.SOCK_STREAM)))
    except OSError as error:
        raise MeetingError(f"{host}: the name of the head, {head}, does not resolve: {error.strerror}") from error


def _is_ours(address: str) -> bool:
    """Whether this machine has the address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _wait_for(head: str, port: int, host: str, patience_s: float) -> None:
    """Until the head listens."""
    end, reason = time.monotonic() + patience_s, ""
    while time.monotonic() < end:
        try:
            socket.create_connection((head, port), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.5)
    raise MeetingError(
        f"{host}: no answer from {head} at port {port} for {patience_s:.0f} s ({reason}): was the job started there, and may nodes "
        "reach that port?"
    )
