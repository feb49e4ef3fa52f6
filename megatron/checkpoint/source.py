"""Weights of a whole model, wherever they come from: what export, import, comparison and generation read.

A training checkpoint, a Hugging Face folder and a legacy Megatron checkpoint all give the same view: global parameter names, whole
tensors, one at a time. So a conversion never holds more than one tensor, and every tool works on every kind of folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.parallel.boxes import Box


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the whole model, without padding."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Weights by global parameter name (`layers.17.attention.qkv.weight`), as `model/records.py` lists them."""

    @property
    def name(self) -> str:
        """What a user calls it: the folder."""

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
        """What a user should know about what was left out or read in a special way; one sentence each."""

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A parameter, or a block of it, on the CPU in its stored dtype; a new contiguous tensor, the caller's own.

        Raises:
            DamagedCheckpointError: its file is missing, truncated or altered.
        """
