"""The gradient's noise scale is that of plain gradients of the first microbatch and of the whole batch, at every layout."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.training import gradient_noise
from megatron.training.gradient_noise import GradientNoiseMeter, NoiseEstimate, _reduce_scatter_chunks, compute_noise_scale
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.covering import full_but
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches
from tests.support.reference_runs import gpt2_like, loss_and_gradients, random_batches
from tests.support.warm import run_warm_ranks

BATCH, MICRO = 8, 2
LAYOUTS = {
    "one process": Layout(),
    "tensor": Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim"),
    "pipeline": Layout(pp=2, dp=2, sharding="optim_grads", overlap=True),
    "late weight gradients": Layout(pp=2, schedule="zb-v", virtual_stages=2, dp=2),
    "sharded": Layout(tp=2, dp=2, sharding="optim_grads_params"),
    "context": Layout(cp=2, tp=2, sequence_parallel=True, sharding="optim", overlap=True),
    "context and stages": Layout(cp=2, pp=2, schedule="zb-h1"),
    "context, sharded": Layout(cp=2, dp=2, sharding="optim_grads_params"),
    "sharded, reduced once": Layout(dp=2, pp=2, sharding="optim_grads_params", reduce_once=True),
}


@functools.cache
def recipe() -> Recipe:
    shape = gpt2_like(num_layers=4, hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, vocab=61, seq=8, tied=True)
    batches = [batch for seed in range(9) for batch in random_batches(shape, 1, BATCH, MICRO, seed) if batch[2][:MICRO].sum() > 1]
    return Recipe(shape, build_random_weights(shape, seed=1), batches[:2])


def estimates(rank: int, layout: Layout) -> list[NoiseEstimate | None]:
    """Of each step."""
    r = recipe()
    context = context_of(layout, rank)
    step = build_step(context, r, layout)
    step._noise_meter = GradientNoiseMeter(step.providers, step.norm_shards, context)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_noise, "_CHUNK_ELEMENTS", 301)  # so that a gradient comes in several pieces
        for number, batch in enumerate(r.batches, start=1):
            inputs = microbatches(batch, context, MICRO)
            found.append(step.run(inputs, iteration=number, learning_rate=0.0, weight_decay=0.0).gradient_noise)
    return found


@functools.cache
def expected() -> list[NoiseEstimate]:
    """McCandlish et al. 2018, appendix A.1, of the matrices in layers."""
    r, found = recipe(), []
    for tokens, labels, mask in r.batches:
        squares = {}
        for size in (MICRO, BATCH):
            _, gradients = loss_and_gradients(r.shape, r.weights, (tokens[:size], labels[:size], mask[:size]))
            inside = (g for name, g in gradients.items() if name.startswith("layers.") and g.dim() > 1)
            squares[size] = sum(g.square().sum().item() for g in inside)
        noise = (squares[MICRO] - squares[BATCH]) / (1 / MICRO - 1 / BATCH)
        signal = (BATCH * squares[BATCH] - MICRO * squares[MICRO]) / (BATCH - MICRO)
        found.append(NoiseEstimate(noise, signal))
    return found


@pytest.mark.parametrize(
    "name",
    full_but(
        ("one process", "tensor", "late weight gradients", "sharded, reduced once", "context, sharded"),
        LAYOUTS,
        "each kind of group and strategy at another layout",
    ),
)
def test_the_estimates_are_those_of_plain_gradients(name: str) -> None:
    layout = replace(LAYOUTS[name], micro_batch_size=MICRO, bucket_size=1500)
    ranks = run_warm_ranks(layout.world_size, estimates, layout)
    for found in ranks:
        for one, wanted in zip(found, expected(), strict=True):
            assert one is not None
            assert (one.covariance_trace, one.squared_norm) == pytest.approx(
                (wanted.covariance_trace, wanted.squared_norm), rel=1e-10
            )


def squares_of_parts(rank: int, number: int) -> float:
    context = make_context(Topology(cp=3), rank, torch.device("cpu"))
    grad = torch.arange(number, dtype=torch.float64) * (rank + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_noise, "_CHUNK_ELEMENTS", 10)
        return sum(float(part.square().sum()) for part in _reduce_scatter_chunks(grad, context.context_group))


def test_parts_of_a_sum_have_each_element_once() -> None:
    """Of any number, over ranks that do not divide it."""
    for number in (1, 9, 29):
        whole = float((6 * torch.arange(number, dtype=torch.float64)).square().sum())
        assert sum(run_warm_ranks(3, squares_of_parts, number)) == whole


def test_a_noise_scale_is_a_ratio_of_sums() -> None:
    assert compute_noise_scale([NoiseEstimate(6.0, 1.0), NoiseEstimate(2.0, 3.0)]) == 2.0
    assert compute_noise_scale([NoiseEstimate(6.0, -1.0)]) is None and compute_noise_scale([]) is None
    assert NoiseEstimate.of(small=3.0, big=1.5, small_batch=2, big_batch=8) == NoiseEstimate(covariance_trace=4.0, squared_norm=1.0)
