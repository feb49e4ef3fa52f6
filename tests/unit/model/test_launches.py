"""How many kernels a GPU is given for a layer and for a loss, counted through the dispatcher: a bound that every change keeps."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron.config.model import ModelConfig
from megatron.model.block import Block
from megatron.model.rope import build_rotary_table
from megatron.parallel.accumulate import GradSink
from megatron.parallel.params import ParamTable, Scope
from megatron.spec.layers import build_layer_specs
from megatron.spec.weights import build_vocab_weight, iter_weights
from megatron.tensor_parallel.cross_entropy import LossOptions, OutputLayer, get_default_chunk_tokens
from megatron_lab.planner.kernel_memory import CudaKernels
from tests.support.launches import FusedNorms, Launches
from tests.support.lone_rank import lone_rank

META = torch.device("meta")
SEQ = 4096
LLAMA = ModelConfig(
    num_layers=1,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    seq_length=SEQ,
    max_position_embeddings=SEQ,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    disable_bias_linear=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
"""A layer of 7B."""


def layer_launches(batch: int) -> list[Counter[str]]:
    """Of forward and backward of one layer in bfloat16, for a first microbatch and one whose gradients are added."""
    table, (spec,) = ParamTable(), build_layer_specs(LLAMA)
    weights = {weight.name: weight for weight in iter_weights(LLAMA, 32000)}
    block = Block(Scope(lone_rank(), table, weights, torch.bfloat16, False).get_child("layers.0"), LLAMA, spec, 0)
    for entry in table:
        provide = partial(torch.empty, entry.param.shape, device=META)
        entry.param.grad_sink = GradSink(torch.float32, lambda: None, provide)  # type: ignore[attr-defined]
    found = []
    for _ in range(2):
        x = torch.empty(SEQ, batch, LLAMA.hidden_size, dtype=torch.bfloat16, device=META, requires_grad=True)
        assert spec.attention.rotary is not None
        rotary = build_rotary_table(torch.zeros(SEQ, batch, dtype=torch.int64, device=META), spec.attention.rotary, x.dtype)
        with CudaKernels(), Launches() as launches, FusedNorms(launches):
            out = block(x, rotary, None)
            torch.autograd.backward([get_gradient_edge(out)], [torch.empty_like(out)])
        found.append(launches.by_name)
    return found


@pytest.mark.parametrize("batch", [1, 2])
def test_a_llama_layer(batch: int) -> None:
    """Four products with two gradients each are 12 of them, norms 6, residual connections 4, attention 2."""
    for launches in layer_launches(batch):
        assert launches.total() < 35, launches
        products = {name: number for name, number in launches.items() if "mm" in name}
        assert sum(products.values()) == 12, "weight gradients are written and added by the product itself"
        assert launches["aten::_fused_rms_norm"] == 2 and launches["aten::_scaled_dot_product_flash_attention"] == 1


def loss_launches(vocab: int, form: LossOptions) -> Counter[str]:
    """Of forward and backward of output layer and loss of one sample in bfloat16."""
    table, config = ParamTable(), ModelConfig(hidden_size=4096, untie_embeddings_and_output_weights=True)
    weight = build_vocab_weight("output.weight", config, vocab, "matrix")
    layer = OutputLayer(Scope(lone_rank(), table, {weight.name: weight}, torch.bfloat16, False).get_child("output"), config, form)
    provide = partial(torch.empty, layer.weight.shape, device=META)
    layer.weight.grad_sink = GradSink(torch.float32, lambda: None, provide)  # type: ignore[attr-defined]
    x = torch.empty(SEQ, 1, 4096, dtype=torch.bfloat16, device=META, requires_grad=True)
    labels, mask = torch.empty(SEQ, 1, dtype=torch.int64, device=META), torch.empty(SEQ, 1, device=META)
    with CudaKernels(), Launches() as launches:
        torch.autograd.backward([get_gradient_edge(layer(x, labels, mask))], [torch.empty((), device=META)])
    return launches.by_name


@pytest.mark.parametrize("vocab", [32000, 128256])
def test_a_cross_entropy(vocab: int) -> None:
    """Of a microbatch of 7B, beside the three products of its output layer."""
    launches = loss_launches(vocab, LossOptions(0))
    assert sum(number for name, number in launches.items() if "mm" in name) == 3
    assert launches.total() - 3 < 40, launches


def test_a_loss_in_chunks() -> None:
    """Each of four chunks has four products and eleven operations beside them."""
    size = get_default_chunk_tokens(SEQ, 128256)
    assert SEQ // size == 4
    launches, fewer = (loss_launches(128256, LossOptions(tokens)) for tokens in (size, 2 * size))
    assert sum(number for name, number in launches.items() if "mm" in name) == 4 * 4
    assert launches.total() < 80 and launches.total() - fewer.total() <= 2 * (4 + 11), launches
