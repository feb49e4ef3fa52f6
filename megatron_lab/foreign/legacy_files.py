"""Files of Megatron-LM's checkpoint format `torch`: one pickled file model_optim_rng.pt for each tensor- and pipeline-parallel
rank.

`find_chunks` determines which layers each file holds.
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

from megatron.checkpoint.errors import MAX_LISTED, CheckpointError, DamagedCheckpointError
from megatron_lab.foreign.torch_file import TorchFile

LATEST = "latest_checkpointed_iteration.txt"
MODEL_FILE = "model_optim_rng.pt"
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_SUPPORTED_VERSION = 3.0
_MAX_LATEST_LENGTH = 20
"""Maximum length of the text in latest_checkpointed_iteration.txt. A longer text does not name an iteration."""

RankFiles = dict[tuple[int, int], TorchFile]
"""Files by (tensor-parallel rank, pipeline-parallel rank)."""
TensorShard = tuple[TorchFile, torch.Tensor]
"""Shard of a parameter on one tensor-parallel rank, and the file that contains it."""


@dataclass(eq=False)
class LegacyChunk:
    """Model chunk (consecutive layers of a pipeline stage), as stored in the files of the stage's tensor-parallel ranks."""

    states: list[tuple[TorchFile, dict[str, Any]]]
    """File of each tensor-parallel rank, and the content of the model chunk in the file, by Megatron-LM name."""
    layers: range
    """Indices of the chunk's layers in the full model."""
    key: str
    """Key under which each file stores the model chunk: `model`, or `model0`, `model1`, ... with virtual pipeline stages."""
    stage: int
    """Index of the pipeline stage that holds the chunk."""
    expected: set[str] = field(default_factory=set)
    """Names of the chunk's stored tensors that belong to a parameter of the model. Any other tensor in the chunk is reported as
    unexpected."""

    def get_shards(self, name: str) -> list[TensorShard]:
        """Return the shards of a stored tensor, one for each tensor-parallel rank that has it."""
        entries = [(file, state.get(name)) for file, state in self.states]
        return [(file, tensor) for file, tensor in entries if isinstance(tensor, torch.Tensor)]


def open_file(path: Path) -> TorchFile:
    """Open the file of a rank without executing code in it, and check that it contains a dictionary.

    Raises:
        CheckpointError: the file contains something else or names an unsafe type.
        DamagedCheckpointError: the file is missing, truncated or altered.
    """
    file = TorchFile(path)
    if not isinstance(file.content, dict):
        raise CheckpointError(
            f"{path} holds a {type(file.content).__name__}, so it is not a checkpoint of Megatron-LM, which is a dictionary. "
            "Choose a --save folder of Megatron-LM"
        )
    return file


def find_iteration_folder(path: Path, contains_files: Callable[[Path], bool]) -> Path | None:
    """Return the folder with the checkpoint files of one iteration.

    Args:
        path: --save folder, of which the latest iteration is selected, or the folder of one iteration.
        contains_files: returns whether a folder contains the checkpoint files.

    Returns:
        The folder of the iteration; None if there is no checkpoint.
    """
    if contains_files(path):
        return path
    latest = path / LATEST
    if not latest.is_file():
        return None
    iteration = latest.read_text(encoding="utf-8", errors="replace").strip()
    folder = path / ("release" if iteration == "release" else f"iter_{iteration.zfill(7)}")
    return folder if len(iteration) < _MAX_LATEST_LENGTH and contains_files(folder) else None


def find_legacy_folder(path: Path) -> Path | None:
    """Return the folder of one iteration, which contains the folders of the ranks (mp_rank_00 and so on); None if there is no
    checkpoint.

    Args:
        path: --save folder, of which the latest iteration is selected, or the folder of one iteration.
    """
    return find_iteration_folder(path, lambda folder: any(folder.glob("mp_rank_*")))


def open_rank_files(folder: Path) -> tuple[RankFiles, Namespace]:
    """Open the checkpoint files of all ranks.

    Returns:
        The files by (tensor-parallel rank, pipeline-parallel rank), and the arguments of the run that wrote them.

    Raises:
        CheckpointError: the version is not supported, the model has experts, arguments are missing, or a file contains an unsafe
            type.
        DamagedCheckpointError: files of ranks are missing, or a file is damaged.
    """
    paths: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK_FOLDER.fullmatch(path.name)
        if match is not None and match[3] is not None:
            raise CheckpointError(
                f"{path}: checkpoints of Megatron-LM models with experts are not supported in this format. Load the checkpoint "
                "with Megatron-LM, and save it again with --ckpt-format torch_dist"
            )
        if match is not None:
            paths[int(match[1]), int(match[2] or 0)] = path / MODEL_FILE
    if (0, 0) not in paths:
        raise DamagedCheckpointError(
            f"{folder} lacks the folder of the first rank (mp_rank_00 or mp_rank_00_000): copy the complete checkpoint"
        )
    first = open_file(paths[0, 0])
    version, args = first.content.get("checkpoint_version"), first.content.get("args")
    if version != _SUPPORTED_VERSION:
        raise CheckpointError(
            f"{first.path} has checkpoint version {version}; only version {_SUPPORTED_VERSION} (Megatron-LM since 2021) is "
            "supported.\n"
            "  Load the checkpoint with a newer Megatron-LM and save it again."
        )
    if not isinstance(args, Namespace):
        raise CheckpointError(
            f"{first.path} holds no args (the arguments of the run), so the sizes of the model are not known. "
            "Load the checkpoint with Megatron-LM and save it again to store them."
        )
    _check_ranks(folder, list(paths), args)
    return {key: first if key == (0, 0) else open_file(path) for key, path in paths.items()}, args


def _check_ranks(folder: Path, ranks_in_folder: list[tuple[int, int]], args: Namespace) -> None:
    """Check that the folder contains the files of exactly the ranks of the run that wrote the checkpoint.

    Args:
        folder: folder of the iteration.
        ranks_in_folder: (tensor-parallel rank, pipeline-parallel rank) of each file.
        args: arguments of the run, with its parallel sizes.

    Raises:
        CheckpointError: there are files of more ranks, or the parallel sizes are not integers.
        DamagedCheckpointError: files of ranks are missing.
    """
    tp_size, pp_size = (getattr(args, f"{axis}_model_parallel_size", None) or 1 for axis in ("tensor", "pipeline"))
    if not isinstance(tp_size, int) or not isinstance(pp_size, int):
        raise CheckpointError(
            f"{folder}: its args (the arguments of the run) say tensor_model_parallel_size = {tp_size!r} and "
            f"pipeline_model_parallel_size = {pp_size!r}, but both must be integers. The checkpoint was altered: copy it again"
        )
    ranks = f"the {tp_size} tensor-parallel x {pp_size} pipeline-parallel ranks of the run (according to its args)"
    expected = ((t, p) for p in range(pp_size) for t in range(tp_size))
    missing = (f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp_size > 1) for t, p in expected if (t, p) not in ranks_in_folder)
    if first := list(islice(missing, MAX_LISTED)):
        raise DamagedCheckpointError(
            f"{folder} lacks {', '.join(first)}{' ...' * (len(first) == MAX_LISTED)} of {ranks}: copy the complete checkpoint"
        )
    if len(ranks_in_folder) > tp_size * pp_size:
        raise CheckpointError(
            f"{folder} holds files of {len(ranks_in_folder)} ranks, which are more than {ranks}. "
            "It may contain files of two checkpoints: copy the files of a single checkpoint"
        )


def list_chunk_keys(file: TorchFile) -> list[str]:
    """Return the keys of the model chunks in a rank's file: `model`, or `model0`, `model1`, ... with virtual pipeline stages.

    Raises:
        CheckpointError: the file has no such key.
    """
    if "model" in file.content:
        return ["model"]
    keys = [f"model{i}" for i in range(len(file.content)) if f"model{i}" in file.content]
    if not keys:
        raise CheckpointError(
            f"{file.path} holds no weights: it has neither the key model nor the key model0. Copy the complete checkpoint"
        )
    return keys


def find_chunks(rank_files: RankFiles, num_layers: int) -> list[LegacyChunk]:
    """Return the model chunks in the order of their layers: the first chunk of every stage, then the second chunk of every stage,
    and so on.

    The layers of each chunk are counted in the files, because stages may have different numbers of layers.

    Raises:
        CheckpointError: layers are missing, or the parameter names are those of an older Megatron-LM.
        DamagedCheckpointError: the file of a rank lacks a model chunk that the files of other ranks have.
    """
    tp_size, pp_size = (1 + max(ranks) for ranks in zip(*rank_files, strict=True))
    chunks, first_layer = [], 0
    for key in list_chunk_keys(rank_files[0, 0]):
        for stage in range(pp_size):
            states = [(rank_files[tp_rank, stage], _get_chunk_state(rank_files, tp_rank, stage, key)) for tp_rank in range(tp_size)]
            layers = {int(match[1]) for name in states[0][1] if (match := _LAYER_KEY.match(name))}
            if layers != set(range(len(layers))):
                raise CheckpointError(
                    f"{states[0][0].path}: its layers have the numbers {sorted(layers)}, but Megatron-LM numbers them from 0 "
                    "without gaps. Layers are missing, or the checkpoint is from another program. Copy the complete checkpoint"
                )
            chunks.append(LegacyChunk(states, range(first_layer, first_layer + len(layers)), key, stage))
            first_layer += len(layers)
    if first_layer != num_layers:
        raise CheckpointError(
            f"{rank_files[0, 0].path.parents[1]} holds {first_layer} layers, but the arguments of the run (args) say num_layers = "
            f"{num_layers}. Copy the complete checkpoint"
        )
    return chunks


def _get_chunk_state(rank_files: RankFiles, tp_rank: int, stage: int, key: str) -> dict[str, Any]:
    """Return the tensors of one model chunk (virtual pipeline stage) from the file of one tensor- and pipeline-parallel rank.

    Args:
        key: key of the model chunk in the file: `model`, or `model0`, `model1`, ... with virtual pipeline stages.
    """
    file = rank_files[tp_rank, stage]
    state = file.content.get(key)
    if not isinstance(state, dict):
        raise DamagedCheckpointError(
            f"{file.path} has no model chunk {key}, although {rank_files[0, 0].path} has one: copy the checkpoint again"
        )
    if "language_model" in state:
        raise CheckpointError(
            f"{file.path} has the parameter names of Megatron-LM before Megatron-Core (language_model...), which are not "
            "supported.\n  Convert the checkpoint first to the names of Megatron-Core, with Megatron-LM's "
            "tools/checkpoint/convert.py."
        )
    return state


_LAYER_KEY = re.compile(r"decoder\.layers\.(\d+)\.")
