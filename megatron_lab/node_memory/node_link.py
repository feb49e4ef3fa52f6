"""Files in the memory of a node, for the other nodes: the server that gives and takes them, and a link to it. Needs no torch.

A message is a line of JSON, or bytes, each behind its length (8 bytes). Whoever connects must prove that he knows the token of the
run: he gets random bytes and answers with their HMAC (RFC 2104), so the token itself never travels. What travels is not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.checkpoint.errors import TruncatedError
from megatron.checkpoint.local_storage import LocalDraft, LocalStorage
from megatron.checkpoint.storage import Reading, Writing

_log = logging.getLogger(__name__)
CHUNK_BYTES = 4 << 20
"""Bytes that travel in one message, at the most."""
_LENGTH = struct.Struct(">Q")
_MOST_BYTES = 1 << 30
_CONNECT_S, _ANSWER_S = 5.0, 60.0
"""Seconds after which a node that does not answer counts as lost."""
_CALLS = ("size", "names", "read", "remove", "retire", "sweep")
"""Methods of `LocalStorage` that a link may call."""


class NodeLost(OSError):
    """A node does not answer."""


def serve(folder: Path, listener: socket.socket, token: Callable[[], str]) -> None:
    """Give the files of a folder to whoever knows the token, each connection in a thread of its own; returns at once.

    Args:
        token: gives that of the run, which is another one after each start of its ranks.
    """

    def hear(connection: socket.socket) -> None:
        # Whatever comes that a link does not send ends the connection, not the server.
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = secrets.token_bytes(32)
            _send(connection, challenge)
            connection.settimeout(_ANSWER_S)
            if not hmac.compare_digest(_receive(connection, most=len(challenge)), _proof(token(), challenge)):
                return
            _send(connection, b"")
            connection.settimeout(None)
            while True:
                _answer(LocalStorage(folder), connection, json.loads(_receive(connection)))

    def accept() -> None:
        while True:
            with contextlib.suppress(OSError):
                threading.Thread(target=hear, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True, name="node files").start()


def _answer(storage: LocalStorage, connection: socket.socket, message: dict[str, Any]) -> None:
    """Do what a message asks for, and answer: with a result, or with the error."""
    name = message["name"]
    data = _receive(connection) if message["call"] == "write" else b""
    if any(PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts for path in (name, message.get("of", ""))):
        raise ValueError(f"{name} is outside of the folder")
    if message["call"] == "create":  # an error in its middle ends the connection, for pieces are on their way
        _take_file(storage, connection, name)
    try:
        result: Any = None
        if message["call"] == "range":
            with storage.open(name) as file:
                result = file.read(int(message["start"]), min(int(message["length"]), CHUNK_BYTES))
        elif message["call"] == "publish":
            draft = LocalDraft(storage.local / message["of"], storage.local / name)
            if draft.storage.local.is_dir():  # else this node holds no part of it
                draft.publish({})
        elif message["call"] == "write":
            storage.child(str(PurePosixPath(name).parent)).make()
            storage.write(name, data)
        elif message["call"] in _CALLS:
            result = getattr(storage, message["call"])(name)
        elif message["call"] != "create":
            raise ValueError(message["call"])
    except OSError as error:
        kind = next((one for one in (FileNotFoundError, TruncatedError) if isinstance(error, one)), OSError)
        _send(connection, json.dumps({"error": str(error), "kind": kind.__name__}).encode())
        return
    if isinstance(result, bytes):
        _send(connection, json.dumps({"bytes": len(result)}).encode())
        _send(connection, result)
    else:
        _send(connection, json.dumps({"result": result}).encode())


def _take_file(storage: LocalStorage, connection: socket.socket, name: str) -> None:
    """Write what comes in pieces up to an empty one; nothing is left of a file that does not come to its end."""
    storage.child(str(PurePosixPath(name).parent)).make()
    with storage.create(name) as file:
        while piece := _receive(connection):
            file.write(piece)


class NodeLink:
    """A link to the server of one node. It connects when it is first used. Several threads may call; one writes a file.

    Args:
        address: host and port.
        token: of the run.

    Every method raises `NodeLost` where the node does not answer, and `OSError` where its storage fails.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self.address, self.token = address, token
        self._socket: socket.socket | None = None
        self._lost: str | None = None
        self._lock = threading.Lock()

    def call(self, name: str, path: str, data: bytes | None = None, **more: Any) -> Any:
        """Call a method of the node's storage for a path; returns its result."""
        with self._lock, self._talking() as connection:
            _send(connection, json.dumps({"call": name, "name": path, **more}).encode())
            if data is not None:
                _send(connection, data)
            return _result(connection)

    def begin_file(self, path: str) -> None:
        """Begin a file there. Nothing but its pieces and its end may follow."""
        with self._talking() as connection:
            _send(connection, json.dumps({"call": "create", "name": path}).encode())

    def send_piece(self, data: memoryview) -> None:
        """Send the next bytes of the file."""
        with self._talking() as connection:
            _send(connection, data)

    def end_file(self) -> None:
        """Send the end of the file; it is written when this returns."""
        with self._talking() as connection:
            _send(connection, b"")
            _result(connection)

    def abandon_file(self) -> None:
        """Break off a file in its middle, and wait until the node has removed what it got of it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.settimeout(_CONNECT_S)
                self._socket.shutdown(socket.SHUT_WR)
                self._socket.recv(1)  # the node ends the connection after it has removed the file
        self.close()

    def close(self) -> None:
        """End the connection, in the middle of what is going on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @contextmanager
    def _talking(self) -> Iterator[socket.socket]:
        if self._lost is not None:  # waiting for it again would cost as much again
            raise NodeLost(self._lost)
        whole = False
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self.address, timeout=_CONNECT_S)
                self._socket.settimeout(_ANSWER_S)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _send(self._socket, _proof(self.token, _receive(self._socket)))
                _receive(self._socket)
            yield self._socket
            whole = True
        except _Refused as error:
            whole = True
            raise error.meaning from None
        except (OSError, ValueError) as error:
            host, port = self.address
            self._lost = f"the node at {host}:{port} does not answer ({error})"
            raise NodeLost(self._lost) from error
        finally:
            if not whole:
                self.close()


class RemoteFile(Reading):
    """A `Reading` of a file on another node."""

    def __init__(self, link: NodeLink, path: str, size: int) -> None:
        self._link, self._path, self.size = link, path, size

    def read_into(self, start: int, buffer: memoryview) -> None:
        for at in range(0, len(buffer), CHUNK_BYTES):
            length = min(CHUNK_BYTES, len(buffer) - at)
            buffer[at : at + length] = self._link.call("range", self._path, start=start + at, length=length)

    def close(self) -> None:
        """End the connection."""
        self._link.close()


class CopiedWriting(Writing):
    """A `Writing` to a local file and to the same file on other nodes. A node that is lost meanwhile gets no copy.

    Args:
        mine: the local file.
        others: links to the nodes that get copies.
        path: the file there.
    """

    def __init__(self, mine: Writing, others: Sequence[NodeLink], path: str) -> None:
        self._mine, self._others = mine, [*others]
        self._each(lambda link: link.begin_file(path))

    def write_some(self, data: memoryview) -> int:
        written = self._mine.write_some(data[:CHUNK_BYTES])
        self._mine.num_bytes += written
        self._each(lambda link: link.send_piece(data[:written]))
        return written

    def sync(self) -> None:
        self._mine.sync()

    def end(self) -> None:
        """The file is complete."""
        self._each(NodeLink.end_file)

    def abandon(self) -> None:
        """The file does not come to its end; nothing of it stays."""
        self._each(NodeLink.abandon_file)

    def _each(self, action: Callable[[NodeLink], None]) -> None:
        for link in [*self._others]:
            try:
                action(link)
            except OSError as error:
                self._others.remove(link)
                _log.warning("a copy of the state is missing: %s", error)


class _Refused(Exception):
    """The node answered with an error."""

    def __init__(self, meaning: OSError) -> None:
        super().__init__(str(meaning))
        self.meaning = meaning


def _result(connection: socket.socket) -> Any:
    answer = json.loads(_receive(connection))
    if "error" in answer:
        kind = {"FileNotFoundError": FileNotFoundError, "TruncatedError": TruncatedError}.get(answer["kind"], OSError)
        raise _Refused(kind(answer["error"]))
    return _receive(connection) if "bytes" in answer else answer["result"]


def _proof(token: str, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), challenge, "sha256")


def _send(connection: socket.socket, data: bytes | memoryview) -> None:
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def _receive(connection: socket.socket, most: int = _MOST_BYTES) -> bytes:
    length = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
    if length > most:
        raise ValueError(f"a message of {length:,} bytes")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    data, done = bytearray(length), 0
    while done < length:
        got = connection.recv_into(memoryview(data)[done:])
        if not got:
            raise ConnectionResetError("the connection has ended")
        done += got
    return bytes(data)
