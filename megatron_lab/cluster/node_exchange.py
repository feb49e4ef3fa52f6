"""Exchange of messages between the nodes of a job, through a key-value store that one node, the head node, serves. Every wait has a
time limit."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from typing import Any

import torch.distributed as dist

_POLL_INTERVAL_S = 0.05


class NodeExchangeError(Exception):
    """The nodes of a job cannot exchange messages. The error message names the node that failed, or the address that does not
    answer."""


class NodeExchange:
    """Connection of one node to a key-value store, through which the nodes of a cluster check exchange messages.

    One node, the head node, serves the store and has node index 0.

    Args:
        head: name or address of the head node.
        port: port of the store.
        num_nodes: number of nodes of the job.
        host: name of this node.
        timeout_s: seconds to wait for the head node to answer.

    Raises:
        NodeExchangeError: the head node's name does not resolve, its port is in use, or it does not answer in time.
    """

    def __init__(self, head: str, port: int, num_nodes: int, host: str, timeout_s: float) -> None:
        self.num_nodes, self.host = num_nodes, host
        timeout = datetime.timedelta(seconds=timeout_s)

        def store(is_head: bool) -> dist.TCPStore:
            return dist.TCPStore(head, port, is_master=is_head, wait_for_workers=False, timeout=timeout)

        self.is_head = any(map(_is_local_address, _resolve_addresses(head, host)))
        if self.is_head:
            try:
                self.store = store(True)
            except (RuntimeError, ValueError) as error:
                if num_nodes == 1:
                    raise NodeExchangeError(
                        f"{host}: cannot listen at port {port}: {str(error).splitlines()[0]}. Choose another port by --head"
                    ) from error
                self.is_head = False  # another node of the job on this machine serves the store already
        if not self.is_head:
            _wait_for_listener(head, port, host, timeout_s)
            try:
                self.store = store(False)
            except (RuntimeError, ValueError) as error:
                raise NodeExchangeError(
                    f"{host}: the process that listens at port {port} of {head} does not belong to this job; "
                    "choose another port by --head"
                ) from error
        self.index = 0 if self.is_head else self.store.add("joined", 1)
        """Index of this node; the head has 0."""
        if self.index >= num_nodes:
            raise NodeExchangeError(
                f"{host}: more than {num_nodes} nodes connected to port {port} of {head}. "
                "If another job uses this port, choose another by --head; otherwise correct --nodes"
            )

    def put(self, key: str, value: Any) -> None:
        """Store a value of this node under a key, for `gather` on the head node.

        Args:
            value: value that can be converted to JSON.
        """
        self.store.set(f"{key}/{self.index}", json.dumps(value))

    def gather(self, key: str, deadline: float) -> dict[int, Any]:
        """On the head node, wait for the values that all nodes store by `put` under a key.

        Args:
            deadline: time until which to wait, as returned by time.monotonic().

        Returns:
            the values by node index. Nodes whose value has not arrived at the deadline are missing.
        """
        values: dict[int, Any] = {}
        while True:
            for node in range(self.num_nodes):
                if node not in values and self.store.check([f"{key}/{node}"]):
                    values[node] = json.loads(self.store.get(f"{key}/{node}"))
            if len(values) == self.num_nodes or time.monotonic() >= deadline:
                return values
            time.sleep(_POLL_INTERVAL_S)

    def broadcast(self, key: str, value: Any) -> None:
        """On the head node, send a value to all nodes, which get it by `receive` with the same key.

        Args:
            value: value that can be converted to JSON.
        """
        self.store.set(key, json.dumps(value))

    def receive(self, key: str, timeout_s: float) -> Any:
        """Wait for the value that the head node broadcasts under a key, and return it.

        Raises:
            NodeExchangeError: the value does not arrive in time, or the head node's process has ended.
        """
        try:
            self.store.wait([key], datetime.timedelta(seconds=timeout_s))
            return json.loads(self.store.get(key))
        except (RuntimeError, ValueError) as error:
            raise NodeExchangeError(
                f"{self.host}: no message from the head node within {timeout_s:.0f} s; its process may have ended, "
                "so read its output"
            ) from error

    def leave(self, timeout_s: float) -> None:
        """Leave the exchange of messages. The head node waits until all nodes have left, because the store ends with the head
        node's process.

        Args:
            timeout_s: maximum seconds that the head node waits.
        """
        with contextlib.suppress(RuntimeError):
            self.store.add("left", 1)
            deadline = time.monotonic() + timeout_s
            while self.is_head and self.store.add("left", 0) <= self.store.add("joined", 0) and time.monotonic() < deadline:
                time.sleep(_POLL_INTERVAL_S)


def _resolve_addresses(head: str, host: str) -> list[str]:
    try:
        return list(
            dict.fromkeys(str(address_info[4][0]) for address_info in socket.getaddrinfo(head, None, type=socket.SOCK_STREAM))
        )
    except OSError as error:
        raise NodeExchangeError(
            f"{host}: the name of the head node, {head}, does not resolve: {error.strerror}. Correct --head"
        ) from error


def _is_local_address(address: str) -> bool:
    """Return whether an IP address belongs to this machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _wait_for_listener(head: str, port: int, host: str, timeout_s: float) -> None:
    """Wait until a process listens at the port of the head node.

    Args:
        head: name or address of the head node.
        host: name of this node, for the error message.

    Raises:
        NodeExchangeError: no process listens in time.
    """
    deadline, reason = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            socket.create_connection((head, port), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.5)
    raise NodeExchangeError(
        f"{host}: no answer from {head} at port {port} for {timeout_s:.0f} s ({reason}). Check that the job was started "
        "there, and that no firewall blocks that port"
    )
