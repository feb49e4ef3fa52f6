"""Models cut over made-up worlds, for the tests of checkpoints: what every rank holds, and saves and loads of all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint import load
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.load import LoadResult, check_requests, plan_load, read_slices
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.save_folder import commit, encode_json_files, get_checkpoint_name, load_manifest
from megatron.checkpoint.save_plan import plan_save, write_rank_files
from megatron.checkpoint.savers import SyncSaver, build_data_reader, build_specs
from megatron.checkpoint.storage import PathOrUrl
from megatron.checkpoint.storage_url import open_storage
from megatron.parallel.context import SELF_GROUP, Group
from megatron.parallel.params import ParamRecord, Split
from megatron.parallel.tensor_slice import BufferSlice, FlatRange, TensorSlice, map_flat_range

PADDING = -777.0
"""Stands in padded elements; nobody may store or overwrite it."""

Shapes = dict[str, tuple[tuple[int, ...], int | None]]
"""Name -> (global shape, dimension that tensor ranks split)."""
Values = dict[str, torch.Tensor]
World = list[list[GlobalTensor]]


@dataclass(frozen=True)
class Layout:
    """Tensor ranks, and where the flattened local tensors are cut over the data ranks (fractions, ascending)."""

    tp: int = 1
    cuts: tuple[float, ...] = ()

    @property
    def dp(self) -> int:
        return len(self.cuts) + 1

    @property
    def world_size(self) -> int:
        return self.tp * self.dp


def record(name: str, shape: tuple[int, ...], split_dim: int | None, layout: Layout) -> ParamRecord:
    """A parameter; dimension 0 is padded where it does not divide."""
    if split_dim is None:
        return ParamRecord(name, shape)
    padded = math.ceil(shape[split_dim] / layout.tp) * layout.tp
    return ParamRecord(name, shape, (Split(split_dim, "tp", padded if padded != shape[split_dim] else None),))


def hold(
    shapes: Shapes, layout: Layout, rank: int, values: Values | None, dtype: torch.dtype = torch.float32
) -> list[GlobalTensor]:
    """What a rank holds: of each name `model.<name>` whole, `main.<name>` a flat piece of its data rank.

    Args:
        values: global values by full name; without them the tensors hold zeros, to be filled by a load.
    """
    axes, coordinates = {"tp": layout.tp}, {"tp": rank % layout.tp}
    data_rank = rank // layout.tp
    tensors = []
    for short, (shape, split_dim) in shapes.items():
        of = record(short, shape, split_dim, layout)
        local_shape, held = of.get_local_shape(axes), of.get_local_slice(axes, coordinates)
        numel = math.prod(local_shape)
        ends = [0, *(round(cut * numel) for cut in layout.cuts), numel]
        for kind, piece in (("model", FlatRange(0, numel)), ("main", FlatRange(ends[data_rank], ends[data_rank + 1]))):
            name = f"{kind}.{short}"
            if values is None:
                local = torch.zeros(numel, dtype=dtype)
            else:
                block = tuple(slice(o, o + n) for o, n in zip(held.offsets, held.sizes, strict=True))
                local = torch.full((numel,), PADDING, dtype=dtype)
                local[: held.numel] = values[name][block].reshape(-1).to(dtype)
            tensors.append(
                GlobalTensor(name, shape, local[piece.start : piece.stop].clone(), map_flat_range(local_shape, held, piece))
            )
    return tensors


def random_values(shapes: Shapes, seed: int = 0) -> Values:
    """Global values for every full name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{kind}.{short}": torch.randn(shape, generator=generator)
        for short, (shape, _) in shapes.items()
        for kind in ("model", "main")
    }


def whole(name: str, tensor: torch.Tensor) -> GlobalTensor:
    """A tensor that one rank holds entirely."""
    shape = tuple(tensor.shape)
    return GlobalTensor(name, shape, tensor, [BufferSlice(TensorSlice.full(shape), 0)] if tensor.numel() else [])


def save_world(
    folder: Path, iteration: int, world: World, state: dict[str, Any] | None = None, max_file_bytes: int | None = None
) -> Path:
    """Save what all ranks hold, in this process: the steps of `save_checkpoint`, rank by rank."""
    save = open_storage(folder)
    draft = save.draft(get_checkpoint_name(iteration), "0")
    planned = plan_save([build_specs(tensors) for tensors in world], max_file_bytes)
    draft.create_folder()
    parts = [write_rank_files(draft, part, build_data_reader(tensors)) for part, tensors in zip(planned, world, strict=True)]
    commit(save, draft, iteration, parts, encode_json_files({}, state or {}))
    return folder / get_checkpoint_name(iteration)


def load_world(path: Path, world: World) -> None:
    """Fill what all ranks hold, in this process: the steps of `load_tensors`, rank by rank."""
    storage = open_storage(path)
    manifest = load_manifest(storage)
    planned = [plan_load(tensors, manifest) for tensors in world]
    check_requests([request for request, _ in planned], manifest, lambda name: False)
    for _, reads in planned:
        read_slices(storage, manifest, reads)


def read_manifest(path: Path) -> Manifest:
    return load_manifest(open_storage(path))


def assert_holds(tensors: Sequence[GlobalTensor], expected: Sequence[GlobalTensor], padding: float) -> None:
    """Every element that a box covers equals that of the other list; every other element is `padding`."""
    for tensor, other in zip(tensors, expected, strict=True):
        assert tensor.slices == other.slices
        covered = torch.zeros(tensor.local.numel(), dtype=torch.bool)
        for placed in tensor.slices:
            covered[placed.offset : placed.offset + placed.slice.numel] = True
        assert torch.equal(tensor.local[covered], other.local[covered]), tensor.name
        assert (tensor.local[~covered] == padding).all(), tensor.name


def group_of(process_group: dist.ProcessGroup | None = None) -> Group:
    """The ranks of a process group; for None all ranks, or this process alone where torch.distributed is not initialised."""
    if process_group is None:
        if not dist.is_initialized():
            return SELF_GROUP
        process_group = dist.group.WORLD
    assert process_group is not None
    return Group("save", tuple(dist.get_process_group_ranks(process_group)), process_group.rank(), process_group)


def load_tensors(
    path: PathOrUrl, tensors: list[GlobalTensor], *, process_group: dist.ProcessGroup | None = None, **settings: Any
) -> LoadResult:
    """Load on every rank of the group. See `megatron.checkpoint.load.load_tensors`."""
    return load.load_tensors(path, tensors, group_of(process_group), **settings)


def save_checkpoint(
    folder: Path,
    iteration: int,
    tensors: list[GlobalTensor],
    config: dict[str, Any],
    state: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write one checkpoint, called on every rank of the group; returns its folder. See `SyncSaver.save`."""
    storage, group = open_storage(folder), group_of(process_group)
    if group.rank == 0:
        storage.remove_unfinished("")
    SyncSaver(storage, group).save(iteration, tensors, config, state)
    return Path(storage.get_location(get_checkpoint_name(iteration)))
