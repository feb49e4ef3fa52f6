"""Writer of Hugging Face folders from any source of weights, for transformers and programs that build on it.

The weights are streamed: only one parameter is in memory at a time, with the tensors to which it is converted.
"""

from __future__ import annotations

import functools
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, format_list
from megatron.checkpoint.global_tensor import get_tensor_bytes
from megatron.checkpoint.local_storage import sync_folder
from megatron.checkpoint.safetensors_file import TensorEntry, encode_header, split_into_files
from megatron.checkpoint.storage_url import open_storage
from megatron.parallel.matmul import get_dtype_name
from megatron_lab.checkpoints.export_result import Export
from megatron_lab.checkpoints.finite_values import WrittenCheck
from megatron_lab.checkpoints.generation_settings import NO_TOKENS, SpecialTokens
from megatron_lab.checkpoints.model_card import UNKNOWN, build_model_card
from megatron_lab.foreign.huggingface.families import select_family
from megatron_lab.foreign.huggingface.family import Family
from megatron_lab.foreign.huggingface.fields import CONFIG, Fields
from megatron_lab.foreign.huggingface.layout import WeightLayout, convert_to_hf
from megatron_lab.foreign.huggingface.weight_files import INDEX, SINGLE
from megatron_lab.foreign.source import WeightSource, find_mismatches
from megatron_lab.tokenizers.file_names import GENERATION_CONFIG, TOKENIZER_CONFIG

MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of the data of one file; the default of transformers."""


def export(
    source: WeightSource,
    folder: Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokens: SpecialTokens = NO_TOKENS,
    extras: Callable[[Path], list[str]] | None = None,
    check: Callable[[Path], str] | None = None,
    card: Callable[[Export, bool], str] | None = None,
) -> Export:
    """Write a model as a Hugging Face folder. The folder has a temporary name until it is complete.

    Args:
        source: architecture and weights of the model.
        folder: folder to write. It must not exist, or must be empty.
        family: `model_type` of the architecture to write. By default the first architecture that supports all features of the
            model.
        dtype: dtype of the weights, except those that need 32 bits. By default the widest dtype of these weights in the source.
        max_shard_bytes: maximum size of the data in one file.
        tokens: special token ids for config.json and generation_config.json, and sampling settings for the latter.
        extras: function that writes additional files (the tokenizer's) into the folder, and returns notes for the user.
        check: function that verifies the folder before it gets its final name. It raises an error, or returns a sentence for
            README.md.
        card: function that returns the text of README.md from the result of the export and whether there is a tokenizer. By default
            a model card without information about the training run.

    Raises:
        CheckpointError: the folder is not empty, no architecture fits, or special tokens are outside of the vocabulary.
        OSError: a file cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is not an empty folder. Choose another name, or remove it")
    selected_family = select_family(source.model, family)
    _check_tokens(tokens, source.vocab_size)
    layouts = selected_family.build_layouts(source.model, source.vocab_size)
    _check_weights(source, layouts)
    weight_dtypes = (source.weights[name].dtype for name, layout in layouts.items() if not layout.requires_float32)
    dtype = dtype or functools.reduce(torch.promote_types, weight_dtypes)
    unique_entries = {  # tensors that several parameters share appear once
        name: TensorEntry(name, get_dtype_name(layout.get_hf_dtype(dtype)), shape)
        for layout in layouts.values()
        for name, shape in layout.get_hf_shapes().items()
    }
    entries, finite_check = [*unique_entries.values()], WrittenCheck()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.exporting-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        write_shards(
            temporary,
            split_into_files(entries, lambda entry: entry.num_bytes, max_shard_bytes),
            _convert_tensors(source, layouts, dtype, finite_check),
        )
        _write_json(temporary / CONFIG, _build_config(selected_family, source, dtype, tokens))
        _write_json(temporary / GENERATION_CONFIG, tokens.build_generation_config())
        notes = [*source.notes, *_describe_unsupported(source, selected_family), *(extras(temporary) if extras else [])]
        notes += finite_check.list_notes(get_dtype_name(dtype))
        result = Export(
            folder=folder,
            family=selected_family.model_type,
            dtype=get_dtype_name(dtype),
            num_parameters=sum(math.prod(layout.shape) for layout in layouts.values()),
            num_bytes=sum(entry.num_bytes for entry in entries),
            max_memory_bytes=max(
                math.prod(info.shape) * (info.dtype.itemsize + dtype.itemsize) for info in source.weights.values()
            ),
            notes=notes,
            verification=check(temporary) if check else None,
        )
        has_tokenizer = (temporary / TOKENIZER_CONFIG).exists()
        card_text = (
            build_model_card(source, None, result, licence=UNKNOWN, has_tokenizer=has_tokenizer)
            if card is None
            else card(result, has_tokenizer)
        )
        (temporary / "README.md").write_text(card_text, encoding="utf-8")
        sync_folder(temporary)
        temporary.rename(folder)  # `folder` does not exist or is empty
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return result


def _check_tokens(tokens: SpecialTokens, vocab_size: int) -> None:
    for role in ("bos", "eos", "pad"):
        id = getattr(tokens, role)
        if id is not None and not 0 <= id < vocab_size:
            raise CheckpointError(
                f"{role}_token_id of the tokenizer is {id}, but the vocabulary of the model has {vocab_size} token ids: the "
                "tokenizer belongs to another model. Choose the model's tokenizer, or set --no-tokenizer"
            )


def _check_weights(source: WeightSource, layouts: dict[str, WeightLayout]) -> None:
    """Check that the names and shapes of the source's weights are exactly those that the architecture to write expects."""
    errors = find_mismatches(source.weights, {name: layout.shape for name, layout in layouts.items()})
    errors += [f"{name} is not a parameter of the architecture" for name in source.weights if name not in layouts]
    if errors:
        raise CheckpointError(
            f"the weights in {source.name} are not those of the model that its settings describe:\n"
            "  " + format_list(errors, "\n  ") + "\n  The source is incomplete or damaged: copy it again."
        )


def _convert_tensors(
    source: WeightSource, layouts: dict[str, WeightLayout], dtype: torch.dtype, finite_check: WrittenCheck
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and content of each Hugging Face tensor, in the order in which the files store them. Only one parameter is
    converted at a time, to save memory. `finite_check` counts the values that are not finite."""
    for name, tensor in convert_to_hf(layouts, lambda name: source.read(name).to(layouts[name].get_hf_dtype(dtype))):
        finite_check.add(name, tensor)
        yield name, tensor


def write_shard(path: Path, entries: Sequence[TensorEntry], stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write one safetensors file.

    Args:
        path: path of the file.
        entries: name, dtype and shape of each tensor of the file, in order.
        stream: yields the name and content of each tensor, in the order of `entries`.
    """
    with open_storage(path.parent).create(path.name) as file:  # flushes the file to the disk during the write
        file.write(encode_header(entries, metadata={"format": "pt"}))  # transformers requires this entry
        for entry in entries:
            key, tensor = next(stream)
            data = get_tensor_bytes(tensor)
            assert key == entry.key and len(data) == entry.num_bytes, f"{key} instead of {entry.key}"
            file.write(data)
            del tensor, data  # free the memory before the next tensor is created


def write_shards(folder: Path, shards: Sequence[Sequence[TensorEntry]], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write the safetensors files, and the index if there are several files.

    Args:
        folder: folder of the files.
        shards: name, dtype and shape of the tensors of each file, from `split_into_files`.
        tensors: yields the name and content of all tensors, in the order of `shards`. The next tensor is requested only when the
            previous one is written, so only one is in memory.

    Raises:
        OSError: a file cannot be written.
    """
    stem, _, suffix = SINGLE.rpartition(".")
    names = [f"{stem}-{n:05d}-of-{len(shards):05d}.{suffix}" for n in range(1, len(shards) + 1)] if len(shards) > 1 else [SINGLE]
    for name, entries in zip(names, shards, strict=True):
        try:
            write_shard(folder / name, entries, tensors)
        except OSError as error:
            is_read_error = error.filename is not None and Path(error.filename).parent != folder
            if error.errno is None or is_read_error:  # not an error of the operating system, or not of this file
                raise
            num_bytes = sum(entry.num_bytes for entry in entries)
            raise OSError(error.errno, f"{error.strerror} ({num_bytes:,} bytes are needed)", str(folder / name)) from error
    assert next(tensors, None) is None, "there are more tensors than entries"
    if len(shards) > 1:
        size = sum(entry.num_bytes for entries in shards for entry in entries)
        weight_map = {entry.key: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        _write_json(folder / f"{SINGLE}{INDEX}", {"metadata": {"total_size": size}, "weight_map": weight_map})


def _build_config(family: Family, source: WeightSource, dtype: torch.dtype, tokens: SpecialTokens) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.write(source.model),
        "vocab_size": source.vocab_size,
        **tokens.to_json(),
        "torch_dtype": get_dtype_name(dtype),
        "use_cache": True,
    }


def _describe_unsupported(source: WeightSource, family: Family) -> list[str]:
    """Return notes about settings of the model that config.json cannot express, but that matter when the model is used or
    fine-tuned with other programs."""
    notes = []
    if source.model.fp32_residual_connection:
        notes.append(
            "the residual stream was float32 (--fp32-residual-connection); in transformers it has the dtype of the weights"
        )
    written, dropout = family.write(source.model), source.model.hidden_dropout
    if family.parse(Fields(family.model_type, written)).hidden_dropout != dropout:
        notes.append(f"the dropout of hidden states ({dropout:g}) has no field in {family.model_type}")
    max_positions, num_positions = written.get("max_position_embeddings"), source.model.num_positions
    if max_positions is not None and max_positions < num_positions:
        notes.append(
            f"the model was trained on sequences of up to {num_positions:,} tokens, but max_position_embeddings is "
            f"{max_positions:,}, because transformers computes the rotary frequencies from it; programs that limit a text to this "
            f"length need another limit, such as vllm serve --max-model-len {num_positions}"
        )
    return notes


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
