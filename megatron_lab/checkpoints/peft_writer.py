"""Writes LoRA's adapters as the folder that PEFT opens beside a model of Hugging Face.

A projection of ours may be several of theirs (queries, keys and values; the halves of a gated MLP). Its adapter then becomes one of
each, with the same A and the rows of B that are theirs, which computes the same.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.local_storage import sync_folder
from megatron.checkpoint.safetensors_file import Entry
from megatron.parallel.products import dtype_name
from megatron.spec.weights import in_layer
from megatron_lab.checkpoints.huggingface_writer import write_shard
from megatron_lab.foreign.adapters import adapter_names, without_adapters
from megatron_lab.foreign.huggingface.families import fitting
from megatron_lab.foreign.source import OtherModel, WeightSource

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BEFORE = "base_model.model."
"""PEFT's name for the model that it wraps."""


@dataclass(frozen=True)
class Adapters:
    """The result of an export."""

    folder: Path
    family: str
    targets: tuple[str, ...]
    """The modules that have an adapter, by the ends of their names."""
    num_parameters: int


def export_adapters(
    source: WeightSource, folder: Path, *, base: str | None = None, family: str | None = None, dtype: torch.dtype | None = None
) -> Adapters:
    """Write the adapters; the folder appears under its name when it is complete.

    Args:
        source: a model with adapters.
        folder: must not exist, or be empty.
        base: name or folder of the model of Hugging Face beside which they belong, for `adapter_config.json`.
        family: its architecture; by default the first that has all parts of the model.
        dtype: of the adapters; by default that of the source.

    Raises:
        CheckpointError: the folder is taken, the model has no adapters, or no architecture fits it as it is.
    """
    model = source.model
    if model.lora_rank is None:
        raise CheckpointError(f"{source.name} has no adapters (--lora-rank): leave --format peft out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already; choose another name, or remove it")
    plain = OtherModel(source, without_adapters(model))
    chosen = fitting(plain.model, family)
    transposed, targets = False, set[str]()
    layouts = chosen.layouts(plain.model, source.vocab_size)
    adapted = [name for name in layouts if adapter_names(name)[0] in source.weights]

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for name in adapted:
            a, b = (source.read(each) for each in adapter_names(name))
            a, b = (each if dtype is None else each.to(dtype) for each in (a, b))
            of_rows = replace(layouts[name], shape=(*b.shape[:-1], model.lora_rank or 0), transposed=False)
            for theirs, rows in of_rows.theirs(b):
                module = f"{_BEFORE}{theirs.removesuffix('.weight')}"
                yield f"{module}.lora_A.weight", a
                yield f"{module}.lora_B.weight", rows

    for name in adapted:
        transposed |= layouts[name].transposed
        layer, _ = in_layer(name)
        before = f"{chosen.prefix}{chosen.layer.format(layer)}."
        targets |= {theirs.removeprefix(before).removesuffix(".weight") for theirs in layouts[name].rows}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.exporting-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        entries = [Entry(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in made()]
        write_shard(temporary / WEIGHTS, entries, made())
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": model.lora_rank,
            "lora_alpha": model.lora_scale * model.lora_rank,
            "lora_dropout": 0.0,
            "target_modules": sorted(targets),
            "bias": "none",
            "fan_in_fan_out": transposed,
            "use_rslora": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "modules_to_save": None,
        }
        (temporary / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sync_folder(temporary)
        temporary.rename(folder)  # onto nothing, or an empty folder
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    numel = sum(torch.Size(entry.shape).numel() for entry in entries)
    return Adapters(folder, chosen.model_type, tuple(sorted(targets)), numel)
