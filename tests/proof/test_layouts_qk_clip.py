"""QK-clip at every layout trains as one plain process does: a head is clipped by the largest score of the whole batch."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from megatron.config.memory import MemoryConfig
from megatron.config.training import OptimizerConfig
from megatron_lab.verification.reference.qk_clip import QkClip
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, build_random_weights
from megatron_lab.verification.reference_run import build_rule_options
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, mean_loss, random_batches, train

ALPHA, THRESHOLDS = 0.3, {"gpt2": 4.0, "llama": 4.0, "latent": 2.7}
SHAPES: dict[str, ReferenceShape] = {
    "gpt2": gpt2_like(hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, vocab=61, seq=4),
    "llama": llama_like(hidden=16, ffn=28, heads=8, kv_heads=2, head_size=4, vocab=61, seq=8, windows=(None, 3), score_cap=0.5),
    "latent": llama_like(
        mtp_depths=2,
        mtp_factor=0.8,
        hidden=16,
        ffn=24,
        heads=4,
        kv_heads=4,
        head_size=9,
        vocab=61,
        seq=8,
        latent=LatentShape(10, 6, qk_head_dim=5, qk_pos_emb_head_dim=4, v_head_dim=3),
    ),
}
# Each data rank has two microbatches of the four sequences.
LAYOUTS = {
    "gpt2": (Layout(tp=2, dp=2, micro_batch_size=1, sharding="optim_grads", offload=0.5),),
    "llama": (
        Layout(tp=4, micro_batch_size=2, sequence_parallel=True, memory=MemoryConfig(recompute_granularity="full")),
        Layout(cp=2, dp=2, micro_batch_size=1, sharding="optim"),
    ),
    "latent": (
        Layout(tp=2, pp=2, cp=2, micro_batch_size=2, sharding="no_shard"),
        Layout(dp=2, micro_batch_size=1, sharding="optim_grads_params", offload=1.0),
    ),
}
SINGLY = {
    "gpt2": (Layout(dp=4, micro_batch_size=1), Layout(pp=2, dp=2, micro_batch_size=1, sharding="optim_grads_params")),
    "llama": (Layout(tp=4, micro_batch_size=1, sequence_parallel=True), Layout(pp=2, dp=2, micro_batch_size=1, sharding="optim")),
    "latent": (Layout(micro_batch_size=1),),
}
"""With --full alone: each has little that another layout has not."""


@functools.cache
def recipe(shape: str) -> Recipe:
    """Large weights, so that scores are large; no clipping of gradients hides them."""
    one = SHAPES[shape]
    weights = {name: w * (3.0 if "attention." in name else 1.0) for name, w in build_random_weights(one, seed=1).items()}
    update = {"qk_clip": True, "qk_clip_threshold": THRESHOLDS[shape], "qk_clip_alpha": ALPHA}
    return Recipe(one, weights, random_batches(one, 2, 4, 1, seed=2), optimizer="muon", update=update)


@functools.cache
def reference(shape: str) -> ReferenceRun:
    r, one = recipe(shape), SHAPES[shape]
    numbers = build_rule_options(OptimizerConfig(), (one.heads // one.kv_heads, one.head_size))
    clip = QkClip(one, THRESHOLDS[shape], ALPHA)
    return train(
        r.shape,
        r.weights,
        r.batches,
        lr=r.lr,
        weight_decay=r.weight_decay,
        clip=r.clip,
        optimizer="muon",
        numbers=numbers,
        clips_scores=clip,
    )


def test_training_equals_one_plain_process(full: bool) -> None:
    """Heads above the threshold and below it, all strategies, grouped queries, latents, biases, a window and a cap."""
    for shape, layouts in LAYOUTS.items():
        for layout in (*layouts, *(SINGLY[shape] if full else ())):
            try:
                assert_equal_runs(run_layout(recipe(shape), layout), reference(shape))
            except AssertionError as error:
                raise AssertionError(f"{shape}, {layout}: {error}") from error


def test_the_threshold_lies_among_the_heads() -> None:
    """Else the proof would say nothing of one side."""
    for shape, one in SHAPES.items():
        found: dict[str, torch.Tensor] = {}
        mean_loss(one, recipe(shape).weights, recipe(shape).batches[0], found.__setitem__)
        assert not one.mtp_depths or any((found[f"mtp.{k}.layer.scores"] > THRESHOLDS[shape]).any() for k in range(one.mtp_depths))
        scores = torch.cat([values.amax(dim=(0, 2)) for name, values in found.items() if name.endswith(".scores")])
        assert scores.min() < THRESHOLDS[shape] < scores.max(), (shape, scores)


def test_narrow_parameters_follow_their_main_ones() -> None:
    """In bfloat16 the weights are rounded from the clipped main parameters, in host memory too (`run_layout` compares them)."""
    for offload in (None, 1.0):
        run_layout(recipe("gpt2"), replace(LAYOUTS["gpt2"][0], dtype=torch.bfloat16, offload=offload))
