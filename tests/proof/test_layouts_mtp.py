"""Multi-token prediction: what is reported of its loss, and how its depths are treated. Training is in `test_layouts.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo  # FSDP and compiled layers import it: here once, not in every rank

import megatron.data_parallel.fsdp  # noqa: F401
from megatron.config.config import Config
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig, SpeedConfig
from megatron.model.build import build_model_from_config
from megatron.model.inputs import ModelInputs
from megatron.model.mlp import MLP
from megatron.model.multi_token import shift_inputs
from megatron.parallel.topology import Topology
from megatron.spec.counts import count_fp8_flops, count_recompute_flops
from megatron.training.step import EvaluationSums
from megatron_lab.verification.reference.model import compute_hidden_states, compute_mtp_losses
from tests.layouts.case import DEFAULTS, recipe_of, reference_of
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches
from tests.support.lone_rank import lone_rank
from tests.support.warm import run_warm_ranks

MEMORIES = {
    "kept": MemoryConfig(),
    "full": MemoryConfig("full"),
    "all of each chunk": MemoryConfig("full", recompute_method="block"),  # each has one layer
    "parts": MemoryConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp")),
    "host": MemoryConfig(cpu_offload_activations=True),
}


def _step_results(rank: int, recipe: Recipe, layout: Layout) -> tuple[float, float | None, EvaluationSums]:
    context = context_of(layout, rank)
    step = build_step(context, recipe, layout)
    batch = microbatches(recipe.batches[0], context, layout.micro_batch_size, recipe.shape.mtp_depths)
    evaluated = step.evaluate(batch)
    result = step.run(batch, iteration=1, learning_rate=0.0, weight_decay=0.0)
    return result.loss, result.mtp_loss, evaluated


@pytest.mark.parametrize("style", ["gpt2 tied", pytest.param("llama", marks=pytest.mark.full("gpt2 tied"))])
def test_the_loss_is_told_apart(style: str) -> None:
    """A mean over depths, without its factor, by the tokens that count for the next one, in training and evaluation; the loss is
    without it."""
    like, tied = style.removesuffix(" tied"), style.endswith(" tied")
    loss_parts = {"depths": 2, "z_loss": 0.05, "smoothing": 0.3}
    r = recipe_of({**DEFAULTS, "style": like, "tied": tied, **loss_parts, "microbatches": 3})
    in_reference = reference_of(r).losses[0]
    tokens, labels, mask = r.batches[0]
    x = compute_hidden_states(r.shape, r.weights, tokens)
    added = compute_mtp_losses(replace(r.shape, smoothing=0.0, mtp_factor=1.0), r.weights, x, labels, None, None, mask)
    expected = ((added * mask).sum() / mask.sum()).item()
    layout = Layout(tp=2, pp=2, cp=2, micro_batch_size=1, sequence_parallel=True)
    for loss, found, evaluated in run_warm_ranks(8, _step_results, r, layout, timeout=120.0):
        assert found == pytest.approx(expected, rel=1e-12) == evaluated.mtp_loss_sum / evaluated.mask_sum
        assert loss == pytest.approx(evaluated.loss_sum / evaluated.mask_sum, rel=1e-12) == pytest.approx(in_reference, rel=1e-12)


@pytest.mark.parametrize("memory", ["full", "all of each chunk", "parts", "host"])
def test_a_depth_is_treated_as_the_last_layer(memory: str) -> None:
    """Run again, moved, compiled, in 8 bits; and counted so."""
    compiles = memory != "parts"
    config = Config(
        model=ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, mtp_num_layers=2),
        memory=replace(MEMORIES[memory], recompute_num_layers=2 if memory == "all of each chunk" else 1),
        precision=PrecisionConfig(bf16=True, fp8_format="e4m3"),
        speed=SpeedConfig(compile=compiles, compile_backend="aot_eager"),
    )
    model = build_model_from_config(config, lone_rank(Topology()), vocab_size=31)
    (chunk,), table = model.chunks.values(), model.layer_table
    assert chunk.mtp is not None and len(chunk.all_blocks) == 4
    *_, last, first_depth, second_depth = table[0].segments
    assert first_depth == replace(last, layers=range(2, 3)) and second_depth == replace(last, layers=range(3, 4))
    assert len(chunk.recomputed_modules) == (0 if memory in ("parts", "host") else 4)
    assert all((block.compiled is not None) is compiles for block in chunk.all_blocks)
    assert all(isinstance(block.mlp, MLP) and block.mlp.up.config.gemms is not None for block in chunk.all_blocks)
    layer, depth = (count_recompute_flops(config.model, segment) for segment in (last, first_depth))
    assert depth - layer == (4 * 16**2 if first_depth.is_recomputed else 0) and bool(layer) is (memory != "host")
    alone = replace(config.model, mtp_num_layers=0)
    assert count_fp8_flops(config.model, config.precision) == 2 * count_fp8_flops(alone, config.precision)


def test_a_chain_ends_where_a_label_does_not_count() -> None:
    labels, mask = torch.arange(10, 16).unsqueeze(1), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]).unsqueeze(1)
    first, second = shift_inputs(ModelInputs(torch.zeros(6, 1), labels=labels, loss_mask=mask), 2)
    assert first[0].flatten().tolist() == [10, 11, 12, 13, 14, 15]
    assert first[1].flatten().tolist() == second[0].flatten().tolist() == [11, 12, 13, 14, 15, 0]
    assert second[1].flatten().tolist() == [12, 13, 14, 15, 0, 0]
    assert first[2].flatten().tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert second[2].flatten().tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
