"""Print the run, model, layout and digests of a checkpoint, and the names, shapes, dtypes and sizes of its tensors.

It reads no tensors: only the manifest and settings of a checkpoint, or the headers of the files of other folders.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from megatron_lab.checkpoints.text import format_bytes, parse_step, sort_tensor_names
from megatron_lab.terminal import format_table, get_terminal_width

if TYPE_CHECKING:
    from megatron_lab.foreign.source import StoredCheckpoint, TensorInfo, WeightSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand `inspect` to its parser."""
    parser.add_argument("source", metavar="SOURCE", help="a --save folder, one checkpoint in it, or a folder of another program")
    parser.add_argument(
        "--step",
        type=parse_step,
        metavar="N|best",
        help="the iteration to take, instead of the newest, or best: the lowest validation loss (--keep-best)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand `inspect`: print a description of the checkpoint or folder. Returns the exit status."""
    from megatron_lab.foreign.open_source import open_source

    description = describe_source(open_source(args.source, args.step))
    print(json.dumps(description, indent=1) if args.json else "\n".join(format_lines(description)))
    return 0


def describe_source(source: WeightSource) -> dict[str, Any]:
    """Return a description of a source of weights as a JSON object: settings of the model, tensors by full name with shape, dtype
    and size, and for a training checkpoint also the run."""
    from megatron.parallel.params import build_global_records
    from megatron_lab.foreign.source import StoredCheckpoint

    description: dict[str, Any] = {"path": source.name}
    checkpoint = source if isinstance(source, StoredCheckpoint) else None
    tensors = {f"model.{name}": tensor for name, tensor in source.weights.items()} if checkpoint is None else checkpoint.tensors
    if checkpoint is not None:
        description |= _describe_run(checkpoint)
    description["model"] = {name: value for name, value in vars(source.model).items() if value is not None}
    description["vocab_size"] = source.vocab_size
    description["parameters"] = sum(math.prod(tensor.shape) for tensor in source.weights.values())
    names = sort_tensor_names(tensors, build_global_records(source.model, source.vocab_size))
    description["tensors"] = {name: _describe_tensor(tensors[name]) for name in names}
    if checkpoint is not None:
        for name, entry in description["tensors"].items():
            entry["boxes"] = len(checkpoint.manifest.tensors[name].slices)
            entry["content"] = checkpoint.manifest.tensors[name].content
    description["notes"] = source.notes
    return description


def format_lines(description: dict[str, Any]) -> list[str]:
    """Format the result of `describe_source` as lines of text."""
    header = [("path", description["path"])]
    if "files" in description:
        header.append(
            ("digest of the content", f"{description['content_digest'] or 'none (older format)'}, the same at every layout")
        )
        header.append(("digest of the files", description["digest"]))
        header.append(("files", f"{description['files']}, {format_bytes(description['bytes'])}"))
    for name in ("layout", "progress", "tokenizer", "command", "versions"):
        if description.get(name):
            value = description[name]
            header.append((name, ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value))
    header.append(("model", ", ".join(f"{key} {value}" for key, value in description["model"].items())))
    header.append(("vocabulary", f"{description['vocab_size']:,}"))
    header.append(("parameters", f"{description['parameters']:,}"))
    header += [("note", note) for note in description["notes"]]
    rows = [("tensor", "shape", "type", "size", *(["slices"] if "files" in description else []))]
    for name, entry in description["tensors"].items():
        row = (name, str(entry["shape"]), entry["dtype"], format_bytes(entry["bytes"]))
        rows.append((*row, str(entry["boxes"])) if "files" in description else row)
    return [*format_table(header), "", *format_table(rows, (3, 4), width=get_terminal_width())]


def _describe_run(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    from megatron_lab.tokenizers.fingerprint import read_config_entry

    parallel, state = checkpoint.settings.parallel, checkpoint.state
    layout = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "schedule": parallel.pipeline_schedule or parallel.schedule,
        "sharding": parallel.sharding,
    }
    progress = {name: value for name, value in state.get("progress", {}).items() if name != "phases"}
    files = checkpoint.manifest.files
    fingerprint = read_config_entry(checkpoint.config, checkpoint.name)
    return {
        "digest": checkpoint.manifest.digest,
        "content_digest": checkpoint.manifest.content_digest,
        "files": len(files),
        "bytes": sum(file.num_bytes for file in files.values()),
        "layout": layout,
        "progress": {name.replace("_", " "): value for name, value in progress.items()},
        "has_optimizer": bool(state.get("has_optimizer")),
        "tokenizer": None if fingerprint is None else str(fingerprint),
        "command": " ".join(checkpoint.config.get("command", [])),
        "versions": checkpoint.config.get("versions", {}),
    }


def _describe_tensor(tensor: TensorInfo) -> dict[str, Any]:
    num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "bytes": num_bytes}
