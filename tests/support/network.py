"""Two nodes on one machine: network namespaces with a link between them that can be slowed or cut. Linux, as root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

_NEW_NAMES, _NEW_NETWORK = 0x04000000, 0x40000000


class Nodes:
    """Two network namespaces, joined by a link."""

    def __init__(self) -> None:
        self.names = [f"{secrets.token_hex(3)}{node}" for node in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def enter(self, node: int) -> None:
        """Let this thread, and what it starts from now on, be of a node; its host is named `node0` or `node1`."""
        _call("unshare", _NEW_NAMES)
        socket.sethostname(f"node{node}")
        self._join(Path(f"/run/netns/{self.names[node]}"))

    @contextlib.contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """Let this thread be of a node's network for a while."""
        with open("/proc/self/ns/net") as before:
            self._join(Path(f"/run/netns/{self.names[node]}"))
            try:
                yield
            finally:
                _call("setns", before.fileno(), _NEW_NETWORK)

    def cut(self, node: int) -> None:
        """Take a node's end of the link down: what is sent is lost, and nobody is told."""
        _ip("-n", self.names[node], "link", "set", "wire", "down")

    def slow(self, rate: str) -> None:
        """Let the link carry so much in each direction, as tc writes it ("1mbit")."""
        for name in self.names:
            shaped = ("qdisc", "add", "dev", "wire", "root", "tbf", "rate", rate, "burst", "4kb", "latency", "2s")
            subprocess.run(["ip", "netns", "exec", name, "tc", *shaped], check=True)

    @staticmethod
    def _join(path: Path) -> None:
        with path.open() as file:
            _call("setns", file.fileno(), _NEW_NETWORK)


@contextlib.contextmanager
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        for name in made.names:
            _ip("netns", "add", name)
        ends = [("name", "wire", "netns", name) for name in made.names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(made.names, made.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for end in ("wire", "lo"):
                _ip("-n", name, "link", "set", end, "up")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def possible() -> bool:
    """Whether this machine lets us make such nodes."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        with nodes():
            return True
    except subprocess.CalledProcessError:
        return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stderr=subprocess.PIPE)


def _call(name: str, *numbers: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*numbers):
        raise OSError(ctypes.get_errno(), name)
