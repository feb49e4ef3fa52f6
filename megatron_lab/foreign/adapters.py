"""A model with LoRA's adapters as one without: their products are added to the weights (Hu et al. 2021, section 4.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from megatron.config.model import LoraFields, ModelConfig
from megatron.parallel.boxes import Box
from megatron.spec.weights import LORA_A, LORA_B
from megatron_lab.foreign.source import OtherModel, TensorInfo, WeightSource


def merged(source: WeightSource) -> WeightSource:
    """The model without adapters that computes the same; a source of a model without adapters as it is."""
    return source if source.model.lora_rank is None else _Merged(source, without_adapters(source.model))


def without_adapters(model: ModelConfig) -> ModelConfig:
    """The model beside whose layers the adapters are."""
    return dataclasses.replace(model, **vars(LoraFields()))


def adapter_names(weight: str) -> tuple[str, str]:
    """The names of the two matrices beside a linear layer's weight, A and B."""
    layer = weight.removesuffix("weight")
    return f"{layer}{LORA_A}", f"{layer}{LORA_B}"


class _Merged(OtherModel):
    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        super().__init__(source, model)
        self._scale = source.model.lora_scale
        found = {name: one for name, one in source.weights.items() if not name.endswith((LORA_A, LORA_B))}
        adapted = [name for name in found if adapter_names(name)[0] in source.weights]
        for name in adapted:  # as exact as the adapters, which are small beside rounding of the weights
            wide = torch.promote_types(found[name].dtype, source.weights[adapter_names(name)[0]].dtype)
            found[name] = dataclasses.replace(found[name], dtype=wide)
        self.weights: Mapping[str, TensorInfo] = found
        self.notes = [
            *source.notes,
            f"the adapters (--lora-rank {source.model.lora_rank}) of {len(adapted)} linear layers are added to their weights",
        ]

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        found, (a, b) = super().read(name, box), adapter_names(name)
        if a not in self._source.weights:
            return found
        box = box or Box.whole(self.weights[name].shape)
        rank = self._source.weights[a].shape[0]
        rows = self._source.read(b, Box((*box.offsets[:-1], 0), (*box.sizes[:-1], rank)))
        columns = self._source.read(a, Box((0, box.offsets[-1]), (rank, box.sizes[-1])))
        return (found.double() + self._scale * (rows.double() @ columns.double())).to(self.weights[name].dtype)
