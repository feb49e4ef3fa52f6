"""The model shapes that the benches train."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.model import ModelConfig


@dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    vocab: int

    @property
    def model(self) -> ModelConfig:
        """The model's settings, without dropout."""
        return ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=self.seq,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )


SHAPES = {
    "small": Shape(6, 512, 8, 512, 4, 8192),
    "tiny": Shape(2, 128, 4, 128, 2, 1024),
    "350m": Shape(24, 1024, 16, 1024, 16, 50304),
    "1.3b": Shape(24, 2048, 16, 2048, 4, 50304),
}
