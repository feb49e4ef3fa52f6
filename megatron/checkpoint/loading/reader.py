"""Storage behind `torch.distributed.checkpoint.load`: from memory maps straight into the targets."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, ranks_named
from megatron.checkpoint.format.digest import matches
from megatron.checkpoint.format.manifest import Manifest, StoredBox, read_manifest
from megatron.checkpoint.format.safetensors_file import Entry, MappedFile, bytes_of
from megatron.checkpoint.global_tensor import slices


class BoxReader(StorageReader):
    """Reads the checkpoint in a folder. Works with any planner of torch.distributed.checkpoint that asks for tensors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifest: Manifest | None = None
        self._failure: Exception | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing to do: a reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Never chosen by a path alone."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is stored, from the manifest. torch hides what is raised here, so a failure waits for the next step."""
        try:
            self._manifest = read_manifest(self._path)
        except (CheckpointError, OSError) as error:
            self._failure = error
            return Metadata({})
        tensors = {}
        for name, stored in self._manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(s.box.offsets), torch.Size(s.box.sizes)) for s in stored.boxes]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
        return Metadata(dict(tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Report a manifest that could not be read."""
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which checkpoint this rank sees."""
        assert self._manifest is not None
        return dataclasses.replace(plan, storage_data=self._manifest.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks must see the same checkpoint."""
        other = [rank for rank, plan in enumerate(plans) if plan.storage_data != plans[0].storage_data]
        if other:
            raise CheckpointError(
                f"{ranks_named(other)} found another checkpoint under this name than rank 0: "
                f"--load must be a folder on a file system that all nodes share"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Check every box that is needed, and copy what overlaps.

        Raises:
            DamagedCheckpointError: a file is missing or altered.
        """
        assert self._manifest is not None
        places = {
            (name, stored.box.offsets): (stored, tensor.dtype)
            for name, tensor in self._manifest.tensors.items()
            for stored in tensor.boxes
        }
        wanted: dict[str, dict[StoredBox, tuple[torch.dtype, list[ReadItem]]]] = defaultdict(dict)
        for item in plan.items:
            index = item.storage_index
            stored, dtype = places[index.fqn, tuple(index.offset or ())]
            wanted[stored.file].setdefault(stored, (dtype, []))[1].append(item)
        for file, boxes in wanted.items():
            mapped = MappedFile(self._path / file, self._manifest.files[file].num_bytes)
            for stored, (dtype, items) in boxes.items():
                source = mapped.tensor(Entry(stored.key, dtype, stored.box.sizes))
                if not matches(bytes_of(source), stored.checksum):
                    raise DamagedCheckpointError(f"{self._path / file}: the data of {stored.key} was altered (checksum)")
                for item in items:
                    target = planner.resolve_tensor(item)
                    target.copy_(source[slices(tuple(item.storage_offsets), tuple(item.lengths))])
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
