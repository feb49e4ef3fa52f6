"""Writes any source of weights as a folder that transformers, and programs built on it, can open.

It streams: one parameter is in memory at a time, with the tensors that it becomes.
"""

from __future__ import annotations

import functools
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.global_tensor import bytes_of
from megatron.checkpoint.local_storage import sync_folder
from megatron.checkpoint.safetensors_file import Entry, header_bytes, in_files
from megatron.checkpoint.storage_kinds import open_storage
from megatron.parallel.products import dtype_name
from megatron_lab.checkpoints.exported import Export
from megatron_lab.checkpoints.model_card import UNKNOWN, model_card
from megatron_lab.foreign.huggingface.families import fitting
from megatron_lab.foreign.huggingface.family import Family
from megatron_lab.foreign.huggingface.fields import CONFIG
from megatron_lab.foreign.huggingface.layout import WeightLayout, their_tensors
from megatron_lab.foreign.huggingface.weight_files import INDEX, SINGLE
from megatron_lab.foreign.source import WeightSource, misfits

MAX_SHARD_BYTES = 5 * 10**9
"""transformers' own limit for a file."""
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of tokens with a role, as far as they are known."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None

    def to_json(self) -> dict[str, int | None]:
        """The ids by transformers' names."""
        return {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}


def export(
    source: WeightSource,
    folder: Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokens: SpecialTokens = SpecialTokens(),
    extras: Callable[[Path], list[str]] | None = None,
    check: Callable[[Path], str] | None = None,
    card: Callable[[Export, bool], str] | None = None,
) -> Export:
    """Write a folder; it appears under its name when it is complete.

    Args:
        source: the model.
        folder: must not exist, or be empty.
        family: the architecture to write, by its model_type; by default the first that has all parts of the model.
        dtype: dtype of the weights, but for those that need 32 bits; by default the widest in the source of the others.
        max_shard_bytes: most bytes of data in one file.
        tokens: ids for config.json and generation_config.json.
        extras: writes further files (the tokenizer's) into the folder, and returns notes for the user.
        check: tests the folder before it gets its name: raises, or returns a sentence on its result, for the README.

        card: makes the text of README.md of what was written, and whether a tokenizer is there; by default a card without a run.

    Raises:
        CheckpointError: the folder is taken, no architecture fits, or special tokens lie outside the vocabulary.
        OSError: a file cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already; choose another name, or remove it")
    chosen = fitting(source.model, family)
    _check_tokens(tokens, source.vocab_size)
    layouts = chosen.layouts(source.model, source.vocab_size)
    _check_weights(source, layouts)
    others = (source.weights[name].dtype for name, layout in layouts.items() if not layout.keeps_32_bits)
    dtype = dtype or functools.reduce(torch.promote_types, others)
    found = {  # of what parameters share, once
        name: Entry(name, dtype_name(layout.stored_as(dtype)), shape)
        for layout in layouts.values()
        for name, shape in layout.their_shapes().items()
    }
    entries = [*found.values()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.exporting-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        write_shards(temporary, in_files(entries, lambda entry: entry.num_bytes, max_shard_bytes), _tensors(source, layouts, dtype))
        _write_json(temporary / CONFIG, _config(chosen, source, dtype, tokens))
        _write_json(temporary / GENERATION_CONFIG, {role: id for role, id in tokens.to_json().items() if id is not None})
        notes = [*source.notes, *_unsaid(source, chosen), *(extras(temporary) if extras else [])]
        written = Export(
            folder=folder,
            family=chosen.model_type,
            dtype=dtype_name(dtype),
            num_parameters=sum(math.prod(layout.shape) for layout in layouts.values()),
            num_bytes=sum(entry.num_bytes for entry in entries),
            peak_bytes=max(math.prod(info.shape) * (info.dtype.itemsize + dtype.itemsize) for info in source.weights.values()),
            notes=notes,
            checked=check(temporary) if check else None,
        )
        has_tokenizer = (temporary / "tokenizer_config.json").exists()
        text = (
            model_card(source, None, written, licence=UNKNOWN, has_tokenizer=has_tokenizer)
            if card is None
            else card(written, has_tokenizer)
        )
        (temporary / "README.md").write_text(text, encoding="utf-8")
        sync_folder(temporary)
        temporary.rename(folder)  # onto nothing, or an empty folder
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


def _check_tokens(tokens: SpecialTokens, vocab_size: int) -> None:
    for role, id in tokens.to_json().items():
        if id is not None and not 0 <= id < vocab_size:
            raise CheckpointError(f"{role} is {id}, but the model has {vocab_size} tokens: this is not its tokenizer")


def _check_weights(source: WeightSource, layouts: dict[str, WeightLayout]) -> None:
    """Check that every parameter of the source goes into the files, and that every one that belongs there is in the source."""
    wrong = misfits(source.weights, {name: layout.shape for name, layout in layouts.items()})
    wrong += [f"{name} has no place there" for name in source.weights if name not in layouts]
    if wrong:
        raise CheckpointError(f"{source.name} does not hold the model that it describes:\n  " + listed(wrong, "\n  "))


def _tensors(source: WeightSource, layouts: dict[str, WeightLayout], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the order of the files, made one parameter at a time."""
    yield from their_tensors(layouts, lambda name: source.read(name).to(layouts[name].stored_as(dtype)))


def write_shard(path: Path, entries: Sequence[Entry], stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write one file of these entries, whose tensors the stream gives in their order."""
    with open_storage(path.parent).create(path.name) as file:  # brings it to the disk while it is written
        file.write(header_bytes(entries, metadata={"format": "pt"}))  # transformers reads no file without it
        for entry in entries:
            key, tensor = next(stream)
            data = bytes_of(tensor)
            assert key == entry.key and len(data) == entry.num_bytes, f"{key} in the place of {entry.key}"
            file.write(data)
            del tensor, data  # before the next is made


def write_shards(folder: Path, shards: Sequence[Sequence[Entry]], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write the files, and the index if there are several.

    Args:
        folder: where.
        shards: the entries of each file; see `in_files`.
        tensors: name and content of all entries, in their order; one is taken when the one before is written.

    Raises:
        OSError: a file cannot be written.
    """
    stem, _, suffix = SINGLE.rpartition(".")
    names = [f"{stem}-{n:05d}-of-{len(shards):05d}.{suffix}" for n in range(1, len(shards) + 1)] if len(shards) > 1 else [SINGLE]
    for name, entries in zip(names, shards, strict=True):
        try:
            write_shard(folder / name, entries, tensors)
        except OSError as error:
            if error.errno is None:
                raise  # not from the system
            needed = sum(entry.num_bytes for entry in entries)
            raise OSError(error.errno, f"{error.strerror} ({needed:,} bytes are needed)", str(folder / name)) from error
    assert next(tensors, None) is None, "tensors are left over"
    if len(shards) > 1:
        size = sum(entry.num_bytes for entries in shards for entry in entries)
        placed = {entry.key: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        _write_json(folder / f"{SINGLE}{INDEX}", {"metadata": {"total_size": size}, "weight_map": placed})


def _config(family: Family, source: WeightSource, dtype: torch.dtype, tokens: SpecialTokens) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.write(source.model),
        "vocab_size": source.vocab_size,
        **tokens.to_json(),
        "torch_dtype": dtype_name(dtype),
        "use_cache": True,
    }


def _unsaid(source: WeightSource, family: Family) -> list[str]:
    """Settings of the model that the architecture has no field for, but that matter beyond continuing its training here."""
    notes = []
    if source.model.fp32_residual_connection:
        notes.append("the residual stream was float32 (--fp32-residual-connection); there it has the type of the weights")
    if source.model.hidden_dropout and "resid_pdrop" not in family.write(source.model):
        notes.append(f"the dropout of hidden states ({source.model.hidden_dropout:g}) has no field in {family.model_type}")
    return notes


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
