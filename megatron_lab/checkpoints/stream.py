"""Writer of a complete checkpoint in one process, with one slice in memory at a time, for conversions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import get_tensor_bytes
from megatron.checkpoint.save_folder import commit, encode_json_files, get_checkpoint_name, merge_manifests
from megatron.checkpoint.save_plan import LocalTensorSpec, WriteItem, plan_save, write_rank_files
from megatron.checkpoint.storage_url import open_storage
from megatron.parallel.matmul import get_dtype_name
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.foreign.source import TensorInfo

_TOKEN = "0"
"""Token that all conversions use in place of a run's token. So a conversion removes the remains of killed conversions, but not
those of runs."""


def write_checkpoint(
    folder: Path | str,
    iteration: int,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str, TensorSlice], torch.Tensor],
    config: dict[str, Any],
    state: dict[str, Any],
    *,
    rank_slices: Sequence[Sequence[tuple[str, TensorSlice]]] | None = None,
    max_file_bytes: int | None = 5 << 30,
    content_digest: str | None = None,
    before_commit: Callable[[], None] | None = None,
) -> str:
    """Write the checkpoint `<folder>/iter_<iteration>/`, and name it as the newest in the save folder's latest file. If writing
    fails, no incomplete checkpoint remains.

    Args:
        folder: path or URL of the save folder. It is created if it does not exist.
        iteration: iteration of the checkpoint. An existing checkpoint of this iteration is replaced.
        tensors: shape and dtype of all tensors to store, by full name, such as `model.layers.0.mlp.up.weight`.
        read: returns the elements of a slice of a tensor, in the sizes of the slice and the dtype of the tensor. Called once per
            slice.
        config: content of `config.json`.
        state: content of `state.json`.
        rank_slices: full name and slice of each tensor that a rank writes, for each rank of a layout. A slice that several ranks
            list is written once. By default complete tensors are written, in order.
        max_file_bytes: start another data file when the current file would exceed this size. A slice is never split.
        content_digest: expected digest of the content; None for no check.
        before_commit: called when all tensors are read and written, but the checkpoint is not yet complete. An error that it raises
            discards the checkpoint.

    Returns:
        Path or URL of the checkpoint's folder.

    Raises:
        CheckpointError: the checkpoint cannot be written, slices do not cover the tensors exactly, `read` returns another shape or
            dtype than `tensors` says, or the content has another digest than expected.
    """
    save, name = open_storage(folder), get_checkpoint_name(iteration)
    small_files = encode_json_files(config, state)
    plans = plan_save(_build_specs(tensors, rank_slices), max_file_bytes)

    def read_data(item: WriteItem) -> memoryview:
        tensor = read(item.name, item.tensor_slice)
        if tuple(tensor.shape) != item.tensor_slice.sizes or get_dtype_name(tensor.dtype) != item.dtype:
            raise CheckpointError(
                f"the tensor {item.key} was read as {list(tensor.shape)} {get_dtype_name(tensor.dtype)}, not "
                f"{list(item.tensor_slice.sizes)} {item.dtype}: the source has changed in the meantime, or this is an internal "
                "error. Try again; if the error stays, please report this"
            )
        return get_tensor_bytes(tensor)

    draft = save.draft(name, _TOKEN)
    try:
        draft.create_folder()
        rank_manifests = [write_rank_files(draft, plan, read_data) for plan in plans]
        if content_digest is not None and (actual_digest := merge_manifests(rank_manifests).content_digest) != content_digest:
            raise CheckpointError(
                f"the tensors that were read have the content digest {actual_digest}, but should have {content_digest}: the source "
                "is damaged, or has changed in the meantime. Nothing is written. Copy the source again, or try again"
            )
        if before_commit is not None:
            before_commit()
        commit(save, draft, iteration, rank_manifests, small_files)
    except OSError as error:
        draft.discard()
        raise CheckpointError(
            f"cannot save {save.get_location(name)}: {error}. Check the free space and the permissions of the folder, then try "
            "again"
        ) from error
    except BaseException:
        draft.discard()
        raise
    return save.get_location(name)


def _build_specs(
    tensors: Mapping[str, TensorInfo], rank_slices: Sequence[Sequence[tuple[str, TensorSlice]]] | None
) -> list[list[LocalTensorSpec]]:
    """Describe the tensors of each rank as if the ranks were saving a checkpoint. By default one rank has all tensors in full.

    Rank 0 names every tensor, also those of which it holds no slice, so that tensors without elements are stored too.

    Args:
        rank_slices: full name and slice of each tensor that a rank writes, for each rank.
    """
    if rank_slices is None:
        rank_slices = [[(name, TensorSlice.full(info.shape)) for name, info in tensors.items() if 0 not in info.shape]]
    world_specs = []
    for index, slices in enumerate(rank_slices):
        slices_by_name: dict[str, list[TensorSlice]] = {name: [] for name in tensors} if index == 0 else {}
        for name, tensor_slice in slices:
            slices_by_name.setdefault(name, []).append(tensor_slice)
        world_specs.append(
            [
                LocalTensorSpec(name, tensors[name].shape, get_dtype_name(tensors[name].dtype), tuple(slices_by_name[name]))
                for name in slices_by_name
            ]
        )
    return world_specs
