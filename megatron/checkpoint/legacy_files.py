"""The files of Megatron-LM's checkpoints in its format `torch`: a pickled model_optim_rng.pt from each model-parallel rank.

They are opened without running anything that they say, their tensors mapped, not read. `find_chunks` says which layers lie where.

A pickle is a program: its opcodes call whatever they name. torch.load with weights_only runs them with an interpreter that knows
tensors and plain containers; any other name in these files must be on the list below, and gets a class that does nothing.
"""

from __future__ import annotations

import pickle
import re
import zipfile
import zlib
from argparse import Namespace
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.checkpoint.errors import MOST_LISTED, CheckpointError, DamagedCheckpointError, listed


class LeftOut:
    """Replaces an object that is not needed: a random state, an enum of the settings, scaling factors of 8-bit products."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_ENUM_MODULES = ("megatron.core.enums", "megatron.core.transformer.enums", "megatron.model.enums", "megatron.legacy.model.enums")
_ENUMS = ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope", "PositionEmbeddingType")
LEFT_OUT = (
    *(f"{module}.{name}" for module in ("numpy.core.multiarray", "numpy._core.multiarray") for name in ("_reconstruct", "scalar")),
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    *(f"{module}.{name}" for module in _ENUM_MODULES for name in _ENUMS),
    *(f"megatron.core.rerun_state_machine.{name}" for name in ("RerunDiagnostic", "RerunMode", "RerunState")),
    "megatron.core.optimizer.OptimizerConfig",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
    "torch._C.Generator",
    "_io.BytesIO",
    "signal.Signals",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)
"""Names that these files hold beside tensors and settings (Megatron-LM, megatron/core/safe_globals.py; older places of them)."""
_SETTINGS = ("argparse.Namespace", "types.SimpleNamespace")


class RankFile:
    """The file of one rank of Megatron-LM.

    Args:
        path: model_optim_rng.pt.

    Raises:
        CheckpointError: it names a type that is not on the list, or is no such checkpoint. Nothing of it was run.
        DamagedCheckpointError: it is missing, truncated or altered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checksums = _record_checksums(path)
        self._checked: set[int] = set()
        allowed: list[Any] = [(Namespace, name) for name in _SETTINGS]
        allowed += [(type(name.rpartition(".")[2], (LeftOut,), {}), name) for name in LEFT_OUT]
        with safe_globals(allowed):
            try:
                unknown = get_unsafe_globals_in_checkpoint(str(path))
                content = None if unknown else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except pickle.UnpicklingError as error:
                first = str(error).strip().splitlines()[-1] if str(error).strip() else "it is no pickle of torch.save"
                raise CheckpointError(f"{path} cannot be opened safely, and nothing of it was run: {first}") from error
            except (RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError) as error:
                raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
        if unknown:
            raise CheckpointError(
                f"{path} asks for {listed(sorted(unknown))}, which opening a checkpoint must not run; nothing of it was run.\n"
                "  If the file is your own, load it with the program that wrote it and save what is needed here alone:\n"
                "  torch.save({key: saved[key] for key in saved if key in ('args', 'checkpoint_version', 'iteration')"
                " or key.startswith('model')}, path)"
            )
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint of Megatron-LM (a dictionary)")
        self.content: dict[str, Any] = content

    def check(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor, after its bytes were compared, once, with the checksums of the file.

        Raises:
            DamagedCheckpointError: they are not what was saved.
        """
        storage = tensor.untyped_storage()
        if self._checksums is not None and storage.data_ptr() not in self._checked and storage.nbytes():
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            if (len(raw), zlib.crc32(raw.numpy().data)) not in self._checksums:
                raise DamagedCheckpointError(f"{self.path} is damaged: {name} is not what was saved (its checksum differs)")
            self._checked.add(storage.data_ptr())
        return tensor


def _record_checksums(path: Path) -> set[tuple[int, int]] | None:
    """Length and CRC-32 of every stored record; None where the file was written without them.

    Raises:
        DamagedCheckpointError: there is no whole file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            program = next((record for record in records if record.filename.endswith("/data.pkl")), None)
            if program is None:
                raise DamagedCheckpointError(f"{path} is no file of torch.save: it has no data.pkl")
            version = next((record for record in records if record.filename.endswith("/version")), program)
            try:
                archive.read(version)
            except zipfile.BadZipFile:  # torch can be told to compute none; it then writes others in their place
                return None
            archive.read(program)
            return {(record.file_size, record.CRC) for record in records}
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing") from error
    except zipfile.BadZipFile as error:
        raise DamagedCheckpointError(
            f"{path} is truncated, altered, or not of torch.save as it has written since torch 1.6: {error}"
        ) from error


LATEST = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_VERSION = 3.0
_LONGEST_WORD = 20
"""Most characters in the file of the latest iteration; a longer file is another one."""

RankFiles = dict[tuple[int, int], RankFile]
"""Files by (tensor rank, pipeline rank)."""
FilePart = tuple[RankFile, torch.Tensor]
"""One tensor rank's part of a parameter, and the file that it is in."""


@dataclass(eq=False)
class LegacyChunk:
    """Consecutive layers, on all tensor ranks."""

    states: list[tuple[RankFile, dict[str, Any]]]
    """(file, the chunk's tensors in it) of each tensor rank."""
    layers: range
    expected: set[str] = field(default_factory=set)
    """Names under which a tensor of the model may be stored in it."""

    def parts(self, name: str) -> list[FilePart]:
        """A stored tensor on the tensor ranks that have it."""
        found = [(file, state.get(name)) for file, state in self.states]
        return [(file, part) for file, part in found if isinstance(part, torch.Tensor)]


def legacy_folder(path: Path) -> Path | None:
    """The folder with the ranks (mp_rank_00...) that a --save folder or an iteration's folder means; None if it is neither."""
    if any(path.glob("mp_rank_*")):
        return path
    latest = path / LATEST
    if not latest.is_file():
        return None
    word = latest.read_text(encoding="utf-8", errors="replace").strip()
    folder = path / ("release" if word == "release" else f"iter_{word.zfill(7)}")
    return folder if len(word) < _LONGEST_WORD and any(folder.glob("mp_rank_*")) else None


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
    first = RankFile(paths[0, 0])
    version, args = first.content.get("checkpoint_version"), first.content.get("args")
    if version != _VERSION:
        raise CheckpointError(
            f"{first.path} is of checkpoint version {version}, and only {_VERSION} (Megatron-LM since 2021) is read.\n"
            "  Load and save it with a newer Megatron-LM first."
        )
    if not isinstance(args, Namespace):
        raise CheckpointError(f"{first.path} holds no args, so its model is not known")
    _check_ranks(folder, list(paths), args)
    return {key: first if key == (0, 0) else RankFile(path) for key, path in paths.items()}, args


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


def chunk_keys(file: RankFile) -> list[str]:
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
            chunks.append(LegacyChunk(states, range(depth, depth + len(layers))))
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
