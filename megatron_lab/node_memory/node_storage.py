"""Checkpoints in the memory of the nodes: the files that a rank writes lie on its own node, with copies on others, and every rank
sees all of them. Needs no torch.

A node's folder lies in memory (/dev/shm) and belongs to its keeper (`keeper.py`)::

    <folder>/nodes.json     the nodes of the job, as its last start found them
    <folder>/state/         what the node holds; names as in a save folder

A checkpoint is whole as long as each of its files is on a node that answers.
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
from megatron.checkpoint.storage import Draft, Reading, Storage, Writing
from megatron.checkpoint.storage_kinds import LOCATION
from megatron_lab.node_memory.node_link import CopiedWriting, NodeLink, NodeLost, RemoteFile

FOLDER_VARIABLE = "MEGATRON_KEEPER_FOLDER"
STATE_FOLDER, NODES = "state", "nodes.json"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, as one of them sees them."""

    addresses: list[tuple[str, int]]
    """Host and port of every node's keeper; empty in a job of one node."""
    index: int
    """This node's place among them."""
    copies: int
    """Number of other nodes that get what a rank writes: those behind its own, in a ring."""
    token: str

    @staticmethod
    def read(folder: Path) -> Nodes:
        """The nodes that a keeper's folder names."""
        content = json.loads((folder / NODES).read_text())
        return Nodes(**{**content, "addresses": [(host, port) for host, port in content["addresses"]]})

    def write(self, folder: Path) -> None:
        """Put them into a keeper's folder."""
        LocalStorage(folder).write(NODES, json.dumps(dataclasses.asdict(self)).encode())


class NodeStorage(Storage):
    """A `Storage` in the memory of all nodes.

    Args:
        folder: this node's.
        within: the folder in it that this is.
        nodes: those of the job, by default as the folder names them.
        links: to the other nodes by their places, in the order in which they get copies of this one's files.
    """

    local = None

    def __init__(
        self, folder: Path, within: str = "", nodes: Nodes | None = None, links: Mapping[int, NodeLink] | None = None
    ) -> None:
        self.nodes = nodes = nodes or Nodes.read(folder)
        if links is None:
            count = len(nodes.addresses)
            order = [(nodes.index + behind) % count for behind in range(1, count)]
            links = {place: NodeLink(nodes.addresses[place], nodes.token) for place in order}
        self._folder, self._within, self._links_by_place = folder, within, links
        self._links, self._copies = [*links.values()], [*links.values()][: nodes.copies]
        self._mine = LocalStorage(folder / STATE_FOLDER / within)
        self.location = self.at("")

    @staticmethod
    def at_url(url: str) -> NodeStorage:
        """The storage, or a folder in it, as `at` names it."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None or not (url + "/").startswith(LOCATION + "/"):
            raise ValueError(f"{url}: this run keeps no state in the memory of its nodes (--memory-save-interval)")
        return NodeStorage(Path(folder), url.removeprefix(LOCATION).strip("/"))

    def at(self, name: str) -> str:
        return posixpath.join(LOCATION, self._within, name).rstrip("/")

    def child(self, name: str) -> NodeStorage:
        return NodeStorage(self._folder, posixpath.join(self._within, name), self.nodes, self._links_by_place)

    def size(self, name: str) -> int | None:
        found = self._mine.size(name)
        return found if found is not None else next((size for _, size in self._sizes(name)), None)

    def names(self, folder: str = "") -> list[str]:
        found = set(self._mine.names(folder))
        for names in self._everywhere("names", folder):
            found.update(names)
        return sorted(found)

    def read(self, name: str) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._mine.read(name)
        for link in self._links:
            with contextlib.suppress(FileNotFoundError, NodeLost):
                return bytes(link.call("read", self._path(name)))
        raise FileNotFoundError(f"{self.at(name)} is on no node that answers")

    def open(self, name: str) -> contextlib.AbstractContextManager[Reading]:
        if self._mine.size(name) is not None:
            return self._mine.open(name)
        for link, size in self._sizes(name):
            # Threads read files at once, each over a connection of its own.
            own = NodeLink(link.address, link.token)
            return contextlib.closing(RemoteFile(own, self._path(name), size))
        raise FileNotFoundError(f"{self.at(name)} is on no node that answers")

    def make(self) -> None:
        self._mine.make()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Writing]:
        with self._mine.create(name) as mine:
            file = CopiedWriting(mine, self._copies, self._path(name))
            try:
                yield file
            except BaseException:
                file.abandon()
                raise
        file.end()

    def write(self, name: str, data: bytes) -> None:
        self._mine.make()
        self._mine.write(name, data)
        for link in self._copies:
            with contextlib.suppress(NodeLost):
                link.call("write", self._path(name), data)

    def remove(self, name: str) -> None:
        self._mine.remove(name)
        self._everywhere("remove", name)

    def draft(self, name: str, token: str) -> NodeDraft:
        return NodeDraft(self, name, f".{name}.{token}.saving")

    def retire(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._mine.retire(name)
        self._everywhere("retire", name)

    def sweep(self, keep: str) -> None:
        self._mine.sweep(keep)
        for link in self._links:
            with contextlib.suppress(NodeLost):
                link.call("sweep", keep)

    def first_holder(self, name: str) -> int | None:
        """The first node, of those that answer, that has a file; None if none has."""
        mine = [] if self._mine.size(name) is None else [self.nodes.index]
        holders = {link for link, _ in self._sizes(name)}
        return min([*mine, *(place for place, link in self._links_by_place.items() if link in holders)], default=None)

    def put_in_place(self, draft: str, name: str) -> None:
        """Give what lies in the folder of a draft its final name, on every node; on this one, which has the manifest, last."""
        self._everywhere("publish", draft, of=self._path(name))
        LocalDraft(self._mine.local / name, self._mine.local / draft).publish({})

    def _path(self, name: str) -> str:
        return posixpath.join(self._within, name)

    def _everywhere(self, call: str, name: str, **more: Any) -> list[Any]:
        """Call a method of all other nodes; returns the results of those that answer."""
        found = []
        for link in self._links:
            with contextlib.suppress(NodeLost):
                found.append(link.call(call, self._path(name), **more))
        return found

    def _sizes(self, name: str) -> Iterator[tuple[NodeLink, int]]:
        """The other nodes that hold a file."""
        for link in self._links:
            with contextlib.suppress(NodeLost):
                if (size := link.call("size", self._path(name))) is not None:
                    yield link, size


class NodeDraft(Draft):
    """A `Draft` that lies on all nodes."""

    def __init__(self, of: NodeStorage, name: str, folder: str) -> None:
        self._of, self._name, self._folder = of, name, folder
        self.storage = of.child(folder)

    def file_name(self, name: str) -> str:
        return name

    def make(self) -> None:
        self.abandon()
        self.join()

    def join(self) -> None:
        self.storage.make()

    def publish(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            self.storage.write(name, data)
        self._of.put_in_place(self._folder, self._name)

    def abandon(self) -> None:
        self._of.remove(self._folder)
