"""Say what a checkpoint holds: run, model, layout that wrote it, digests, names, shapes, types and sizes.

Reads no tensors: of a checkpoint its manifest and settings, of other folders their headers.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from megatron_lab.checkpoints.text import columns, in_order, size

if TYPE_CHECKING:
    from megatron_lab.foreign.source import StoredCheckpoint, TensorInfo, WeightSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("source", metavar="SOURCE", help="a --save folder, one checkpoint in it, or a folder of another program")
    parser.add_argument("--step", type=int, metavar="N", help="the iteration to take, instead of the newest")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    from megatron_lab.foreign.opening import open_source

    found = describe(open_source(args.source, args.step))
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines(found)))
    return 0


def describe(source: WeightSource) -> dict[str, Any]:
    """Everything that is said, in JSON types."""
    from megatron.parallel.params import global_records
    from megatron_lab.foreign.source import StoredCheckpoint

    found: dict[str, Any] = {"path": source.name}
    stored = source if isinstance(source, StoredCheckpoint) else None
    tensors = {f"model.{name}": tensor for name, tensor in source.weights.items()} if stored is None else stored.tensors
    if stored is not None:
        found |= _of_a_run(stored)
    found["model"] = {name: value for name, value in vars(source.model).items() if value is not None}
    found["vocab_size"] = source.vocab_size
    found["parameters"] = sum(math.prod(tensor.shape) for tensor in source.weights.values())
    order = in_order(tensors, global_records(source.model, source.vocab_size))
    found["tensors"] = {name: _describe_tensor(tensors[name]) for name in order}
    if stored is not None:
        for name, entry in found["tensors"].items():
            entry["boxes"] = len(stored.manifest.tensors[name].boxes)
            entry["content"] = stored.manifest.tensors[name].content
    found["notes"] = source.notes
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """The description as text."""
    head = [("path", found["path"])]
    if "files" in found:
        head.append(("digest of the content", f"{found['content_digest'] or 'none (older format)'}, the same at every layout"))
        head.append(("digest of the files", found["digest"]))
        head.append(("files", f"{found['files']}, {size(found['bytes'])}"))
    for name in ("layout", "progress", "command", "versions"):
        if found.get(name):
            value = found[name]
            head.append((name, ", ".join(f"{key} {what}" for key, what in value.items()) if isinstance(value, dict) else value))
    head.append(("model", ", ".join(f"{key} {value}" for key, value in found["model"].items())))
    head.append(("vocabulary", f"{found['vocab_size']:,}"))
    head.append(("parameters", f"{found['parameters']:,}"))
    head += [("note", note) for note in found["notes"]]
    rows = [("tensor", "shape", "type", "size", *(["boxes"] if "files" in found else []))]
    for name, entry in found["tensors"].items():
        row = (name, str(entry["shape"]), entry["dtype"], size(entry["bytes"]))
        rows.append((*row, str(entry["boxes"])) if "files" in found else row)
    return [*columns(head), "", *columns(rows, right=(3, 4))]


def _of_a_run(stored: StoredCheckpoint) -> dict[str, Any]:
    parallel, state = stored.config["config"]["parallel"], stored.state
    layout = {
        "TP": parallel["tensor_model_parallel_size"],
        "PP": parallel["pipeline_model_parallel_size"],
        "schedule": parallel["pipeline_schedule"] or stored.settings.parallel.schedule,
        "sharding": stored.settings.parallel.sharding,
    }
    progress = {name: value for name, value in state.get("progress", {}).items() if name != "phases"}
    files = stored.manifest.files
    return {
        "digest": stored.manifest.digest,
        "content_digest": stored.manifest.content_digest,
        "files": len(files),
        "bytes": sum(file.num_bytes for file in files.values()),
        "layout": layout,
        "progress": {name.replace("_", " "): value for name, value in progress.items()},
        "has_optimizer": bool(state.get("has_optimizer")),
        "command": " ".join(stored.config.get("command", [])),
        "versions": stored.config.get("versions", {}),
    }


def _describe_tensor(tensor: TensorInfo) -> dict[str, Any]:
    num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "bytes": num_bytes}
