"""The files of Megatron-LM's checkpoints in its format `torch`: a pickled model_optim_rng.pt from each model-parallel rank.

`find_chunks` says which layers lie where.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import MOST_LISTED, CheckpointError, DamagedCheckpointError
from megatron_lab.foreign.torch_file import TorchFile

LATEST = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_VERSION = 3.0
_LONGEST_WORD = 20
"""Most characters in the file of the latest iteration; a longer file is another one."""

RankFiles = dict[tuple[int, int], TorchFile]
"""Files by (tensor rank, pipeline rank)."""
FilePart = tuple[TorchFile, torch.Tensor]
"""One tensor rank's part of a parameter, and the file that it is in."""


@dataclass(eq=False)
class LegacyChunk:
    """Consecutive layers, on all tensor ranks."""

    states: list[tuple[TorchFile, dict[str, Any]]]
    """(file, the chunk's tensors in it) of each tensor rank."""
    layers: range
    key: str
    """Name under which ranks store it."""
    stage: int
    expected: set[str] = field(default_factory=set)
    """Names under which a tensor of the model may be stored in it."""

    def parts(self, name: str) -> list[FilePart]:
        """A stored tensor on the tensor ranks that have it."""
        found = [(file, state.get(name)) for file, state in self.states]
        return [(file, part) for file, part in found if isinstance(part, torch.Tensor)]


def open_file(path: Path) -> TorchFile:
    """A file of one rank, which holds a dictionary.

    Raises:
        CheckpointError, DamagedCheckpointError: as `TorchFile`.
    """
    file = TorchFile(path)
    if not isinstance(file.content, dict):
        raise CheckpointError(f"{path} holds a {type(file.content).__name__}, not a checkpoint of Megatron-LM (a dictionary)")
    return file


def newest_folder(path: Path, holds: Callable[[Path], bool]) -> Path | None:
    """The folder with files that a --save folder or an iteration's folder means; None if it is neither.

    Args:
        holds: whether a folder has these files.
    """
    if holds(path):
        return path
    latest = path / LATEST
    if not latest.is_file():
        return None
    word = latest.read_text(encoding="utf-8", errors="replace").strip()
    folder = path / ("release" if word == "release" else f"iter_{word.zfill(7)}")
    return folder if len(word) < _LONGEST_WORD and holds(folder) else None


def legacy_folder(path: Path) -> Path | None:
    """The folder with the ranks (mp_rank_00...)."""
    return newest_folder(path, lambda folder: any(folder.glob("mp_rank_*")))


def open_ranks(folder: Path) -> tuple[RankFiles, Namespace]:
    """Open all files. Returns them, and the arguments of the run that wrote them.

    Raises:
        CheckpointError: another version, experts, no arguments, or a type that is not safe.
        DamagedCheckpointError: ranks are missing, or a file is damaged.
    """
    paths: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        found = _RANK.fullmatch(path.name)
        if found is not None and found[3] is not None:
            raise CheckpointError(f"{path}: experts are not built here")
        if found is not None:
            paths[int(found[1]), int(found[2] or 0)] = path / FILE
    if (0, 0) not in paths:
        raise DamagedCheckpointError(f"{folder} lacks mp_rank_00 (or mp_rank_00_000)")
    first = open_file(paths[0, 0])
    version, args = first.content.get("checkpoint_version"), first.content.get("args")
    if version != _VERSION:
        raise CheckpointError(
            f"{first.path} is of checkpoint version {version}, and only {_VERSION} (Megatron-LM since 2021) is read.\n"
            "  Load and save it with a newer Megatron-LM first."
        )
    if not isinstance(args, Namespace):
        raise CheckpointError(f"{first.path} holds no args, so its model is not known")
    _check_ranks(folder, list(paths), args)
    return {key: first if key == (0, 0) else open_file(path) for key, path in paths.items()}, args


def _check_ranks(folder: Path, found: list[tuple[int, int]], args: Namespace) -> None:
    """Check that all ranks of the job that wrote the checkpoint are here, and no others."""
    tensor, pipeline = (getattr(args, f"{axis}_model_parallel_size", None) or 1 for axis in ("tensor", "pipeline"))
    if not isinstance(tensor, int) or not isinstance(pipeline, int):
        raise CheckpointError(f"{folder}: its args say tensor_model_parallel_size = {tensor!r}, pipeline = {pipeline!r}")
    ranks = f"tensor {tensor} x pipeline {pipeline} ranks, as its args say"
    wanted = ((t, p) for p in range(pipeline) for t in range(tensor))
    missing = (f"mp_rank_{t:02d}" + f"_{p:03d}" * (pipeline > 1) for t, p in wanted if (t, p) not in found)
    if first := list(islice(missing, MOST_LISTED)):
        raise DamagedCheckpointError(f"{folder} lacks {', '.join(first)}{' ...' * (len(first) == MOST_LISTED)} of {ranks}")
    if len(found) > tensor * pipeline:
        raise CheckpointError(f"{folder} holds {len(found)} ranks, not {ranks}")


def chunk_keys(file: TorchFile) -> list[str]:
    """Names under which a rank stores its chunks: model, or model0, model1, ... with virtual stages."""
    if "model" in file.content:
        return ["model"]
    keys = [f"model{i}" for i in range(len(file.content)) if f"model{i}" in file.content]
    if not keys:
        raise CheckpointError(f"{file.path} holds no model")
    return keys


def find_chunks(files: RankFiles, num_layers: int) -> list[LegacyChunk]:
    """The chunks in the order of the depth: the first of every stage, then the second of every stage (interleaved), and so on.

    The layers of a chunk are counted, not computed: stages need not be of one size.

    Raises:
        CheckpointError: layers are missing, or the names are of another generation.
        DamagedCheckpointError: a rank lacks a chunk that another has.
    """
    tensor_ranks, stages = (1 + max(numbers) for numbers in zip(*files, strict=True))
    chunks, depth = [], 0
    for key in chunk_keys(files[0, 0]):
        for stage in range(stages):
            states = [(files[tensor, stage], _state(files, tensor, stage, key)) for tensor in range(tensor_ranks)]
            layers = {int(found[1]) for name in states[0][1] if (found := STORED_LAYER.match(name))}
            if layers != set(range(len(layers))):
                raise CheckpointError(f"{states[0][0].path}: its layers are {sorted(layers)}, not counted from 0 on")
            chunks.append(LegacyChunk(states, range(depth, depth + len(layers)), key, stage))
            depth += len(layers)
    if depth != num_layers:
        raise CheckpointError(f"{files[0, 0].path.parents[1]} holds {depth} layers, but its args say {num_layers}")
    return chunks


def _state(files: RankFiles, tensor: int, stage: int, key: str) -> dict[str, Any]:
    file = files[tensor, stage]
    state = file.content.get(key)
    if not isinstance(state, dict):
        raise DamagedCheckpointError(f"{file.path} has no {key}, which {files[0, 0].path} has")
    if "language_model" in state:
        raise CheckpointError(
            f"{file.path} is of Megatron-LM's models before its core (language_model...), which are not read here.\n"
            "  Bring it to the core's names first with Megatron-LM's own tools/checkpoint/convert.py."
        )
    return state


STORED_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
