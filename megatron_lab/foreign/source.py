"""Weights of a whole model, wherever they come from: what export, import, comparison and generation read.

A training checkpoint, a Hugging Face folder and a legacy Megatron checkpoint all give the same view: global parameter names, whole
tensors, one at a time. So a conversion never holds more than one tensor, and every tool works on every kind of folder.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.checkpoint.data_files import BoxRead, DataFiles
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.global_tensor import AVERAGE, WEIGHT, bytes_of, torch_dtype
from megatron.checkpoint.manifest import content_sums
from megatron.checkpoint.save_folder import manifest_in, read_json
from megatron.checkpoint.storage import CONFIG, STATE, Place
from megatron.checkpoint.storage_kinds import open_storage
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_SETTINGS, DataConfig
from megatron.config.model import ModelConfig
from megatron.config.save import from_dict
from megatron.parallel.boxes import Box


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the whole model, without padding."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Weights by global parameter name (`layers.17.attention.qkv.weight`), as `spec/weights.py` lists them."""

    @property
    def name(self) -> str:
        """The folder, as a user names it."""

    @property
    def model(self) -> ModelConfig:
        """Shape and parts of the model."""

    @property
    def vocab_size(self) -> int:
        """Rows of the word embedding, without padding."""

    @property
    def tokenizer(self) -> DataConfig | None:
        """The settings that name a tokenizer and its files (all other fields have their defaults), if it is known."""

    @property
    def weights(self) -> Mapping[str, TensorInfo]:
        """Every parameter of the model."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user on what was left out or read in a special way; one sentence each."""

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A parameter, or a box of it, on the CPU in its stored dtype; a new contiguous tensor, the caller's own.

        Raises:
            DamagedCheckpointError: its file is missing, truncated or altered.
        """


class OtherModel:
    """A `WeightSource` that gives the weights of another as those of a model that differs from its own."""

    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        self._source, self.model = source, model
        self.weights, self.notes = source.weights, source.notes

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def vocab_size(self) -> int:
        return self._source.vocab_size

    @property
    def tokenizer(self) -> DataConfig | None:
        return self._source.tokenizer

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self._source.read(name, box)


def misfits(found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Texts about expected tensors that are missing or have another shape, one for each."""
    wrong = []
    for name, shape in expected.items():
        if name not in found:
            wrong.append(f"{name} is missing")
        elif found[name].shape != shape:
            wrong.append(f"{name} is {list(found[name].shape)}, not {list(shape)}")
    return wrong


class StoredCheckpoint:
    """One complete checkpoint, read only; a `WeightSource`.

    Args:
        path: its folder (`<save>/iter_0000100`), or its URL.
        notes: what to tell the user about it.
        average: take the moving average of the weights for the weights.

    Raises:
        CheckpointError: written by a newer version, or there is no average.
        DamagedCheckpointError: the manifest is missing or altered.
    """

    def __init__(self, path: Place, notes: Sequence[str] = (), *, average: bool = False) -> None:
        self._storage, self.notes = open_storage(path), [*notes]
        self._kind = AVERAGE if average else WEIGHT
        self.manifest = manifest_in(self._storage)
        self._files = DataFiles(self._storage, self.manifest)
        if average:
            if not self.weights:
                raise CheckpointError(f"{self.name} holds no average of the weights: its run was without --ema-decay")
            self.notes.append("weights are their exponential moving average (--ema)")

    @property
    def name(self) -> str:
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
        return self.settings.model

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def tokenizer(self) -> DataConfig:
        data = self.settings.data
        return DataConfig(**{field: getattr(data, field) for field in ("tokenizer_type", *TOKENIZER_SETTINGS)})

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All stored tensors, by full name: weights as `model.<name>`, moments as `exp_avg.<name>`."""
        return {name: TensorInfo(tensor.shape, torch_dtype(tensor.dtype)) for name, tensor in self.manifest.tensors.items()}

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        own = self._named(self._kind)
        # What LoRA leaves as it is has no average of its own.
        return {**self._named(WEIGHT), **own} if own and self._kind == AVERAGE and self.model.lora_rank is not None else own

    def _named(self, kind: str) -> dict[str, TensorInfo]:
        start = f"{kind}."
        return {name.removeprefix(start): tensor for name, tensor in self.tensors.items() if name.startswith(start)}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        stored = f"{self._kind}.{name}"
        return self.read_stored(stored if stored in self.tensors or name not in self.weights else f"{WEIGHT}.{name}", box)

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
