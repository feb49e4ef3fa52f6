"""Sizes of the models that the benchmarks train, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.model import ModelConfig


@dataclass(frozen=True)
class Shape:
    """Sizes of a benchmark's model and of the batch of one step.

    A GPT has LayerNorm, learned positions, biases and tied word embeddings. A Llama has RMSNorm, rotary positions, a gated MLP, no
    biases, and an output matrix separate from the word embeddings. Neither has dropout.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    vocab: int
    style: Literal["gpt", "llama"] = "gpt"
    kv_heads: int | None = None
    """Number of key-value heads; None for as many as query heads."""
    ffn: int | None = None
    """Hidden size of the MLP or of each expert; None for 4 x hidden."""
    experts: int = 0
    """Number of experts in each layer, of which a token uses two; 0 for a dense MLP."""

    @property
    def flags(self) -> dict[str, Any]:
        """Values of the command-line flags that select the model, by the name of the flag's field.

        A switch (a flag without a value) has the value True.
        """
        flags: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "seq_length": self.seq,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }
        if self.ffn is not None:
            flags["ffn_hidden_size"] = self.ffn
        if self.style == "llama":
            flags |= LLAMA_FLAGS
        if self.kv_heads is not None:
            flags |= {"group_query_attention": True, "num_query_groups": self.kv_heads}
        if self.experts:
            flags |= {"num_experts": self.experts, "moe_router_topk": EXPERTS_PER_TOKEN}
        return flags

    @property
    def model(self) -> ModelConfig:
        """Model settings of a run with the flags of this shape."""
        from megatron.config.cli import load

        return load(build_argv({**_REQUIRED_FLAGS, **self.flags}), 1).config.model


EXPERTS_PER_TOKEN = 2
LLAMA_FLAGS: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
_REQUIRED_FLAGS: Mapping[str, Any] = {
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 127,
    "micro_batch_size": 1,
    "lr": 1e-4,
    "train_iters": 1,
}
"""Flags that every command line must have and that do not change the model."""


def build_argv(flags: Mapping[str, Any]) -> list[str]:
    """Return command-line words for flags. A flag whose value is None or False is left out.

    Args:
        flags: values by the field names of the flags, such as num_layers for --num-layers.
    """
    argv: list[str] = []
    for name, value in flags.items():
        if value is not None and value is not False:
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return argv


SHAPES = {
    "small": Shape(6, 512, 8, 512, 4, 8192),
    "tiny": Shape(2, 128, 4, 128, 2, 1024),
    "350m": Shape(24, 1024, 16, 1024, 16, 50304),
    "1.3b": Shape(24, 2048, 16, 2048, 4, 50304),
    # Layers of Llama 3 8B (Grattafiori et al. 2024, table 3), with a small vocabulary so that the layers take the time.
    "8b-layers": Shape(8, 4096, 32, 4096, 1, 32000, style="llama", kv_heads=8, ffn=14336),
    "experts": Shape(6, 2048, 16, 2048, 4, 32000, style="llama", kv_heads=8, ffn=5632, experts=8),
    "tiny-llama": Shape(2, 128, 4, 128, 2, 1024, style="llama", kv_heads=2, ffn=384),
    "tiny-experts": Shape(2, 128, 4, 128, 2, 1024, style="llama", kv_heads=2, ffn=256, experts=4),
}
