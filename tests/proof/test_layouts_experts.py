"""Mixtures of experts: those that nobody chooses, and what is reported of the balance. Training is in `test_layouts.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.moe.balance import RouterMetrics
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.model import OutputHook, compute_token_losses
from megatron_lab.verification.reference.shape import build_random_weights
from tests.layouts.case import DEFAULTS, recipe_of
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches, run_layout
from tests.support.reference_runs import llama_like, random_batches, train
from tests.support.warm import run_warm_ranks

SIZES = {"num_layers": 1, "hidden": 12, "ffn": 20, "heads": 4, "kv_heads": 4, "head_size": 4, "vocab": 32, "seq": 4}


def test_experts_that_nobody_chooses_have_no_gradient() -> None:
    """Of many experts of which each rank has some; the plain process gives exactly zero."""
    shape = llama_like(**SIZES, experts=ExpertsShape((True,), 32, 1, 4))
    r = Recipe(shape, build_random_weights(shape, seed=5, std=0.3), random_batches(shape, 1, 2, 1, seed=6))
    expected = train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    idle = (expected.first_gradients["layers.0.mlp.experts.up.weight"].flatten(1) == 0).all(1)
    assert 16 < idle.sum() < 32
    for ep in (1, 2):
        assert_equal_runs(run_layout(r, Layout(dp=2, ep=ep, micro_batch_size=1)), expected)


def test_the_balance_is_told_of_the_global_batch() -> None:
    """By every layout the same, and of the loss as it is defined, depths too; evaluations are without."""
    kind = "top 4, gated shared, dropped by probability"
    r = recipe_of({**DEFAULTS, "experts": kind, "depths": 1, "micro_batch_size": 2})
    found = [
        run_warm_ranks(layout.world_size, _balance, r, layout, timeout=120.0)
        for layout in (Layout(), Layout(dp=2, ep=2, pp=2), Layout(tp=2, cp=1, dp=2, ep=4, etp=1, sequence_parallel=True))
    ]
    first, *_ = found[0]
    shape = r.shape.experts
    assert shape is not None
    logits: list[torch.Tensor] = []
    compute_token_losses(
        replace(r.shape, experts=replace(shape, aux_loss_coeff=0.0, z_loss_coeff=1.0)),
        r.weights,
        *r.batches[0][:2],
        hook=_keeping(logits),
    )
    assert first.z_loss == pytest.approx(float(torch.stack(logits).mean()), rel=1e-12)
    assert set(first.busiest_expert) == {*(f"layers.{layer}" for layer in range(r.shape.num_layers)), "mtp.0"}
    assert all(1.0 <= worst <= 8 / 4 for worst in first.busiest_expert.values())
    for result in (result for results in found for result in results):
        assert result.load_balancing_loss == pytest.approx(first.load_balancing_loss, rel=1e-12)
        assert result.z_loss == pytest.approx(first.z_loss, rel=1e-12)
        assert result.busiest_expert == pytest.approx(first.busiest_expert)
        assert result.dropped_share == first.dropped_share and 0.0 < first.dropped_share < 0.5


def _keeping(values: list[torch.Tensor]) -> OutputHook:
    return lambda name, found: values.append(found) if name.endswith("balance") else None


def _balance(rank: int, recipe: Recipe, layout: Layout) -> RouterMetrics | None:
    context = context_of(layout, rank)
    step = build_step(context, recipe, layout)
    batch = microbatches(recipe.batches[0], context, layout.micro_batch_size, recipe.shape.mtp_depths)
    step.evaluate(batch)
    return step.run(batch, iteration=1, learning_rate=0.0, weight_decay=0.0).expert_balance
