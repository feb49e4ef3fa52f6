"""Writer of indexed datasets (PREFIX.bin and PREFIX.idx), and the cache of large indexes.

Datasets are written from documents or joined from other datasets. The files appear under their final names only when they are
complete. To join datasets, the .bin files are copied unchanged, and the index is computed in blocks.
"""

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

from megatron.config.regular_file import check_replaceable, open_regular
from megatron.data.indexed_dataset import (
    COUNTS_OFFSET,
    HEADER,
    MAGIC,
    TOKEN_TYPES,
    VERSION,
    DatasetError,
    IndexedDataset,
    get_tokenizer_file,
    iter_blocks,
)
from megatron.data.samples import SHUFFLED_FILE, compute_permutation


def get_host_marker() -> str:
    """Return a string that identifies this host, for the names of temporary files."""
    return f".partial-{socket.gethostname()}-"


def create_partial_name(suffix: str) -> str:
    """Return a unique, unpredictable name for a file that is being written.

    Args:
        suffix: start of the name, such as the file's final path.
    """
    return f"{suffix}{get_host_marker()}{secrets.token_hex(8)}"


def _build_header(dtype: np.dtype[Any], num_sequences: int, num_entries: int) -> bytes:
    code = next(code for code, dtype_of_code in TOKEN_TYPES.items() if np.dtype(dtype_of_code) == dtype.newbyteorder("="))
    return HEADER.pack(MAGIC, VERSION, code, num_sequences, num_entries)


@contextlib.contextmanager
def write_atomically(*paths: str, folder: str | None = None, sync: bool = True) -> Iterator[list[BinaryIO]]:
    """Open new files under temporary names. After the block, rename them to `paths`, or delete them if the block failed.

    Before the renaming, old files at all paths but the first are deleted. Then the files are renamed in order. If the process is
    killed in between, the later paths do not exist. So, with .bin as the first path, an index is never next to the .bin of another
    dataset.

    Args:
        folder: folder of the temporary files, on the same disk; None for the folders of `paths`.
        sync: flush the files to the disk before they are renamed, so that a power failure leaves no empty files.

    Raises:
        OSError: a file cannot be written, or a folder, device or pipe is at one of the paths.
    """
    for path in paths:
        check_replaceable(path)
    temporary_paths = [
        Path(create_partial_name(path if folder is None else f"{folder}/{os.path.basename(path)}")) for path in paths
    ]
    try:
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = [stack.enter_context(path.open("x+b")) for path in temporary_paths]
            yield files
            for file in files:
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        for path in paths[1:]:
            Path(path).unlink(missing_ok=True)
        for temporary_path, path in zip(temporary_paths, paths, strict=True):
            temporary_path.replace(path)
    finally:
        for temporary_path in temporary_paths:
            temporary_path.unlink(missing_ok=True)


@contextlib.contextmanager
def write_dataset(prefix: str, dtype: DTypeLike, sync: bool = True, folder: str | None = None) -> Iterator[IndexedDatasetWriter]:
    """Open a writer for a new dataset. After the block, the files get their final names, or are deleted if the block failed.

    Args:
        prefix: path without ``.bin`` and ``.idx``. Its folder must exist.
        dtype: type of the tokens, for example `get_token_dtype(vocab_size)`.
        sync: flush the files to the disk, so that a power failure leaves no empty files.
        folder: folder of the files until they are complete, on the same disk; None for the folder of `prefix`.
    """
    with write_atomically(f"{prefix}.bin", f"{prefix}.idx", folder=folder, sync=sync) as (tokens, index):
        writer = IndexedDatasetWriter(prefix, np.dtype(dtype).newbyteorder("<"), tokens, index)
        yield writer
        writer.finish()
        Path(get_tokenizer_file(prefix)).unlink(missing_ok=True)  # it describes the dataset that is replaced


class IndexedDatasetWriter:
    """Writer of the two files of an indexed dataset. Each document is one sequence. Memory use does not grow with the number of
    documents."""

    def __init__(self, prefix: str, dtype: np.dtype[Any], tokens: BinaryIO, index: BinaryIO) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.num_documents = self.num_tokens = 0
        self._tokens, self._index = tokens, index
        self._index.write(_build_header(self.dtype, 0, 0))  # the counts are filled in at the end

    def add_documents(self, tokens: ArrayLike, lengths: Sequence[int] | NDArray[np.integer] | None = None) -> None:
        """Append documents.

        Args:
            tokens: tokens of the documents, concatenated.
            lengths: number of tokens of each document; None for a single document.

        Raises:
            ValueError: a token does not fit the type of the file, or a document has 2**31 tokens or more.
        """
        array = np.asarray(tokens)
        document_lengths = np.array([array.size] if lengths is None else lengths, dtype=np.int64)
        assert document_lengths.sum() == array.size, f"{document_lengths.sum()} tokens in the lengths, {array.size} given"
        if array.size and array.dtype != self.dtype:
            low, high, bounds = array.min(), array.max(), np.iinfo(self.dtype)
            if array.dtype.kind not in "iu" or low < bounds.min or high > bounds.max:
                raise ValueError(
                    f"token ids from {low} to {high} ({array.dtype}) do not fit into {self.dtype.name}, the token type of "
                    f"{self.prefix}.bin.\n"
                    "  Pass integer ids, and open the writer with a dtype for all of them (get_token_dtype(vocab_size))."
                )
        if document_lengths.size and document_lengths.max() >= 2**31:
            raise ValueError(
                f"a document has {document_lengths.max():,} tokens, but {self.prefix}.idx only stores lengths below "
                f"2**31 = {2**31:,}.\n"
                "  Split the document."
            )
        self._tokens.write(array.astype(self.dtype, copy=False).tobytes())
        self._index.write(document_lengths.astype("<i4").tobytes())
        self.num_documents += document_lengths.size
        self.num_tokens += array.size

    def finish(self) -> None:
        """Write the index. No document can be added afterwards."""
        lengths_end = HEADER.size + 4 * self.num_documents
        num_tokens = 0
        for block in iter_blocks(self.num_documents):
            self._index.seek(HEADER.size + 4 * block.start)
            ends = num_tokens + np.cumsum(np.frombuffer(self._index.read(4 * (block.stop - block.start)), "<i4"), dtype="<i8")
            offsets = np.concatenate([np.array([num_tokens], "<i8"), ends[:-1]]) * self.dtype.itemsize
            num_tokens = int(ends[-1])
            self._index.seek(lengths_end + 8 * block.start)
            self._index.write(offsets.tobytes())
        self._index.seek(lengths_end + 8 * self.num_documents)
        for block in iter_blocks(self.num_documents + 1):
            self._index.write(np.arange(block.start, block.stop, dtype="<i8").tobytes())
        self._index.seek(COUNTS_OFFSET)
        self._index.write(struct.pack("<QQ", self.num_documents, self.num_documents + 1))


_COPY_BUFFER_BYTES = 1 << 24
_MAX_BUFFERED_TOKENS = 1 << 22


def write_shuffled(prefix: str, output: str, seed: int, folder: str | None = None) -> None:
    """Write the documents of a dataset in a random order that depends only on the seed and the number of documents.

    Each document must be one sequence.

    Args:
        folder: folder of the files until they are complete, on the same disk; None for the folder of the output.
    """
    dataset = IndexedDataset(prefix)
    assert dataset.has_single_sequences, "each document must be one sequence, as preprocessing writes it"
    order = compute_permutation(dataset.num_documents, (SHUFFLED_FILE, seed))
    with write_dataset(output, dataset.dtype, folder=folder) as writer:
        buffered: list[NDArray[np.integer]] = []
        num_tokens = 0
        for document_index in order.tolist():
            buffered.append(dataset.read(document_index, 0, int(dataset.lengths[document_index])))
            num_tokens += buffered[-1].size
            if num_tokens > _MAX_BUFFERED_TOKENS:
                writer.add_documents(np.concatenate(buffered), [len(document) for document in buffered])
                buffered, num_tokens = [], 0
        if buffered:
            writer.add_documents(np.concatenate(buffered), [len(document) for document in buffered])


@dataclass(frozen=True)
class JoinedDatasetSize:
    """Size of a dataset that is made by joining other datasets."""

    num_sequences: int
    num_documents: int
    num_tokens: int
    bin_bytes: int
    """Size of .bin in bytes."""


def join_datasets(
    prefixes: Sequence[str], output: str, folder: str | None = None, advice: str = "Write to another disk."
) -> JoinedDatasetSize:
    """Write the documents of all datasets, in order, to OUTPUT.bin and OUTPUT.idx. The files appear only when they are complete.

    Only a block of the data is in memory at a time. The result depends only on the documents, not on their division into datasets.

    Args:
        prefixes: datasets, without .bin and .idx; at least one.
        output: prefix of the joined dataset, which must not be one of the datasets. Its folder must exist.
        folder: folder of the files until they are complete, on the same disk; None for the folder of the output.
        advice: what the user can do if the disk is full, for the error message.

    Raises:
        DatasetError: a dataset is damaged, or datasets have different token types.
        ValueError: the disk has not enough free space.
    """
    dtype, joined_size = _check_and_measure(prefixes)
    free_bytes = shutil.disk_usage(Path(output).parent).free
    num_bytes = joined_size.bin_bytes + HEADER.size + 12 * joined_size.num_sequences + 8 * (joined_size.num_documents + 1)
    if free_bytes < num_bytes:
        raise ValueError(
            f"{Path(output).absolute().parent}: the disk has {free_bytes / 1e6:,.1f} MB free, but {output} takes "
            f"{num_bytes / 1e6:,.1f} MB.\n  Free space on this disk. {advice}"
        )
    with write_atomically(f"{output}.bin", f"{output}.idx", folder=folder) as (tokens, index):
        for prefix in prefixes:
            with open_regular(f"{prefix}.bin") as source:
                shutil.copyfileobj(source, tokens, _COPY_BUFFER_BYTES)
        if tokens.tell() != joined_size.bin_bytes:
            raise OSError(
                f"a .bin file was changed while it was copied to {output}.bin. Join the datasets again when they are complete."
            )
        _write_index(prefixes, index, dtype, joined_size)
        Path(get_tokenizer_file(output)).unlink(missing_ok=True)  # it describes the dataset that is replaced
    return joined_size


def _check_and_measure(prefixes: Sequence[str]) -> tuple[np.dtype[Any], JoinedDatasetSize]:
    """Check that every dataset is undamaged and that all have the same token type. Return this type and the size of the joined
    dataset."""
    dtype: np.dtype[Any] = IndexedDataset(prefixes[0]).dtype
    num_sequences = num_documents = num_tokens = bin_bytes = 0
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        size = len(dataset.data)
        if dataset.dtype != dtype:
            raise DatasetError(
                f"{prefix} holds tokens of type {dataset.dtype.name}, but {prefixes[0]} holds tokens of type {dtype.name}.\n"
                "  Datasets of one vocabulary have one type: preprocess the text of one dataset again with the tokenizer of "
                "the other."
            )
        if size % dtype.itemsize:
            raise DatasetError(
                f"{prefix}.bin has {size:,} bytes, which is not a multiple of the token size of {dtype.itemsize} bytes.\n"
                "  The .bin file is damaged: make or copy it again."
            )
        num_sequences += len(dataset.lengths)
        num_documents += dataset.num_documents
        num_tokens += dataset.count_tokens(range(dataset.num_documents))
        bin_bytes += size
    return dtype, JoinedDatasetSize(num_sequences, num_documents, num_tokens, bin_bytes)


def _write_index(prefixes: Sequence[str], lengths: BinaryIO, dtype: np.dtype[Any], joined_size: JoinedDatasetSize) -> None:
    """Write the .idx file of the joined dataset. Its three lists (sequence lengths, offsets, document index) are written in one
    pass over the datasets, with one file handle per list.

    Args:
        lengths: the new .idx file. The header and the list of lengths are written through this handle.
    """
    lengths.write(_build_header(dtype, joined_size.num_sequences, joined_size.num_documents + 1))
    lengths.flush()
    with open(lengths.name, "r+b") as offsets, open(lengths.name, "r+b") as documents:
        offsets.seek(HEADER.size + 4 * joined_size.num_sequences)
        documents.seek(HEADER.size + 12 * joined_size.num_sequences)
        documents.write(np.zeros(1, "<i8").tobytes())
        byte_offset = num_sequences = 0
        for prefix in prefixes:
            dataset = IndexedDataset(prefix)
            for block in iter_blocks(len(dataset.lengths)):
                lengths.write(dataset.lengths[block].tobytes())
                offsets.write((dataset.offsets[block] + byte_offset).tobytes())
            for block in iter_blocks(dataset.num_documents):
                documents.write((dataset.document_index[block.start + 1 : block.stop + 1] + num_sequences).tobytes())
            byte_offset += len(dataset.data)
            num_sequences += len(dataset.lengths)


# ---- Cache of large indexes in files, so that they are computed once and shared by the processes of a host.
#
# The name of a file is a hash of everything on which its content depends. A file appears under its name only when it is complete,
# and is checked before use. So a cache may be deleted, copied, or shared by hosts and runs at any time. If the cache cannot be
# used, every process computes the arrays in its own memory.

_CACHE_VERSION = 1
"""Part of every key. Increase this number when the meaning of the cached arrays changes."""
MIN_ENTRIES = 1 << 20
"""Indexes with fewer entries are not cached, because they are computed quickly."""

_MAX_PARTIAL_AGE_S = 24 * 3600.0

Build = Callable[[], tuple[NDArray, ...]]
Key = tuple[object, ...]


def open_index_cache(prefix: str, data_cache_path: str | None, notify: Callable[[str], None] | None = None) -> IndexCache:
    """Return the cache that stores computed index arrays (such as the order of samples) in files, so that later starts need not
    compute them again. Its folder is --data-cache-path, or the folder `cache` next to the dataset."""
    return IndexCache(Path(data_cache_path) if data_cache_path else Path(prefix).parent / "cache", notify)


class IndexCache:
    """Cache of index arrays in files, by a key of all their inputs. Safe to use from several threads and processes.

    Args:
        folder: folder of the files, created at the first use; None to cache nothing.
        notify: function that is called with a message about each problem of the cache, once per message. Default: print to stderr.
    """

    def __init__(self, folder: Path | None, notify: Callable[[str], None] | None = None) -> None:
        self.folder = folder
        self.written_files: list[Path] = []
        """Files that this object wrote."""
        self.loaded_files: list[Path] = []
        """Files that this object read instead of building the arrays."""
        self.problem: str | None = None
        """Why the cache cannot be used, or None if no problem has occurred."""
        self._notify = notify or (lambda text: print(f"note: {text}", file=sys.stderr, flush=True))
        self._reported: set[str] = set()

    def get(self, name: str, arrays: Sequence[str], key: Callable[[], Key], num_entries: int, build: Build) -> tuple[NDArray, ...]:
        """Return arrays from the cache. If they are not there, one process builds and stores them while the other processes wait.

        Args:
            name: start of the file names.
            arrays: names of the arrays, in the order in which `build` returns them. The arrays are one-dimensional.
            key: returns all numbers and strings on which the content of the arrays depends. Called only if the cache is used.
            num_entries: approximate size of the largest array. Small arrays are not cached.
            build: computes the arrays.
        """
        if self.folder is None or num_entries < MIN_ENTRIES:
            return build()
        digest = hashlib.sha256(repr((_CACHE_VERSION, name, *key())).encode()).digest()[:16]
        # Include the name of the array, so that the files of an index cannot be confused with each other.
        file_digests = (hashlib.sha256(digest + array.encode()).digest()[:16] for array in arrays)
        files = {
            self.folder / f"{name}-{digest.hex()}-{array}.npy": file_digest
            for array, file_digest in zip(arrays, file_digests, strict=True)
        }
        cached = self._load(files)
        if cached is not None:
            return cached
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("ab")
        except OSError as error:
            self._report_os_error(error)
            return build()
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also if the process is killed
            except OSError as error:
                self._report_os_error(error)
                return build()
            cached = self._load(files)
            return cached if cached is not None else self._save(files, build())

    def _load(self, files: Mapping[Path, bytes]) -> tuple[NDArray, ...] | None:
        """Return the arrays from files of the cache, or None if a file is missing or damaged.

        Args:
            files: digest that each file must contain, by path.
        """
        try:
            arrays = tuple(read_array(file, file_digest) for file, file_digest in files.items())
        except FileNotFoundError:
            return None
        except DamagedIndexError as error:
            self._report(str(error))
        except OSError as error:
            self._report_os_error(error)
        else:
            self.loaded_files += [file for file in files if file not in self.written_files]
            return arrays
        return None

    def _save(self, files: Mapping[Path, bytes], arrays: tuple[NDArray, ...]) -> tuple[NDArray, ...]:
        """Write the arrays to files of the cache. Return the arrays mapped from the files, or the arrays in memory if writing
        failed.

        Args:
            files: digest to write into each file, by path, in the order of the arrays.
        """
        assert self.folder is not None
        _remove_partial_files(self.folder)
        try:
            for (file, file_digest), array in zip(files.items(), arrays, strict=True):
                with write_atomically(str(file), sync=False) as (new_file,):
                    write_array(new_file, file_digest, array)
                self.written_files.append(file)
        except OSError as error:
            self._report_os_error(error)
            return arrays
        return self._load(files) or arrays

    def _report_os_error(self, error: OSError) -> None:
        self.problem = (
            f"the index cache {self.folder} cannot be used ({error.strerror or error}): every process computes large indexes in "
            "its own memory, at each start. Give a folder that can be written with --data-cache-path."
        )
        self._report(self.problem)

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._notify(text)


def _remove_partial_files(folder: Path) -> None:
    """Remove unfinished files of killed processes: those of this host, and those of any host that are older than a day.

    The caller must hold the lock of the cache folder, so that no other process of this host is writing.
    """
    marker = get_host_marker()
    for partial in folder.glob("*.partial-*"):
        try:
            if marker in partial.name or time.time() - partial.stat().st_mtime > _MAX_PARTIAL_AGE_S:
                partial.unlink()
        except OSError:
            continue  # another host has renamed or removed the file


_FOOTER = struct.Struct("<8s16s16s")
_MAGIC = b"mindex1\0"


class DamagedIndexError(Exception):
    """Error for a damaged file of the index cache. The message contains the file and the damage."""


def write_array(file: BinaryIO, digest: bytes, array: NDArray) -> None:
    """Write an array to a new file, which must be open for reading too.

    Args:
        digest: 16 bytes that identify the inputs from which the array was computed. `read_array` checks them.
    """
    npy.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    file.write(_MAGIC + digest)
    file.flush()
    from xxhash import xxh3_128_digest

    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        checksum = xxh3_128_digest(mapped)
    file.write(checksum)


def read_array(path: Path, digest: bytes) -> NDArray:
    """Open an array that `write_array` wrote, as a read-only memory map.

    Args:
        digest: the digest with which the array must have been written.

    Raises:
        DamagedIndexError: the file is truncated, changed, or was written with another digest.
        OSError: the file cannot be opened.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _FOOTER.size:
            raise DamagedIndexError(f"the cached index {path} is truncated; the index is computed again, so no action is needed")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, stored_digest, checksum = _FOOTER.unpack_from(mapped, size - _FOOTER.size)
    if magic != _MAGIC or stored_digest != digest:
        raise DamagedIndexError(
            f"the cached index {path} is truncated or belongs to another dataset; the index is computed again, so no action is "
            "needed"
        )
    from xxhash import xxh3_128_digest

    with memoryview(mapped) as view, view[: size - len(checksum)] as content:
        if xxh3_128_digest(content) != checksum:
            raise DamagedIndexError(
                f"the cached index {path} is damaged: its checksum does not match; the index is computed again, so no action is "
                "needed"
            )
    header = io.BytesIO(mapped[:128])
    npy.read_magic(header)
    shape, _, dtype = npy.read_array_header_1_0(header)
    return np.frombuffer(mapped, dtype, shape[0], header.tell())
