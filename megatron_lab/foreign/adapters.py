"""Merging of LoRA adapters into the weights of a model: W + scale * B @ A, with the adapter matrices A and B of a linear layer (Hu
et al. 2021, section 4.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from megatron.config.model import LoraFields, ModelConfig
from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.weights import LORA_A, LORA_B
from megatron_lab.foreign.source import DerivedSource, TensorInfo, WeightSource


def merge_adapters(source: WeightSource) -> WeightSource:
    """Return a source of weights in which every LoRA adapter is added to the weight of its linear layer.

    The model of the returned source has no adapters and computes the same function. If the model of `source` has no adapters,
    `source` itself is returned.
    """
    return source if source.model.lora_rank is None else _MergedSource(source, remove_lora_settings(source.model))


def remove_lora_settings(model: ModelConfig) -> ModelConfig:
    """Return the configuration of the same model without LoRA adapters."""
    return dataclasses.replace(model, **vars(LoraFields()))


def build_base_source(source: WeightSource) -> WeightSource:
    """Return a source of the model without its LoRA adapters: the weights from which the training of the adapters started."""
    base = DerivedSource(source, remove_lora_settings(source.model))
    base.weights = {name: info for name, info in source.weights.items() if not name.endswith((LORA_A, LORA_B))}
    return base


class RoundedAdapters(DerivedSource):
    """Weights of another source, with the LoRA matrices rounded to a dtype."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        super().__init__(source, source.model)
        self._dtype = dtype

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        tensor = super().read(name, tensor_slice)
        return tensor.to(self._dtype).to(tensor.dtype) if name.endswith((LORA_A, LORA_B)) else tensor


def get_adapter_names(weight: str) -> tuple[str, str]:
    """Return the parameter names of the LoRA matrices A and B of a linear layer.

    Args:
        weight: name of the layer's weight.
    """
    layer = weight.removesuffix("weight")
    return f"{layer}{LORA_A}", f"{layer}{LORA_B}"


class _MergedSource(DerivedSource):
    """Weights of another source, with each LoRA adapter added to the weight of its layer. A message about the merged adapters is
    added to `notes` (messages for the user)."""

    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        super().__init__(source, model)
        self._scale = source.model.lora_scale
        infos = {name: info for name, info in source.weights.items() if not name.endswith((LORA_A, LORA_B))}
        adapted = [name for name in infos if get_adapter_names(name)[0] in source.weights]
        # Keep the wider of both dtypes: the adapters may be smaller than the rounding error of the weights' dtype.
        for name in adapted:
            promoted_dtype = torch.promote_types(infos[name].dtype, source.weights[get_adapter_names(name)[0]].dtype)
            infos[name] = dataclasses.replace(infos[name], dtype=promoted_dtype)
        self.weights: Mapping[str, TensorInfo] = infos
        self.notes = [
            *source.notes,
            f"the adapters (--lora-rank {source.model.lora_rank}) of {len(adapted)} linear layers are added to their weights",
        ]

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        weight, (a_name, b_name) = super().read(name, tensor_slice), get_adapter_names(name)
        if a_name not in self._source.weights:
            return weight
        tensor_slice = tensor_slice or TensorSlice.full(self.weights[name].shape)
        rank = self._source.weights[a_name].shape[0]
        b_rows = self._source.read(b_name, TensorSlice((*tensor_slice.offsets[:-1], 0), (*tensor_slice.sizes[:-1], rank)))
        a_cols = self._source.read(a_name, TensorSlice((0, tensor_slice.offsets[-1]), (rank, tensor_slice.sizes[-1])))
        return (weight.double() + self._scale * (b_rows.double() @ a_cols.double())).to(self.weights[name].dtype)

    def read_parts(self, name: str) -> Mapping[str, torch.Tensor]:
        names = [part for part in (name, *get_adapter_names(name)) if part in self._source.weights]
        return {key: tensor for part in names for key, tensor in super(_MergedSource, self).read_parts(part).items()}
