"""Whether a checkpoint is sound, to the last byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.checkpoint.dtypes import bytes_of, torch_dtype
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format.content import NO_SUMS, content_sums
from megatron.checkpoint.format.manifest import CONFIG, STATE, Manifest, StoredTensor
from megatron.checkpoint.format.tiling import tiles
from megatron.checkpoint.loading.data_files import BoxRead, DataFiles
from megatron.checkpoint.loading.find import manifest_in, read_json
from megatron.checkpoint.storage.protocol import Storage
from megatron.parallel.boxes import Box


@dataclass(frozen=True)
class Verified:
    """What has been read, and what is wrong with it."""

    tensors: int
    num_bytes: int
    """Of all boxes."""
    digest: str | None
    """Of the content; None in an older checkpoint, which holds no content sums."""
    faults: tuple[str, ...]


def verify(inside: Storage, progress: Callable[[str], None] = lambda name: None) -> Verified:
    """Read all of a checkpoint. Memory: one box.

    Args:
        inside: its folder.
        progress: is told the name of each tensor before it is read.

    Raises:
        CheckpointError: it was written by a newer version.
    """
    try:
        manifest = manifest_in(inside)
    except DamagedCheckpointError as error:
        return Verified(0, 0, None, (str(error),))
    faults = _faults_of_files(inside, manifest)
    num_bytes = 0
    with DataFiles(inside, manifest) as files:
        for name, stored in manifest.tensors.items():
            progress(name)
            num_bytes += sum(box.box.numel for box in stored.boxes) * torch_dtype(stored.dtype).itemsize
            faults += _faults_of_tensor(name, stored, files)
    return Verified(len(manifest.tensors), num_bytes, manifest.content_digest, tuple(dict.fromkeys(faults)))


def _faults_of_files(inside: Storage, manifest: Manifest) -> list[str]:
    faults = []
    for name, file in manifest.files.items():
        found = inside.size(name)
        if found is None:
            faults.append(f"{inside.at(name)} is missing")
        elif found != file.num_bytes:
            faults.append(f"{inside.at(name)} has {found} bytes, it was written with {file.num_bytes}")
    for name in (CONFIG, STATE):
        try:
            read_json(inside, name, manifest)
        except DamagedCheckpointError as error:
            faults.append(str(error))
    return faults


def _faults_of_tensor(name: str, stored: StoredTensor, files: DataFiles) -> list[str]:
    if not tiles(stored.shape, [box.box for box in stored.boxes]):
        return [f"{name}: its boxes do not make up a whole tensor of shape {list(stored.shape)}"]
    faults, total = [], NO_SUMS
    for box in stored.boxes:
        data = torch.empty(math.prod(box.box.sizes), dtype=torch_dtype(stored.dtype)).view(box.box.sizes)
        try:
            files.read(box, stored.dtype, [BoxRead(Box((0,) * len(box.box.sizes), box.box.sizes), data)])
        except DamagedCheckpointError as error:
            faults.append(str(error))
            continue
        if stored.content is not None:
            total = total.plus(content_sums(bytes_of(data), stored.dtype, box.box, stored.shape))
    if not faults and stored.content not in (None, total.hex):
        faults.append(f"{name}: its content sums are {total.hex}, the manifest says {stored.content}")
    return faults
