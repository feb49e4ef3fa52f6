"""Weights in memory, as a source."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.foreign.source import TensorInfo
from megatron_lab.verification.reference.shape import ReferenceShape, Weights
from tests.support.layout import model_config


class MemorySource:
    """A `WeightSource` of tensors by their global names."""

    def __init__(
        self, model: ModelConfig, tensors: Mapping[str, torch.Tensor], *, tokenizer: DataConfig | None = None, name: str = "memory"
    ) -> None:
        self.model, self.tensors, self.tokenizer, self.name = model, dict(tensors), tokenizer, name
        self.vocab_size = len(self.tensors["embedding.word.weight"])
        self.notes: list[str] = []

    @property
    def weights(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str, box: TensorSlice | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        return (tensor if box is None else tensor[box.index]).clone(memory_format=torch.contiguous_format)


def reference_source(shape: ReferenceShape, weights: Weights, *, vocabulary_multiple: int = 1) -> MemorySource:
    """The reference's weights.

    Args:
        vocabulary_multiple: rows of the vocabulary are padded to a multiple of this (x TP).
    """
    return MemorySource(model_config(shape, make_vocab_size_divisible_by=vocabulary_multiple), weights)
