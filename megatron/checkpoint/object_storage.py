"""Checkpoints in an object store, or any other file system, through fsspec: s3://, gs://, memory:// and so on.

Such a store renames nothing, and what is written there is on the disk when the write returns. So files are written under the name
of the checkpoint, and the manifest comes last: without a manifest there is no checkpoint::

    <save>/iter_0000100/rank_00000-<token>.safetensors      the token is that of the run that wrote it
    <save>/iter_0000100/{config,state,manifest}.json
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.checkpoint.errors import TruncatedError
from megatron.checkpoint.storage import CONFIG, MANIFEST, STATE, Draft, Reading, Storage, Writing

BLOCK_BYTES = 64 << 20
"""Size of the parts of an upload; stores allow some ten thousand parts to a file."""
RANGE_BYTES = 16 << 20
RANGES_AT_ONCE = 8
"""Large reads are cut into ranges; this many are read at once where the store can do that."""


@contextlib.contextmanager
def told(place: str) -> Iterator[None]:
    """Turn the errors of every store into `OSError` that names the place; a missing file stays `FileNotFoundError`."""
    try:
        yield
    except OSError as error:
        if place in str(error):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) else OSError
        raise kind(f"{place}: {error.strerror or error or type(error).__name__}") from error
    except Exception as error:
        raise OSError(f"{place}: {type(error).__name__}: {error}") from error  # every store has errors of its own


class ObjectFile(Reading):
    """A `Reading` of a file in an object store.

    Args:
        files: fsspec's file system.
        path: path of the file in it.
        url: the file's URL, for messages.
        size: bytes in it.
    """

    def __init__(self, files: Any, path: str, url: str, size: int) -> None:
        self._files, self._path, self._url, self.size = files, path, url, size

    def read_into(self, start: int, buffer: memoryview) -> None:
        ranges = [(at, min(at + RANGE_BYTES, len(buffer))) for at in range(0, len(buffer), RANGE_BYTES)]
        for first in range(0, len(ranges), RANGES_AT_ONCE):
            chosen = ranges[first : first + RANGES_AT_ONCE]
            with told(self._url):
                starts, stops = ([start + at for at in places] for places in zip(*chosen, strict=True))
                found = self._files.cat_ranges([self._path] * len(chosen), starts, stops, on_error="raise")
            for (begin, end), data in zip(chosen, found, strict=True):
                if len(data) != end - begin:
                    missing = start + begin + len(data)
                    raise TruncatedError(f"{self._url} has no byte {missing}: it was truncated")
                buffer[begin:end] = data


class ObjectWriting(Writing):
    """A `Writing` of a file in an object store.

    Args:
        file: fsspec's file, open for writing.
        url: the file's URL, for messages.
    """

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def write_some(self, data: memoryview) -> int:
        with told(self._url):
            return self._file.write(data[:BLOCK_BYTES])

    def sync(self) -> None:
        pass


_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"}
"""Stores in which folders need not be made; asked to, some make a missing bucket, perhaps of a misspelt name."""
_CHECKPOINT = re.compile(r"iter_\d{7,}")
_LEFT_FILE = re.compile(rf"rank_.*-[0-9a-f]+\..+|{re.escape(CONFIG)}|{re.escape(STATE)}")


class ObjectStorage(Storage):
    """A `Storage` at a URL.

    Args:
        url: as the user gave it.
        files: its file system of fsspec.
        root: the folder's path in that.
    """

    def __init__(self, url: str, files: Any, root: str) -> None:
        self.location, self._files, self._root = url, files, root
        self.local = None

    def at(self, name: str) -> str:
        return posixpath.join(self.location, name) if name else self.location

    def child(self, name: str) -> ObjectStorage:
        return ObjectStorage(self.at(name), self._files, self._path(name))

    def size(self, name: str) -> int | None:
        with told(self.at(name)), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            info = self._fresh(name).info(self._path(name))
            if info["type"] == "file":
                return int(info["size"])
        return None

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder)
        with told(self.at(folder)), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = self._fresh(folder).ls(path, detail=False)
            # Some stores list the folder itself, or a file under its own name.
            return sorted(posixpath.basename(entry.rstrip("/")) for entry in found if entry.strip("/") != path.strip("/"))
        return []

    def read(self, name: str) -> bytes:
        with told(self.at(name)):
            return self._files.cat_file(self._path(name))

    def open(self, name: str) -> contextlib.AbstractContextManager[ObjectFile]:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.at(name)} is not there")
        return contextlib.nullcontext(ObjectFile(self._files, self._path(name), self.at(name), size))

    def make(self) -> None:
        """Make the folder, where the store has such a thing."""
        protocol = self._files.protocol
        if _WITHOUT_FOLDERS.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            with told(self.at("")):
                self._files.makedirs(self._root, exist_ok=True)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[ObjectWriting]:
        place, path = self.at(name), self._path(name)
        with told(place):
            file = self._files.open(path, "wb", block_size=BLOCK_BYTES)
        try:
            yield ObjectWriting(file, place)
            with told(place):
                file.close()
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            try:
                file.closed = True  # else the upload would be finished when the object goes
            except AttributeError:
                file.close()
            with contextlib.suppress(Exception):
                self._files.rm_file(path)
            raise

    def write(self, name: str, data: bytes) -> None:
        with told(self.at(name)):
            self._files.pipe_file(self._path(name), data)

    def remove(self, name: str) -> None:
        with told(self.at(name)), contextlib.suppress(FileNotFoundError):
            self._fresh(name).rm(self._path(name), recursive=True)

    def draft(self, name: str, token: str) -> ObjectDraft:
        return ObjectDraft(self.child(name), token)

    def retire(self, name: str) -> None:
        """Remove the manifest of a checkpoint, then the rest."""
        if not self.names(name):
            raise FileNotFoundError(f"{self.at(name)} is not there")
        self.child(name).remove(MANIFEST)
        self.remove(name)

    def sweep(self, keep: str) -> None:
        """Remove checkpoints without a manifest."""
        for name in filter(_CHECKPOINT.fullmatch, self.names()):
            found = self.names(name)
            if all(_is_left(file) and not _written_by(file, keep) for file in found):
                with contextlib.suppress(OSError):
                    self.remove(name)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root

    def _fresh(self, name: str) -> Any:
        """The file system, without its cached listing of a folder: other processes write there too."""
        self._files.invalidate_cache(self._path(name))
        self._files.invalidate_cache(posixpath.dirname(self._path(name)))
        return self._files


class ObjectDraft(Draft):
    """A `Draft` at the final place."""

    def __init__(self, final: ObjectStorage, token: str) -> None:
        self.storage, self._token = final, token

    def file_name(self, name: str) -> str:
        """The name with the token before its extensions."""
        stem, dot, extensions = name.partition(".")
        return f"{stem}-{self._token}{dot}{extensions}"

    def make(self) -> None:
        """Make the folder, without files of this token."""
        self.storage.make()
        self._remove_files(lambda name: _written_by(name, self._token))

    def join(self) -> None:
        """Make the folder."""
        self.storage.make()

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write the last files, the manifest at the end."""
        # They replace those of an older checkpoint, which is incomplete from here on.
        self.storage.remove(MANIFEST)
        for name, data in files.items():
            self.storage.write(name, data)
        with contextlib.suppress(OSError):
            self._remove_files(lambda name: name not in files and _is_left(name) and not _written_by(name, self._token))

    def abandon(self) -> None:
        """Remove the files of this token, and the folder if they were all."""
        with contextlib.suppress(OSError):
            self._remove_files(lambda name: _written_by(name, self._token))
            if not self.storage.names():
                self.storage.remove("")

    def _remove_files(self, chosen: Callable[[str], bool]) -> None:
        for name in self.storage.names():
            if chosen(name):
                self.storage.remove(name)


def _is_left(name: str) -> bool:
    """Whether a killed save may have left this file; a file of another program is not touched."""
    return _LEFT_FILE.fullmatch(name) is not None


def _written_by(name: str, token: str) -> bool:
    return name.partition(".")[0].endswith(f"-{token}")
