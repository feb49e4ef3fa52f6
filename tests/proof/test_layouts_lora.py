"""LoRA's checkpoints from layout to layout, its products and its counts. Training with it is in `test_layouts.py`."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.counts import count_flops_per_token
from megatron_lab.foreign.adapters import merge_adapters
from megatron_lab.foreign.source import StoredCheckpoint
from megatron_lab.verification.reference.model import compute_logits
from megatron_lab.verification.reference.shape import build_random_weights, is_trained
from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches, model_config
from tests.support.memory_source import MemorySource
from tests.support.reference_runs import gpt2_like, llama_like, random_batches, train
from tests.support.runs import checkpoint, saved_tensors
from tests.support.step_checkpoints import load, save
from tests.support.warm import run_warm_ranks

ALL = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")


@functools.cache
def recipe(style: str, layers: int, batch: int, targets: tuple[str, ...]) -> Recipe:
    like = llama_like if style == "llama" else gpt2_like
    sizes = dict(num_layers=layers, hidden=12, ffn=12, heads=4, kv_heads=4, head_size=3 + (style == "llama"), vocab=29, seq=8)
    shape = replace(like(**sizes), lora_rank=3, lora_scale=1.7, lora_targets=targets)
    return Recipe(shape, build_random_weights(shape, seed=5), random_batches(shape, 2, batch, 1, seed=6))


# ---- checkpoints

WALK = (
    Layout(tp=2, dp=2, sharding="optim", sequence_parallel=True, micro_batch_size=1, bucket_size=200),
    Layout(pp=2, dp=2, sharding="optim_grads", micro_batch_size=1, bucket_size=300),
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
    source = merge_adapters(MemorySource(model_config(r.shape), r.weights))
    assert source.model == model_config(replace(r.shape, lora_rank=None))
    weights = {name: source.read(name) for name in source.weights}
    tokens = r.batches[0][0]
    torch.testing.assert_close(
        compute_logits(replace(r.shape, lora_rank=None), weights, tokens),
        compute_logits(r.shape, r.weights, tokens),
        rtol=1e-10,
        atol=1e-12,
    )
    box = TensorSlice((1, 3, 2), (1, 4, 5))
    torch.testing.assert_close(source.read("layers.1.mlp.up.weight", box), weights["layers.1.mlp.up.weight"][box.index])


def test_what_is_frozen_has_no_weight_gradient() -> None:
    """Two products for each weight in place of three; adapters have all three."""
    with_all = model_config(recipe("llama", 2, 4, ALL).shape)
    without = replace(with_all, lora_rank=None)
    layers, hidden, rank = 2, 12, 3
    matrices = layers * (3 * 4 * 4 * hidden + 4 * 4 * hidden + 3 * hidden * 12)
    low = layers * rank * ((hidden + 3 * 16) + (16 + hidden) + (hidden + 24) + (12 + hidden))
    assert count_flops_per_token(with_all, 29) == count_flops_per_token(without, 29) - 2 * (matrices + 29 * hidden) + 6 * low
