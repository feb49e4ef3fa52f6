"""Reads all of a checkpoint and names its faults, one box in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.checkpoint.data_files import BoxRead, DataFiles
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.global_tensor import bytes_of, torch_dtype
from megatron.checkpoint.manifest import NO_SUMS, StoredTensor, content_sums, tiles
from megatron.checkpoint.save_folder import faults_of_files, manifest_in, read_json
from megatron.checkpoint.storage import CONFIG, STATE, Storage
from megatron.parallel.boxes import Box


@dataclass(frozen=True)
class Verified:
    """The result of reading a whole checkpoint, with its faults."""

    tensors: int
    num_bytes: int
    """Bytes of all boxes."""
    digest: str | None
    """Digest of the content; None in an older checkpoint, which holds no content sums."""
    faults: tuple[str, ...]


def verify(inside: Storage, progress: Callable[[str], None] = lambda name: None) -> Verified:
    """Read all of a checkpoint. At most one box is in memory.

    Args:
        inside: its folder.
        progress: called with the name of each tensor before it is read.

    Raises:
        CheckpointError: it was written by a newer version.
    """
    try:
        manifest = manifest_in(inside)
    except DamagedCheckpointError as error:
        return Verified(0, 0, None, (str(error),))
    faults = [*faults_of_files(inside, manifest)]
    for name in (CONFIG, STATE):
        try:
            read_json(inside, name, manifest)
        except DamagedCheckpointError as error:
            faults.append(str(error))
    num_bytes = 0
    with DataFiles(inside, manifest) as files:
        for name, stored in manifest.tensors.items():
            progress(name)
            num_bytes += sum(box.box.numel for box in stored.boxes) * torch_dtype(stored.dtype).itemsize
            faults += _faults_of_tensor(name, stored, files)
    return Verified(len(manifest.tensors), num_bytes, manifest.content_digest, tuple(dict.fromkeys(faults)))


def _faults_of_tensor(name: str, stored: StoredTensor, files: DataFiles) -> list[str]:
    if not tiles(stored.shape, [box.box for box in stored.boxes]):
        return [f"{name}: its boxes do not make up a whole tensor of shape {list(stored.shape)}"]
    faults, total = [], NO_SUMS
    for box in stored.boxes:
        data = torch.empty(box.box.sizes, dtype=torch_dtype(stored.dtype))
        try:
            files.read(box, stored.dtype, [BoxRead(Box.whole(box.box.sizes), data)])
        except DamagedCheckpointError as error:
            faults.append(str(error))
            continue
        if stored.content is not None:
            total = total.plus(content_sums(bytes_of(data), stored.dtype, box.box, stored.shape))
    if not faults and stored.content not in (None, total.hex):
        faults.append(f"{name}: its content sums are {total.hex}, the manifest says {stored.content}")
    return faults
