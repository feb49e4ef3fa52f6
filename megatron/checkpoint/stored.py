"""Reads a checkpoint of this framework as whole tensors, one in memory at a time, without a process group."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.content_sums import content_sums
from megatron.checkpoint.data_files import BoxRead, DataFiles
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.global_tensor import WEIGHT, bytes_of, torch_dtype
from megatron.checkpoint.manifest import CONFIG, STATE, Manifest
from megatron.checkpoint.save_folder import manifest_in, read_json
from megatron.checkpoint.source import TensorInfo
from megatron.checkpoint.storage import open_storage
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_SETTINGS, DataConfig
from megatron.config.model import ModelConfig
from megatron.config.save import from_dict
from megatron.parallel.boxes import Box


class StoredCheckpoint:
    """One complete checkpoint, read only; a `WeightSource`.

    Args:
        path: its folder (`<save>/iter_0000100`), or its URL.

    Raises:
        CheckpointError: written by a newer version.
        DamagedCheckpointError: the manifest is missing or altered.
    """

    def __init__(self, path: Path | str) -> None:
        self._storage = open_storage(path)
        self.manifest: Manifest = manifest_in(self._storage)
        self.notes: list[str] = []
        self._files = DataFiles(self._storage, self.manifest)

    @property
    def name(self) -> str:
        """The folder."""
        return self._storage.location

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`: `config` (the settings), `command`, `versions` and `vocab_size`."""
        return read_json(self._storage, CONFIG, self.manifest)

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        """The content of `state.json`: counts, the loss scaler, the schedules."""
        return read_json(self._storage, STATE, self.manifest)

    @functools.cached_property
    def settings(self) -> Config:
        """The settings of the run that saved it.

        Raises:
            CheckpointError: it holds none.
        """
        if not isinstance(self.config.get("config"), dict):
            raise CheckpointError(f"{self._storage.at(CONFIG)} holds no settings of a run")
        return from_dict(self.config["config"])

    @property
    def model(self) -> ModelConfig:
        """Shape and parts of the model."""
        return self.settings.model

    @property
    def vocab_size(self) -> int:
        """Rows of the word embedding, without padding."""
        return int(self.config["vocab_size"])

    @property
    def tokenizer(self) -> DataConfig:
        """The settings that name the tokenizer and its files."""
        data = self.settings.data
        return DataConfig(**{field: getattr(data, field) for field in ("tokenizer_type", *TOKENIZER_SETTINGS)})

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All stored tensors, by full name: weights as `model.<name>`, moments as `exp_avg.<name>`."""
        return {name: TensorInfo(tensor.shape, torch_dtype(tensor.dtype)) for name, tensor in self.manifest.tensors.items()}

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        """Every parameter of the model by its name."""
        start = f"{WEIGHT}."
        return {name.removeprefix(start): tensor for name, tensor in self.tensors.items() if name.startswith(start)}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A parameter, or a box of it; see `WeightSource.read`."""
        return self.read_stored(f"{WEIGHT}.{name}", box)

    def read_stored(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A stored tensor by its full name, or a box of it, on the CPU in its stored dtype; a new contiguous tensor.

        Every stored box that overlaps is checked, once; of a whole tensor the content sums too.

        Raises:
            DamagedCheckpointError: a file is missing, truncated or altered.
        """
        tensor = self.manifest.tensors[name]
        wanted = box or Box.whole(tensor.shape)
        found = torch.empty(wanted.sizes, dtype=torch_dtype(tensor.dtype))
        for stored in tensor.boxes:
            common = stored.box.intersect(wanted)
            if common is not None:
                target = found[common.relative_to(wanted).index]
                self._files.read(stored, tensor.dtype, [BoxRead(common.relative_to(stored.box), target)])
        if tensor.content is None or wanted.sizes != tensor.shape:
            return found
        content = content_sums(bytes_of(found), tensor.dtype, wanted, tensor.shape).hex
        if content != tensor.content:
            raise DamagedCheckpointError(f"{self.name}: {name} has the content sums {content}, the manifest says {tensor.content}")
        return found
