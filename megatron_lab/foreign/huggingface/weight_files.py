"""Weight files of a Hugging Face folder, read through memory maps.

A folder has one `model.safetensors`, or several files and the index `model.safetensors.index.json`, which names the file of each
tensor. Older folders have `pytorch_model.bin`, with or without an index. These files are pickles. torch.load opens them with
`weights_only`, so that no code in them is executed.
"""

from __future__ import annotations

import pickle
import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.checkpoint.safetensors_file import DTYPES
from megatron.config.optional_packages import import_optional
from megatron.config.regular_file import parse_json, read_text
from megatron.parallel.matmul import get_dtype_name
from megatron_lab.foreign.source import TensorInfo

INDEX = ".index.json"
SINGLE = "model.safetensors"
_PICKLE = "pytorch_model.bin"
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FileTensor(TensorInfo):
    """Shape and dtype of a tensor in a weight file, and a function that reads it."""

    read: Callable[[], torch.Tensor]
    """Function that returns the tensor's content. The memory of the returned tensor is mapped from the file."""


def open_tensors(folder: Path) -> dict[str, FileTensor]:
    """Open the weight files of a folder, and return their tensors by Hugging Face name. The data is not read yet.

    Raises:
        CheckpointError: the folder has no weights, or their format is not supported.
        DamagedCheckpointError: a file is missing or truncated, or the files do not match the index.
    """
    folder_tensors: dict[str, FileTensor] = {}
    single_name, names_by_path = _find_files(folder)
    for path, names in names_by_path.items():
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing, although {single_name}{INDEX} names it. Copy the file")
        file_tensors = _open_safetensors(path) if single_name == SINGLE else _open_pickle(path)
        if names is not None:
            if absent := sorted(names - file_tensors.keys()):
                raise DamagedCheckpointError(
                    f"{path} lacks tensors that are in it according to {single_name}{INDEX}: {format_list(absent)}. "
                    "The files do not belong together: copy the folder again"
                )
            if extra := sorted(file_tensors.keys() - names):
                raise DamagedCheckpointError(
                    f"{path} holds tensors that {single_name}{INDEX} does not name: {format_list(extra)}. "
                    "The files do not belong together: copy the folder again"
                )
        folder_tensors |= file_tensors
    return folder_tensors


def _find_files(folder: Path) -> tuple[str, dict[Path, set[str] | None]]:
    """Find the weight files of a folder.

    Returns:
        The file name that a folder in this format has if it has a single weight file: model.safetensors or pytorch_model.bin. For
        each weight file, the names of the tensors that the index lists for it, or None if there is no index.

    Raises:
        CheckpointError: the folder has no weight files.
    """
    for single_name in (SINGLE, _PICKLE):
        if (folder / single_name).is_file():
            return single_name, {folder / single_name: None}
        index = folder / f"{single_name}{INDEX}"
        if index.is_file():
            return single_name, _read_index(index)
    raise CheckpointError(
        f"{folder} holds no weights: it has neither {SINGLE} nor {_PICKLE}, and no index ({SINGLE}{INDEX} or {_PICKLE}{INDEX}). "
        "Copy the complete folder"
    )


def _read_index(path: Path) -> dict[Path, set[str] | None]:
    """Read an index file, and return, for each weight file, the names of the tensors that the index lists for it.

    Raises:
        DamagedCheckpointError: the file is not an index, or names a file outside of its folder.
    """
    try:
        mapping = parse_json(read_text(path))["weight_map"]
        names_by_file: dict[str, set[str]] = defaultdict(set)
        for name, file in mapping.items():
            if Path(file).name != file:
                raise DamagedCheckpointError(
                    f"{path} names {file!r}, which is not a file in its folder. For safety, other files are not read. Copy the "
                    "folder again from a source that you trust"
                )
            names_by_file[file].add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedCheckpointError(f"{path} is not a readable index of weight files ({error!r}): copy it again") from error
    return {path.parent / file: names for file, names in names_by_file.items()}


def _open_safetensors(path: Path) -> dict[str, FileTensor]:
    import_optional("safetensors", f"{path} needs the package safetensors")
    from safetensors import SafetensorError, safe_open

    dtypes = {DTYPES[get_dtype_name(dtype)].code: dtype for dtype in WEIGHT_DTYPES} | {"F8_E4M3": torch.float8_e4m3fn}

    def read_tensor(name: str) -> torch.Tensor:
        try:
            # Map the file again for each tensor: a permanent map would keep the pages of all read tensors in memory.
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpointError(
                f"{path}: the tensor {name} cannot be read ({error}). The file is damaged: copy it again"
            ) from error
        return tensor

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {  # dtypes that are not dtypes of weights become uint8
                name: FileTensor(
                    tuple(tensor_slice.get_shape()), dtypes.get(tensor_slice.get_dtype(), torch.uint8), partial(read_tensor, name)
                )
                for name, tensor_slice in slices.items()
            }
    except (SafetensorError, OSError, struct.error) as error:
        raise DamagedCheckpointError(f"{path} is not a complete safetensors file ({error}): copy it again") from error


def _open_pickle(path: Path) -> dict[str, FileTensor]:
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):  # files from before torch 1.6 cannot be memory-mapped
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is a pickle that contains more than weights. It is not opened, since that could run any program: "
            f"{str(error).splitlines()[0]}\n  If you trust the file, load it with torch and save the weights as safetensors."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is not a complete file of weights ({error}): copy it again") from error
    tensors: dict[str, Any] = content if isinstance(content, dict) else {}
    if not tensors or not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()):
        raise CheckpointError(
            f"{path} is not a state dict: expected a mapping from parameter names to tensors. Save the state dict of the model "
            "into this file"
        )
    return {name: FileTensor(tuple(value.shape), value.dtype, value.detach) for name, value in tensors.items()}
