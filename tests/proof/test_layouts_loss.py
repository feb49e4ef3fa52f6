"""Forms of the loss: what is reported of them, and chunks in fewer bits. Training with them is in `test_layouts.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config.memory import MemoryConfig
from megatron.optimizer.grad_scaler import GradScaler
from tests.layouts.case import DEFAULTS, recipe_of, reference_of
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches, run_layout
from tests.support.warm import run_warm_ranks


def _step_results(rank: int, recipe: Recipe, layout: Layout) -> tuple[float, float | None, float]:
    context = context_of(layout, rank)
    step = build_step(context, recipe, layout)
    batch = microbatches(recipe.batches[0], context, layout.micro_batch_size)
    evaluated, count, *_ = step.evaluate(batch)
    result = step.run(batch, iteration=1, learning_rate=0.0, weight_decay=0.0)
    return result.loss, result.z_loss, evaluated / count


def test_the_z_loss_is_told_apart() -> None:
    """Each token counts once in the world; loss and evaluation are without it; without a coefficient there is none."""
    from megatron_lab.verification.reference.model import compute_logits

    r = recipe_of({**DEFAULTS, "style": "gpt2", "tied": True, "z_loss": 0.05, "microbatches": 4})
    expected = reference_of(r).losses[0]
    tokens, _, mask = r.batches[0]
    log_z = compute_logits(r.shape, r.weights, tokens).logsumexp(-1)
    z_loss = (0.05 * log_z.square() * mask).sum() / mask.sum()
    every = Layout(tp=2, pp=2, dp=2, micro_batch_size=1, sequence_parallel=True, memory=MemoryConfig(loss_chunk_tokens=3))
    for layout in (every, Layout(tp=2)):
        for loss, found, evaluated in run_warm_ranks(layout.world_size, _step_results, r, layout, timeout=120.0):
            assert found == pytest.approx(z_loss.item(), rel=1e-12)
            assert loss == pytest.approx(evaluated, rel=1e-12) == pytest.approx(expected, rel=1e-12)
    without = replace(r, shape=replace(r.shape, z_loss=0.0))
    assert run_warm_ranks(1, _step_results, without, Layout(micro_batch_size=1), timeout=60.0)[0][1] is None


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full("dtypes with fewer bits"))]
)
def test_chunks_train_as_the_whole_in_fewer_bits(dtype: torch.dtype) -> None:
    """With a loss scale in float16; two tensor ranks under sequence parallelism. Losses and gradients are as near as rounding
    allows."""
    r = replace(
        recipe_of({**DEFAULTS, "z_loss": 0.01, "microbatches": 4}), scaler=GradScaler(256.0 if dtype == torch.float16 else 1.0)
    )
    one = Layout(tp=2, micro_batch_size=2, sequence_parallel=True, dtype=dtype)
    whole, chunked = (run_layout(r, replace(one, memory=MemoryConfig(loss_chunk_tokens=chunk))) for chunk in (0, 5))
    rounding = torch.finfo(dtype).eps
    assert chunked.losses == pytest.approx(whole.losses, rel=4 * rounding)
    for name, gradient in whole.first_gradients.items():
        assert (chunked.first_gradients[name] - gradient).norm() < 8 * rounding * gradient.norm(), name
