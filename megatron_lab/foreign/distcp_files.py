"""Reader of torch.distributed.checkpoint files, as in Megatron-Core's format `torch_dist`.

The file `.metadata` lists the shape, dtype and chunks of every tensor. A chunk is a rectangular region of a tensor that was saved
as a unit. For every chunk, `.metadata` names a `.distcp` file and a byte range, which contains the output of torch.save.
`.metadata` is a pickle and is parsed without executing anything (`inert_pickle.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.checkpoint.manifest import is_partition
from megatron.config.regular_file import open_regular, read_regular
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.foreign.inert_pickle import CallRecord, GlobalName, read_pickle
from megatron_lab.foreign.torch_file import TorchFile

METADATA = ".metadata"
_MAX_METADATA_BYTES = 2 << 30
"""Maximum size of .metadata in bytes. The file of a model with 10^12 parameters on 10,000 ranks is smaller."""
_MAX_OVERHEAD_BYTES = 1 << 16
"""Maximum number of bytes that torch.save adds to the data of a tensor. It adds about 1,200."""
_METADATA_CLASSES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta TensorProperties"
)
_PLANNER_CLASSES = "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"
_MEGATRON_CLASSES = "MCoreMetadata MCoreSavePlan"
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 uint8 int8 int16 int32 int64 bool".split()),
        *("uint16 uint32 uint64 complex64 complex128".split()),
    )
}
_ALLOWED_NAMES = frozenset(
    (
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in (*_METADATA_CLASSES.split(), "_MEM_FORMAT_ENCODING")),
        *(f"torch.distributed.checkpoint.planner.{name}" for name in _PLANNER_CLASSES.split()),
        *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in _MEGATRON_CLASSES.split()),
        *(f"torch.distributed._shard.sharded_tensor.metadata.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
        *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.Size"),
        *("pathlib.PosixPath", "pathlib._local.PosixPath", "collections.OrderedDict", "collections.defaultdict", "builtins.dict"),
        *_DTYPES,
    )
)
"""Names that .metadata may contain, as torch 2.1 and later and Megatron-Core up to 0.16 write it. The reader never imports
them."""


@dataclass(frozen=True)
class DistcpChunk:
    """Byte range of a `.distcp` file, which stores one region of a tensor or one object that is not a tensor.

    Args:
        tensor_slice: region of the tensor; None for an object that is not a tensor.
        file: name of the file in the checkpoint folder.
        offset: first byte.
        length: number of bytes.
    """

    tensor_slice: TensorSlice | None
    file: str
    offset: int
    length: int


@dataclass
class DistcpTensor:
    """Shape and dtype of a stored tensor, and the chunks (regions with their byte ranges) that together hold it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[DistcpChunk] = field(default_factory=list)


class DistcpReader:
    """Reader of the tensors and other objects in one torch.distributed.checkpoint folder.

    Args:
        folder: folder that contains `.metadata`.

    Raises:
        CheckpointError: `.metadata` contains unexpected names or opcodes.
        DamagedCheckpointError: `.metadata` is missing or altered, or does not match its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            if (num_bytes := path.stat().st_size) > _MAX_METADATA_BYTES:
                raise CheckpointError(
                    f"{path} has {num_bytes:,} bytes, more than the metadata of any checkpoint needs, so the file is not read. The "
                    "file is probably damaged: copy the checkpoint again"
                )
            data = read_regular(path, _MAX_METADATA_BYTES)
        except OSError as error:
            raise DamagedCheckpointError(
                f"{path} cannot be read ({error.strerror or error}). Copy the complete checkpoint, including this hidden file"
            ) from error
        self.tensors: dict[str, DistcpTensor] = {}
        self.objects: dict[str, DistcpChunk] = {}
        self._verified: set[str] = set()
        try:
            self._parse_metadata(read_pickle(data, str(path), _ALLOWED_NAMES))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise DamagedCheckpointError(
                f"{path} is not readable as the metadata of a torch checkpoint: {str(error)[:400]}. If a new copy of the file "
                "gives the same error, use another checkpoint of the run"
            ) from error

    def _parse_metadata(self, metadata: Any) -> None:
        """Fill `tensors` and `objects` from the parsed `.metadata`, and check that every byte range lies within its file.

        Raises:
            CheckpointError: a byte range is compressed or in a file outside of the folder.
            DamagedCheckpointError: files are missing or too short.
            ValueError: an entry of `.metadata` does not have the expected form.
        """
        metadata_fields = _get_fields(metadata, "Metadata")
        file_sizes: dict[str, int] = {}
        expected: dict[str, dict[tuple[int, ...], TensorSlice]] = {}
        for name, entry_metadata in _get_dict(metadata_fields["state_dict_metadata"]).items():
            if entry_metadata.name.endswith(".TensorStorageMetadata"):
                tensor_fields = _get_fields(entry_metadata, "TensorStorageMetadata")
                self.tensors[name] = DistcpTensor(_parse_size(tensor_fields["size"]), _parse_dtype(tensor_fields["properties"]))
                chunks = [_get_fields(chunk, "ChunkStorageMetadata") for chunk in tensor_fields["chunks"]]
                slices = [TensorSlice(_parse_size(chunk["offsets"]), _parse_size(chunk["sizes"])) for chunk in chunks]
                expected[name] = {tensor_slice.offsets: tensor_slice for tensor_slice in slices}
            elif not entry_metadata.name.endswith(".BytesStorageMetadata"):
                raise ValueError(
                    f"the entry {name} in {METADATA} has the type {entry_metadata.name}, which is neither that of a tensor nor "
                    "that of an object. The file is damaged (copy it again), or written by an unsupported version of torch (save "
                    "the checkpoint with another version, 2.1 or later)"
                )
        truncated: list[str] = []
        for index, storage_info in _get_dict(metadata_fields["storage_data"]).items():
            index_fields, storage_fields = _get_fields(index, "MetadataIndex"), _get_fields(storage_info, "_StorageInfo")
            name, file = index_fields["fqn"], storage_fields["relative_path"]
            if not isinstance(file, str) or Path(file).name != file or file.startswith("."):
                raise CheckpointError(
                    f"{self.folder / METADATA} names a file outside of its folder: {str(file)[:80]!r}. For safety, such files are "
                    "not read: the checkpoint is damaged or was manipulated. Copy it again from a source that you trust"
                )
            if storage_fields.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self.folder}: the entry {name} of the checkpoint is compressed or encrypted, which is not supported. Load "
                    "the checkpoint with Megatron-LM, and save it again without compression and encryption"
                )
            offset, length = _parse_count(storage_fields["offset"]), _parse_count(storage_fields["length"])
            if file not in file_sizes:
                try:
                    file_sizes[file] = (self.folder / file).stat().st_size
                except OSError as error:
                    raise DamagedCheckpointError(f"{self.folder / file} is missing: copy the complete checkpoint") from error
            if offset + length > file_sizes[file]:
                truncated.append(f"{name} (up to byte {offset + length:,} of {file}, which has {file_sizes[file]:,})")
                continue
            if name not in self.tensors:
                self.objects[name] = DistcpChunk(None, file, offset, length)
                continue
            entry = self.tensors[name]
            offsets = (0,) * len(entry.shape) if index_fields["offset"] is None else _parse_size(index_fields["offset"])
            if offsets not in expected[name]:
                raise ValueError(
                    f"the tensor {name} in {METADATA} does not have exactly one chunk (stored part) that starts at the indices "
                    f"{offsets}, so the file is damaged. Copy it again"
                )
            entry.chunks.append(DistcpChunk(expected[name].pop(offsets), file, offset, length))
        if truncated:
            raise DamagedCheckpointError(
                f"{self.folder} is truncated or altered: the files lack the data of {format_list(truncated)}. Copy the checkpoint "
                "again"
            )

    def read(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """Read a slice of a stored tensor into a new contiguous tensor in its stored dtype.

        Raises:
            DamagedCheckpointError: a file is truncated or altered, or chunks of the tensor are missing.
        """
        entry = self.tensors[name]
        if name not in self._verified:
            if not is_partition(entry.shape, [chunk.tensor_slice for chunk in entry.chunks if chunk.tensor_slice is not None]):
                raise DamagedCheckpointError(
                    f"{self.folder}: the stored chunks of the tensor {name} do not cover every element exactly once. The "
                    "checkpoint is incomplete or damaged: copy it again"
                )
            self._verified.add(name)
        result = torch.empty(tensor_slice.sizes, dtype=entry.dtype)
        for chunk in entry.chunks:
            assert chunk.tensor_slice is not None
            if (overlap := chunk.tensor_slice.intersect(tensor_slice)) is not None:
                result[overlap.relative_to(tensor_slice).index] = self._read_chunk(name, entry, chunk)[
                    overlap.relative_to(chunk.tensor_slice).index
                ]
        return result

    def read_object(self, name: str) -> Any:
        """Return a stored object that is not a tensor, such as a dictionary of settings. No code in the file is executed."""
        file = self._open_chunk(name, self.objects[name])
        return file.content

    def _read_chunk(self, name: str, entry: DistcpTensor, chunk: DistcpChunk) -> torch.Tensor:
        """Read the tensor of one stored chunk, and check its size, shape, dtype and checksum."""
        assert chunk.tensor_slice is not None
        max_length = chunk.tensor_slice.numel * entry.dtype.itemsize + _MAX_OVERHEAD_BYTES
        if chunk.length > max_length:
            raise DamagedCheckpointError(
                f"{self.folder / chunk.file}: a chunk of {name} is stored in {chunk.length:,} bytes, but needs at most "
                f"{max_length:,}. The checkpoint is damaged: copy it again"
            )
        file = self._open_chunk(name, chunk)
        tensor = file.content
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.tensor_slice.sizes or tensor.dtype != entry.dtype:
            description = (
                f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            )
            raise DamagedCheckpointError(
                f"{self.folder / chunk.file}: a chunk of {name} is {description} in this file, but {METADATA} says "
                f"{list(chunk.tensor_slice.sizes)} {entry.dtype}. The checkpoint is damaged: copy it again"
            )
        return file.check(tensor, name)

    def _open_chunk(self, name: str, chunk: DistcpChunk) -> TorchFile:
        """Open the byte range of a chunk as a file written by torch.save."""
        path = self.folder / chunk.file
        try:
            with open_regular(path) as file:
                file.seek(chunk.offset)
                return TorchFile(path, file.read(chunk.length))
        except OSError as error:
            raise DamagedCheckpointError(
                f"{path} cannot be read ({error.strerror or os.strerror(error.errno or 0)}): copy the complete checkpoint"
            ) from error
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"the entry {name} of the checkpoint ({chunk.length:,} bytes from byte {chunk.offset:,} on of {path}) cannot be "
                f"read: {error}. If a new copy of this file gives the same error, use another checkpoint of the run"
            ) from error


def _get_fields(record: Any, class_name: str) -> Mapping[str, Any]:
    """Return the attributes of an object in a pickle, by name, after checking that its class is `class_name`."""
    if not isinstance(record, CallRecord) or record.name.rpartition(".")[2] != class_name or not isinstance(record.state, dict):
        raise ValueError(
            f"an entry of {METADATA} is not an object of the class {class_name}. The file is damaged (copy it again), or written "
            "by an unsupported version of torch (save the checkpoint with another version, 2.1 or later)"
        )
    return record.state


def _get_dict(value: Any) -> dict[Any, Any]:
    """Return a dictionary in a pickle, which may be an object of a dictionary subclass, as a plain dictionary."""
    content = value.state if isinstance(value, CallRecord) else value
    if not isinstance(content, dict):
        raise ValueError(
            f"an entry of {METADATA} is not a dictionary. The file is damaged (copy it again), or written by an unsupported "
            "version of torch (save the checkpoint with another version, 2.1 or later)"
        )
    return content


def _parse_size(value: Any) -> tuple[int, ...]:
    """Check that a value in a pickle is a torch.Size of a possible tensor, and return it as a tuple."""
    if isinstance(value, CallRecord) and value.name == "torch.Size":
        (value,) = value.args
    if not isinstance(value, tuple) or len(value) > 8 or math.prod(map(_parse_count, value)) >= 1 << 62:
        raise ValueError(
            f"the value {str(value)[:80]} in {METADATA} is a shape or an offset, but not a valid torch.Size: the file is damaged. "
            "Copy it again"
        )
    return value


def _parse_count(value: Any) -> int:
    """Check that a value in a pickle is a valid number of bytes or elements, and return it."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(
            f"the value {str(value)[:40]} in {METADATA} is not a number of bytes or elements: the file is damaged. Copy it again"
        )
    return value


def _parse_dtype(properties: Any) -> torch.dtype:
    """Return the dtype that a TensorProperties object in a pickle contains."""
    if not isinstance(properties, CallRecord) or not properties.name.endswith(".TensorProperties"):
        raise ValueError(
            f"a tensor in {METADATA} has no properties (TensorProperties, with the dtype). The file is damaged (copy it again), or "
            "written by an unsupported version of torch (save the checkpoint with another version, 2.1 or later)"
        )
    dtype_name = properties.state[0] if isinstance(properties.state, tuple) else properties.state["dtype"]
    if not isinstance(dtype_name, GlobalName) or dtype_name.name not in _DTYPES:
        raise ValueError(
            f"a tensor in {METADATA} has the dtype {str(dtype_name)[:80]}, which is not supported (supported are "
            f"{', '.join(_DTYPES)}). Choose a checkpoint with a supported dtype; if the file is damaged, copy it again"
        )
    return _DTYPES[dtype_name.name]
