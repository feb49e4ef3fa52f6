"""Storage behind `torch.distributed.checkpoint.load`: from the files straight into the targets."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.checkpoint.dtypes import torch_dtype
from megatron.checkpoint.errors import CheckpointError, ranks_named
from megatron.checkpoint.format.manifest import Manifest, StoredBox
from megatron.checkpoint.loading.data_files import DataFiles, Part
from megatron.checkpoint.loading.find import manifest_in
from megatron.checkpoint.storage.protocol import Storage
from megatron.parallel.boxes import Box


class BoxReader(StorageReader):
    """Reads a checkpoint. Works with any planner of torch.distributed.checkpoint that asks for tensors.

    Args:
        storage: the checkpoint's folder.
        threads: how many read at the same time.
    """

    def __init__(self, storage: Storage, threads: int = 1) -> None:
        self._storage, self._threads = storage, threads
        self._manifest: Manifest | None = None
        self._failure: Exception | None = None
        self.straight: Counter[str] = Counter()
        """By tensor, the elements that were read in whole boxes, straight into their place, and checked there."""

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing to do: a reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Never chosen by a path alone."""
        return False

    @property
    def manifest(self) -> Manifest:
        """Of the checkpoint, once it has been read."""
        assert self._manifest is not None
        return self._manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is stored, from the manifest. torch hides what is raised here, so a failure waits for the next step."""
        try:
            self._manifest = manifest_in(self._storage)
        except (CheckpointError, OSError) as error:
            self._failure = error
            return Metadata({})
        tensors = {}
        for name, stored in self._manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(s.box.offsets), torch.Size(s.box.sizes)) for s in stored.boxes]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=torch_dtype(stored.dtype)), torch.Size(stored.shape), chunks
            )
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
        wanted: dict[StoredBox, tuple[str, list[Part]]] = {}
        for item in plan.items:
            index = item.storage_index
            stored, dtype = places[index.fqn, tuple(index.offset or ())]
            part = Part(Box(tuple(item.storage_offsets), tuple(item.lengths)), planner.resolve_tensor(item))
            wanted.setdefault(stored, (dtype, []))[1].append(part)
            if part.goes_straight(stored, dtype) and _place(item) == stored.box.offsets:
                self.straight[index.fqn] += stored.box.numel
        with DataFiles(self._storage, self._manifest) as files, ThreadPoolExecutor(self._threads) as pool:
            in_order = sorted(wanted.items(), key=lambda entry: (entry[0].file, files.start(entry[0], entry[1][0])))
            for read in [pool.submit(files.read, stored, *what) for stored, what in in_order]:
                read.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _place(item: ReadItem) -> tuple[int, ...]:
    """Where the first element goes, in the whole tensor."""
    return tuple(a + b for a, b in zip(item.dest_index.offset or (), item.dest_offsets, strict=True))
