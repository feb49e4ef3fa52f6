"""FLOPs against PyTorch's counter on a plain model, parameters against that model and against published sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.model import ModelConfig
from megatron.spec.counts import (
    count_attention_flops,
    count_flops_per_step,
    count_flops_per_token,
    count_layer_flops,
    count_parameters,
)

GPT2_SMALL = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024)
LLAMA = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    ffn_hidden_size=11008,
    seq_length=4096,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
)
TINY = ModelConfig(num_layers=3, hidden_size=24, num_attention_heads=4, seq_length=10)
TINY_LLAMA = dataclasses.replace(
    LLAMA, num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=56, seq_length=12,
    group_query_attention=True, num_query_groups=2,
)  # fmt: skip
SHAPES = {
    "gpt": TINY,
    "gpt, wide heads": dataclasses.replace(TINY, kv_channels=16, max_position_embeddings=17),
    "gpt, default gated": dataclasses.replace(TINY, hidden_size=96, swiglu=True, position_embedding_type="none"),
    "gpt, no bias but qkv": dataclasses.replace(TINY, disable_bias_linear=True, add_qkv_bias=True),
    "gpt, no bias": dataclasses.replace(TINY, disable_bias_linear=True, squared_relu=True),
    "gpt, norms of heads": dataclasses.replace(TINY, qk_layernorm=True, untie_embeddings_and_output_weights=True),
    "llama": TINY_LLAMA,
    "llama, one group": dataclasses.replace(TINY_LLAMA, num_query_groups=1, kv_channels=16),
    "llama, norms of heads": dataclasses.replace(TINY_LLAMA, qk_layernorm=True, add_qkv_bias=True),
    "llama, groups not asked for": dataclasses.replace(TINY_LLAMA, group_query_attention=False),
}
VOCABULARY = 41


class PlainModel(nn.Module):
    """The model with ordinary modules, written down from the meaning of the settings. Positions and masks cost no products."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.size = config.kv_channels or hidden // heads
        self.groups = config.num_query_groups if config.group_query_attention else heads
        width = config.ffn_hidden_size or ((8 * hidden // 3) // 64 * 64 if config.swiglu else 4 * hidden)
        norm = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
        bias = not config.disable_bias_linear
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        if config.position_embedding_type == "learned_absolute":
            self.positions = nn.Embedding(config.max_position_embeddings or config.seq_length, hidden)
        self.layers: list[nn.ModuleDict] = []
        for _ in range(config.num_layers):
            layer = nn.ModuleDict()
            layer["norm1"], layer["norm2"] = norm(hidden), norm(hidden)
            layer["q"] = nn.Linear(hidden, heads * self.size, bias=bias or config.add_qkv_bias)
            layer["k"] = nn.Linear(hidden, self.groups * self.size, bias=bias or config.add_qkv_bias)
            layer["v"] = nn.Linear(hidden, self.groups * self.size, bias=bias or config.add_qkv_bias)
            layer["out"] = nn.Linear(heads * self.size, hidden, bias=bias)
            layer["up"] = nn.Linear(hidden, width, bias=bias)
            layer["down"] = nn.Linear(width, hidden, bias=bias)
            if config.swiglu:
                layer["gate"] = nn.Linear(hidden, width, bias=bias)
            if config.qk_layernorm:
                layer["q_norm"], layer["k_norm"] = norm(self.size), norm(self.size)
            self.layers.append(layer)
        self.all_layers = nn.ModuleList(self.layers)
        self.norm = norm(hidden)
        self.output = nn.Linear(hidden, VOCABULARY, bias=False)
        if not config.untie_embeddings_and_output_weights:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.embedding(tokens)
        for layer in self.layers:
            y = layer["norm1"](x)
            q, k, v = (layer[name](y).view(batch, length, -1, self.size).transpose(1, 2) for name in "qkv")
            if self.config.qk_layernorm:
                q, k = layer["q_norm"](q), layer["k_norm"](k)
            repeats = self.config.num_attention_heads // self.groups
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            y = torch.softmax(q @ k.transpose(2, 3), -1) @ v
            x = x + layer["out"](y.transpose(1, 2).reshape(batch, length, -1))
            y = layer["norm2"](x)
            y = nn.functional.silu(layer["gate"](y)) * layer["up"](y) if self.config.swiglu else layer["up"](y).relu()
            x = x + layer["down"](y)
        return self.output(self.norm(x))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_flops_equal_the_products_of_a_plain_model(config: ModelConfig) -> None:
    sequences, length = 3, config.seq_length
    with torch.device("meta"):
        model = PlainModel(config)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(sequences, length, dtype=torch.long)).sum().backward()
    # The plain model computes the whole square of scores; half of it is masked. Two products forward, twice that backward.
    size = config.kv_channels or config.hidden_size // config.num_attention_heads
    square = 3 * 2 * (2 * length * length * size) * config.num_attention_heads * config.num_layers * sequences
    expected = counter.get_total_flops() - square // 2
    assert count_flops_per_step(config, VOCABULARY, sequences) == expected
    assert count_flops_per_token(config, VOCABULARY) * sequences * length == expected


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_attention_within_documents_is_counted_as_such(config: ModelConfig) -> None:
    """Two sequences, of which one is two documents of a half each: its attention is half as much."""
    size = config.kv_channels or config.hidden_size // config.num_attention_heads
    causal = 3 * 2 * (2 * config.seq_length**2 * size) // 2 * config.num_attention_heads * config.num_layers
    whole = count_flops_per_step(config, VOCABULARY, 2)
    assert count_flops_per_step(config, VOCABULARY, 2, 2.0) == whole
    assert count_flops_per_step(config, VOCABULARY, 2, 1.0 + 2 * 0.5**2) == whole - causal / 2


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_parameters_equal_those_of_a_plain_model(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = PlainModel(config)
    assert count_parameters(config, VOCABULARY) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "vocabulary", "parameters"),
    [
        (GPT2_SMALL, 50257, 124_439_808),  # GPT-2
        (LLAMA, 32000, 6_738_415_616),  # Llama 2 7B
        (  # Llama 3 8B
            dataclasses.replace(LLAMA, ffn_hidden_size=14336, group_query_attention=True, num_query_groups=8),
            128256,
            8_030_261_248,
        ),
        (  # Qwen2 7B
            dataclasses.replace(
                LLAMA, num_layers=28, hidden_size=3584, num_attention_heads=28, ffn_hidden_size=18944,
                group_query_attention=True, num_query_groups=4, add_qkv_bias=True,
            ),
            152064,
            7_615_616_512,
        ),
        (  # Qwen3 0.6B
            dataclasses.replace(
                LLAMA, num_layers=28, hidden_size=1024, num_attention_heads=16, kv_channels=128, ffn_hidden_size=3072,
                group_query_attention=True, num_query_groups=8, qk_layernorm=True,
                untie_embeddings_and_output_weights=False,
            ),
            151936,
            596_049_920,
        ),
    ],
)  # fmt: skip
def test_parameters_equal_published_sizes(config: ModelConfig, vocabulary: int, parameters: int) -> None:
    assert count_parameters(config, vocabulary) == parameters


def test_flops_are_near_six_per_parameter_and_token() -> None:
    # 6 N per token plus attention (Kaplan et al. 2020); for Llama 2 7B: 6 x (parameters - embedding) + 6 x layers x hidden x s.
    embedding_and_norms = 32000 * 4096 + (2 * 32 + 1) * 4096
    products = count_parameters(LLAMA, 32000) - embedding_and_norms
    assert count_flops_per_token(LLAMA, 32000) == 6 * products + 6 * 32 * 4096 * 4096


@pytest.mark.parametrize("query_rank", [None, 6])
def test_latent_attention_by_hand(query_rank: int | None) -> None:
    """Each product of a layer, of two FLOPs a multiply-add; queries have 5 + 4 channels, values 3."""
    sizes = {"q_lora_rank": query_rank, "kv_lora_rank": 7, "qk_head_dim": 5, "qk_pos_emb_head_dim": 4, "v_head_dim": 3}
    config = dataclasses.replace(TINY, multi_latent_attention=True, position_embedding_type="rope", **sizes)  # type: ignore[arg-type]
    h, n, s = config.hidden_size, config.num_attention_heads, config.seq_length
    queries = h * n * 9 if query_rank is None else h * query_rank + query_rank * n * 9
    products = queries + h * (7 + 4) + 7 * n * (5 + 3) + n * 3 * h + 2 * h * config.ffn_size
    assert count_attention_flops(config) == (n * (9 + 3) * s,) * config.num_layers  # causal: half of the square
    assert count_layer_flops(config) == (2 * products + n * (9 + 3) * s,) * config.num_layers
