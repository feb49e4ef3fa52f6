"""Writes the weights of a Hugging Face folder in a stream: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from megatron.checkpoint.dtypes import bytes_of
from megatron.checkpoint.format.safetensors_file import Entry, header_bytes
from megatron.checkpoint.huggingface.weight_files import INDEX, SINGLE
from megatron.checkpoint.storage.opening import open_storage


def plan_shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """The entries in order, cut into files of at most so many bytes of data (more where a single tensor is larger)."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _write_shard(path: Path, entries: Sequence[Entry], stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    with open_storage(path.parent).create(path.name) as file:  # brings it to the disk while it is written
        file.write(header_bytes(entries, metadata={"format": "pt"}))  # transformers reads no file without it
        for entry in entries:
            key, tensor = next(stream)
            data = bytes_of(tensor)
            assert key == entry.key and len(data) == entry.num_bytes, f"{key} in the place of {entry.key}"
            file.write(data)
            del tensor, data  # before the next is made


def write_shards(folder: Path, shards: Sequence[Sequence[Entry]], tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Write the files, and the index if there are several.

    Args:
        folder: where.
        shards: what each file holds; see `plan_shards`.
        tensors: name and content of all entries, in their order; one is taken when the one before is written.

    Returns:
        the names of the files.

    Raises:
        OSError: a file cannot be written.
    """
    stem, _, suffix = SINGLE.rpartition(".")
    names = [f"{stem}-{n:05d}-of-{len(shards):05d}.{suffix}" for n in range(1, len(shards) + 1)] if len(shards) > 1 else [SINGLE]
    stream = iter(tensors)
    for name, entries in zip(names, shards, strict=True):
        try:
            _write_shard(folder / name, entries, stream)
        except OSError as error:
            if error.errno is None:
                raise  # not from the system
            needed = sum(entry.num_bytes for entry in entries)
            raise OSError(error.errno, f"{error.strerror} ({needed:,} bytes are needed)", str(folder / name)) from error
    assert next(stream, None) is None, "tensors are left over"
    if len(shards) == 1:
        return names
    index = {
        "metadata": {"total_size": sum(entry.num_bytes for entries in shards for entry in entries)},
        "weight_map": {entry.key: name for name, entries in zip(names, shards, strict=True) for entry in entries},
    }
    (folder / f"{SINGLE}{INDEX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*names, f"{SINGLE}{INDEX}"]
