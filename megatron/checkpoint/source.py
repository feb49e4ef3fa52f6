"""Weights of a whole model, wherever they come from: what export, import, comparison and generation read.

A training checkpoint, a Hugging Face folder and a legacy Megatron checkpoint all give the same view: global parameter names, whole
tensors, one at a time. So a conversion never holds more than one tensor, and every tool works on every kind of folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.model.build import Model
from megatron.parallel.boxes import Box
from megatron.parallel.context import ParallelContext


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


def misfits(found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Texts about expected tensors that are missing or have another shape, one for each."""
    wrong = []
    for name, shape in expected.items():
        if name not in found:
            wrong.append(f"{name} is missing")
        elif found[name].shape != shape:
            wrong.append(f"{name} is {list(found[name].shape)}, not {list(shape)}")
    return wrong


@torch.no_grad()
def fill_model(model: Model, context: ParallelContext, source: WeightSource) -> None:
    """Give every parameter of a materialized model the values of the source, rounded to the model's dtype; padding becomes 0.

    Raises:
        CheckpointError: the source lacks parameters of the model, or holds them in other shapes.
    """
    wrong = misfits(source.weights, {entry.record.name: entry.record.shape for entry in model.params})
    if wrong:
        raise CheckpointError(f"{source.name} does not hold this model: {listed(wrong)}")
    sizes, coordinates = context.axis_sizes, context.coordinates
    for entry in model.params:
        box = entry.record.held_box(sizes, coordinates)
        flat = entry.param.detach().view(-1)
        if box.numel < flat.numel():
            flat.zero_()  # only the first dimension is padded, so what is held lies in front
        if box.numel:
            flat[: box.numel].copy_(source.read(entry.record.name, box).view(-1))
