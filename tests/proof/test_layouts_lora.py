"""The proof again for LoRA: adapters beside linear layers at every layout, and a model under them that does not move.

In float64 all layouts train as one plain process does, which multiplies with W + scale B A. Every pair of settings occurs; `--full`
takes every case.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.adapters import merged
from megatron.checkpoint.source import StoredCheckpoint
from megatron.config.memory import MemoryConfig
from megatron.model.compiled import BlockCompiler
from megatron.parallel.boxes import Box
from megatron.spec.counts import flops_per_token
from megatron.spec.schedules import SCHEDULES
from megatron.verification.reference.model import logits
from megatron.verification.reference.shape import is_trained, random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs, assert_equal_tensors, number_differences
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches, model_config, run_layout
from tests.support.memory_source import MemorySource
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, random_batches, train
from tests.support.runs import checkpoint, saved_tensors
from tests.support.step_checkpoints import load, save
from tests.support.warm import run_warm_ranks

ALL = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
AXES: dict[str, list[Any]] = {
    "sizes": [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1)],
    "cp": [1, 2],
    "style": ["gpt2 tied", "llama"],
    "targets": [ALL, ("attention.qkv", "mlp.down"), ("attention.output",), ("mlp.up",)],
    "sequence_parallel": [False, True, "overlapping"],
    "schedule": sorted(SCHEDULES),
    "sharding": ["no_shard", "optim", "optim_grads"],
    "chunk": [0, 4],
    "memory": ["kept", "full", "parts", "host"],
}
MEMORIES = {
    "kept": MemoryConfig(),
    "full": MemoryConfig("full"),
    "parts": MemoryConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp_act")),
    "host": MemoryConfig(cpu_offload_activations=True),
}


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout, and are not refused."""
    tp, pp, dp = case["sizes"]
    return (
        not (case["sequence_parallel"] and tp == 1)
        and not (case["cp"] * tp * pp * dp > 4)
        and not (pp == 1 and case["schedule"] not in ("1f1b", "zb-v"))
        and not (dp == 1 and case["sharding"] != "no_shard")
    )


@functools.cache
def recipe(style: str, layers: int, batch: int, targets: tuple[str, ...]) -> Recipe:
    like = llama_like if style == "llama" else gpt2_like
    sizes = dict(num_layers=layers, hidden=12, ffn=12, heads=4, kv_heads=4, head_size=3 + (style == "llama"), vocab=29, seq=8)
    shape = replace(like(**sizes), lora_rank=3, lora_scale=1.7, lora_targets=targets)
    return Recipe(shape, random_weights(shape, seed=5), random_batches(shape, 2, batch, 1, seed=6))


@functools.cache
def reference(*key: Any) -> ReferenceRun:
    r = recipe(*key)
    return train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def name(case: dict[str, Any]) -> str:
    words = ["tp{}-pp{}-dp{}".format(*case["sizes"]), f"cp{case['cp']}", case["style"], *case["targets"], case["schedule"]]
    words += [str(case["sequence_parallel"]), case["sharding"], f"chunk{case['chunk']}", case["memory"]]
    return "-".join(words)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 3, fits)
        metafunc.parametrize("case", cases, ids=name)


def test_every_layout_equals_one_plain_process(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    chunks = SCHEDULES[case["schedule"]].chunks_per_stage or (2 if case["schedule"] == "interleaved" else 1)
    key = (case["style"], pp * chunks, dp * (3 if pp > 1 else 2), case["targets"])
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=case["cp"],
        micro_batch_size=1,
        bucket_size=200,
        virtual_stages=chunks,
        memory=replace(MEMORIES[case["memory"]], loss_chunk_tokens=case["chunk"]),
        **{name: case[name] for name in ("sequence_parallel", "schedule", "sharding")},
    )
    found = run_layout(recipe(*key), layout)
    assert_equal_runs(found, reference(*key))
    r = recipe(*key)
    for name, before in r.weights.items():
        assert torch.equal(found.weights_after[name], before) is not is_trained(r.shape, name), name
    assert all(is_trained(r.shape, name) for name in found.first_gradients)


def test_compiled_layers_do_the_same() -> None:
    key = ("llama", 1, 2, ALL)
    layout = Layout(tp=2, sequence_parallel=True, micro_batch_size=1, compiler=BlockCompiler("aot_eager"))
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


# ---- checkpoints

WALK = (
    Layout(tp=2, dp=2, sharding="optim", sequence_parallel=True, micro_batch_size=1, bucket_size=200),
    Layout(pp=2, dp=2, sharding="optim_grads", micro_batch_size=1, bucket_size=300),
    Layout(tp=4, micro_batch_size=1),
)
KEY = ("gpt2 tied", 2, 4, ALL)


def stretch(rank: int, layout: Layout, done: int, source: Path | None, folder: Path) -> float:
    """One step after `done`, from a checkpoint if it is given. Saves what was loaded, and what came out."""
    context, r = context_of(layout, rank), recipe(*KEY)
    # Other weights than those of the checkpoint, so that what is not filled shows.
    step = build_step(context, r if source is None else replace(r, weights={k: w + 1 for k, w in r.weights.items()}), layout)
    if source is not None:
        load(step, source, done)
        save(step, folder / "loaded", done)
    inputs = microbatches(r.batches[done % 2], context, layout.micro_batch_size)
    loss = step.run(inputs, iteration=done + 1, learning_rate=r.lr, weight_decay=r.weight_decay).loss
    save(step, folder, done + 1)
    if dist.is_initialized():
        dist.barrier()
    return loss


def test_a_run_goes_from_layout_to_layout(tmp_path: Path) -> None:
    """And a checkpoint has each weight once, state of an optimizer for the adapters alone; merged it is the plain model's."""
    r = recipe(*KEY)
    source: Path | None = None
    expected = train(
        r.shape, r.weights, [r.batches[i % 2] for i in range(len(WALK))], lr=r.lr, weight_decay=r.weight_decay, clip=r.clip
    )
    losses = []
    for done, layout in enumerate(WALK):
        folder = tmp_path / str(done)
        losses.append(run_warm_ranks(layout.world_size, stretch, layout, done, source, folder)[0])
        if source is not None:
            assert_equal_tensors(saved_tensors(folder / "loaded", done), saved_tensors(source, done))
        source = folder
    assert not number_differences("losses", losses, expected.losses, 1e-10)
    assert source is not None
    stored = StoredCheckpoint(checkpoint(source, len(WALK)))
    for name in r.weights:
        kinds = {kind for kind in ("model", "exp_avg", "exp_avg_sq") if f"{kind}.{name}" in stored.tensors}
        assert kinds == ({"model", "exp_avg", "exp_avg_sq"} if is_trained(r.shape, name) else {"model"})


def test_products_of_adapters_are_added_to_the_weights() -> None:
    """The plain model without adapters gives the same logits, whichever box of a weight is read."""
    r = recipe("llama", 2, 4, ALL)
    source = merged(MemorySource(model_config(r.shape), r.weights))
    assert source.model == model_config(replace(r.shape, lora_rank=None))
    weights = {name: source.read(name) for name in source.weights}
    tokens = r.batches[0][0]
    torch.testing.assert_close(
        logits(replace(r.shape, lora_rank=None), weights, tokens), logits(r.shape, r.weights, tokens), rtol=1e-10, atol=1e-12
    )
    box = Box((1, 3, 2), (1, 4, 5))
    torch.testing.assert_close(source.read("layers.1.mlp.up.weight", box), weights["layers.1.mlp.up.weight"][box.index])


def test_what_is_frozen_has_no_weight_gradient() -> None:
    """Two products for each weight in place of three; adapters have all three."""
    with_all = model_config(recipe("llama", 2, 4, ALL).shape)
    without = replace(with_all, lora_rank=None)
    layers, hidden, rank = 2, 12, 3
    matrices = layers * (3 * 4 * 4 * hidden + 4 * 4 * hidden + 3 * hidden * 12)
    low = layers * rank * ((hidden + 3 * 16) + (16 + hidden) + (hidden + 24) + (12 + hidden))
    assert flops_per_token(with_all, 29) == flops_per_token(without, 29) - 2 * (matrices + 29 * hidden) + 6 * low
