"""Verification of a complete checkpoint, with one slice in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron.checkpoint.data_files import DataFileReader, SliceRead
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.global_tensor import get_tensor_bytes, get_torch_dtype
from megatron.checkpoint.manifest import EMPTY_HASH, StoredTensor, hash_content, is_partition
from megatron.checkpoint.save_folder import find_file_problems, load_manifest, read_json
from megatron.checkpoint.storage import CONFIG, STATE, Storage
from megatron.parallel.tensor_slice import TensorSlice
from megatron.training.resume import check_state


@dataclass(frozen=True)
class VerificationResult:
    """Result of verifying all files of a checkpoint: number and size of the tensors that were read, and a message for each
    problem."""

    num_tensors: int
    num_bytes: int
    """Size of all stored tensors in bytes."""
    content_digest: str | None
    """Digest of the checkpoint's content, from its manifest. None for old checkpoints, which have no content hashes."""
    problems: tuple[str, ...]


def verify_checkpoint(checkpoint: Storage, on_tensor: Callable[[str], None] = lambda name: None) -> VerificationResult:
    """Read all files of a checkpoint and verify their sizes, checksums and content hashes. At most one slice is in memory.

    Args:
        checkpoint: folder of the checkpoint.
        on_tensor: called with the name of each tensor before it is read.

    Raises:
        CheckpointError: a newer version of this program wrote the checkpoint.
    """
    try:
        manifest = load_manifest(checkpoint)
    except DamagedCheckpointError as error:
        return VerificationResult(0, 0, None, (str(error),))
    problems = [*find_file_problems(checkpoint, manifest)]
    for name in (CONFIG, STATE):
        try:
            content = read_json(checkpoint, name, manifest)
            if name == STATE:
                check_state(checkpoint.path_or_url, content)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    num_bytes, file_sizes = 0, {name: checkpoint.get_file_size(name) for name in manifest.files}
    with DataFileReader(checkpoint, manifest) as reader:
        for name, stored_tensor in manifest.tensors.items():
            on_tensor(name)
            num_bytes += (
                sum(stored_slice.tensor_slice.numel for stored_slice in stored_tensor.slices)
                * get_torch_dtype(stored_tensor.dtype).itemsize
            )
            problems += _verify_tensor(name, stored_tensor, reader, file_sizes)
    return VerificationResult(len(manifest.tensors), num_bytes, manifest.content_digest, tuple(dict.fromkeys(problems)))


def _verify_tensor(
    name: str, stored_tensor: StoredTensor, reader: DataFileReader, file_sizes: Mapping[str, int | None]
) -> list[str]:
    if not is_partition(stored_tensor.shape, [stored_slice.tensor_slice for stored_slice in stored_tensor.slices]):
        return [f"{name}: its slices do not cover a tensor of shape {list(stored_tensor.shape)} exactly once"]
    problems, content_hash = [], EMPTY_HASH
    for stored_slice in stored_tensor.slices:
        num_bytes = stored_slice.tensor_slice.numel * get_torch_dtype(stored_tensor.dtype).itemsize
        if (file_size := file_sizes[stored_slice.file]) is None:
            return []  # a missing file is one problem, not one for each of its slices
        if num_bytes > file_size:  # do not reserve memory for a size that is wrong
            problems.append(
                f"{name}: {stored_slice.file} is too short for a slice of shape {list(stored_slice.tensor_slice.sizes)}"
            )
            continue
        data = torch.empty(stored_slice.tensor_slice.sizes, dtype=get_torch_dtype(stored_tensor.dtype))
        try:
            reader.read(stored_slice, stored_tensor.dtype, [SliceRead(TensorSlice.full(stored_slice.tensor_slice.sizes), data)])
        except DamagedCheckpointError as error:
            problems.append(str(error))
            continue
        if stored_tensor.content is not None:
            content_hash = content_hash.combine(
                hash_content(get_tensor_bytes(data), stored_tensor.dtype, stored_slice.tensor_slice, stored_tensor.shape)
            )
    if not problems and stored_tensor.content not in (None, content_hash.hex):
        problems.append(f"{name}: its content hash is {content_hash.hex}, the manifest has {stored_tensor.content}")
    return problems
