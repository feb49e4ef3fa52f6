"""The files of a distributed checkpoint of torch (torch.distributed.checkpoint), as Megatron-Core's format `torch_dist` has them.

`.metadata`, a pickle that is read as data (`inert_pickle.py`), says for every tensor its shape, its dtype and its chunks, and for
every chunk the bytes of a `.distcp` file in which torch.save has written it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.manifest import tiles
from megatron.parallel.boxes import Box
from megatron_lab.foreign.inert_pickle import Made, Named, read_pickle
from megatron_lab.foreign.torch_file import TorchFile

METADATA = ".metadata"
_MOST_BYTES = 2 << 30
"""Bytes of .metadata; that of a model of a trillion parameters on ten thousand ranks has fewer."""
_MOST_AROUND = 1 << 16
"""Bytes that torch.save writes around the data of a tensor; it needs some 1,200."""
_OF_METADATA = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta TensorProperties"
_OF_PLANS = "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"
_OF_MEGATRON = "MCoreMetadata MCoreSavePlan"
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 uint8 int8 int16 int32 int64 bool".split()),
        *("uint16 uint32 uint64 complex64 complex128".split()),
    )
}
_KNOWN = frozenset(
    (
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in (*_OF_METADATA.split(), "_MEM_FORMAT_ENCODING")),
        *(f"torch.distributed.checkpoint.planner.{name}" for name in _OF_PLANS.split()),
        *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in _OF_MEGATRON.split()),
        *(f"torch.distributed._shard.sharded_tensor.metadata.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
        *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.Size"),
        *("pathlib.PosixPath", "pathlib._local.PosixPath", "collections.OrderedDict", "collections.defaultdict", "builtins.dict"),
        *_DTYPES,
    )
)
"""Names in such a file: torch 2.1 and later, Megatron-Core up to 0.16. They are read as words; no class is looked up."""


@dataclass(frozen=True)
class DistcpChunk:
    """A box of a tensor, or an object without one, and the bytes in which it lies."""

    box: Box | None
    file: str
    offset: int
    length: int


@dataclass
class DistcpTensor:
    """A tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[DistcpChunk] = field(default_factory=list)


class DistcpFiles:
    """The tensors and objects of one checkpoint.

    Args:
        folder: the folder with `.metadata`.

    Raises:
        CheckpointError: `.metadata` is of another kind, or would do something when opened as a pickle.
        DamagedCheckpointError: it is missing or altered, or does not fit its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            if (num_bytes := path.stat().st_size) > _MOST_BYTES:
                raise CheckpointError(f"{path} has {num_bytes:,} bytes, more than any checkpoint needs: it is not read")
            data = path.read_bytes()
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
        self.tensors: dict[str, DistcpTensor] = {}
        self.objects: dict[str, DistcpChunk] = {}
        self._whole: set[str] = set()
        try:
            self._fill(read_pickle(data, str(path), _KNOWN))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise DamagedCheckpointError(f"{path} is not what torch's checkpoints say of themselves ({str(error)[:80]})") from error

    def _fill(self, metadata: Any) -> None:
        parts = _state(metadata, "Metadata")
        sizes: dict[str, int] = {}
        wanted: dict[str, dict[tuple[int, ...], Box]] = {}
        for name, kind in _mapping(parts["state_dict_metadata"]).items():
            if kind.name.endswith(".TensorStorageMetadata"):
                about = _state(kind, "TensorStorageMetadata")
                self.tensors[name] = DistcpTensor(_size(about["size"]), _dtype(about["properties"]))
                chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in about["chunks"]]
                boxes = [Box(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
                wanted[name] = {box.offsets: box for box in boxes}
            elif not kind.name.endswith(".BytesStorageMetadata"):
                raise ValueError(f"{name} is a {kind.name}")
        lost: list[str] = []
        for index, info in _mapping(parts["storage_data"]).items():
            key, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
            name, file = key["fqn"], place["relative_path"]
            if not isinstance(file, str) or Path(file).name != file or file.startswith("."):
                raise CheckpointError(f"{self.folder / METADATA} names files outside of its folder: {str(file)[:80]!r}")
            if place.get("transform_descriptors"):
                raise CheckpointError(f"{self.folder}: {name} is compressed or encrypted, which is not read here")
            offset, length = _count(place["offset"]), _count(place["length"])
            if file not in sizes:
                try:
                    sizes[file] = (self.folder / file).stat().st_size
                except OSError as error:
                    raise DamagedCheckpointError(f"{self.folder / file} is missing") from error
            if offset + length > sizes[file]:
                lost.append(f"{name} (up to byte {offset + length:,} of {file}, which has {sizes[file]:,})")
                continue
            if name not in self.tensors:
                self.objects[name] = DistcpChunk(None, file, offset, length)
                continue
            entry = self.tensors[name]
            at = (0,) * len(entry.shape) if key["offset"] is None else _size(key["offset"])
            if at not in wanted[name]:
                raise ValueError(f"{name} has no chunk at {at}, or two")
            entry.chunks.append(DistcpChunk(wanted[name].pop(at), file, offset, length))
        if lost:
            raise DamagedCheckpointError(f"{self.folder} is truncated or altered: it lacks {listed(lost)}")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor: a new contiguous tensor in its stored dtype.

        Raises:
            DamagedCheckpointError: a file is truncated or altered, or chunks are missing.
        """
        entry = self.tensors[name]
        if name not in self._whole:
            if not tiles(entry.shape, [chunk.box for chunk in entry.chunks if chunk.box is not None]):
                raise DamagedCheckpointError(f"{self.folder}: the chunks of {name} are not the whole tensor, once")
            self._whole.add(name)
        found = torch.empty(box.sizes, dtype=entry.dtype)
        for chunk in entry.chunks:
            assert chunk.box is not None
            if (common := chunk.box.intersect(box)) is not None:
                found[common.relative_to(box).index] = self._chunk(name, entry, chunk)[common.relative_to(chunk.box).index]
        return found

    def read_object(self, name: str) -> Any:
        """What is stored under a name that is no tensor, opened without running anything."""
        file = self._part(name, self.objects[name])
        return file.content

    def _chunk(self, name: str, entry: DistcpTensor, chunk: DistcpChunk) -> torch.Tensor:
        assert chunk.box is not None
        most = chunk.box.numel * entry.dtype.itemsize + _MOST_AROUND
        if chunk.length > most:
            raise DamagedCheckpointError(
                f"{self.folder / chunk.file}: {name} takes {chunk.length:,} bytes, and needs at most {most:,}"
            )
        file = self._part(name, chunk)
        tensor = file.content
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.box.sizes or tensor.dtype != entry.dtype:
            what = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            raise DamagedCheckpointError(
                f"{self.folder / chunk.file}: {name} is {what} there, and {METADATA} says {list(chunk.box.sizes)} {entry.dtype}"
            )
        return file.check(tensor, name)

    def _part(self, name: str, chunk: DistcpChunk) -> TorchFile:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.offset)
                return TorchFile(path, file.read(chunk.length))
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror or os.strerror(error.errno or 0)})") from error
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{name}, {chunk.length:,} bytes from byte {chunk.offset:,} on: {error}") from error


def _state(made: Any, kind: str) -> Mapping[str, Any]:
    """The fields of a record of some class."""
    if not isinstance(made, Made) or made.name.rpartition(".")[2] != kind or not isinstance(made.state, dict):
        raise ValueError(f"no {kind}")
    return made.state


def _mapping(value: Any) -> dict[Any, Any]:
    found = value.state if isinstance(value, Made) else value
    if not isinstance(found, dict):
        raise ValueError("no dictionary")
    return found


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size."""
    if isinstance(value, Made) and value.name == "torch.Size":
        (value,) = value.args
    if not isinstance(value, tuple) or len(value) > 8 or math.prod(map(_count, value)) >= 1 << 62:
        raise ValueError("no size")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]} is no number of bytes or elements")
    return value


def _dtype(properties: Any) -> torch.dtype:
    if not isinstance(properties, Made) or not properties.name.endswith(".TensorProperties"):
        raise ValueError("no properties of a tensor")
    named = properties.state[0] if isinstance(properties.state, tuple) else properties.state["dtype"]
    if not isinstance(named, Named) or named.name not in _DTYPES:
        raise ValueError("no dtype")
    return _DTYPES[named.name]
