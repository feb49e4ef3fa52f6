"""Who writes what: every box once in the world, spread evenly over the ranks that hold it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.format.safetensors_file import DTYPE_CODES
from megatron.checkpoint.format.tiling import tiles
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.parallel.boxes import Box

TENSORS = "tensors"
"""Key of the list of global tensors in the state dict that is handed to torch.distributed.checkpoint."""


class BoxSavePlanner(SavePlanner):
    """Plans a save of `{TENSORS: [GlobalTensor, ...]}`."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the tensors of this rank."""
        self._tensors: list[GlobalTensor] = state_dict[TENSORS]
        self._parts: dict[tuple[str, Box], torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """One item for each box of this rank, and the description of every tensor, also of those it holds no box of."""
        items = []
        for tensor in self._tensors:
            for placed in tensor.boxes:
                self._parts[tensor.name, placed.box] = tensor.part(placed)
                items.append(_write_item(tensor, placed.box))
        described = [(tensor.name, tensor.global_shape, tensor.local.dtype) for tensor in self._tensors]
        return SavePlan(items, planner_data=described)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Give every box to one of its holders, and check that boxes make up whole tensors.

        Raises:
            CheckpointError: ranks disagree on a tensor's shape or dtype, a dtype is not supported, or a tensor is not whole.
        """
        metadata = _describe(all_plans)
        holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders[item.index.fqn, item_box(item)].append(rank)
        for name, box in holders:
            metadata[name].chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
        broken = [name for name, stored in metadata.items() if not tiles(tuple(stored.size), stored_boxes(stored))]
        if broken:
            raise CheckpointError(f"the boxes that the ranks hold do not make up whole tensors: {listed(broken)}")
        writers = _share(holders, {name: stored.properties.dtype for name, stored in metadata.items()}, len(all_plans))
        plans = []
        for rank, plan in enumerate(all_plans):
            mine = {(item.index.fqn, item_box(item)): item for item in plan.items}
            items = [item for key, item in mine.items() if writers[key] == rank]
            plans.append(dataclasses.replace(plan, items=items, planner_data=None))
        return plans, Metadata(dict(metadata))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Accept the coordinator's plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The local elements of a box."""
        return self._parts[write_item.index.fqn, item_box(write_item)]


def item_box(item: WriteItem) -> Box:
    """The box that an item writes."""
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def stored_boxes(stored: TensorStorageMetadata) -> list[Box]:
    """The boxes in which a tensor is stored."""
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]


def _write_item(tensor: GlobalTensor, box: Box) -> WriteItem:
    offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=tensor.local.dtype), torch.Size(tensor.global_shape)
    )
    return WriteItem(MetadataIndex(tensor.name, offsets), WriteItemType.SHARD, tensor_data=data)


def _describe(all_plans: list[SavePlan]) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor in the world, without boxes."""
    found: dict[str, TensorStorageMetadata] = {}
    problems: list[str] = []
    for rank, plan in enumerate(all_plans):
        for name, shape, dtype in plan.planner_data:
            stored = found.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), []))
            if (tuple(stored.size), stored.properties.dtype) != (shape, dtype):
                problems.append(f"{name} is {shape} {dtype} on rank {rank}, {tuple(stored.size)} {stored.properties.dtype} before")
            if dtype not in DTYPE_CODES:
                problems.append(f"{name} is {dtype}, a checkpoint holds {', '.join(map(str, DTYPE_CODES))}")
    if problems:
        raise CheckpointError(f"tensors cannot be saved: {listed(problems, '; ')}")
    return found


def _share(
    holders: dict[tuple[str, Box], list[int]], dtypes: dict[str, torch.dtype], world_size: int
) -> dict[tuple[str, Box], int]:
    """Which rank writes each box: the one with the fewest bytes so far, large boxes first."""
    sizes = {key: key[1].numel * dtypes[key[0]].itemsize for key in holders}
    load, writers = [0] * world_size, {}
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key])):
        rank = min(holders[key], key=lambda rank: load[rank])
        writers[key] = rank
        load[rank] += sizes[key]
    return writers
