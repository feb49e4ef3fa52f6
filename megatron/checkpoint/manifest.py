"""The manifest of a checkpoint (`manifest.json`): which tensors the checkpoint holds, and in which files. A reader needs only the
manifest and the data files.

A reader need not know which rank wrote a file, or at which offset of the file a slice starts. Readers ignore fields that they do
not know. A change that old readers must not ignore increases the version.

docs/checkpoints.md describes `manifest.json`. Manifests of the first versions have no `content` and no `content_digest`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.safetensors_file import DTYPES
from megatron.checkpoint.storage import STATE
from megatron.config.regular_file import parse_json
from megatron.config.save import MAX_SHOWN_CHARS, check_json_type
from megatron.parallel.tensor_slice import TensorSlice

# ---- Checksums of slices, content hashes of tensors, and digests of a checkpoint.
#
# The checksum of a slice detects damage of its file. The content hash of a tensor (64 bits) does not depend on how the tensor is
# cut into slices: the hashes of the slices of any layout add up to the same value. So the memory of all ranks after a load can be
# compared with a checkpoint that was saved at another layout.
#
# View the tensor as a matrix: the last dimension is the columns, all other dimensions together are the rows, and a 1-D tensor is
# one row. Read the bits of the elements as unsigned integers u of 32 bits: elements of 8 and 16 bits are widened, and elements of
# 64 bits count as two columns, the low half first. Let v = u XOR (u >> 16). All arithmetic is modulo 2^32, and every row and every
# column has an odd weight ::
#
#     row_sum    = sum over r of  weight(r, seed 0) * (sum over c of v[r, c])
#     column_sum = sum over c of  weight(c, seed 1) * (sum over r of v[r, c])
#
# (With u instead of v the weights would have almost no effect on the highest bits: modulo 2^32 an odd multiple of 2^31 is 2^31 for
# every weight, so the changes of two signs would cancel.)
#
# r and c are indices in the global tensor, so each slice contributes its summand. A single changed element always changes both
# sums. Exchanged rows or columns change one of them. `content` in the manifest is `row_sum` and `column_sum`, 8 hexadecimal digits
# each.
#
# weight(i, seed) is the finalizer of MurmurHash3 (32 bits) of i XOR (seed * 0x9E3779B9), with the lowest bit set. i is taken modulo
# 2^32.

_BLOCK_BYTES = 1 << 18
"""Size of the blocks that are hashed, in bytes. A block is summed along rows and along columns while it is in the CPU cache."""


class ContentHash(NamedTuple):
    """Additive 64-bit hash of a tensor or of a region of it. The hashes of disjoint regions add up to the hash of their union."""

    row_sum: int
    column_sum: int

    def combine(self, other_hash: ContentHash) -> ContentHash:
        """Return the hash of the union of two disjoint regions of a tensor."""
        return ContentHash((self.row_sum + other_hash.row_sum) & 0xFFFFFFFF, (self.column_sum + other_hash.column_sum) & 0xFFFFFFFF)

    @property
    def hex(self) -> str:
        """The hash as 16 hexadecimal digits."""
        return f"{self.row_sum:08x}{self.column_sum:08x}"

    @classmethod
    def from_hex(cls, text: str) -> ContentHash:
        """Build a hash from 16 hexadecimal digits."""
        return cls(int(text[:8], 16), int(text[8:], 16))


EMPTY_HASH = ContentHash(0, 0)


def hash_content(
    data: memoryview | bytes | bytearray,
    dtype: str,
    tensor_slice: TensorSlice,
    global_shape: tuple[int, ...],
    on_block: Callable[[memoryview], None] | None = None,
    block_bytes: int = _BLOCK_BYTES,
) -> ContentHash:
    """Return the content hash of a slice of a tensor.

    Args:
        data: raw bytes of the slice, row-major, little-endian, contiguous.
        dtype: name of the dtype of the elements, such as `bfloat16`.
        tensor_slice: region of the global tensor that `data` holds.
        global_shape: shape of the global tensor.
        on_block: called with each block of the data, in order, just before the block is hashed. A caller that also writes or checks
            the block thus loads it into the CPU cache only once.
        block_bytes: approximate maximum size of a block in bytes.
    """
    if not tensor_slice.numel:
        return EMPTY_HASH
    view = memoryview(data).cast("B")
    itemsize = DTYPES[dtype].itemsize
    word_dtype = np.dtype(f"<u{min(itemsize, 4)}")
    words_per_element = itemsize // word_dtype.itemsize
    width, first_column = (
        (words_per_element * tensor_slice.sizes[-1], words_per_element * tensor_slice.offsets[-1])
        if tensor_slice.sizes
        else (words_per_element, 0)
    )
    # A block holds complete rows, or a segment of one row that is longer than a block.
    max_block_numel = max(1, block_bytes // word_dtype.itemsize)
    block_rows, block_columns = max(1, max_block_numel // width), min(width, max_block_numel)
    row_weights = _compute_row_weights(tensor_slice, global_shape)
    row_sum, column_sums = 0, np.zeros(width, np.uint32)
    scratch = np.empty(block_rows * block_columns, np.uint32)
    for row in range(0, len(row_weights), block_rows):
        weights = row_weights[row : row + block_rows]
        for column in range(0, width, block_columns):
            block_numel = len(weights) * min(block_columns, width - column)
            start = (row * width + column) * word_dtype.itemsize
            block_data = view[start : start + block_numel * word_dtype.itemsize]
            if on_block is not None:
                on_block(block_data)
            bits, mixed = np.frombuffer(block_data, word_dtype), scratch[:block_numel]
            if word_dtype.itemsize < 4:
                np.copyto(mixed, bits)
            else:
                np.right_shift(bits, np.uint32(16), out=mixed)
                np.bitwise_xor(mixed, bits, out=mixed)
            matrix = mixed.reshape(len(weights), -1)
            column_sums[column : column + matrix.shape[1]] += np.add.reduce(matrix, axis=0, dtype=np.uint32)
            row_sum += int(np.add.reduce(np.add.reduce(matrix, axis=1, dtype=np.uint32) * weights, dtype=np.uint32))
    column_weights = _compute_index_weights(first_column, width, 1)
    return ContentHash(row_sum & 0xFFFFFFFF, int(np.add.reduce(column_sums * column_weights, dtype=np.uint32)))


def _compute_row_weights(tensor_slice: TensorSlice, global_shape: tuple[int, ...]) -> np.ndarray:
    """Return the multiplier that the content hash uses for each row of a slice. It depends on the row's position in the global
    tensor.

    A row is a sequence of elements along the last dimension.

    Returns:
        uint32, [product of all sizes of the slice but the last].
    """
    if len(tensor_slice.sizes) <= 1:
        return _compute_index_weights(0, 1, 0)
    if tensor_slice.offsets[1:-1] == (0,) * (len(global_shape) - 2) and tensor_slice.sizes[1:-1] == global_shape[1:-1]:
        rows_per_index = math.prod(global_shape[1:-1])  # the rows are consecutive
        return _compute_index_weights(tensor_slice.offsets[0] * rows_per_index, tensor_slice.sizes[0] * rows_per_index, 0)
    row_indices = np.zeros(1, np.int64)
    for offset, size, global_size in zip(tensor_slice.offsets[:-1], tensor_slice.sizes[:-1], global_shape[:-1], strict=True):
        row_indices = (row_indices[:, None] * global_size + np.arange(offset, offset + size)).reshape(-1)
    return _hash_indices(row_indices, 0)


@functools.lru_cache(maxsize=32)
def _compute_index_weights(first: int, count: int, seed: int) -> np.ndarray:
    """Return the multipliers that the content hash uses for the indices first, ..., first + count - 1.

    Returns:
        uint32, [count].
    """
    return _hash_indices(np.arange(first, first + count, dtype=np.int64), seed)


def _hash_indices(indices: np.ndarray, seed: int) -> np.ndarray:
    """Return a pseudo-random odd uint32 for each index. The content hash multiplies the elements at the index by this number."""
    hashes = indices.astype(np.uint32) ^ np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    hashes ^= hashes >> np.uint32(16)
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    hashes ^= hashes >> np.uint32(16)
    return hashes | np.uint32(1)


_ALGORITHM = "xxh3:"


class Checksum:
    """Checksum of raw bytes that are passed in several pieces (XXH3, 64 bits, seed 0).

    It reaches 28 GB/s per core, about the speed of memory (CRC-32 of zlib: 4 GB/s). Therefore it adds almost nothing to the time of
    a load.
    """

    def __init__(self, data: memoryview | bytes = b"") -> None:
        from xxhash import xxh3_64  # only checkpoints need it

        self._hash = xxh3_64(data)

    def update(self, data: memoryview | bytes) -> None:
        """Add the next bytes of the data to the checksum."""
        self._hash.update(data)

    @property
    def text(self) -> str:
        """Checksum of all bytes so far, with the name of the algorithm: `xxh3:` and 16 hexadecimal digits."""
        return f"{_ALGORITHM}{self._hash.hexdigest()}"


def checksums_match(actual: str, expected: str) -> bool:
    """Return whether a computed checksum equals the stored one.

    Raises:
        CheckpointError: this program does not know the algorithm of the stored checksum.
    """
    if not expected.startswith(_ALGORITHM):
        raise CheckpointError(
            f"the checkpoint contains the checksum {expected!r}, whose algorithm is unknown: a newer version of this program wrote "
            "the checkpoint. Update this program"
        )
    return actual == expected


def digest_entries(entries: Iterable[str]) -> str:
    """Return the SHA-256 of the sorted entries (lines of text), each followed by a newline.

    Because the entries are sorted, the digest does not depend on which rank wrote which file. If the entries describe slices, it
    does depend on how tensors are divided into slices.
    """
    sha256 = hashlib.sha256()
    for entry in sorted(entries):
        sha256.update(entry.encode())
        sha256.update(b"\n")
    return sha256.hexdigest()


FORMAT = "megatron-boxes"
VERSION = 1
_MAX_DIMS = 16
"""Maximum number of dimensions of a tensor. The test whether slices cover a tensor takes time proportional to 2^dimensions."""


@dataclass(frozen=True)
class StoredSlice:
    """Slice of a tensor in a data file: its region in the tensor, its key in the file, and its checksum."""

    tensor_slice: TensorSlice
    file: str
    key: str
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """Global tensor in a checkpoint: shape, dtype, content hash, and the slices of which it consists."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype, a key of `DTYPES`."""
    slices: tuple[StoredSlice, ...]
    content: str | None = None
    """Content hash of the tensor as hexadecimal digits (`ContentHash.hex`). None in checkpoints of early versions."""


@dataclass(frozen=True)
class StoredFile:
    """File of a checkpoint: its size, and its checksum. A data file has no checksum of its own, because each of its slices has
    one."""

    num_bytes: int
    checksum: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Index of a checkpoint (`manifest.json`): all tensors with their slices, and all files."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the stored slices and of the training state. It combines one line per slice, `name shape dtype offsets sizes
        checksum`, and one for `state.json`."""
        entries = [f"{STATE} {self.files[STATE].checksum}"] if STATE in self.files else []
        for name, tensor in self.tensors.items():
            head = f"{name} {list(tensor.shape)} {tensor.dtype}"
            entries += [f"{head} {list(s.tensor_slice.offsets)} {list(s.tensor_slice.sizes)} {s.checksum}" for s in tensor.slices]
            if not tensor.slices:
                entries.append(head)
        return digest_entries(entries)

    @functools.cached_property
    def content_digest(self) -> str | None:
        """Digest of the content of all tensors, the same at every layout. It combines one line per tensor: `name shape dtype
        content`.

        None in checkpoints of early versions, which have no content hashes.
        """
        if any(tensor.content is None for tensor in self.tensors.values()):
            return None
        return digest_entries(f"{name} {list(t.shape)} {t.dtype} {t.content}" for name, t in self.tensors.items())

    def to_json(self) -> bytes:
        """Return the manifest as the bytes of `manifest.json`."""
        files = {
            name: {"bytes": file.num_bytes} | ({"checksum": file.checksum} if file.checksum else {})
            for name, file in self.files.items()
        }
        tensors = {
            name: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                **({} if tensor.content is None else {"content": tensor.content}),
                "boxes": [
                    {
                        "offsets": stored.tensor_slice.offsets,
                        "sizes": stored.tensor_slice.sizes,
                        "file": stored.file,
                        "key": stored.key,
                        "checksum": stored.checksum,
                    }
                    for stored in tensor.slices
                ],
            }
            for name, tensor in self.tensors.items()
        }
        header = {"format": FORMAT, "version": VERSION, "digest": self.digest}
        if self.content_digest is not None:
            header["content_digest"] = self.content_digest
        return json.dumps({**header, "files": files, "tensors": tensors}, separators=(",", ":")).encode()


def merge_tensors(entries: Iterable[tuple[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Merge the descriptions of a tensor that several ranks have written: concatenate their slices and combine their content
    hashes.

    Args:
        entries: (name of a tensor, description by one rank). A description lists only the slices that this rank has written, and
            must have a content hash.

    Returns:
        the merged tensors by name.
    """
    first_entries: dict[str, StoredTensor] = {}
    slices: dict[str, list[StoredSlice]] = defaultdict(list)
    hashes: dict[str, ContentHash] = defaultdict(lambda: EMPTY_HASH)
    for name, tensor in entries:
        assert tensor.content is not None, "slices that were just written have a content hash"
        first_entries.setdefault(name, tensor)
        slices[name] += tensor.slices
        hashes[name] = hashes[name].combine(ContentHash.from_hex(tensor.content))
    return {
        name: StoredTensor(first.shape, first.dtype, tuple(slices[name]), hashes[name].hex) for name, first in first_entries.items()
    }


class _SliceContent(TypedDict):
    """Slice of a tensor in the JSON of a manifest."""

    offsets: list[int]
    sizes: list[int]
    file: str
    key: str
    checksum: str


_TensorContent = TypedDict(  # noqa: UP013 - `boxes` is a key of the file, but not a term for a name
    "_TensorContent", {"shape": list[int], "dtype": str, "content": NotRequired[str], "boxes": list[_SliceContent]}
)
"""Tensor in the JSON of a manifest."""


class _FileContent(TypedDict):
    """File of the checkpoint in the JSON of a manifest."""

    bytes: int
    checksum: NotRequired[str]


class _ManifestContent(TypedDict):
    """Top level of the JSON of a manifest."""

    format: str
    version: int
    digest: str
    content_digest: NotRequired[str]
    files: dict[str, _FileContent]
    tensors: dict[str, _TensorContent]


def parse_manifest(data: bytes, path: str, name: str) -> Manifest:
    """Parse and check the manifest of a checkpoint, or the manifest that one rank has written for its files.

    Args:
        data: content of the file.
        path: folder of the checkpoint, for error messages.
        name: name of the file, for error messages.

    Raises:
        CheckpointError: the file has another format, or a newer version of this program wrote it.
        DamagedCheckpointError: the file is unreadable or altered.
    """
    file = f"{path.rstrip('/')}/{name}"
    try:
        content = parse_json(data)
        format_name, version = content["format"], content["version"]
        if format_name != FORMAT or not isinstance(version, int):
            raise CheckpointError(
                f"{path} has the format {format_name!r}, version {version!r}, but this program reads only the format {FORMAT!r}, "
                f"versions 1 to {VERSION}: give the path of a checkpoint that this program wrote"
            )
        if version > VERSION:
            raise CheckpointError(
                f"{path} was written by a newer version of this program (format version {version}; this one reads up to "
                f"{VERSION}): update this program"
            )
        check_json_type(content, _ManifestContent, "", is_open=True)
        manifest = Manifest(
            {name: _parse_tensor(tensor, f"tensors.{name}") for name, tensor in content["tensors"].items()},
            {name: StoredFile(file["bytes"], file.get("checksum")) for name, file in content["files"].items()},
        )
        stated_digests = content["digest"], content.get("content_digest")
        computed_digests = manifest.digest, manifest.content_digest
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{file} is not readable ({error}): the file is damaged; copy it again") from error
    if computed_digests != stated_digests:
        raise DamagedCheckpointError(
            f"{file} was altered: its content does not match the digest that is stored in the file; copy the file again"
        )
    invalid_keys = [
        stored.key
        for name, tensor in manifest.tensors.items()
        for stored in tensor.slices
        if stored.key != slice_key(name, tensor.shape, stored.tensor_slice)
    ]
    if invalid_keys:
        raise DamagedCheckpointError(
            f"{file} is damaged: it lists slices under keys that do not match their tensors and offsets, such as "
            f"{invalid_keys[:3]}; copy the file again"
        )
    used_files = {stored.file for tensor in manifest.tensors.values() for stored in tensor.slices}
    if invalid_names := sorted(
        name for name in used_files | manifest.files.keys() if name not in manifest.files or Path(name).name != name
    ):
        raise DamagedCheckpointError(
            f"{file} is damaged: it names files that are missing from its file list, or outside the checkpoint folder, such as "
            f"{invalid_names[:3]}; copy the file again"
        )
    _check_slice_sizes(manifest, file)
    return manifest


def _check_slice_sizes(manifest: Manifest, path: str) -> None:
    """Check that the files are large enough for the slices that the manifest lists, before a reader reserves memory for them.

    Args:
        path: path of the manifest, for error messages.

    Raises:
        DamagedCheckpointError: the slices of a file have more bytes than the file.
    """
    num_bytes: Counter[str] = Counter()
    for tensor in manifest.tensors.values():
        for stored in tensor.slices:
            num_bytes[stored.file] += stored.tensor_slice.numel * DTYPES[tensor.dtype].itemsize
    for name, count in num_bytes.items():
        if count > manifest.files[name].num_bytes:
            raise DamagedCheckpointError(
                f"{path} is damaged: it lists slices of {count:,} bytes in {name}, which has only "
                f"{manifest.files[name].num_bytes:,} bytes; copy the file again"
            )


def slice_key(name: str, shape: tuple[int, ...], tensor_slice: TensorSlice) -> str:
    """Return the key of a slice in its data file: `name` for a complete tensor, otherwise name and ranges, such as
    `name[0:128,64:128]`.

    Readers look slices up by this key, so they cannot confuse two slices of the same size.

    Args:
        name, shape: name and shape of the global tensor.
    """
    if tensor_slice.sizes == shape:
        return name
    return f"{name}[{','.join(f'{interval.start}:{interval.stop}' for interval in tensor_slice.index)}]"


def _parse_tensor(content: dict[str, Any], key: str) -> StoredTensor:
    """Build the description of a tensor from its entry in the manifest, whose types are already checked.

    Args:
        key: key of the entry, for error messages.

    Raises:
        ValueError: the dtype is unknown, the tensor has too many dimensions, or the slices have another number of dimensions.
    """
    shape = tuple(content["shape"])
    if (dtype := content["dtype"]) not in DTYPES:
        raise ValueError(f"{key}.dtype is {dtype[:MAX_SHOWN_CHARS]!r}, which is not a known dtype")
    dims = {len(shape), *(len(entry[name]) for entry in content["boxes"] for name in ("offsets", "sizes"))}
    if len(dims) > 1 or len(shape) > _MAX_DIMS:
        raise ValueError(
            f"{key} has {len(shape)} dimensions, and slices of {sorted(dims)} dimensions, but all must have the same number of "
            f"dimensions, at most {_MAX_DIMS}"
        )
    slices = tuple(
        StoredSlice(
            TensorSlice(tuple(entry["offsets"]), tuple(entry["sizes"])),
            entry["file"],
            entry["key"],
            entry["checksum"],
        )
        for entry in content["boxes"]
    )
    return StoredTensor(shape, dtype, slices, content.get("content"))


def is_partition(shape: tuple[int, ...], slices: Iterable[TensorSlice]) -> bool:
    """Return whether the slices cover every element of a tensor of `shape` exactly once, and nothing outside of the tensor.

    Consider a slice as a function that is 1 inside and 0 outside. It is determined by its corners with signs: each corner has the
    sign (-1)^m, where m is the number of dimensions in which the corner is at the end of the slice. The functions of the slices add
    up to that of the full tensor exactly if their signed corners do. So one pass over the slices is enough; comparing all pairs
    would take quadratic time.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    full_slice, slices = TensorSlice.full(shape), [*slices]
    if slices == [full_slice]:
        return True
    for tensor_slice, weight in [(full_slice, -1), *((tensor_slice, 1) for tensor_slice in slices)]:
        for corner in itertools.product(*(((interval.start, 1), (interval.stop, -1)) for interval in tensor_slice.index)):
            corners[tuple(coordinate for coordinate, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())
