"""Access to the checkpoint files in the memory of another node: a server, and a client for it (`NodeLink`). The module does not
import torch.

A message is a line of JSON, or raw bytes, each preceded by its length (8 bytes). A client must prove that it knows the secret token
of the run: it receives random bytes and replies with their HMAC (RFC 2104), so the token itself is never sent. The data is not
encrypted.
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
_ALLOWED_CALLS = ("get_file_size", "list_names", "read", "remove", "remove_checkpoint", "remove_unfinished")
"""Methods of `LocalStorage` that a link may call."""


class NodeUnreachableError(OSError):
    """Another node does not respond. Checkpoint files in its memory cannot be read or written."""


def serve(folder: Path, listener: socket.socket, get_token: Callable[[], str]) -> None:
    """Serve the files of a folder to other nodes that know the secret token of the run. Each connection has its own thread. Returns
    immediately.

    Args:
        listener: socket on which the server accepts connections.
        get_token: returns the current token. The token changes at each restart of the ranks.
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
    """Call the storage method that another node requests, and send that node the result or the error.

    Args:
        storage: the only folder of this node that other nodes may access.
        message: method ("call"), path ("name") and further arguments.
    """
    name = message["name"]
    data = _receive(connection) if message["call"] == "write" else b""
    if any(PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts for path in (name, message.get("of", ""))):
        raise ValueError(
            f"the path {name} is outside of {storage.local}, the only folder of this node that other nodes may access. The request "
            "is refused. Use the same version of the program on all nodes"
        )
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
            storage.get_child(str(PurePosixPath(name).parent)).create_folder()
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
    """Receive the blocks of a file and write them, until an empty block marks the end. An incomplete file is removed.

    Args:
        name: path of the file within `storage`.
    """
    storage.get_child(str(PurePosixPath(name).parent)).create_folder()
    with storage.create(name) as file:
        while block := _receive(connection):
            file.write(block)


class NodeLink:
    """Client for the checkpoint files in the memory of another node. It connects on first use.

    Several threads may use a client, but only one may write a file. All methods raise `NodeUnreachableError` if the node does not
    respond, and `OSError` if its storage fails.

    Args:
        address: host and port of the node's server.
        token: secret token of the run.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self.address, self.token = address, token
        self._socket: socket.socket | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()

    def call(self, name: str, path: str, data: bytes | None = None, **arguments: Any) -> Any:
        """Call a method of the other node's storage, and return the result.

        Args:
            name: name of the method.
            path: path of the file or folder, the first argument of the method.
            data: content to write, if the method is "write".
            arguments: further arguments of the method.
        """
        with self._lock, self._connect() as connection:
            _send(connection, json.dumps({"call": name, "name": path, **arguments}).encode())
            if data is not None:
                _send(connection, data)
            return _receive_result(connection)

    def start_file(self, path: str) -> None:
        """Start to write a file on the other node. Until `finish_file` or `abort_file`, only blocks of this file may be sent.

        Args:
            path: path of the file on the other node.
        """
        with self._connect() as connection:
            _send(connection, json.dumps({"call": "create", "name": path}).encode())

    def send_block(self, data: memoryview) -> None:
        """Send the next bytes of the file that is being written."""
        with self._connect() as connection:
            _send(connection, data)

    def finish_file(self) -> None:
        """End the file that is being written, and wait until the other node has stored it completely."""
        with self._connect() as connection:
            _send(connection, b"")
            _receive_result(connection)

    def abort_file(self) -> None:
        """Cancel the file that is being written, and wait until the other node has removed it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.settimeout(_CONNECT_TIMEOUT_S)
                self._socket.shutdown(socket.SHUT_WR)
                self._socket.recv(1)  # the node closes the connection after it has removed the file
        self.close()

    def close(self) -> None:
        """Close the connection, even if another thread is waiting for an answer."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @contextmanager
    def _connect(self) -> Iterator[socket.socket]:
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
    """`FileReader` of a file in the memory of another node. Each read is a request over a `NodeLink`."""

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
    """`FileWriter` of a local file that also writes copies of the file on other nodes.

    If a node becomes unreachable, the writer continues without the copy on that node.

    Args:
        local_writer: writer of the local file.
        links: links to the nodes that receive copies.
        path: path of the copies on these nodes.
    """

    def __init__(self, local_writer: FileWriter, links: Sequence[NodeLink], path: str) -> None:
        self._local_writer, self._links = local_writer, [*links]
        self._call_for_each_link(lambda link: link.start_file(path))

    def write_partial(self, data: memoryview) -> int:
        num_written = self._local_writer.write_partial(data[:CHUNK_BYTES])
        self._local_writer.num_bytes += num_written
        self._call_for_each_link(lambda link: link.send_block(data[:num_written]))
        return num_written

    def sync(self) -> None:
        self._local_writer.sync()

    def finish(self) -> None:
        """Complete the copies of the file on the other nodes."""
        self._call_for_each_link(NodeLink.finish_file)

    def abort(self) -> None:
        """Cancel the copies of the file on the other nodes, and remove the incomplete files there."""
        self._call_for_each_link(NodeLink.abort_file)

    def _call_for_each_link(self, action: Callable[[NodeLink], None]) -> None:
        for link in [*self._links]:
            try:
                action(link)
            except OSError as error:
                self._links.remove(link)
                _log.warning("a copy of the state is missing: %s", error)


class _RemoteError(Exception):
    """The storage of the other node has raised an error. The connection to that node still works."""

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
        raise ValueError(
            f"a message from another node has {length:,} bytes, but at most {max_bytes:,} are allowed: the message is damaged, or "
            "another program sent it. Restart the job"
        )
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data, total = bytearray(length), 0
    while total < length:
        num_received = connection.recv_into(memoryview(data)[total:])
        if not num_received:
            raise ConnectionResetError(
                "the other node closed the connection, perhaps because the process there has ended. Read the output of that node"
            )
        total += num_received
    return bytes(data)
