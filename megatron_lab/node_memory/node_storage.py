"""Storage in the memory of all nodes. The module does not import torch.

The files that a rank writes are on its own node, with copies on other nodes, and every rank sees the files of all nodes.

The folder of a node is in memory (/dev/shm) and belongs to its keeper (`keeper.py`)::

    <folder>/nodes.json     nodes of the job, written at its last start
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
from megatron_lab.node_memory.node_link import NodeLink, NodeUnreachableError, RemoteFileReader, ReplicatedFileWriter

FOLDER_VARIABLE = "MEGATRON_KEEPER_FOLDER"
STATE_FOLDER, NODES_FILE = "state", "nodes.json"


@dataclass(frozen=True)
class Nodes:
    """Addresses of all nodes of a job, the index of this node, and the number of copies of each file."""

    addresses: list[tuple[str, int]]
    """Host and port of every node's keeper. Empty in a job with one node."""
    index: int
    """Index of this node in `addresses`."""
    copies: int
    """Number of other nodes that receive a copy of each file: those with the next indices after this node, in a ring."""
    token: str

    @staticmethod
    def read(folder: Path) -> Nodes:
        """Read the `Nodes` of a job from a keeper's folder."""
        content = json.loads((folder / NODES_FILE).read_text())
        return Nodes(**{**content, "addresses": [(host, port) for host, port in content["addresses"]]})

    def write(self, folder: Path) -> None:
        """Write the `Nodes` of a job to a keeper's folder."""
        LocalStorage(folder).write(NODES_FILE, json.dumps(dataclasses.asdict(self)).encode())


class NodeStorage(Storage):
    """`Storage` in the memory of all nodes of a job: files are written on this node and copied to others, and read from any node.

    Args:
        folder: keeper's folder of this node.
        subfolder: path of the storage's folder, relative to the state folder.
        nodes: nodes of the job, by default read from `folder`.
        links: links to the other nodes by their indices. The first `nodes.copies` of them receive copies of this node's files.
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
        self.location = self.location_of("")

    @staticmethod
    def from_url(url: str) -> NodeStorage:
        """Return the storage of the folder with a URL that `location_of` has returned."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None or not (url + "/").startswith(NODE_MEMORY_URL + "/"):
            raise ValueError(f"{url}: this run keeps no state in the memory of its nodes (--memory-save-interval)")
        return NodeStorage(Path(folder), url.removeprefix(NODE_MEMORY_URL).strip("/"))

    def location_of(self, name: str) -> str:
        return posixpath.join(NODE_MEMORY_URL, self._subfolder, name).rstrip("/")

    def child(self, name: str) -> NodeStorage:
        return NodeStorage(self._folder, posixpath.join(self._subfolder, name), self.nodes, self._links_by_index)

    def file_size(self, name: str) -> int | None:
        local_size = self._local_storage.file_size(name)
        return local_size if local_size is not None else next((size for _, size in self._remote_sizes(name)), None)

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
                return bytes(link.call("read", self._path(name)))
        raise FileNotFoundError(f"{self.location_of(name)} is on no node that responds")

    def open(self, name: str) -> contextlib.AbstractContextManager[FileReader]:
        if self._local_storage.file_size(name) is not None:
            return self._local_storage.open(name)
        for link, size in self._remote_sizes(name):
            # Threads read files concurrently, each over its own connection.
            link_copy = NodeLink(link.address, link.token)
            return contextlib.closing(RemoteFileReader(link_copy, self._path(name), size))
        raise FileNotFoundError(f"{self.location_of(name)} is on no node that responds")

    def create_folder(self) -> None:
        self._local_storage.create_folder()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[FileWriter]:
        with self._local_storage.create(name) as local_writer:
            file = ReplicatedFileWriter(local_writer, self._replica_links, self._path(name))
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
                link.call("write", self._path(name), data)

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

    def first_holder(self, name: str) -> int | None:
        """Return the lowest index of the reachable nodes that have a file. Returns None if no reachable node has it."""
        local_indices = [] if self._local_storage.file_size(name) is None else [self.nodes.index]
        holders = {link for link, _ in self._remote_sizes(name)}
        return min([*local_indices, *(index for index, link in self._links_by_index.items() if link in holders)], default=None)

    def publish_draft(self, draft: str, name: str) -> None:
        """Rename the folder of a draft (unfinished checkpoint) to its final name on every node. This node, which has the manifest,
        renames its folder last."""
        self._call_all("publish", draft, of=self._path(name))
        LocalDraft(self._local_storage.local / name, self._local_storage.local / draft).publish({})

    def _path(self, name: str) -> str:
        return posixpath.join(self._subfolder, name)

    def _call_all(self, call: str, name: str, **arguments: Any) -> list[Any]:
        """Call a storage method on all other nodes, and return the results of the nodes that respond."""
        results = []
        for link in self._links:
            with contextlib.suppress(NodeUnreachableError):
                results.append(link.call(call, self._path(name), **arguments))
        return results

    def _remote_sizes(self, name: str) -> Iterator[tuple[NodeLink, int]]:
        """Yield (link, size of the file in bytes) for each other node that has the file `name`."""
        for link in self._links:
            with contextlib.suppress(NodeUnreachableError):
                if (size := link.call("file_size", self._path(name))) is not None:
                    yield link, size


class NodeDraft(Draft):
    """`Draft` (unfinished checkpoint) whose files are in the memory of all nodes."""

    def __init__(self, parent: NodeStorage, name: str, folder: str) -> None:
        self._parent, self._name, self._folder = parent, name, folder
        self.storage = parent.child(folder)

    def file_name(self, name: str) -> str:
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
