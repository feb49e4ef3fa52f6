"""Safe reader of files, or byte ranges of files, that torch.save wrote. Tensors in a complete file are memory-mapped.

A pickle is a program whose opcodes call any function that they name. torch.load with `weights_only` uses an interpreter that
supports only tensors and plain containers. All other classes and functions in these files must be in `IGNORED_TYPES` or
`_NAMESPACE_TYPES`. Each ignored type is replaced by a class without behavior.
"""

from __future__ import annotations

import io
import pickle
import signal
import struct
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.config.regular_file import open_regular


class IgnoredObject:
    """Replacement for an object in a file whose content the reader does not need, such as random state, an enum in the arguments,
    or FP8 scaling factors."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_ENUM_MODULES = ("megatron.core.enums", "megatron.core.transformer.enums", "megatron.model.enums", "megatron.legacy.model.enums")
_ENUMS = ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope", "PositionEmbeddingType")
IGNORED_TYPES = (
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
    *(f"signal.{name}" for name in signal.Signals.__members__),  # Python up to 3.11.3 pickles a signal by its name
    "builtins.getattr",  # Python 3.11.0 to 3.11.3 pickle an enum member as getattr(class, name); the call is ignored
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)
"""Names in these files other than tensors and arguments. Sources: megatron/core/safe_globals.py of Megatron-LM, and the former
modules of these types."""
_NAMESPACE_TYPES = ("argparse.Namespace", "types.SimpleNamespace")
_ALLOWED_TYPES: list[Any] = [
    *((Namespace, name) for name in _NAMESPACE_TYPES),
    *((type(name.rpartition(".")[2], (IgnoredObject,), {}), name) for name in IGNORED_TYPES),
]


class TorchFile:
    """File written by torch.save, loaded without executing anything in it.

    Args:
        path: path of the file.
        data: bytes to load instead of the file's content, if torch.save wrote to a byte range of the file.

    Raises:
        CheckpointError: the file names a type that is not allowed. Nothing was executed.
        DamagedCheckpointError: the file is missing, truncated or altered.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        self.path = path
        self._checksums = _read_checksums(path, data)
        self._checked: set[int] = set()
        with safe_globals(_ALLOWED_TYPES):
            try:
                disallowed = (
                    get_unsafe_globals_in_checkpoint(path) if data is None else []
                )  # for a byte range, torch.load reports the first name
                content = (
                    None
                    if disallowed
                    else torch.load(_open_stream(path, data), map_location="cpu", weights_only=True, mmap=data is None)
                )
            except pickle.UnpicklingError as error:
                reason = str(error).strip().splitlines()[-1] if str(error).strip() else "it is not a file of torch.save"
                raise CheckpointError(
                    f"{path} cannot be opened safely, and nothing in it was run: {reason}. Copy the original file again"
                ) from error
            except (RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError, OSError) as error:
                raise DamagedCheckpointError(f"{path} is damaged and cannot be read: {error}. Copy it again") from error
        if disallowed:
            raise CheckpointError(
                f"{path} asks for {format_list(sorted(disallowed))}, which a checkpoint must not call. For safety, the file is not "
                "read; nothing in it was run.\n"
                "  If you trust the file, load it with the program that wrote it and save only the required entries:\n"
                "  torch.save({key: saved[key] for key in saved if key in ('args', 'checkpoint_version', 'iteration')"
                " or key.startswith('model')}, path)"
            )
        self.content: Any = content

    def check(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Verify the checksum of a tensor, unless it was verified before, and return the tensor.

        Args:
            tensor: tensor of this file.
            name: name of the tensor, for error messages.

        Raises:
            DamagedCheckpointError: the bytes of the tensor differ from those that were saved.
        """
        storage = tensor.untyped_storage()
        if self._checksums is not None and storage.data_ptr() not in self._checked and storage.nbytes():
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            if (len(raw), zlib.crc32(raw.numpy().data)) not in self._checksums:
                raise DamagedCheckpointError(
                    f"{self.path} is damaged: the tensor {name} differs from what was saved (wrong checksum). Copy the file again"
                )
            self._checked.add(storage.data_ptr())
        return tensor


def _open_stream(path: Path, data: bytes | None) -> str | io.BytesIO:
    return str(path) if data is None else io.BytesIO(data)


def _read_checksums(path: Path, data: bytes | None) -> set[tuple[int, int]] | None:
    """Return the length in bytes and the CRC-32 of every record (entry of the zip archive) that torch.save wrote; None if the file
    was written without checksums.

    Args:
        path: path of the file.
        data: bytes to read instead of the file's content, or None.

    Raises:
        DamagedCheckpointError: the file is incomplete, or its records are compressed and could become larger than the file.
    """
    try:
        if data is None:
            open_regular(path).close()  # a pipe is refused here; zipfile would wait for its writer
        with zipfile.ZipFile(_open_stream(path, data)) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise DamagedCheckpointError(
                    f"{path} was not written by torch.save: its entries are compressed, which torch.save never does. Copy the "
                    "original file again"
                )
            pickle_record = next((record for record in records if record.filename.endswith("/data.pkl")), None)
            if pickle_record is None:
                raise DamagedCheckpointError(
                    f"{path} was not written by torch.save: it has no data.pkl (the pickle in the zip archive). Copy the original "
                    "file again"
                )
            version_record = next((record for record in records if record.filename.endswith("/version")), pickle_record)
            try:
                archive.read(version_record)
            except zipfile.BadZipFile:  # torch.save can be configured to write dummy checksums
                return None
            archive.read(pickle_record)
            return {(record.file_size, record.CRC) for record in records}
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing: copy the complete checkpoint") from error
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror or error}. Copy it again") from error
    except CheckpointError:
        raise
    # zipfile raises the other errors for a directory of files, or a header of a file, with changed bytes.
    except (zipfile.BadZipFile, ValueError, RuntimeError, EOFError, struct.error) as error:
        raise DamagedCheckpointError(
            f"{path} is truncated, altered, or not in the format of torch.save since torch 1.6: {error}. Copy it again"
        ) from error
