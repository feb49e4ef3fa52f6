"""A file of torch.save, or a part of one, opened without running anything that it says; its tensors are mapped, not read.

A pickle is a program: its opcodes call whatever they name. torch.load with weights_only runs them with an interpreter that knows
tensors and plain containers; any other name in these files must be on the list below, and gets a class that does nothing.
"""

from __future__ import annotations

import io
import pickle
import signal
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed


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
    *(f"signal.{name}" for name in signal.Signals.__members__),  # how Python writes a signal up to 3.11.3
    "builtins.getattr",  # how Python 3.11.0 to 3.11.3 write an enum: getattr(the class, a name), which is left out as a whole
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)
"""Names that these files hold beside tensors and settings (Megatron-LM, megatron/core/safe_globals.py; older places of them)."""
_SETTINGS = ("argparse.Namespace", "types.SimpleNamespace")
_ALLOWED: list[Any] = [
    *((Namespace, name) for name in _SETTINGS),
    *((type(name.rpartition(".")[2], (LeftOut,), {}), name) for name in LEFT_OUT),
]


class TorchFile:
    """What torch.save has written.

    Args:
        path: the file.
        part: its bytes, where they are a part of the file that was read before.

    Raises:
        CheckpointError: it names a type that is not on the list. Nothing of it was run.
        DamagedCheckpointError: it is missing, truncated or altered.
    """

    def __init__(self, path: Path, part: bytes | None = None) -> None:
        self.path = path
        self._checksums = _record_checksums(path, part)
        self._checked: set[int] = set()
        with safe_globals(_ALLOWED):
            try:
                unknown = get_unsafe_globals_in_checkpoint(path) if part is None else []  # of many parts the first must do
                content = (
                    None if unknown else torch.load(_opened(path, part), map_location="cpu", weights_only=True, mmap=part is None)
                )
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
        self.content: Any = content

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


def _opened(path: Path, part: bytes | None) -> str | io.BytesIO:
    return str(path) if part is None else io.BytesIO(part)


def _record_checksums(path: Path, part: bytes | None) -> set[tuple[int, int]] | None:
    """Length and CRC-32 of every stored record; None where the file was written without them.

    Raises:
        DamagedCheckpointError: there is no whole file, or its records would become larger than it is.
    """
    try:
        with zipfile.ZipFile(_opened(path, part)) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise DamagedCheckpointError(f"{path} is no file of torch.save, which compresses nothing")
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
