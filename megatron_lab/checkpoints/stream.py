"""Write a checkpoint of a whole model in one process, one box in memory at a time: for conversions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import bytes_of
from megatron.checkpoint.rank_parts import BoxToWrite, HeldTensor, share_out, write_part
from megatron.checkpoint.save_folder import checkpoint_name, commit, encoded, merged
from megatron.checkpoint.storage_kinds import open_storage
from megatron.parallel.boxes import Box
from megatron.parallel.products import dtype_name
from megatron_lab.foreign.source import TensorInfo

_TOKEN = "0"
"""Token of all conversions, in place of a run's. Each removes what a killed one left, and nothing of a run that saves there."""


def write_checkpoint(
    folder: Path | str,
    iteration: int,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str, Box], torch.Tensor],
    config: dict[str, Any],
    state: dict[str, Any],
    *,
    files: Sequence[Sequence[tuple[str, Box]]] | None = None,
    max_file_bytes: int | None = 5 << 30,
    content_digest: str | None = None,
) -> str:
    """Write `<folder>/iter_<iteration>/` and point the latest file to it. It is complete or, after a failure, not there.

    Args:
        folder: the save folder, or its URL; made if it does not exist.
        iteration: number of the checkpoint. One of the same number is replaced.
        tensors: everything to store, by full name, e.g. `model.layers.0.mlp.up.weight`.
        read: gives the elements of a box of a tensor, in the sizes of the box and the dtype of the tensor; called once for each.
        config: goes into `config.json`.
        state: goes into `state.json`.
        files: the boxes in each rank's file, for files as a layout has them (a box in several is written into one of them); by
            default whole tensors, in their order.
        max_file_bytes: begin another data file where one would become larger (a box is never cut).
        content_digest: the digest that the checkpoint must have, if it is known.

    Returns:
        the folder of the checkpoint, or its URL.

    Raises:
        CheckpointError: it cannot be written, the boxes are not whole tensors, `read` gives something else than was announced, or
            the content has another digest.
    """
    save, name = open_storage(folder), checkpoint_name(iteration)
    small = encoded(config, state)
    parts = share_out(_held(tensors, files), max_file_bytes)

    def data_of(box: BoxToWrite) -> memoryview:
        tensor = read(box.name, box.box)
        if tuple(tensor.shape) != box.box.sizes or dtype_name(tensor.dtype) != box.dtype:
            raise CheckpointError(
                f"{box.key} was read as {list(tensor.shape)} {dtype_name(tensor.dtype)}, not {list(box.box.sizes)} {box.dtype}"
            )
        return bytes_of(tensor)

    draft = save.draft(name, _TOKEN)
    try:
        draft.make()
        written = [write_part(draft, part, data_of) for part in parts]
        if content_digest is not None and (found := merged(written).content_digest) != content_digest:
            raise CheckpointError(f"what was read has the content digest {found}, and it should be {content_digest}")
        commit(save, draft, iteration, written, small)
    except OSError as error:
        draft.abandon()
        raise CheckpointError(f"cannot save {save.at(name)}: {error}") from error
    except BaseException:
        draft.abandon()
        raise
    return save.at(name)


def _held(tensors: Mapping[str, TensorInfo], files: Sequence[Sequence[tuple[str, Box]]] | None) -> list[list[HeldTensor]]:
    """The boxes of each file, as if a rank held them; the first lists all tensors, also those without elements."""
    if files is None:
        files = [[(name, Box.whole(info.shape)) for name, info in tensors.items() if 0 not in info.shape]]
    world = []
    for number, file in enumerate(files):
        boxes: dict[str, list[Box]] = {name: [] for name in tensors} if number == 0 else {}
        for name, box in file:
            boxes.setdefault(name, []).append(box)
        world.append([HeldTensor(name, tensors[name].shape, dtype_name(tensors[name].dtype), tuple(boxes[name])) for name in boxes])
    return world
