"""The proof again for multi-token prediction: one to three depths at every layout, tied and untied, with documents.

In float64 all layouts train as one plain process does. Every pair of settings occurs; `--full` takes every case.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP and compiled layers import it: here once, not in every rank

import megatron.data_parallel.fsdp  # noqa: F401
from megatron.config.config import Config
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.speed import SpeedConfig
from megatron.data.samples import DocumentRules
from megatron.model.build import model_of
from megatron.model.compiled import BlockCompiler
from megatron.model.gpt import ModelInputs
from megatron.model.mlp import MLP
from megatron.model.multi_token import shifted
from megatron.parallel.topology import Topology
from megatron.spec.counts import flops_in_8_bits, recompute_flops
from megatron.spec.schedules import SCHEDULES
from megatron.training.step import Evaluated
from megatron.verification.reference.model import Batch, Rules, beyond_next, hidden_states
from megatron.verification.reference.shape import random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches, run_layout
from tests.support.lone_rank import lone_rank
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, loss_with_rules, mean_loss, random_batches, train
from tests.support.warm import run_warm_ranks

EOD = 5
AXES: dict[str, list[Any]] = {
    "sizes": [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 3, 1)],
    "cp": [1, 2],
    "depths": [1, 2, 3],
    "style": ["gpt2 tied", "llama", "llama tied"],
    "sequence_parallel": [False, True],
    "schedule": sorted(SCHEDULES),
    "sharding": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "chunk": [0, 4],
    "documents": [None, "attention", "all"],
    "memory": ["kept", "full", "parts, host", "full, host"],
    "beside": [False, True],
}


MEMORIES = {
    "kept": MemoryConfig(),
    "full": MemoryConfig("full"),
    "all of each chunk": MemoryConfig("full", recompute_method="block"),  # each has one layer
    "parts": MemoryConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp")),
    "host": MemoryConfig(cpu_offload_activations=True),
    "parts, host": MemoryConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp"), cpu_offload_activations=True),
    "full, host": MemoryConfig("full", cpu_offload_activations=True),
}


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout, and are not refused."""
    tp, pp, dp = case["sizes"]
    return (
        not (case["sequence_parallel"] and tp == 1)
        and not (pp == 1 and case["schedule"] not in ("1f1b", "zb-v"))
        and not (dp == 1 and case["sharding"] != "no_shard")
        and not (case["sharding"] == "optim_grads_params" and case["schedule"].startswith("zb"))
    )


def chunks_of(case: dict[str, Any]) -> int:
    """Chunks of the model on a stage."""
    return SCHEDULES[case["schedule"]].chunks_per_stage or (2 if case["schedule"] == "interleaved" else 1)


Key = tuple[str, int, int, int, int, "str | None", bool]


@functools.cache
def recipe(style: str, layers: int, batch: int, depths: int, documents: str | None, beside: bool) -> Recipe:
    """One sample a microbatch; of documents, some end in each sample. `beside`: z-loss and smoothed labels too."""
    like = llama_like if "llama" in style else gpt2_like
    sizes = dict(num_layers=layers, hidden=12, ffn=12, heads=6, kv_heads=6, head_size=2, vocab=29, seq=8, tied="tied" in style)
    z_loss, smoothing = (0.05, 0.2) if beside else (0.0, 0.0)
    shape = replace(like(**sizes), mtp_depths=depths, mtp_factor=0.7, z_loss=z_loss, smoothing=smoothing)
    batches = random_batches(shape, 2, batch, 1, seed=6)
    if documents:
        batches = [_ended(batch) for batch in batches]
    rules = None if documents is None else DocumentRules(EOD, documents == "all", True, documents == "all")
    return Recipe(shape, random_weights(shape, seed=5), batches, rules=rules)


def _ended(batch: Batch) -> Batch:
    tokens, labels, mask = (tensor.clone() for tensor in batch)
    tokens[:, 3] = labels[:, 2] = EOD
    return tokens, labels, torch.ones_like(mask)


@functools.cache
def reference(*key: Any) -> ReferenceRun:
    r = recipe(*key)
    loss: Any = mean_loss
    if r.rules is not None:
        rules = Rules(EOD, positions=r.rules.reset_position_ids, loss=r.rules.eod_mask_loss)
        loss = functools.partial(loss_with_rules, rules=rules)
    return train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def name(case: dict[str, Any]) -> str:
    words = [
        "tp{}-pp{}-dp{}".format(*case["sizes"]),
        f"cp{case['cp']}",
        f"depths{case['depths']}",
        case["style"],
        case["schedule"],
        case["sharding"],
    ]
    words += [f"chunk{case['chunk']}", str(case["documents"]), case["memory"]]
    return "-".join([*words, *(name for name in ("sequence_parallel", "beside") if case[name])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 3, fits)
        metafunc.parametrize("case", cases, ids=name)


def test_every_layout_equals_one_plain_process(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    chunks = chunks_of(case)
    batch = dp * (3 if pp > 1 else 2)
    key = (case["style"], pp * chunks, batch, case["depths"], case["documents"], case["beside"])
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=case["cp"],
        micro_batch_size=1,
        bucket_size=700,
        virtual_stages=chunks,
        memory=replace(MEMORIES[case["memory"]], loss_chunk_tokens=case["chunk"]),
        **{name: case[name] for name in ("sequence_parallel", "schedule", "sharding")},
    )
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


@pytest.mark.parametrize(("tp", "memory"), [(1, "full, host"), (2, "kept")])
def test_compiled_depths_do_the_same(tp: int, memory: str) -> None:
    key = ("llama", 2, 2, 2, "all", True)
    layout = Layout(
        tp=tp, sequence_parallel=tp > 1, micro_batch_size=1, compiler=BlockCompiler("aot_eager"), memory=MEMORIES[memory]
    )
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


def _step_results(rank: int, recipe: Recipe, layout: Layout) -> tuple[float, float | None, Evaluated]:
    context = context_of(layout, rank)
    step = build_step(context, recipe, layout)
    batch = microbatches(recipe.batches[0], context, layout.micro_batch_size, recipe.shape.mtp_depths)
    evaluated = step.evaluate(batch)
    result = step.run(batch, iteration=1, learning_rate=0.0, weight_decay=0.0)
    return result.loss, result.mtp_loss, evaluated


@pytest.mark.parametrize("style", ["llama", "gpt2 tied"])
def test_the_loss_is_told_apart(style: str) -> None:
    """A mean over depths, without its factor, by the tokens that count for the next one, in training and evaluation; the loss is
    without it."""
    key = (style, 2, 6, 2, None, True)
    r = recipe(*key)
    tokens, labels, mask = r.batches[0]
    x = hidden_states(r.shape, r.weights, tokens)
    added = beyond_next(replace(r.shape, smoothing=0.0, mtp_factor=1.0), r.weights, x, labels, None, None, mask)
    expected = ((added * mask).sum() / mask.sum()).item()
    layout = Layout(tp=2, pp=2, cp=2, micro_batch_size=1, sequence_parallel=True)
    for loss, found, evaluated in run_warm_ranks(8, _step_results, r, layout, timeout=120.0):
        assert found == pytest.approx(expected, rel=1e-12) == evaluated.mtp_loss / evaluated.mask
        assert (
            loss == pytest.approx(evaluated.loss / evaluated.mask, rel=1e-12) == pytest.approx(reference(*key).losses[0], rel=1e-12)
        )


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
    model = model_of(config, lone_rank(Topology()), vocab_size=31)
    (chunk,), table = model.chunks.values(), model.layer_table
    assert chunk.mtp is not None and len(chunk.all_blocks) == 4
    *_, last, first_depth, second_depth = table[0].segments
    assert first_depth == replace(last, layers=range(2, 3)) and second_depth == replace(last, layers=range(3, 4))
    assert len(chunk.recomputed) == (0 if memory in ("parts", "host") else 4)
    assert all((block.compiled is not None) is compiles for block in chunk.all_blocks)
    assert all(isinstance(block.mlp, MLP) and block.mlp.up.form.products is not None for block in chunk.all_blocks)
    layer, depth = (recompute_flops(config.model, segment) for segment in (last, first_depth))
    assert depth - layer == (4 * 16**2 if first_depth.recomputed else 0) and bool(layer) is (memory != "host")
    alone = replace(config.model, mtp_num_layers=0)
    assert flops_in_8_bits(config.model, config.precision) == 2 * flops_in_8_bits(alone, config.precision)


def test_a_chain_ends_where_a_label_does_not_count() -> None:
    labels, mask = torch.arange(10, 16).unsqueeze(1), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]).unsqueeze(1)
    first, second = shifted(ModelInputs(torch.zeros(6, 1), labels=labels, loss_mask=mask), 2)
    assert first[0].flatten().tolist() == [10, 11, 12, 13, 14, 15]
    assert first[1].flatten().tolist() == second[0].flatten().tolist() == [11, 12, 13, 14, 15, 0]
    assert second[1].flatten().tolist() == [12, 13, 14, 15, 0, 0]
    assert first[2].flatten().tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert second[2].flatten().tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
