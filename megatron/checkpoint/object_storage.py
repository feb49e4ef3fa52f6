"""Storage in an object store, or in another file system that fsspec knows: s3://, gs://, memory:// and so on.

An object store cannot rename files, and a file is on the disk when its write returns. Therefore a save writes its files directly
into the final folder of the checkpoint, and the manifest last. A folder without a manifest is not a checkpoint::

    <save>/iter_0000100/rank_00000-<token>.safetensors      with the token of the run that wrote the file
    <save>/iter_0000100/{config,state,manifest}.json
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.checkpoint.errors import TruncatedError
from megatron.checkpoint.storage import CONFIG, MANIFEST, STATE, Draft, FileReader, FileWriter, Storage

BLOCK_BYTES = 64 << 20
"""Size of the blocks of a multipart upload, in bytes. Object stores allow about ten thousand blocks per file."""
RANGE_BYTES = 16 << 20
CONCURRENT_RANGES = 8
"""Number of ranges of `RANGE_BYTES` bytes that a large read requests concurrently, if the store supports concurrent requests."""


@contextlib.contextmanager
def _convert_errors(location: str) -> Iterator[None]:
    """Within the context, convert every error to one that names the location: `FileNotFoundError` if a file is missing, otherwise
    `OSError`."""
    try:
        yield
    except OSError as error:
        if location in str(error):
            raise
        error_type = FileNotFoundError if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) else OSError
        raise error_type(f"{location}: {error.strerror or error or type(error).__name__}") from error
    except Exception as error:
        raise OSError(f"{location}: {type(error).__name__}: {error}") from error  # every store has its own error types


class ObjectFileReader(FileReader):
    """`FileReader` of a file in an object store.

    Args:
        filesystem: fsspec file system.
        path: path of the file in the file system.
        url: URL of the file, for error messages.
        size: size of the file in bytes.
    """

    def __init__(self, filesystem: Any, path: str, url: str, size: int) -> None:
        self._filesystem, self._path, self._url, self.size = filesystem, path, url, size

    def read_into(self, start: int, buffer: memoryview) -> None:
        ranges = [(offset, min(offset + RANGE_BYTES, len(buffer))) for offset in range(0, len(buffer), RANGE_BYTES)]
        for first in range(0, len(ranges), CONCURRENT_RANGES):
            batch = ranges[first : first + CONCURRENT_RANGES]
            with _convert_errors(self._url):
                starts, ends = ([start + at for at in offsets] for offsets in zip(*batch, strict=True))
                contents = self._filesystem.cat_ranges([self._path] * len(batch), starts, ends, on_error="raise")
            for (range_start, range_end), data in zip(batch, contents, strict=True):
                if len(data) != range_end - range_start:
                    missing_byte = start + range_start + len(data)
                    raise TruncatedError(f"{self._url} ends before byte {missing_byte}: it was truncated; copy the file again")
                buffer[range_start:range_end] = data


class ObjectFileWriter(FileWriter):
    """`FileWriter` of a file in an object store.

    Args:
        file: fsspec file, open for writing.
        url: URL of the file, for error messages.
    """

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def write_partial(self, data: memoryview) -> int:
        with _convert_errors(self._url):
            return self._file.write(data[:BLOCK_BYTES])

    def sync(self) -> None:
        pass


_PROTOCOLS_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"}
"""Protocols of stores in which folders need not be created. If asked to create one, some would create a missing bucket, for example
of a misspelt name."""
_CHECKPOINT = re.compile(r"iter_\d{7,}")
_CHECKPOINT_FILE = re.compile(rf"rank_.*-[0-9a-f]+\..+|{re.escape(CONFIG)}|{re.escape(STATE)}")


class ObjectStorage(Storage):
    """`Storage` in a folder of an object store, given by a URL.

    Args:
        url: URL of the folder, as the user wrote it.
        filesystem: fsspec file system of the URL.
        root: path of the folder in the file system.
    """

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.location, self._filesystem, self._root = url, filesystem, root
        self.local = None

    def get_location(self, name: str) -> str:
        return posixpath.join(self.location, name) if name else self.location

    def get_child(self, name: str) -> ObjectStorage:
        return ObjectStorage(self.get_location(name), self._filesystem, self._get_path(name))

    def get_file_size(self, name: str) -> int | None:
        with _convert_errors(self.get_location(name)), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            info = self._get_uncached_filesystem(name).info(self._get_path(name))
            if info["type"] == "file":
                return int(info["size"])
        return None

    def list_names(self, folder: str = "") -> list[str]:
        path = self._get_path(folder)
        with _convert_errors(self.get_location(folder)), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            entries = self._get_uncached_filesystem(folder).ls(path, detail=False)
            # Some stores list the folder itself, or, for a file, the file.
            return sorted(posixpath.basename(entry.rstrip("/")) for entry in entries if entry.strip("/") != path.strip("/"))
        return []

    def read(self, name: str) -> bytes:
        with _convert_errors(self.get_location(name)):
            return self._filesystem.cat_file(self._get_path(name))

    def open(self, name: str) -> contextlib.AbstractContextManager[ObjectFileReader]:
        size = self.get_file_size(name)
        if size is None:
            raise FileNotFoundError(f"the file {self.get_location(name)} does not exist: check the path, or copy the file again")
        return contextlib.nullcontext(ObjectFileReader(self._filesystem, self._get_path(name), self.get_location(name), size))

    def create_folder(self) -> None:
        """Create the folder. Does nothing in an object store that has no folders, such as S3."""
        protocol = self._filesystem.protocol
        if _PROTOCOLS_WITHOUT_FOLDERS.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            with _convert_errors(self.get_location("")):
                self._filesystem.makedirs(self._root, exist_ok=True)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[ObjectFileWriter]:
        location, path = self.get_location(name), self._get_path(name)
        with _convert_errors(location):
            file = self._filesystem.open(path, "wb", block_size=BLOCK_BYTES)
        try:
            yield ObjectFileWriter(file, location)
            with _convert_errors(location):
                file.close()
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            try:
                file.closed = True  # otherwise the destructor of the file would complete the upload
            except AttributeError:
                file.close()
            with contextlib.suppress(Exception):
                self._filesystem.rm_file(path)
            raise

    def write(self, name: str, data: bytes) -> None:
        with _convert_errors(self.get_location(name)):
            self._filesystem.pipe_file(self._get_path(name), data)

    def remove(self, name: str) -> None:
        with _convert_errors(self.get_location(name)), contextlib.suppress(FileNotFoundError):
            self._get_uncached_filesystem(name).rm(self._get_path(name), recursive=True)

    def draft(self, name: str, token: str) -> ObjectDraft:
        return ObjectDraft(self.get_child(name), token)

    def remove_checkpoint(self, name: str) -> None:
        """Remove a checkpoint: first its manifest, so that the checkpoint counts as incomplete, then the other files."""
        if not self.list_names(name):
            raise FileNotFoundError(
                f"the checkpoint {self.get_location(name)} does not exist, so it cannot be removed: check the path"
            )
        self.get_child(name).remove(MANIFEST)
        self.remove(name)

    def remove_unfinished(self, active_token: str) -> None:
        """Remove the folders of incomplete checkpoints (without a manifest), which interrupted saves and removals have left.

        A folder is not touched if it has files of other programs, or files of the active run.

        Args:
            active_token: hexadecimal digits that identify the active run; its file names contain them.
        """
        for name in filter(_CHECKPOINT.fullmatch, self.list_names()):
            file_names = self.list_names(name)
            if all(_is_checkpoint_file(file) and not _has_token(file, active_token) for file in file_names):
                with contextlib.suppress(OSError):
                    self.remove(name)

    def _get_path(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root

    def _get_uncached_filesystem(self, name: str) -> Any:
        """Return the file system without its cached listing of the folder of `name`. Other processes write there too, so the cache
        may be out of date."""
        self._filesystem.invalidate_cache(self._get_path(name))
        self._filesystem.invalidate_cache(posixpath.dirname(self._get_path(name)))
        return self._filesystem


class ObjectDraft(Draft):
    """`Draft` whose files are written directly into the checkpoint's final folder. Their names contain the token of the run
    (hexadecimal digits that identify it), which distinguishes them from other files in the folder."""

    def __init__(self, final: ObjectStorage, token: str) -> None:
        self.storage, self._token = final, token

    def get_file_name(self, name: str) -> str:
        """Return the file name with the token of the run inserted before its extensions. The token (hexadecimal digits) identifies
        the run, so that runs that write the same checkpoint do not overwrite each other's files."""
        stem, dot, extensions = name.partition(".")
        return f"{stem}-{self._token}{dot}{extensions}"

    def create_folder(self) -> None:
        """Create the checkpoint's folder, and remove files that an earlier attempt of this run has left there."""
        self.storage.create_folder()
        self._remove_matching(lambda name: _has_token(name, self._token))

    def ensure_folder(self) -> None:
        """Create the checkpoint's folder if it does not exist. Does nothing in an object store that has no folders."""
        self.storage.create_folder()

    def publish(self, small_files: Mapping[str, bytes]) -> None:
        """Write the files whose names do not contain the token of the run (`config.json` and so on), the manifest last. Then remove
        the checkpoint files with other tokens, which other runs have left in the folder. The new manifest does not list them."""
        # The new files replace those of an older checkpoint, which is incomplete from here on.
        self.storage.remove(MANIFEST)
        for name, data in small_files.items():
            self.storage.write(name, data)
        with contextlib.suppress(OSError):
            self._remove_matching(
                lambda name: name not in small_files and _is_checkpoint_file(name) and not _has_token(name, self._token)
            )

    def discard(self) -> None:
        """Remove the files of this unfinished checkpoint, and its folder if no other files are left."""
        with contextlib.suppress(OSError):
            self._remove_matching(lambda name: _has_token(name, self._token))
            if not self.storage.list_names():
                self.storage.remove("")

    def _remove_matching(self, should_remove: Callable[[str], bool]) -> None:
        for name in self.storage.list_names():
            if should_remove(name):
                self.storage.remove(name)


def _is_checkpoint_file(name: str) -> bool:
    """Return whether a file name is one that saves of this program use. Files with other names are left alone."""
    return _CHECKPOINT_FILE.fullmatch(name) is not None


def _has_token(name: str, token: str) -> bool:
    return name.partition(".")[0].endswith(f"-{token}")
