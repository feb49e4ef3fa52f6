"""Writer of LoRA adapters as a folder that the library PEFT can load on top of a Hugging Face model.

A projection of this framework may correspond to several Hugging Face projections (query, key and value; gate and up of an MLP). Its
adapter then becomes one adapter for each of them, with the full matrix A and the matching rows of B, which computes the same
function.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.local_storage import sync_folder
from megatron.checkpoint.safetensors_file import TensorEntry
from megatron.parallel.matmul import get_dtype_name
from megatron.spec.weights import split_layer_name
from megatron_lab.checkpoints.finite_values import WrittenCheck
from megatron_lab.checkpoints.huggingface_writer import write_shard
from megatron_lab.foreign.adapters import get_adapter_names, remove_lora_settings
from megatron_lab.foreign.huggingface.families import select_family
from megatron_lab.foreign.source import WeightSource

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MODEL_PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of the wrapped model."""
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's matrices A [rank, inputs] and B [outputs, rank], after the name of the module."""


@dataclass(frozen=True)
class AdapterExport:
    """Result of exporting LoRA adapters, for the summary."""

    folder: Path
    family: str
    targets: tuple[str, ...]
    """Names of the Hugging Face modules that have an adapter (PEFT's `target_modules`), without the prefix of their layer."""
    num_parameters: int
    verification: str | None
    """Result of the comparison with transformers, as a sentence. None if there was no comparison."""
    notes: list[str]
    """Sentences for the user about values that are not finite."""


def export_adapters(
    source: WeightSource,
    folder: Path,
    *,
    base: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    check: Callable[[Path], str] | None = None,
) -> AdapterExport:
    """Write the LoRA adapters of a model as a PEFT folder. The folder has a temporary name until it is complete.

    Args:
        source: model with adapters.
        folder: folder to write. It must not exist, or must be empty.
        base: name or folder of the Hugging Face model to which the adapters belong, for `adapter_config.json`.
        family: architecture of that model. By default the first architecture that supports all features of the model.
        dtype: dtype of the adapters. By default that of the source.
        check: function that verifies the folder before it gets its final name. It raises an error, or returns a sentence for the
            summary.

    Raises:
        CheckpointError: the folder is not empty, the model has no adapters, or no architecture fits the base model.
    """
    model = source.model
    if model.lora_rank is None:
        raise CheckpointError(
            f"{source.name} has no adapters: its run did not set --lora-rank. Remove --format peft, which writes only adapters"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is not an empty folder. Choose another name, or remove it")
    base_model = remove_lora_settings(model)
    selected_family = select_family(base_model, family)
    is_transposed, targets = False, set[str]()
    layouts = selected_family.build_layouts(base_model, source.vocab_size)
    adapted_names = [name for name in layouts if get_adapter_names(name)[0] in source.weights]

    def generate_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in adapted_names:
            a, b = (source.read(param) for param in get_adapter_names(name))
            a, b = (param if dtype is None else param.to(dtype) for param in (a, b))
            b_layout = replace(layouts[name], shape=(*b.shape[:-1], model.lora_rank or 0), is_transposed=False)
            for target_name, rows in b_layout.iter_hf_tensors(b):
                module = f"{MODEL_PREFIX}{target_name.removesuffix('.weight')}"
                yield f"{module}{A_SUFFIX}", a
                yield f"{module}{B_SUFFIX}", rows

    for name in adapted_names:
        is_transposed |= layouts[name].is_transposed
        layer, _ = split_layer_name(name)
        layer_prefix = f"{selected_family.prefix}{selected_family.layer_name.format(layer)}."
        targets |= {target_name.removeprefix(layer_prefix).removesuffix(".weight") for target_name in layouts[name].row_counts}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.exporting-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        entries, finite_check = list[TensorEntry](), WrittenCheck()
        for name, tensor in generate_tensors():
            entries.append(TensorEntry(name, get_dtype_name(tensor.dtype), tuple(tensor.shape)))
            finite_check.add(name, tensor)
        write_shard(temporary / WEIGHTS, entries, generate_tensors())
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": model.lora_rank,
            "lora_alpha": model.lora_rank if model.lora_alpha is None else model.lora_alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(targets),
            "bias": "none",
            "fan_in_fan_out": is_transposed,
            "use_rslora": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "modules_to_save": None,
        }
        (temporary / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        verification = check(temporary) if check else None
        sync_folder(temporary)
        temporary.rename(folder)  # `folder` does not exist or is empty
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    numel = sum(torch.Size(entry.shape).numel() for entry in entries)
    notes = finite_check.list_notes(", ".join(sorted({entry.dtype for entry in entries})))
    return AdapterExport(folder, selected_family.model_type, tuple(sorted(targets)), numel, verification, notes)
