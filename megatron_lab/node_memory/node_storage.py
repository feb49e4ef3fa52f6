"""Storage for checkpoints in the memory of all nodes. The module does not import torch.

The files that a rank writes are on its own node, with copies on other nodes, and every rank sees the files of all nodes.

The folder of a node is in memory (/dev/shm) and belongs to its keeper process (`keeper.py`)::

    <folder>/nodes.json     nodes of the job, written when its ranks were last started
    <folder>/state/         files on this node, named as in a save folder

A checkpoint is complete as long as each of its files is on a node that responds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.local_storage import LocalDraft, LocalStorage
from megatron.checkpoint.storage import Draft, FileReader, FileWriter, Storage
from megatron.checkpoint.storage_url import NODE_MEMORY_URL
from megatron.config.regular_file import parse_json
from megatron_lab.node_memory.node_link import NodeLink, NodeUnreachableError, RemoteFileReader, ReplicatedFileWriter

FOLDER_VARIABLE = "MEGATRON_KEEPER_FOLDER"
STATE_FOLDER, NODES_FILE = "state", "nodes.json"


@dataclass(frozen=True)
class Nodes:
    """Addresses of all nodes of a job, the index of this node, and how many other nodes get a copy of each file."""

    addresses: list[tuple[str, int]]
    """Host and port of the server of checkpoint files on each node. Empty in a job with one node."""
    index: int
    """Index of this node in `addresses`."""
    copies: int
    """Number of other nodes that receive a copy of each file of this node. These are the next nodes by index; after the last
    node comes the first."""
    token: str

    @staticmethod
    def read(folder: Path) -> Nodes:
        """Read the nodes of a job from the file `nodes.json` of a folder."""
        content = parse_json((folder / NODES_FILE).read_text())
        return Nodes(**{**content, "addresses": [(host, port) for host, port in content["addresses"]]})

    def write(self, folder: Path) -> None:
        """Write the nodes of a job to the file `nodes.json` of a folder."""
        LocalStorage(folder).write(NODES_FILE, json.dumps(dataclasses.asdict(self)).encode())


class NodeStorage(Storage):
    """`Storage` for checkpoints in the memory of all nodes of a job. Files are written on this node and copied to others, and read
    from any node.

    Args:
        folder: folder of this node in memory.
        subfolder: folder that this storage represents, as a path relative to `folder`/state.
        nodes: nodes of the job; by default read from `folder`.
        links: links to the other nodes by node index. The first `nodes.copies` links lead to the nodes that receive copies of this
            node's files.
    """

    local = None

    def __init__(
        self, folder: Path, subfolder: str = "", nodes: Nodes | None = None, links: Mapping[int, NodeLink] | None = None
    ) -> None:
        self.nodes = nodes = nodes or Nodes.read(folder)
        if links is None:
            count = len(nodes.addresses)
            indices = [(nodes.index + distance) % count for distance in range(1, count)]
            links = {index: NodeLink(nodes.addresses[index], nodes.token) for index in indices}
        self._folder, self._subfolder, self._links_by_index = folder, subfolder, links
        self._links, self._replica_links = [*links.values()], [*links.values()][: nodes.copies]
        self._local_storage = LocalStorage(folder / STATE_FOLDER / subfolder)
        self.location = self.get_location("")

    @staticmethod
    def from_url(url: str) -> NodeStorage:
        """Return the storage for a folder in node memory, given by its URL (as returned by `get_location`)."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None or not (url + "/").startswith(NODE_MEMORY_URL + "/"):
            raise ValueError(
                f"{url} cannot be read: this run was started without --memory-save-interval, which keeps checkpoints in node "
                "memory. Set this flag, or load a checkpoint from disk"
            )
        return NodeStorage(Path(folder), url.removeprefix(NODE_MEMORY_URL).strip("/"))

    def get_location(self, name: str) -> str:
        return posixpath.join(NODE_MEMORY_URL, self._subfolder, name).rstrip("/")

    def get_child(self, name: str) -> NodeStorage:
        return NodeStorage(self._folder, posixpath.join(self._subfolder, name), self.nodes, self._links_by_index)

    def get_file_size(self, name: str) -> int | None:
        local_size = self._local_storage.get_file_size(name)
        return local_size if local_size is not None else next((size for _, size in self._iter_remote_sizes(name)), None)

    def list_names(self, folder: str = "") -> list[str]:
        all_names = set(self._local_storage.list_names(folder))
        for names in self._call_all("list_names", folder):
            all_names.update(names)
        return sorted(all_names)

    def read(self, name: str) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._local_storage.read(name)
        for link in self._links:
            with contextlib.suppress(FileNotFoundError, NodeUnreachableError):
                return bytes(link.call("read", self._get_path(name)))
        raise FileNotFoundError(
            f"no node that responds has the file {self.get_location(name)}. Start all nodes of the earlier launch, or load a "
            "checkpoint from disk"
        )

    def open(self, name: str) -> contextlib.AbstractContextManager[FileReader]:
        if self._local_storage.get_file_size(name) is not None:
            return self._local_storage.open(name)
        for link, size in self._iter_remote_sizes(name):
            # Threads read files concurrently, each over its own connection.
            link_copy = NodeLink(link.address, link.token)
            return contextlib.closing(RemoteFileReader(link_copy, self._get_path(name), size))
        raise FileNotFoundError(
            f"no node that responds has the file {self.get_location(name)}. Start all nodes of the earlier launch, or load a "
            "checkpoint from disk"
        )

    def create_folder(self) -> None:
        self._local_storage.create_folder()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[FileWriter]:
        with self._local_storage.create(name) as local_writer:
            file = ReplicatedFileWriter(local_writer, self._replica_links, self._get_path(name))
            try:
                yield file
            except BaseException:
                file.abort()
                raise
        file.finish()

    def write(self, name: str, data: bytes) -> None:
        self._local_storage.create_folder()
        self._local_storage.write(name, data)
        for link in self._replica_links:
            with contextlib.suppress(NodeUnreachableError):
                link.call("write", self._get_path(name), data)

    def remove(self, name: str) -> None:
        self._local_storage.remove(name)
        self._call_all("remove", name)

    def draft(self, name: str, token: str) -> NodeDraft:
        return NodeDraft(self, name, f".{name}.{token}.saving")

    def remove_checkpoint(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._local_storage.remove_checkpoint(name)
        self._call_all("remove_checkpoint", name)

    def remove_unfinished(self, active_token: str) -> None:
        self._local_storage.remove_unfinished(active_token)
        for link in self._links:
            with contextlib.suppress(NodeUnreachableError):
                link.call("remove_unfinished", active_token)

    def find_first_holder(self, name: str) -> int | None:
        """Return the lowest index of a reachable node that has a file; None if no reachable node has it.

        Args:
            name: name of the file.
        """
        local_indices = [] if self._local_storage.get_file_size(name) is None else [self.nodes.index]
        holders = {link for link, _ in self._iter_remote_sizes(name)}
        return min([*local_indices, *(index for index, link in self._links_by_index.items() if link in holders)], default=None)

    def publish_draft(self, draft: str, name: str) -> None:
        """Complete a checkpoint: rename its folder on every node. This node, which has the manifest, renames its folder last.

        Args:
            draft: name of the folder of the unfinished checkpoint.
            name: final name.
        """
        self._call_all("publish", draft, of=self._get_path(name))
        LocalDraft(self._local_storage.local / name, self._local_storage.local / draft).publish({})

    def _get_path(self, name: str) -> str:
        return posixpath.join(self._subfolder, name)

    def _call_all(self, call: str, name: str, **arguments: Any) -> list[Any]:
        """Call a storage method on all other nodes. Return the results of the nodes that respond.

        Args:
            call: name of the method.
            name: file or folder, the first argument of the method.
            arguments: further arguments of the method.
        """
        results = []
        for link in self._links:
            with contextlib.suppress(NodeUnreachableError):
                results.append(link.call(call, self._get_path(name), **arguments))
        return results

    def _iter_remote_sizes(self, name: str) -> Iterator[tuple[NodeLink, int]]:
        """Yield the link to each other node that has the file `name`, with the size of the file in bytes."""
        for link in self._links:
            with contextlib.suppress(NodeUnreachableError):
                if (size := link.call("get_file_size", self._get_path(name))) is not None:
                    yield link, size


class NodeDraft(Draft):
    """Unfinished checkpoint (`Draft`) whose files are in the memory of all nodes."""

    def __init__(self, parent: NodeStorage, name: str, folder: str) -> None:
        self._parent, self._name, self._folder = parent, name, folder
        self.storage = parent.get_child(folder)

    def get_file_name(self, name: str) -> str:
        return name

    def create_folder(self) -> None:
        self.discard()
        self.ensure_folder()

    def ensure_folder(self) -> None:
        self.storage.create_folder()

    def publish(self, small_files: Mapping[str, bytes]) -> None:
        for name, data in small_files.items():
            self.storage.write(name, data)
        self._parent.publish_draft(self._folder, self._name)

    def discard(self) -> None:
        self._parent.remove(self._folder)
