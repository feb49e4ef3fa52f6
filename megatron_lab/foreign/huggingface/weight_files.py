"""The files that hold the weights of a Hugging Face folder, read through memory maps.

One `model.safetensors`, or several with `model.safetensors.index.json` that says in which each tensor is; in older folders
`pytorch_model.bin` in the same two ways, pickles that are opened as weights only.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.safetensors_file import DTYPES
from megatron.config.extras import optional
from megatron.config.regular_file import read_text
from megatron.parallel.products import dtype_name
from megatron_lab.foreign.source import TensorInfo

INDEX = ".index.json"
SINGLE = "model.safetensors"
_PICKLED = "pytorch_model.bin"
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FileTensor(TensorInfo):
    """A tensor in a file."""

    read: Callable[[], torch.Tensor]
    """Gives a view of the file."""


def stored_tensors(folder: Path) -> dict[str, FileTensor]:
    """The tensors of a folder by their names there.

    Raises:
        CheckpointError: no weights, or a format that is not opened.
        DamagedCheckpointError: a file is missing or truncated, or files and index disagree.
    """
    found: dict[str, FileTensor] = {}
    kind, expected = _find(folder)
    for path, names in expected.items():
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing; {path.name} is named in {kind}{INDEX}")
        tensors = _open_safetensors(path) if kind == SINGLE else _open_pickle(path)
        if names is not None:
            if absent := sorted(names - tensors.keys()):
                raise DamagedCheckpointError(f"{path} lacks tensors that {kind}{INDEX} says are in it: {listed(absent)}")
            if extra := sorted(tensors.keys() - names):
                raise DamagedCheckpointError(f"{path} holds tensors that {kind}{INDEX} does not name: {listed(extra)}")
        found |= tensors
    return found


def _find(folder: Path) -> tuple[str, dict[Path, set[str] | None]]:
    """The kind of files, and the files, each with the tensors that the index lists for it."""
    for kind in (SINGLE, _PICKLED):
        if (folder / kind).is_file():
            return kind, {folder / kind: None}
        index = folder / f"{kind}{INDEX}"
        if index.is_file():
            return kind, _read_index(index)
    raise CheckpointError(
        f"{folder} holds no weights: there is no {SINGLE}, {SINGLE}{INDEX}, {_PICKLED} or {_PICKLED}{INDEX} in it"
    )


def _read_index(path: Path) -> dict[Path, set[str] | None]:
    try:
        mapping = json.loads(read_text(path))["weight_map"]
        found: dict[str, set[str]] = defaultdict(set)
        for name, file in mapping.items():
            if Path(file).name != file:
                raise DamagedCheckpointError(f"{path} names {file!r}, which is not a file in its folder")
            found[file].add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedCheckpointError(f"{path} is not a readable index of weights ({error!r})") from error
    return {path.parent / file: names for file, names in found.items()}


def _open_safetensors(path: Path) -> dict[str, FileTensor]:
    optional("safetensors", f"{path} needs the package safetensors")
    from safetensors import SafetensorError, safe_open

    dtypes = {DTYPES[dtype_name(dtype)].code: dtype for dtype in WEIGHT_DTYPES} | {"F8_E4M3": torch.float8_e4m3fn}

    def read(name: str) -> torch.Tensor:
        try:
            # Mapped anew each time: the pages of a map that stays would stay resident, in the end the whole model's.
            with safe_open(path, framework="pt") as opened:
                found: torch.Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpointError(f"{path}: {name} cannot be read ({error})") from error
        return found

    try:
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {  # types that no weight has become some other type
                name: FileTensor(tuple(part.get_shape()), dtypes.get(part.get_dtype(), torch.uint8), partial(read, name))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError, struct.error) as error:
        raise DamagedCheckpointError(f"{path} is not a whole safetensors file ({error})") from error


def _open_pickle(path: Path) -> dict[str, FileTensor]:
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):  # files of before torch 1.6 cannot be mapped
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is a pickle with more in it than weights, and is not opened, since that could run any program: "
            f"{str(error).splitlines()[0]}\n  Save the model as safetensors where you trust it."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is not a whole file of weights ({error})") from error
    tensors: dict[str, Any] = content if isinstance(content, dict) else {}
    if not tensors or not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()):
        raise CheckpointError(f"{path} does not hold weights by their names")
    return {name: FileTensor(tuple(value.shape), value.dtype, value.detach) for name, value in tensors.items()}
