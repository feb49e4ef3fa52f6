"""Access to the files in the memory of another node: a server, and a client for it (`NodeLink`). The module does not import torch.

A message is a line of JSON, or raw bytes, each preceded by its length (8 bytes). A client must prove that it knows the token of the
run: it receives random bytes and replies with their HMAC (RFC 2104), so the token itself is never sent. The data is not encrypted.
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
from megatron.checkpoint.storage import FileReader, FileWriter

_log = logging.getLogger(__name__)
CHUNK_BYTES = 4 << 20
"""Maximum number of bytes of file data in one message."""
_LENGTH = struct.Struct(">Q")
_MAX_MESSAGE_BYTES = 1 << 30
_CONNECT_TIMEOUT_S, _REPLY_TIMEOUT_S = 5.0, 60.0
"""Seconds after which a node that does not answer counts as lost."""
_ALLOWED_CALLS = ("file_size", "list_names", "read", "remove", "remove_checkpoint", "remove_unfinished")
"""Methods of `LocalStorage` that a link may call."""


class NodeUnreachableError(OSError):
    """Raised if a node does not respond."""


def serve(folder: Path, listener: socket.socket, get_token: Callable[[], str]) -> None:
    """Serve the files of a folder to clients that know the token of the run, with one thread per connection. Returns immediately.

    Args:
        listener: socket on which the server accepts connections.
        get_token: returns the token of the run. The token changes at each restart of the ranks.
    """

    def handle_connection(connection: socket.socket) -> None:
        # An invalid message ends the connection, not the server.
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = secrets.token_bytes(32)
            _send(connection, challenge)
            connection.settimeout(_REPLY_TIMEOUT_S)
            if not hmac.compare_digest(_receive(connection, max_bytes=len(challenge)), _authenticate(get_token(), challenge)):
                return
            _send(connection, b"")
            connection.settimeout(None)
            while True:
                _handle_message(LocalStorage(folder), connection, json.loads(_receive(connection)))

    def accept() -> None:
        while True:
            with contextlib.suppress(OSError):
                threading.Thread(target=handle_connection, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True, name="node files").start()


def _handle_message(storage: LocalStorage, connection: socket.socket, message: dict[str, Any]) -> None:
    """Call the storage method that a client's message requests, and send the result or the error to the client.

    Args:
        storage: the folder of this node that other nodes may access.
    """
    name = message["name"]
    data = _receive(connection) if message["call"] == "write" else b""
    if any(PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts for path in (name, message.get("of", ""))):
        raise ValueError(f"{name} is outside of {storage.local}, the only folder of this node that other nodes may access")
    if message["call"] == "create":  # not in the `try`: an error ends the connection, because more blocks are on their way
        _receive_file(storage, connection, name)
    try:
        result: Any = None
        if message["call"] == "range":
            with storage.open(name) as file:
                result = file.read(int(message["start"]), min(int(message["length"]), CHUNK_BYTES))
        elif message["call"] == "publish":
            draft = LocalDraft(storage.local / message["of"], storage.local / name)
            if draft.storage.local.is_dir():  # otherwise this node holds no file of the draft
                draft.publish({})
        elif message["call"] == "write":
            storage.child(str(PurePosixPath(name).parent)).create_folder()
            storage.write(name, data)
        elif message["call"] in _ALLOWED_CALLS:
            result = getattr(storage, message["call"])(name)
        elif message["call"] != "create":
            raise ValueError(message["call"])
    except OSError as error:
        error_type = next((candidate for candidate in (FileNotFoundError, TruncatedError) if isinstance(error, candidate)), OSError)
        _send(connection, json.dumps({"error": str(error), "kind": error_type.__name__}).encode())
        return
    if isinstance(result, bytes):
        _send(connection, json.dumps({"bytes": len(result)}).encode())
        _send(connection, result)
    else:
        _send(connection, json.dumps({"result": result}).encode())


def _receive_file(storage: LocalStorage, connection: socket.socket, name: str) -> None:
    """Receive the blocks of a file up to an empty block, and write them to the file. An incomplete file is removed."""
    storage.child(str(PurePosixPath(name).parent)).create_folder()
    with storage.create(name) as file:
        while block := _receive(connection):
            file.write(block)


class NodeLink:
    """Client for the server of one node. It connects on first use. Several threads may call methods, but only one may write a file.

    All methods raise `NodeUnreachableError` if the node does not respond, and `OSError` if its storage fails.

    Args:
        address: host and port.
        token: token of the run.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self.address, self.token = address, token
        self._socket: socket.socket | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()

    def call(self, name: str, path: str, data: bytes | None = None, **arguments: Any) -> Any:
        """Call a method of the other node's storage for a path, and return the result."""
        with self._lock, self._connected() as connection:
            _send(connection, json.dumps({"call": name, "name": path, **arguments}).encode())
            if data is not None:
                _send(connection, data)
            return _receive_result(connection)

    def start_file(self, path: str) -> None:
        """Start writing a file on the other node. Until the file is finished or aborted, only its blocks may be sent over this
        link."""
        with self._connected() as connection:
            _send(connection, json.dumps({"call": "create", "name": path}).encode())

    def send_block(self, data: memoryview) -> None:
        """Send the next bytes of the file that is being written."""
        with self._connected() as connection:
            _send(connection, data)

    def finish_file(self) -> None:
        """Send the end of the file, and wait until the node has written the complete file."""
        with self._connected() as connection:
            _send(connection, b"")
            _receive_result(connection)

    def abort_file(self) -> None:
        """Cancel the write of a file, and wait until the node has removed the incomplete file."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.settimeout(_CONNECT_TIMEOUT_S)
                self._socket.shutdown(socket.SHUT_WR)
                self._socket.recv(1)  # the node closes the connection after it has removed the file
        self.close()

    def close(self) -> None:
        """Close the connection, even if another thread is still in a call of this client."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        if self._failure is not None:  # do not wait for the timeout again
            raise NodeUnreachableError(self._failure)
        is_complete = False
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self.address, timeout=_CONNECT_TIMEOUT_S)
                self._socket.settimeout(_REPLY_TIMEOUT_S)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _send(self._socket, _authenticate(self.token, _receive(self._socket)))
                _receive(self._socket)
            yield self._socket
            is_complete = True
        except _RemoteError as error:
            is_complete = True
            raise error.error from None
        except (OSError, ValueError) as error:
            host, port = self.address
            self._failure = f"the node at {host}:{port} does not answer ({error})"
            raise NodeUnreachableError(self._failure) from error
        finally:
            if not is_complete:
                self.close()


class RemoteFileReader(FileReader):
    """`FileReader` of a file on another node, which reads over a `NodeLink`."""

    def __init__(self, link: NodeLink, path: str, size: int) -> None:
        self._link, self._path, self.size = link, path, size

    def read_into(self, start: int, buffer: memoryview) -> None:
        for offset in range(0, len(buffer), CHUNK_BYTES):
            length = min(CHUNK_BYTES, len(buffer) - offset)
            buffer[offset : offset + length] = self._link.call("range", self._path, start=start + offset, length=length)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


class ReplicatedFileWriter(FileWriter):
    """`FileWriter` of a local file and of its copies on other nodes. If a node becomes unreachable, the writer continues without
    the copy on that node.

    Args:
        local_writer: writer of the local file.
        links: links to the nodes that receive copies.
        path: path of the copies on these nodes.
    """

    def __init__(self, local_writer: FileWriter, links: Sequence[NodeLink], path: str) -> None:
        self._local_writer, self._links = local_writer, [*links]
        self._for_each_link(lambda link: link.start_file(path))

    def write_partial(self, data: memoryview) -> int:
        num_written = self._local_writer.write_partial(data[:CHUNK_BYTES])
        self._local_writer.num_bytes += num_written
        self._for_each_link(lambda link: link.send_block(data[:num_written]))
        return num_written

    def sync(self) -> None:
        self._local_writer.sync()

    def finish(self) -> None:
        """Complete the copies on the other nodes."""
        self._for_each_link(NodeLink.finish_file)

    def abort(self) -> None:
        """Cancel writing the copies, and remove the incomplete copies."""
        self._for_each_link(NodeLink.abort_file)

    def _for_each_link(self, action: Callable[[NodeLink], None]) -> None:
        for link in [*self._links]:
            try:
                action(link)
            except OSError as error:
                self._links.remove(link)
                _log.warning("a copy of the state is missing: %s", error)


class _RemoteError(Exception):
    """Error raised by the storage of the other node, in contrast to an error of the connection."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _receive_result(connection: socket.socket) -> Any:
    reply = json.loads(_receive(connection))
    if "error" in reply:
        error_type = {"FileNotFoundError": FileNotFoundError, "TruncatedError": TruncatedError}.get(reply["kind"], OSError)
        raise _RemoteError(error_type(reply["error"]))
    return _receive(connection) if "bytes" in reply else reply["result"]


def _authenticate(token: str, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), challenge, "sha256")


def _send(connection: socket.socket, data: bytes | memoryview) -> None:
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def _receive(connection: socket.socket, max_bytes: int = _MAX_MESSAGE_BYTES) -> bytes:
    length = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))[0]
    if length > max_bytes:
        raise ValueError(f"a message has {length:,} bytes, but at most {max_bytes:,} are allowed")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data, total = bytearray(length), 0
    while total < length:
        num_received = connection.recv_into(memoryview(data)[total:])
        if not num_received:
            raise ConnectionResetError("the other node closed the connection")
        total += num_received
    return bytes(data)
