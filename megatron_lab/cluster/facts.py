"""What a node reports about itself, and the faults that it finds without asking another node."""

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
from megatron.config.data import DataConfig, split_words
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer import build_tokenizer, embedding_rows
from megatron.spec.counts import count_parameters

T = TypeVar("T")
BYTES_SAVED = 12
"""Of a parameter in a checkpoint: weight and both moments of Adam in float32."""

RANKS_PER_CORE = 64
"""The most on a CPU. A rank takes 1.5 s of a core to start, and 150 MB: so many take a third of the usual --limit to start, and
10 GB for each core."""


@dataclass
class NodeFacts:
    """Of one node; JSON-able."""

    host: str
    versions: dict[str, str]
    """What must be the same on all nodes."""
    faults: list[str] = field(default_factory=list)
    free_space: int | None = None
    """Bytes in the save folder; None where none is given or it is a URL."""
    room_needed: int = 0
    """Bytes of one checkpoint; 0 where the model's size is not known."""


def node_facts(config: Config, ranks: int) -> NodeFacts:
    """Look at this node. Nothing is started.

    Args:
        config: of the run.
        ranks: processes that the node is to start.
    """
    facts = NodeFacts(socket.gethostname(), versions(config.parallel.device))
    rows = _tried(facts.faults, lambda: embedding_rows(build_tokenizer(config.data), config.data))
    for prefix in _prefixes(config.data, facts.faults):
        _tried(facts.faults, functools.partial(IndexedDataset, prefix))
    facts.faults.extend(too_many(ranks, config.parallel.device))
    if config.checkpoint.save and not is_url(config.checkpoint.save):
        if rows:
            facts.room_needed = BYTES_SAVED * count_parameters(config.model, rows)
        look_at_folder(Path(config.checkpoint.save.removeprefix("file://")), facts)
    return facts


def too_many(ranks: int, device: str) -> list[str]:
    """What is wrong with so many ranks on this node."""
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus or device == "cuda":
        return [f"{gpus} GPUs for {ranks} ranks (a GPU that is lost, or CUDA_VISIBLE_DEVICES)"] if gpus < ranks else []
    cores = num_cores()
    if ranks <= RANKS_PER_CORE * cores:
        return []
    most = f"at most {RANKS_PER_CORE * cores} start there in reasonable time ({RANKS_PER_CORE} a core)"
    return [f"{ranks} ranks for {cores} CPU core{'s' * (cores > 1)}: {most}. Give --ranks-per-node as the job will start them"]


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(device: str) -> dict[str, str]:
    """Of what must agree between nodes, by name."""
    found = {"torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    if device != "cpu" and torch.cuda.is_available():
        found["driver"] = _driver()
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["GPU"] = " and ".join(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
    return found


def _driver() -> str:
    """The version of NVIDIA's driver: of the kernel module, which a container shares with its host."""
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.\d+[.\d]*)\s", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[1]
    return "unknown"


def look_at_folder(folder: Path, facts: NodeFacts) -> None:
    """Whether the save folder takes a file and has room for a checkpoint. Makes it if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        facts.free_space = shutil.disk_usage(folder).free
    except OSError as error:
        facts.faults.append(f"--save {folder} cannot be written to: {error.strerror}")
        return
    if facts.free_space < facts.room_needed:
        facts.faults.append(
            f"--save {folder} has {facts.free_space / 1e9:,.1f} GB free, but a checkpoint takes {facts.room_needed / 1e9:,.1f} GB"
        )


def _prefixes(data: DataConfig, faults: list[str]) -> Iterator[str]:
    """The datasets, each once."""
    words = _tried(faults, lambda: split_words(data))
    if words:
        yield from dict.fromkeys(each.prefix for split in words[1] for each in split)


def _tried(faults: list[str], action: Callable[[], T]) -> T | None:
    """What an action returns; or note why it failed."""
    try:
        return action()
    except (ValueError, OSError) as error:
        faults.append(str(error))
        return None
