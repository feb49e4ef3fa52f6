"""Muon at every layout trains as one plain process does: each matrix is whole where it is orthogonalised."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron.config.training import OptimizerConfig
from megatron.optimizer import matrix_plan
from megatron.verification.local_ranks import run_ranks
from megatron.verification.plain_run import rule_numbers
from megatron.verification.reference.shape import LatentShape, ReferenceShape, random_weights
from tests.support.covering import Case, covering
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, random_batches, train

STEPS = 2
SHAPES: dict[str, ReferenceShape] = {
    "gpt2": gpt2_like(hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, vocab=61, seq=8),
    "llama": llama_like(hidden=16, ffn=26, heads=4, kv_heads=2, head_size=4, vocab=61, seq=8, qk_norm="each_head"),
    "latent": llama_like(
        hidden=16, ffn=24, heads=4, kv_heads=4, head_size=9, vocab=61, seq=8, latent=LatentShape(10, 6, plain=5, rotated=4, value=3)
    ),
}
"""Rows of matrices that data ranks do not divide evenly; the gated MLP of the llama has two matrices in one weight, and
of latent attention tensor ranks hold some matrices whole."""
RULES: dict[str, dict[str, Any]] = {
    "as published": {"muon_use_nesterov": True, "muon_extra_scale_factor": 0.2},
    "heads": {"muon_split_heads": True, "muon_momentum": 0.8, "muon_scale_mode": "unit_rms_norm"},
    "fused": {"muon_no_split_qkv": True, "muon_num_ns_steps": 4, "muon_scale_mode": "shape_scaling", "muon_use_nesterov": True},
    "three, even steps": {"muon_num_ns_steps": 2},
}
AXES: dict[str, tuple[Any, ...]] = {
    "grid": ((1, 1, 1), (1, 1, 3), (2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)),
    "sequence_parallel": (False, True),
    "sharding": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "shape": tuple(SHAPES),
    "rule": tuple(RULES),
    "offload": (None, 0.5, 1.0),
    "overlap": (True, False),
    "bucket_size": (500, None),
    "fsdp_shard_size": (None, 1),
}
"""(tp, pp, dp) and what else must not change the run."""


def possible(case: Case) -> bool:
    """What the rules between settings accept."""
    tp, _, dp = case["grid"]
    hybrid = case["fsdp_shard_size"] is None or (case["sharding"] == "optim_grads_params" and dp > 1)
    return hybrid and (tp > 1 or not case["sequence_parallel"])


@functools.cache
def recipe(shape: str, rule: str) -> Recipe:
    one = SHAPES[shape]
    batches = random_batches(one, STEPS, 6, 1, seed=2)
    return Recipe(one, random_weights(one, seed=1), batches, optimizer="muon", update=RULES[rule])


@functools.cache
def reference(shape: str, rule: str) -> ReferenceRun:
    r, heads = recipe(shape, rule), (SHAPES[shape].heads // SHAPES[shape].kv_heads, SHAPES[shape].head_size)
    numbers = rule_numbers(OptimizerConfig(**r.update), heads)
    return train(
        r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip, optimizer="muon", numbers=numbers
    )


def layout_of(case: Case) -> Layout:
    """The layout of a case."""
    tp, pp, dp = case["grid"]
    fields = {
        name: case[name] for name in ("sequence_parallel", "sharding", "offload", "overlap", "bucket_size", "fsdp_shard_size")
    }
    return Layout(tp=tp, pp=pp, dp=dp, micro_batch_size=1, **fields)


def test_training_equals_one_plain_process() -> None:
    """Pairs of layouts, strategies, ways to make matrices, offloading."""
    cases = covering(AXES, seed=1, valid=possible)
    assert len(cases) > 20
    for case in cases:
        check(case["shape"], case["rule"], layout_of(case))


def check(shape: str, rule: str, layout: Layout) -> None:
    try:
        assert_equal_runs(run_layout(recipe(shape, rule), layout), reference(shape, rule))
    except AssertionError as error:
        raise AssertionError(f"{shape}, {rule}, {layout}: {error}") from error


@pytest.mark.parametrize("most", [1, 1000])
def test_many_rounds_are_no_other(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Rounds of one matrix a rank, and of some: while one is computed others travel, in buffers that are used again."""
    monkeypatch.setattr(matrix_plan, "MOST_ELEMENTS", most)
    monkeypatch.setattr("tests.support.layout.run_warm_ranks", run_ranks)  # ranks that are forked now know the size
    for layout in (Layout(), Layout(tp=2, dp=2, sharding="optim"), Layout(dp=2, micro_batch_size=1, sharding="optim_grads_params")):
        check("llama", "three, even steps", layout)
