"""Writes checkpoints as Megatron-Core does in its format `torch_dist`, in one process, whatever the layout of the ranks.

Its files were compared with those that Megatron-Core 0.16 and 0.12 have written themselves.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_lab.verification.reference.shape import Weights
from tests.support.legacy_checkpoints import LegacyLayout, arguments_of, megatron_enums
from tests.support.megatron_states import (
    ITERATION,
    MOST,
    SCALER,
    TrainedModel,
    arguments_of_run,
    flat_buckets,
    groups_of,
    local_tensors,
    made_up,
    schedule_of_run,
)
from tests.support.reference_runs import llama_like

Names = Literal["stacked", "own", "halves"]
"""Layers in one tensor; each with its own names; these with gate and up projection apart."""
StateForm = Literal["fully_reshardable", "fully_sharded_model_space", "dp_reshardable", "dp_zero_gather_scatter", "plain", "none"]


class Piece(NamedTuple):
    """A part of a tensor of the whole model, on one rank."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    part: torch.Tensor


@dataclass
class DistWriter:
    """Collects parts, writes them into files as they come, and `.metadata` at the end."""

    folder: Path
    about: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    stored: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def add(self, piece: Piece, rank: int) -> None:
        whole, offsets, sizes = torch.Size(piece.whole), torch.Size(piece.offsets), piece.part.shape
        if piece.key not in self.about:
            self.about[piece.key] = TensorStorageMetadata(TensorProperties(dtype=piece.part.dtype), whole, [])
        entry = self.about[piece.key]
        assert isinstance(entry, TensorStorageMetadata) and entry.size == whole, piece.key
        index = MetadataIndex(piece.key, offsets)
        if index in self.stored:
            return  # a replica
        entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
        self._write(index, piece.part.clone(), rank)

    def add_object(self, key: str, value: Any, rank: int) -> None:
        self.about[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), [value], rank)

    def _write(self, index: MetadataIndex, value: Any, rank: int) -> None:
        data = io.BytesIO()
        torch.save(value, data)
        path = self.folder / f"__{rank}_0.distcp"
        with path.open("ab") as file:
            self.stored[index] = _StorageInfo(path.name, file.tell(), file.write(data.getvalue()))

    def finish(self) -> None:
        (self.folder / ".metadata").write_bytes(pickle.dumps(Metadata(self.about, storage_data=self.stored)))  # type: ignore[arg-type]


def pieces_of(
    name: str, local: torch.Tensor, first_layer: int, num_layers: int, rank: int, tp: int, names: Names, gated: bool
) -> Iterator[Piece]:
    """What a tensor rank saves of one of its tensors.

    Args:
        name: in its chunk.
        first_layer: of the chunk.
        gated: whether the up projection is a pair.
    """
    rows = ("qkv.weight", "qkv.bias", "fc1.weight", "fc1.bias", "word_emb", "output_layer")
    dim = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0 if any(part in name for part in rows) else None
    row, key = None, name
    if name.startswith("decoder.layers."):
        decoder, layers, layer, rest = name.split(".", 3)
        row = first_layer + int(layer)
        key = ".".join([decoder, layers, *([] if names == "stacked" else [str(row)]), rest])
    parts = [(key, 0, local)]
    halves = 1
    if gated and ".linear_fc1." in name and "layer_norm" not in name:
        gate, up = local.chunk(2)
        halves = 1 if names == "halves" else 2
        parts = [(f"{key}_w", 0, gate), (f"{key}_v", 0, up)] if names == "halves" else [(key, 0, gate), (key, 1, up)]
    for one, half, part in parts:
        whole, offsets = list(part.shape), [0] * part.dim()
        if dim is not None:
            whole[dim] *= tp * halves
            offsets[dim] = (half * tp + rank) * part.shape[dim]
        if names == "stacked" and row is not None:
            whole, offsets, part = [num_layers, *whole], [row, *offsets], part[None]
        yield Piece(one, tuple(whole), tuple(offsets), part)


def flattened(piece: Piece, cuts: tuple[float, ...]) -> Iterator[Piece]:
    """A part as the data ranks of a sharded optimizer hold it: flat, one range each, in a grid of such parts."""
    grid = tuple(whole // size for whole, size in zip(piece.whole, piece.part.shape, strict=True))
    cell = tuple(at // size for at, size in zip(piece.offsets, piece.part.shape, strict=True))
    flat, ones = piece.part.flatten(), (1,) * len(grid)
    ends = [0, *(math.floor(cut * len(flat)) for cut in cuts), len(flat)]
    for start, end in itertools.pairwise(ends):
        if end > start:
            yield Piece(piece.key, (*grid, len(flat)), (*cell, start), flat[start:end].view(*ones, -1))


def write_dist(
    folder: Path,
    model: TrainedModel,
    layout: LegacyLayout,
    *,
    names: Names = "stacked",
    form: StateForm = "fully_reshardable",
    **changes: Any,
) -> Path:
    """Write a checkpoint into a --save folder; returns the folder of the iteration.

    Args:
        form: of the optimizer state.
        changes: of the arguments.
    """
    shape, path = model.shape, folder / f"iter_{ITERATION:07d}"
    path.mkdir(parents=True)
    writer, gated, shared = DistWriter(path), shape.activation == "swiglu", shape.tied and layout.pp > 1
    sharded = form not in ("plain", "none")
    kinds = {"fp32_param" if kind == "param" and form != "fully_reshardable" else kind: some for kind, some in model.kinds.items()}
    if sharded and not model.mains:
        kinds = {"param" if form == "fully_reshardable" else "fp32_param": model.weights, **kinds}
    for chunk, rank in itertools.product(range(layout.pp * layout.virtual), range(layout.tp)):
        stage, number = chunk % layout.pp, chunk // layout.pp
        first, world_rank = layout.chunk_layers(shape.num_layers)[chunk].start, stage * layout.tp + rank
        local = partial(local_tensors, shape, layout=layout, chunk=chunk, rank=rank)

        def parts(tensors: Weights, first: int = first, rank: int = rank, local: Any = local) -> Iterator[Piece]:
            for name, tensor in local(tensors).items():
                if not (shape.tied and name == "output_layer.weight"):  # a replica of the embedding
                    yield from pieces_of(name, tensor, first, shape.num_layers, rank, layout.tp, names, gated)

        for piece in parts(model.weights):
            writer.add(piece, world_rank)
        writer.add_object(f"decoder.layers.mlp.linear_fc1._extra_state/shard_{chunk}", None, world_rank)
        if form in ("fully_reshardable", "fully_sharded_model_space", "plain"):
            for kind, tensors in kinds.items():
                for piece in parts(tensors):
                    for one in flattened(piece, (0.3, 0.31)) if form == "fully_sharded_model_space" else [piece]:
                        writer.add(one._replace(key=f"optimizer.state.{kind}.{one.key}"), world_rank)
        start = f"optimizer.distributed.dp_group_idx_{world_rank}."
        if sharded:
            groups = groups_of([], updates=model.updates)
            writer.add_object(f"{start}optimizer/shard_0_1", {"param_groups": groups}, world_rank)
            writer.add_object(f"{start}grad_scaler/shard_0_1", SCALER, world_rank)
        if form == "dp_reshardable":
            states = {("param" if kind == "fp32_param" else kind): local(tensors) for kind, tensors in kinds.items()}
            for bucket, found in enumerate(flat_buckets(states["param"], states, shared, MOST if stage == number == 0 else None)):
                key = f"{start}gbuf_idx_{number}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{bucket}."
                for kind, flat in found.items():
                    middle = len(flat) // 2
                    for at, part in ((0, flat[:middle]), (middle, flat[middle:])):
                        writer.add(Piece(f"{key}{kind}", (len(flat),), (at,), part), world_rank)
    writer.add_object("rng_state/shard_0.0_1.1", {"random_rng_state": (3, (1, 2), None)}, 0)
    writer.finish()
    inner: dict[str, Any] = {"param_groups": groups_of([], updates=model.updates if sharded else None)}
    if form == "plain":
        inner["state"] = {"common_step": torch.tensor(float(model.updates))}
    optimizer: dict[str, Any] = {"optimizer": inner, "grad_scaler": SCALER, "param_state_sharding_type": form}
    if form == "plain":
        optimizer = {"optimizer": inner, "grad_scaler": SCALER} if model.mains else inner
    elif form in ("dp_reshardable", "dp_zero_gather_scatter"):
        optimizer = {"param_state_sharding_type": form}
    with megatron_enums() as enums:
        settings = {**enums, **arguments_of_run(model, sharded=sharded), **changes}
        common = {
            "args": arguments_of(shape, layout, **settings),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "num_floating_point_operations_so_far": 1e15,
            "content_metadata": {"singleton_local_shards": names == "halves"},
            **({} if form == "none" else {"optimizer": optimizer, "opt_param_scheduler": schedule_of_run(model)}),
        }
        torch.save(common, path / "common.pt")
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(about))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return path


def write_dist_example(folder: Path, vocab_size: int) -> None:
    """A --save folder with a tiny Llama on two tensor ranks, and the state of its run; arguments as of `write_legacy_example`."""
    write_dist(folder, made_up(llama_like(vocab=vocab_size)).rounded(), LegacyLayout(tp=2))
