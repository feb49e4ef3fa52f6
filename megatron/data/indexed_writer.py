"""Writes the token files PREFIX.bin and PREFIX.idx, from documents or from whole datasets: complete under their final names, or not
at all. To join datasets, the .bin files are copied as they are, and the index is put together in blocks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import mmap
import os
import secrets
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.config.regular_file import open_regular
from megatron.data.indexed_dataset import COUNTS_OFFSET, HEADER, MAGIC, TOKEN_TYPES, VERSION, DatasetError, IndexedDataset, blocks
from megatron.data.samples import WRITTEN, permutation


def of_this_host() -> str:
    """What names of files that are being written on this machine have in them."""
    return f".partial-{socket.gethostname()}-"


def unfinished(suffix: str) -> str:
    """The name of a file that is being written. Nobody else uses the same one, or knows it before."""
    return f"{suffix}{of_this_host()}{secrets.token_hex(8)}"


def _header(dtype: np.dtype[Any], num_sequences: int, num_entries: int) -> bytes:
    code = next(code for code, known in TOKEN_TYPES.items() if np.dtype(known) == dtype.newbyteorder("="))
    return HEADER.pack(MAGIC, VERSION, code, num_sequences, num_entries)


@contextlib.contextmanager
def appearing(*paths: str, folder: str | None = None, sync: bool = True) -> Iterator[list[BinaryIO]]:
    """Files to be written: under temporary names; after the block under their own, or gone if it failed.

    Whenever we are interrupted, only the first may be new: no index lies beside a .bin of another dataset.

    Args:
        folder: where they lie until then, on the same disk; None: beside their places.
        sync: write all to the disk before they get their names, so that a loss of power leaves no empty files.
    """
    partial = [Path(unfinished(path if folder is None else f"{folder}/{os.path.basename(path)}")) for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = [stack.enter_context(path.open("x+b")) for path in partial]
            yield files
            for file in files:
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        for path in paths[1:]:
            Path(path).unlink(missing_ok=True)
        for temporary, path in zip(partial, paths, strict=True):
            temporary.replace(path)
    finally:
        for temporary in partial:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def write_dataset(prefix: str, dtype: DTypeLike, sync: bool = True, folder: str | None = None) -> Iterator[IndexedDatasetWriter]:
    """Write a dataset: the files have their final names after the block, or are gone if it failed.

    Args:
        prefix: Path without ``.bin`` and ``.idx``; its folder must exist.
        dtype: Type of the tokens, for example `token_dtype(vocab_size)`.
        sync: See `appearing`.
        folder: See `appearing`.
    """
    with appearing(f"{prefix}.bin", f"{prefix}.idx", folder=folder, sync=sync) as (tokens, index):
        writer = IndexedDatasetWriter(prefix, np.dtype(dtype).newbyteorder("<"), tokens, index)
        yield writer
        writer.finish()


class IndexedDatasetWriter:
    """Writes documents of one sequence each into two files. Memory use does not grow with what is written."""

    def __init__(self, prefix: str, dtype: np.dtype[Any], tokens: BinaryIO, index: BinaryIO) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.num_documents = self.num_tokens = 0
        self._tokens, self._index = tokens, index
        self._index.write(_header(self.dtype, 0, 0))  # the counts are filled in at the end

    def add_documents(self, tokens: ArrayLike, lengths: Sequence[int] | NDArray[np.integer] | None = None) -> None:
        """Append documents: all their tokens, one document after another, and the length of each; without lengths it is one.

        Raises:
            ValueError: a token does not fit the type of the file, or a document has 2**31 tokens or more.
        """
        array = np.asarray(tokens)
        counts = np.array([array.size] if lengths is None else lengths, dtype=np.int64)
        assert counts.sum() == array.size, f"{counts.sum()} tokens in the lengths, {array.size} given"
        if array.size and array.dtype != self.dtype:
            low, high, bounds = array.min(), array.max(), np.iinfo(self.dtype)
            if array.dtype.kind not in "iu" or low < bounds.min or high > bounds.max:
                raise ValueError(
                    f"tokens from {low} to {high} ({array.dtype}) do not fit into {self.dtype.name} of {self.prefix}.bin"
                )
        if counts.size and counts.max() >= 2**31:
            raise ValueError(f"a document of {counts.max():,} tokens is too long for {self.prefix}.idx (below 2**31 = {2**31:,})")
        self._tokens.write(array.astype(self.dtype, copy=False).tobytes())
        self._index.write(counts.astype("<i4").tobytes())
        self.num_documents += counts.size
        self.num_tokens += array.size

    def finish(self) -> None:
        """Complete the index."""
        end = HEADER.size + 4 * self.num_documents
        position = 0
        for block in blocks(self.num_documents):
            self._index.seek(HEADER.size + 4 * block.start)
            ends = position + np.cumsum(np.frombuffer(self._index.read(4 * (block.stop - block.start)), "<i4"), dtype="<i8")
            offsets = np.concatenate([np.array([position], "<i8"), ends[:-1]]) * self.dtype.itemsize
            position = int(ends[-1])
            self._index.seek(end + 8 * block.start)
            self._index.write(offsets.tobytes())
        self._index.seek(end + 8 * self.num_documents)
        for block in blocks(self.num_documents + 1):
            self._index.write(np.arange(block.start, block.stop, dtype="<i8").tobytes())
        self._index.seek(COUNTS_OFFSET)
        self._index.write(struct.pack("<QQ", self.num_documents, self.num_documents + 1))


_COPIED_AT_ONCE = 1 << 24
_TOKENS_AT_ONCE = 1 << 22


def write_shuffled(prefix: str, output: str, seed: int, folder: str | None = None) -> None:
    """Write the documents of a dataset, of one sequence each, in a random order that follows from a seed and their number alone.

    Args:
        folder: where the files lie until they are complete, on the same disk; None: beside the output.
    """
    dataset = IndexedDataset(prefix)
    assert dataset.one_sequence_each, "as preprocessing writes it"
    order = permutation(dataset.num_documents, (WRITTEN, seed))
    with write_dataset(output, dataset.dtype, folder=folder) as writer:
        waiting: list[NDArray[np.integer]] = []
        num_tokens = 0
        for number in order.tolist():
            waiting.append(dataset.read(number, 0, int(dataset.lengths[number])))
            num_tokens += waiting[-1].size
            if num_tokens > _TOKENS_AT_ONCE:
                writer.add_documents(np.concatenate(waiting), [len(document) for document in waiting])
                waiting, num_tokens = [], 0
        if waiting:
            writer.add_documents(np.concatenate(waiting), [len(document) for document in waiting])


@dataclass(frozen=True)
class JoinedSize:
    """Sizes of a joined dataset."""

    num_sequences: int
    num_documents: int
    num_tokens: int
    bin_bytes: int
    """Bytes of .bin."""


def join(prefixes: Sequence[str], output: str, folder: str | None = None, remedy: str = "Write to another disk.") -> JoinedSize:
    """Write OUTPUT.bin and OUTPUT.idx, the documents of all datasets in this order: complete, or not at all.

    Memory holds a block at a time. The result depends on the documents alone, not on how they were divided.

    Args:
        prefixes: datasets, without .bin and .idx; at least one.
        output: the joined dataset, which must not be one of them; its folder must exist.
        folder: where the files lie until they are complete, on the same disk; None: beside the output.
        remedy: what else to do where there is no room, for the message.

    Raises:
        DatasetError: a dataset is damaged, or they differ in the type of their tokens.
        ValueError: not enough room on the disk.
    """
    dtype, joined = _measure(prefixes)
    free = shutil.disk_usage(Path(output).parent).free
    num_bytes = joined.bin_bytes + HEADER.size + 12 * joined.num_sequences + 8 * (joined.num_documents + 1)
    if free < num_bytes:
        raise ValueError(
            f"{Path(output).absolute().parent}: the disk has {free / 1e6:,.1f} MB free, but {output} takes "
            f"{num_bytes / 1e6:,.1f} MB.\n  Make room there. {remedy}"
        )
    with appearing(f"{output}.bin", f"{output}.idx", folder=folder) as (tokens, index):
        for prefix in prefixes:
            with open(f"{prefix}.bin", "rb") as source:
                shutil.copyfileobj(source, tokens, _COPIED_AT_ONCE)
        if tokens.tell() != joined.bin_bytes:
            raise OSError("a .bin file was changed while it was copied")
        _write_index(prefixes, index, dtype, joined)
    return joined


def _measure(prefixes: Sequence[str]) -> tuple[np.dtype[Any], JoinedSize]:
    """The common token type, and the sizes. Every dataset is checked before anything is written."""
    dtype: np.dtype[Any] = IndexedDataset(prefixes[0]).dtype
    sequences = documents = tokens = bin_bytes = 0
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        size = len(dataset.data)
        if dataset.dtype != dtype:
            raise DatasetError(
                f"{prefix} holds tokens of type {dataset.dtype.name}, but {prefixes[0]} holds {dtype.name}.\n"
                "  Datasets of one vocabulary have one type: preprocess the text of one of them again with the other's tokenizer."
            )
        if size % dtype.itemsize:
            raise DatasetError(
                f"{prefix}.bin has {size:,} bytes, which is no whole number of tokens of {dtype.itemsize} bytes.\n"
                "  It is damaged: make or copy it again."
            )
        sequences += len(dataset.lengths)
        documents += dataset.num_documents
        tokens += dataset.num_tokens(range(dataset.num_documents))
        bin_bytes += size
    return dtype, JoinedSize(sequences, documents, tokens, bin_bytes)


def _write_index(prefixes: Sequence[str], lengths: BinaryIO, dtype: np.dtype[Any], joined: JoinedSize) -> None:
    """Write the three lists of the index at once, each through a file handle of its own."""
    lengths.write(_header(dtype, joined.num_sequences, joined.num_documents + 1))
    lengths.flush()
    with open(lengths.name, "r+b") as offsets, open(lengths.name, "r+b") as documents:
        offsets.seek(HEADER.size + 4 * joined.num_sequences)
        documents.seek(HEADER.size + 12 * joined.num_sequences)
        documents.write(np.zeros(1, "<i8").tobytes())
        byte = sequence = 0
        for prefix in prefixes:
            dataset = IndexedDataset(prefix)
            for block in blocks(len(dataset.lengths)):
                lengths.write(dataset.lengths[block].tobytes())
                offsets.write((dataset.offsets[block] + byte).tobytes())
            for block in blocks(dataset.num_documents):
                documents.write((dataset.document_index[block.start + 1 : block.stop + 1] + sequence).tobytes())
            byte += len(dataset.data)
            sequence += len(dataset.lengths)


# ---- Keeps indexes of large datasets in files, so that they are made once and shared by the processes of a machine.
#
# A file is found by a hash of everything that its content depends on. It appears under its name only when it is complete, and is
# checked before use. So a cache may be deleted, copied, or shared by machines and runs at any time. Where it does not work, every
# process computes the same arrays in its own memory.

_CACHE_VERSION = 1
"""Part of every key. Raise it when the content of the arrays changes its meaning."""
MIN_ENTRIES = 1 << 20
"""Indexes with fewer entries are not kept: they are computed in no time."""

_OLD_S = 24 * 3600.0

Build = Callable[[], tuple[NDArray, ...]]
Key = tuple[object, ...]


def cache_for(prefix: str, data_cache_path: str | None, note: Callable[[str], None] | None = None) -> IndexCache:
    """The cache of a dataset: --data-cache-path, or the folder `cache` beside the dataset."""
    return IndexCache(Path(data_cache_path) if data_cache_path else Path(prefix).parent / "cache", note)


class IndexCache:
    """Arrays by key. Safe to use from several threads and processes.

    Args:
        folder: Made at the first use; None keeps nothing.
        note: Called, once for each, with what keeps the cache from working; prints to stderr by default.
    """

    def __init__(self, folder: Path | None, note: Callable[[str], None] | None = None) -> None:
        self.folder = folder
        self.made: list[Path] = []
        """Files that this object wrote."""
        self.found: list[Path] = []
        """Files that it read instead of building the arrays."""
        self.fault: str | None = None
        """What keeps the cache from working, once it is known."""
        self._note = note or (lambda text: print(f"note: {text}", file=sys.stderr, flush=True))
        self._told: set[str] = set()

    def get(self, name: str, arrays: Sequence[str], key: Callable[[], Key], num_entries: int, build: Build) -> tuple[NDArray, ...]:
        """The arrays that `build` makes: read from the cache, or built by one process while the others wait.

        Args:
            name: Beginning of the file names.
            arrays: Names of the arrays, in the order in which `build` returns them; they are one-dimensional.
            key: All that their content depends on, as numbers and texts; called only if the cache is used.
            num_entries: Approximate size of the largest array; small ones are never kept.
            build: Makes the arrays.
        """
        if self.folder is None or num_entries < MIN_ENTRIES:
            return build()
        digest = hashlib.sha256(repr((_CACHE_VERSION, name, *key())).encode()).digest()[:16]
        # The name of the array too, so that a file is not taken for another of the same index.
        owners = (hashlib.sha256(digest + array.encode()).digest()[:16] for array in arrays)
        files = {self.folder / f"{name}-{digest.hex()}-{array}.npy": owner for array, owner in zip(arrays, owners, strict=True)}
        found = self._load(files)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("ab")
        except OSError as error:
            self._tell_of(error)
            return build()
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also by a process that is killed
            except OSError as error:
                self._tell_of(error)
                return build()
            found = self._load(files)
            return found if found is not None else self._save(files, build())

    def _load(self, files: Mapping[Path, bytes]) -> tuple[NDArray, ...] | None:
        try:
            arrays = tuple(read_array(file, owner) for file, owner in files.items())
        except FileNotFoundError:
            return None
        except DamagedIndexError as error:
            self._tell(f"{error}; it is made again")
        except OSError as error:
            self._tell_of(error)
        else:
            self.found += [file for file in files if file not in self.made]
            return arrays
        return None

    def _save(self, files: Mapping[Path, bytes], arrays: tuple[NDArray, ...]) -> tuple[NDArray, ...]:
        """Write the arrays and return them from the files, or from memory if that does not work."""
        assert self.folder is not None
        _sweep(self.folder)
        try:
            for (file, owner), array in zip(files.items(), arrays, strict=True):
                with appearing(str(file), sync=False) as (opened,):
                    write_array(opened, owner, array)
                self.made.append(file)
        except OSError as error:
            self._tell_of(error)
            return arrays
        return self._load(files) or arrays

    def _tell_of(self, error: OSError) -> None:
        self.fault = (
            f"the index cache {self.folder} cannot be used ({error.strerror or error}): every process computes large indexes in "
            "its own memory, at each start. Give a folder that can be written with --data-cache-path."
        )
        self._tell(self.fault)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left. Whoever holds the lock is the only writer on this machine."""
    mark = of_this_host()
    for partial in folder.glob("*.partial-*"):
        try:
            if mark in partial.name or time.time() - partial.stat().st_mtime > _OLD_S:
                partial.unlink()
        except OSError:
            continue  # renamed or removed by another machine in the meantime


_FOOTER = struct.Struct("<8s16s16s")
_MAGIC = b"mindex1\0"


class DamagedIndexError(Exception):
    """A damaged file; the message names it and says what is wrong."""


def write_array(file: BinaryIO, digest: bytes, array: NDArray) -> None:
    """Write an array and a digest of 16 bytes to a new file, which can be read too."""
    npy.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    file.write(_MAGIC + digest)
    file.flush()
    from xxhash import xxh3_128_digest

    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as written:
        checksum = xxh3_128_digest(written)
    file.write(checksum)


def read_array(path: Path, digest: bytes) -> NDArray:
    """Map an array that `write_array` wrote, read-only.

    Raises:
        DamagedIndexError: the file is truncated, changed, or belongs to another digest.
        OSError: it cannot be opened.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _FOOTER.size:
            raise DamagedIndexError(f"the cached index {path} is truncated")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, owner, checksum = _FOOTER.unpack_from(mapped, size - _FOOTER.size)
    if magic != _MAGIC or owner != digest:
        raise DamagedIndexError(f"the cached index {path} is truncated or belongs to another dataset")
    from xxhash import xxh3_128_digest

    with memoryview(mapped) as view, view[: size - len(checksum)] as content:
        if xxh3_128_digest(content) != checksum:
            raise DamagedIndexError(f"the cached index {path} is damaged: its checksum does not fit")
    head = io.BytesIO(mapped[:128])
    npy.read_magic(head)
    shape, _, dtype = npy.read_array_header_1_0(head)
    return np.frombuffer(mapped, dtype, shape[0], head.tell())
