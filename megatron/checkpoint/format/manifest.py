"""The manifest: what a checkpoint holds and where. Together with the data files it is all that a reader needs.

Which rank wrote a file, and where a box lies in it, is of no importance to a reader. Fields that a reader does not know are to be
passed over; a change that old readers must not pass over raises the version.

`manifest.json`::

    {"format": "megatron-boxes", "version": 1,
     "digest": "<sha-256>",                                  # see `Manifest.digest`
     "files": {"rank_00000.safetensors": {"bytes": 1024},
               "config.json": {"bytes": 2, "checksum": "xxh3:..."}, "state.json": {...}},
     "tensors": {"model.embedding.weight": {
         "shape": [512, 64], "dtype": "float32",             # of the whole model, without padding
         "boxes": [{"offsets": [0, 0], "sizes": [256, 64],   # boxes tile the tensor exactly
                    "file": "rank_00000.safetensors", "key": "model.embedding.weight[0:256,0:64]",
                    "checksum": "xxh3:cbbf039e47008cb8"}, ...]}}}   # of the box's bytes: row-major, little-endian
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.format.digest import content_digest
from megatron.checkpoint.format.safetensors_file import DTYPE_CODES
from megatron.parallel.boxes import Box

MANIFEST = "manifest.json"
CONFIG = "config.json"
STATE = "state.json"
FORMAT = "megatron-boxes"
VERSION = 1

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}


@dataclass(frozen=True)
class StoredBox:
    """A box and where its elements are."""

    box: Box
    file: str
    key: str
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the whole model, as it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class StoredFile:
    """Size of a file, and its checksum where the boxes in it do not have their own."""

    num_bytes: int
    checksum: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of tensors and training state, one entry a box: `name shape dtype offsets sizes checksum`."""
        entries = [f"{STATE} {self.files[STATE].checksum}"]
        for name, tensor in self.tensors.items():
            head = f"{name} {list(tensor.shape)} {_dtype_name(tensor.dtype)}"
            entries += [f"{head} {list(s.box.offsets)} {list(s.box.sizes)} {s.checksum}" for s in tensor.boxes]
            if not tensor.boxes:
                entries.append(head)
        return content_digest(entries)

    def to_json(self) -> bytes:
        """The content of `manifest.json`."""
        files = {
            name: {"bytes": file.num_bytes} | ({"checksum": file.checksum} if file.checksum else {})
            for name, file in self.files.items()
        }
        tensors = {
            name: {
                "shape": tensor.shape,
                "dtype": _dtype_name(tensor.dtype),
                "boxes": [
                    {"offsets": s.box.offsets, "sizes": s.box.sizes, "file": s.file, "key": s.key, "checksum": s.checksum}
                    for s in tensor.boxes
                ],
            }
            for name, tensor in self.tensors.items()
        }
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest}
        return json.dumps({**head, "files": files, "tensors": tensors}, separators=(",", ":")).encode()


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in folder `path`.

    Raises:
        CheckpointError: it is of another format, or written by a newer version.
        DamagedCheckpointError: it is missing, unreadable or altered.
    """
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        written_as, version = content["format"], content["version"]
        if written_as != FORMAT or not isinstance(version, int):
            raise CheckpointError(f"{path} is of format {written_as!r}, version {version!r}; this program reads {FORMAT!r}")
        if version > VERSION:
            raise CheckpointError(
                f"{path} was written by a newer version of this program (format version {version}; this one reads up to "
                f"{VERSION}): update the program that loads"
            )
        manifest = Manifest(
            {name: _tensor_from_json(tensor) for name, tensor in content["tensors"].items()},
            {name: StoredFile(file["bytes"], file.get("checksum")) for name, file in content["files"].items()},
        )
        stored_digest, digest = content["digest"], manifest.digest
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}") from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{path / MANIFEST} is not readable ({error!r})") from error
    if digest != stored_digest:
        raise DamagedCheckpointError(f"{path / MANIFEST} was altered: its content does not have the digest that it states")
    named = {stored.file for tensor in manifest.tensors.values() for stored in tensor.boxes}
    if strange := sorted(name for name in named | manifest.files.keys() if name not in manifest.files or Path(name).name != name):
        raise DamagedCheckpointError(f"{path / MANIFEST} names files that are not in its list or not in its folder: {strange[:3]}")
    return manifest


def _tensor_from_json(content: dict) -> StoredTensor:
    boxes = tuple(
        StoredBox(Box(tuple(b["offsets"]), tuple(b["sizes"])), b["file"], b["key"], b["checksum"]) for b in content["boxes"]
    )
    return StoredTensor(tuple(content["shape"]), _DTYPES[content["dtype"]], boxes)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
