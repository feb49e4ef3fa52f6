"""Storage behind `torch.distributed.checkpoint.save`: safetensors files and a manifest, complete or not there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format.digest import checksum
from megatron.checkpoint.format.folder import (
    LATEST,
    checkpoint_name,
    replace_synced,
    saving_name,
    set_aside,
    sync_folder,
    write_synced,
)
from megatron.checkpoint.format.manifest import CONFIG, MANIFEST, STATE, Manifest, StoredBox, StoredFile, StoredTensor
from megatron.checkpoint.format.safetensors_file import Entry, write_file
from megatron.checkpoint.global_tensor import box_key
from megatron.checkpoint.saving.plan import item_box
from megatron.parallel.boxes import Box


class BoxWriter(StorageWriter):
    """Writes one checkpoint.

    Every rank writes its own files into a folder with a temporary name. When all have been written and synced, the coordinator
    adds the manifest, renames the folder and points the latest file to it.
    """

    def __init__(
        self, folder: Path, iteration: int, config: dict[str, Any], state: dict[str, Any], max_file_bytes: int | None = None
    ) -> None:
        self.final = folder / checkpoint_name(iteration)
        self._temporary = folder / saving_name(iteration)
        self._iteration = iteration
        self._json = {CONFIG: config, STATE: state}
        self._max_file_bytes = max_file_bytes
        self._is_coordinator = False
        self._encoded: dict[str, bytes] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing to do: a writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Never chosen by a path alone."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this rank coordinates."""
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: make the temporary folder (anew, if a killed save left one) and number the ranks."""
        for name, content in self._json.items():
            try:
                self._encoded[name] = json.dumps(content, indent=1).encode()
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"{name} would hold what JSON cannot: {error}") from error
        if self._temporary.exists():
            shutil.rmtree(self._temporary)
        self._temporary.mkdir(parents=True)
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes. The storage data of a result is (file, its size, key, checksum)."""
        if not self._temporary.is_dir():
            raise CheckpointError(
                f"rank {plan.storage_data} does not see {self._temporary}, which the first rank made: "
                f"--save must be a folder on a file system that all nodes share"
            )
        results = []
        for name, items in self._files(plan):
            entries = [_entry(item) for item in items]

            def tensor_of(index: int, items: list[WriteItem] = items) -> Any:
                return planner.resolve_data(items[index])

            size, checksums = write_file(self._temporary / name, entries, tensor_of)
            for item, entry, value in zip(items, entries, checksums, strict=True):
                results.append(WriteResult(item.index, entry.num_bytes, (name, size, entry.key, value)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: manifest, final name, latest file, in this order."""
        files = {}
        for name, num_bytes in {result.storage_data[:2] for rank_results in results for result in rank_results}:
            if (found := (self._temporary / name).stat().st_size) != num_bytes:
                raise CheckpointError(f"{self._temporary / name} was written with {num_bytes} bytes, the first rank sees {found}")
            files[name] = StoredFile(num_bytes)
        for name, data in self._encoded.items():
            write_synced(self._temporary / name, data)
            files[name] = StoredFile(len(data), checksum(data))
        manifest = Manifest(_stored_tensors(metadata, results), dict(sorted(files.items())))
        write_synced(self._temporary / MANIFEST, manifest.to_json())
        sync_folder(self._temporary)
        replaced = set_aside(self.final) if self.final.exists() else None
        self._temporary.rename(self.final)
        sync_folder(self.final.parent)
        replace_synced(self.final.parent / LATEST, f"{self._iteration}\n".encode())
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)  # the new one is complete; retention removes what may be left

    def abandon(self) -> None:
        """After a failure: the coordinator frees the space of what was written."""
        if self._is_coordinator:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _files(self, plan: SavePlan) -> Iterator[tuple[str, list[WriteItem]]]:
        """The rank's files and what goes into each: one file, or as many as the size limit asks for."""
        parts: list[list[WriteItem]] = []
        size = 0
        for item in plan.items:
            num_bytes = _entry(item).num_bytes
            if not parts or (self._max_file_bytes is not None and size + num_bytes > self._max_file_bytes):
                parts.append([])
                size = 0
            parts[-1].append(item)
            size += num_bytes
        for number, part in enumerate(parts):
            suffix = f"_{number:05d}" if len(parts) > 1 else ""
            yield f"rank_{plan.storage_data:05d}{suffix}.safetensors", part


def _stored_tensors(metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, StoredTensor]:
    places = {result.index: result.storage_data for rank_results in results for result in rank_results}
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        boxes = []
        for chunk in stored.chunks:
            file, _, key, value = places[MetadataIndex(name, chunk.offsets)]
            boxes.append(StoredBox(Box(tuple(chunk.offsets), tuple(chunk.sizes)), file, key, value))
        tensors[name] = StoredTensor(tuple(stored.size), stored.properties.dtype, tuple(boxes))
    return tensors


def _entry(item: WriteItem) -> Entry:
    assert item.tensor_data is not None
    box = item_box(item)
    key = box_key(item.index.fqn, tuple(item.tensor_data.size), box)
    return Entry(key, item.tensor_data.properties.dtype, box.sizes)
