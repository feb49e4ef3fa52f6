"""The `WeightSource` protocol: access to the unsharded weights of a model, independent of the format that stores them.

Export, import, comparison and generation read weights through this protocol. A checkpoint of this framework, a Hugging Face folder
and a Megatron-LM checkpoint all provide complete tensors by global parameter name, one tensor at a time. A conversion therefore
needs memory for only one tensor, and every tool works with every format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.checkpoint.data_files import DataFileReader, SliceRead
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.global_tensor import EMA, WEIGHT, get_tensor_bytes, get_torch_dtype
from megatron.checkpoint.manifest import hash_content
from megatron.checkpoint.save_folder import load_manifest, read_json
from megatron.checkpoint.storage import CONFIG, STATE, PathOrUrl
from megatron.checkpoint.storage_url import open_storage
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_SETTINGS, DataConfig
from megatron.config.model import ModelConfig
from megatron.config.save import from_dict
from megatron.parallel.tensor_slice import TensorSlice
from megatron.training.resume import check_state


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of an unsharded tensor, without padding."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Weights of an unsharded model, read by global parameter name, such as `layers.17.attention.qkv.weight`. Each supported format
    implements this protocol.

    `megatron/spec/weights.py` lists the names.
    """

    @property
    def name(self) -> str:
        """Folder of the weights, as the user wrote it."""

    @property
    def model(self) -> ModelConfig:
        """Configuration of the model: its shape and architecture."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the word embedding, without padding."""

    @property
    def tokenizer(self) -> DataConfig | None:
        """Settings that select the tokenizer and its files; all other data settings have their default values. None if the source
        does not name a tokenizer."""

    @property
    def weights(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every parameter of the model, by name."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user, one sentence each, about content that the source ignores or converts in a special way."""

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        """Read a parameter, or a slice of it, into a new contiguous CPU tensor.

        Args:
            name: global name of the parameter.
            tensor_slice: region to read; by default the full parameter.

        Returns:
            The parameter or slice in its stored dtype. The caller may modify the tensor.

        Raises:
            DamagedCheckpointError: the file of the parameter is missing, truncated or altered.
        """


class DerivedSource:
    """A `WeightSource` that reads another source and presents its weights as those of a model with different settings.

    By default all weights equal those of the original source. Subclasses change them.

    Args:
        source: source that holds the weights.
        model: configuration of the derived model.
    """

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

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        return self._source.read(name, tensor_slice)

    def read_parts(self, name: str) -> Mapping[str, torch.Tensor]:
        """Read the stored tensors of a parameter, by their names in the files (see `megatron_lab.foreign.source.read_parts`)."""
        return read_parts(self._source, name)


def read_parts(source: WeightSource, name: str) -> Mapping[str, torch.Tensor]:
    """Read the stored tensors from which a source computes a parameter, by their names in the files of the source.

    A source without a method `read_parts` stores the parameter itself.

    Args:
        name: global name of the parameter.
    """
    read: Callable[[str], Mapping[str, torch.Tensor]] | None = getattr(source, "read_parts", None)
    return {name: source.read(name)} if read is None else read(name)


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and values. A NaN equals a NaN."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def find_mismatches(tensors: Mapping[str, TensorInfo], expected_shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a message for each expected tensor that is missing or has a different shape.

    Args:
        tensors: tensors that exist, by name.
        expected_shapes: shape of each expected tensor, by name.
    """
    mismatches = []
    for name, shape in expected_shapes.items():
        if name not in tensors:
            mismatches.append(f"{name} is missing")
        elif tensors[name].shape != shape:
            mismatches.append(f"{name} is {list(tensors[name].shape)}, not {list(shape)}")
    return mismatches


class StoredCheckpoint:
    """A `WeightSource` that reads a complete checkpoint of this framework.

    Args:
        path: folder or URL of the checkpoint, such as `<save>/iter_0000100`.
        notes: initial notes for the user.
        average: read the exponential moving averages of the weights instead of the weights.

    Raises:
        CheckpointError: a newer version wrote the checkpoint, or it has no averages.
        DamagedCheckpointError: the manifest is missing or altered.
    """

    def __init__(self, path: PathOrUrl, notes: Sequence[str] = (), *, average: bool = False) -> None:
        self._storage, self.notes = open_storage(path), [*notes]
        self._weight_prefix = EMA if average else WEIGHT
        self.manifest = load_manifest(self._storage)
        self._files = DataFileReader(self._storage, self.manifest)
        if average:
            if not self.weights:
                raise CheckpointError(
                    f"{self.name} holds no averages of the weights, because its run did not set --ema-decay. Remove --ema"
                )
            self.notes.append("the weights are exponential moving averages (--ema)")

    @property
    def name(self) -> str:
        return self._storage.location

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Content of `config.json`: settings of the run (`config`), its command line, versions and `vocab_size`."""
        return read_json(self._storage, CONFIG, self.manifest)

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        """Content of `state.json`: counters, loss scaler and schedules of the run at the saved iteration."""
        state = read_json(self._storage, STATE, self.manifest)
        check_state(self._storage.path_or_url, state)
        return state

    @functools.cached_property
    def settings(self) -> Config:
        """Settings of the run that saved the checkpoint.

        Raises:
            CheckpointError: the checkpoint holds no settings.
        """
        if not isinstance(self.config.get("config"), dict):
            raise CheckpointError(
                f"{self._storage.get_location(CONFIG)} does not hold the settings of a run (the key config is missing). Choose the "
                "folder of a training checkpoint, or copy the checkpoint again"
            )
        return from_dict(self.config["config"], self._storage.get_location(CONFIG))

    @property
    def model(self) -> ModelConfig:
        return self.settings.model

    @property
    def vocab_size(self) -> int:
        if "vocab_size" not in self.config:
            raise DamagedCheckpointError(f"{self._storage.get_location(CONFIG)} has no entry vocab_size; copy the checkpoint again")
        return int(self.config["vocab_size"])

    @property
    def tokenizer(self) -> DataConfig:
        data = self.settings.data
        return DataConfig(**{field: getattr(data, field) for field in ("tokenizer_type", *TOKENIZER_SETTINGS)})

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of all stored tensors, by full name: `model.<name>` for weights, and, for example, `exp_avg.<name>` for
        optimizer moments."""
        return {name: TensorInfo(tensor.shape, get_torch_dtype(tensor.dtype)) for name, tensor in self.manifest.tensors.items()}

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        weights = self._select_by_prefix(self._weight_prefix)
        # With LoRA, only the trained weights have averages.
        return (
            {**self._select_by_prefix(WEIGHT), **weights}
            if weights and self._weight_prefix == EMA and self.model.lora_rank is not None
            else weights
        )

    def _select_by_prefix(self, prefix: str) -> dict[str, TensorInfo]:
        full_prefix = f"{prefix}."
        return {name.removeprefix(full_prefix): tensor for name, tensor in self.tensors.items() if name.startswith(full_prefix)}

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        full_name = f"{self._weight_prefix}.{name}"
        return self.read_stored(
            full_name if full_name in self.tensors or name not in self.weights else f"{WEIGHT}.{name}", tensor_slice
        )

    def read_stored(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        """Read a stored tensor, or a slice of it, into a new contiguous CPU tensor in its stored dtype.

        The checksum of every stored slice that overlaps the requested region is verified, once per slice. If the full tensor is
        read, the hash of all its elements is verified too.

        Args:
            name: full name of the tensor, such as `model.<name>` or `exp_avg.<name>`.
            tensor_slice: region to read; by default the full tensor.

        Raises:
            DamagedCheckpointError: a file is missing, truncated or altered.
        """
        tensor = self.manifest.tensors[name]
        requested = tensor_slice or TensorSlice.full(tensor.shape)
        result = torch.empty(requested.sizes, dtype=get_torch_dtype(tensor.dtype))
        for stored_slice in tensor.slices:
            common = stored_slice.tensor_slice.intersect(requested)
            if common is not None:
                target = result[common.relative_to(requested).index]
                self._files.read(stored_slice, tensor.dtype, [SliceRead(common.relative_to(stored_slice.tensor_slice), target)])
        if tensor.content is None or requested.sizes != tensor.shape:
            return result
        content_hash = hash_content(get_tensor_bytes(result), tensor.dtype, requested, tensor.shape).hex
        if content_hash != tensor.content:
            raise DamagedCheckpointError(
                f"{self.name}: {name} differs from what was saved (its content hash is {content_hash}, but the manifest says "
                f"{tensor.content}). The checkpoint is damaged: use another one, or copy it again"
            )
        return result
