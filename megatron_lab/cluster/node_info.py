"""Properties of this node for the cluster check, and the problems that the node can find without contact to other nodes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from megatron.checkpoint.storage import is_url
from megatron.config.config import Config
from megatron.config.data import DataConfig, read_split_blends
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer import build_tokenizer, compute_embedding_rows
from megatron.spec.counts import count_parameters

T = TypeVar("T")
CHECKPOINT_BYTES_PER_PARAM = 12
"""Bytes of one parameter in a checkpoint: the weight and both moments of Adam in float32."""

RANKS_PER_CORE = 64
"""Maximum number of ranks per CPU core. A rank needs 1.5 s of a core and 150 MB to start. At this limit, the start takes a third of
the default --limit, and 10 GB of memory per core."""


@dataclass
class NodeInfo:
    """Properties of one node, which the cluster check compares with those of the other nodes. Sent as JSON."""

    host: str
    versions: dict[str, str]
    """Versions of software and hardware, which must be equal on all nodes: by name, such as "torch", "NCCL" or "GPU"."""
    faults: list[str] = field(default_factory=list)
    """Messages about problems that the node has found without contact to other nodes."""
    free_space: int | None = None
    """Free bytes on the disk of the save folder; None if there is no save folder, or it is a URL or cannot be written."""
    room_needed: int = 0
    """Bytes that one checkpoint takes; 0 if the size of the model is unknown, or there is no save folder on a disk."""


def collect_node_info(config: Config, num_ranks: int) -> NodeInfo:
    """Determine the versions and problems of this node without starting ranks.

    Problems are an unreadable tokenizer or dataset, too few devices, and a save folder that is not writable or too small.

    Args:
        config: settings of the run.
        num_ranks: number of ranks that the job starts on this node.
    """
    node_info = NodeInfo(socket.gethostname(), collect_versions(config.parallel.device))
    embedding_rows = _try_action(node_info.faults, lambda: compute_embedding_rows(build_tokenizer(config.data), config.data))
    for prefix in _iterate_dataset_prefixes(config.data, node_info.faults):
        _try_action(node_info.faults, functools.partial(IndexedDataset, prefix))
    node_info.faults.extend(check_num_ranks(num_ranks, config.parallel.device))
    if config.checkpoint.save and not is_url(config.checkpoint.save):
        if embedding_rows:
            node_info.room_needed = CHECKPOINT_BYTES_PER_PARAM * count_parameters(config.model, embedding_rows)
        check_save_folder(Path(config.checkpoint.save.removeprefix("file://")), node_info)
    return node_info


def check_num_ranks(num_ranks: int, device: str) -> list[str]:
    """Check that this node has enough GPUs or CPU cores for `num_ranks` ranks. Return messages about problems.

    Args:
        device: value of --device.
    """
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    if num_gpus or device == "cuda":
        return (
            [f"{num_gpus} GPUs for {num_ranks} ranks (a GPU has failed, or CUDA_VISIBLE_DEVICES hides it)"]
            if num_gpus < num_ranks
            else []
        )
    num_cores = count_cores()
    if num_ranks <= RANKS_PER_CORE * num_cores:
        return []
    limit = f"at most {RANKS_PER_CORE * num_cores} ({RANKS_PER_CORE} per core) start in reasonable time"
    return [
        f"{num_ranks} ranks for {num_cores} CPU core{'s' * (num_cores > 1)}: {limit}. Set --ranks-per-node "
        "to the number of ranks that the job starts on this node"
    ]


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def collect_versions(device: str) -> dict[str, str]:
    """Return the versions of software and hardware, which must be equal on all nodes: by name, such as "torch", "NCCL" or "GPU".

    Args:
        device: value of --device. Versions of the driver, NCCL and GPUs are omitted for cpu.
    """
    versions = {"torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    if device != "cpu" and torch.cuda.is_available():
        versions["driver"] = _get_driver_version()
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["GPU"] = " and ".join(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
    return versions


def _get_driver_version() -> str:
    """Return the version of NVIDIA's kernel module; "unknown" if it cannot be read. A container shares this module with its
    host."""
    with contextlib.suppress(OSError):
        match = re.search(r"\s(\d+\.\d+[.\d]*)\s", Path("/proc/driver/nvidia/version").read_text())
        if match:
            return match[1]
    return "unknown"


def check_save_folder(folder: Path, node_info: NodeInfo) -> None:
    """Check that the save folder is writable and has space for a checkpoint. Create the folder if it is missing.

    Args:
        node_info: information about this node. Its `room_needed` is the required space. The function stores `free_space` and adds
            problems to `faults`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        node_info.free_space = shutil.disk_usage(folder).free
    except OSError as error:
        node_info.faults.append(f"--save {folder} cannot be written to: {error.strerror}")
        return
    if node_info.free_space < node_info.room_needed:
        node_info.faults.append(
            f"--save {folder} has {node_info.free_space / 1e9:,.1f} GB free, but a checkpoint takes "
            f"{node_info.room_needed / 1e9:,.1f} GB"
        )


def _iterate_dataset_prefixes(data: DataConfig, problems: list[str]) -> Iterator[str]:
    """Yield the path prefix of each dataset once. If the data flags cannot be read, add a message to `problems`."""
    blends = _try_action(problems, lambda: read_split_blends(data))
    if blends:
        yield from dict.fromkeys(dataset.prefix for sets in blends[1] for blend in sets.values() for dataset in blend)


def _try_action(problems: list[str], action: Callable[[], T]) -> T | None:
    """Call `action` and return its result. If it raises an error, add the error's message to `problems` and return None, so that
    the other checks of the node still run."""
    try:
        return action()
    except (ValueError, OSError) as error:
        problems.append(str(error))
        return None
