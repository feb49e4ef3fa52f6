"""The manifest: what a checkpoint holds and where. Together with the data files it is all that a reader needs.

A reader need not know which rank wrote a file, nor where a box lies in it. Readers ignore fields that they do not know; a change
that old readers must not ignore raises the version.

docs/checkpoints.md shows `manifest.json`. Manifests of the first programs have no `content` and no `content_digest`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.content_sums import NO_SUMS, Sums, content_digest
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.safetensors_file import DTYPES
from megatron.checkpoint.storage import STATE
from megatron.parallel.boxes import Box

FORMAT = "megatron-boxes"
VERSION = 1


@dataclass(frozen=True)
class StoredBox:
    """A box, its file and its checksum."""

    box: Box
    file: str
    key: str
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor, as it is stored."""

    shape: tuple[int, ...]
    dtype: str
    """A name in `DTYPES`."""
    boxes: tuple[StoredBox, ...]
    content: str | None = None
    """Its content sums (`content.Sums.hex`); None in old checkpoints."""


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
        entries = [f"{STATE} {self.files[STATE].checksum}"] if STATE in self.files else []
        for name, tensor in self.tensors.items():
            head = f"{name} {list(tensor.shape)} {tensor.dtype}"
            entries += [f"{head} {list(s.box.offsets)} {list(s.box.sizes)} {s.checksum}" for s in tensor.boxes]
            if not tensor.boxes:
                entries.append(head)
        return content_digest(entries)

    @functools.cached_property
    def content_digest(self) -> str | None:
        """Digest of the tensors, one entry each: `name shape dtype content`. The same at every layout; None in old checkpoints."""
        if any(tensor.content is None for tensor in self.tensors.values()):
            return None
        return content_digest(f"{name} {list(t.shape)} {t.dtype} {t.content}" for name, t in self.tensors.items())

    def to_json(self) -> bytes:
        """The content of `manifest.json`."""
        files = {
            name: {"bytes": file.num_bytes} | ({"checksum": file.checksum} if file.checksum else {})
            for name, file in self.files.items()
        }
        tensors = {
            name: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                **({} if tensor.content is None else {"content": tensor.content}),
                "boxes": [
                    {"offsets": s.box.offsets, "sizes": s.box.sizes, "file": s.file, "key": s.key, "checksum": s.checksum}
                    for s in tensor.boxes
                ],
            }
            for name, tensor in self.tensors.items()
        }
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest}
        if self.content_digest is not None:
            head["content_digest"] = self.content_digest
        return json.dumps({**head, "files": files, "tensors": tensors}, separators=(",", ":")).encode()


def joined(parts: Iterable[tuple[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Put together parts of tensors that were just written, by name: boxes one after another, content sums added up."""
    heads: dict[str, StoredTensor] = {}
    boxes: dict[str, list[StoredBox]] = defaultdict(list)
    sums: dict[str, Sums] = defaultdict(lambda: NO_SUMS)
    for name, part in parts:
        assert part.content is not None, "a part that was just written has sums"
        heads.setdefault(name, part)
        boxes[name] += part.boxes
        sums[name] = sums[name].plus(Sums.from_hex(part.content))
    return {name: StoredTensor(head.shape, head.dtype, tuple(boxes[name]), sums[name].hex) for name, head in heads.items()}


def part_from_json(data: bytes, path: str, name: str) -> Manifest:
    """Read and check a manifest, or a rank's part of one.

    Args:
        data: content of the file.
        path: the checkpoint's folder, for messages.
        name: name of the file, for messages.

    Raises:
        CheckpointError: it is of another format, or written by a newer version.
        DamagedCheckpointError: it is unreadable or altered.
    """
    file = f"{path.rstrip('/')}/{name}"
    try:
        content = json.loads(data)
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
            {name: StoredFile(_count(file["bytes"]), file.get("checksum")) for name, file in content["files"].items()},
        )
        stated = content["digest"], content.get("content_digest")
        found = manifest.digest, manifest.content_digest
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{file} is not readable ({error!r})") from error
    if found != stated:
        raise DamagedCheckpointError(f"{file} was altered: its content does not have the digest that it states")
    misnamed = [
        stored.key
        for name, tensor in manifest.tensors.items()
        for stored in tensor.boxes
        if stored.key != box_key(name, tensor.shape, stored.box)
    ]
    if misnamed:
        raise DamagedCheckpointError(f"{file} takes boxes for parts of tensors after which they are not named: {misnamed[:3]}")
    named = {stored.file for tensor in manifest.tensors.values() for stored in tensor.boxes}
    if strange := sorted(name for name in named | manifest.files.keys() if name not in manifest.files or Path(name).name != name):
        raise DamagedCheckpointError(f"{file} names files that are not in its list or not in its folder: {strange[:3]}")
    return manifest


def box_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Name of a box in a file: `name` for a whole tensor of `shape`, else `name[0:128,64:128]`.

    A reader asks for it by this name, so that no box is taken for another one of the same size.
    """
    if box.sizes == shape:
        return name
    return f"{name}[{','.join(f'{part.start}:{part.stop}' for part in box.index)}]"


def _tensor_from_json(content: dict) -> StoredTensor:
    boxes = tuple(
        StoredBox(Box(tuple(map(_count, b["offsets"])), tuple(map(_count, b["sizes"]))), b["file"], b["key"], b["checksum"])
        for b in content["boxes"]
    )
    if (dtype := content["dtype"]) not in DTYPES:
        raise KeyError(dtype)
    return StoredTensor(tuple(map(_count, content["shape"])), dtype, boxes, content.get("content"))


def _count(value: object) -> int:
    """A number of elements or bytes.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]} is no number of elements or bytes")
    return value


def tiles(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether the boxes cover every element of a tensor of `shape` exactly once, and nothing outside.

    Take a box as a function that is 1 inside and 0 outside. Its corners, each with the sign (-1)^(number of upper ends), determine
    it. The functions add up to that of the whole tensor exactly if their signed corners do. So this needs one pass over the boxes,
    where comparing pairs would need a square of it.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    whole, boxes = Box.whole(shape), [*boxes]
    if boxes == [whole]:
        return True
    for box, weight in [(whole, -1), *((box, 1) for box in boxes)]:
        for corner in itertools.product(*(((part.start, 1), (part.stop, -1)) for part in box.index)):
            corners[tuple(at for at, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())
