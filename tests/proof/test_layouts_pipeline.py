"""Ways to run a pipeline that change no bit. That each trains as one plain process does is proved in `test_layouts.py`."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megatron.spec.schedules import SCHEDULES
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import gpt2_like, llama_like, random_batches


@functools.cache
def recipe(style: str, layers: int, batch: int) -> Recipe:
    like = llama_like if style == "llama" else gpt2_like
    shape = like(num_layers=layers, hidden=8, ffn=16, heads=2, kv_heads=2, head_size=4, vocab=29, seq=4, tied="tied" in style)
    return Recipe(shape, build_random_weights(shape, seed=5), random_batches(shape, 2, batch, 1, seed=6))


WITH_ONE_CHUNK = pytest.mark.full("schedules with two chunks on a stage")


@pytest.mark.parametrize(
    "schedule", ["interleaved", "zb-v", *(pytest.param(one, marks=WITH_ONE_CHUNK) for one in ("1f1b", "zb-h1"))]
)
def test_waiting_for_messages_changes_no_bit(schedule: str) -> None:
    r = recipe("gpt2 tied", 5, 5)
    layout = Layout(pp=2, schedule=schedule, virtual_stages=SCHEDULES[schedule].chunks_per_stage or 2, micro_batch_size=1)
    overlapped, waiting = run_layout(r, layout), run_layout(r, replace(layout, overlap_p2p=False))
    assert overlapped.losses == waiting.losses
    assert all(torch.equal(overlapped.weights_after[name], weight) for name, weight in waiting.weights_after.items())


def test_putting_weight_gradients_off_changes_no_bit() -> None:
    """zb-h1 and 1f1b sum every gradient over the microbatches in the same order."""
    r = recipe("gpt2 tied", 3, 6)
    runs = [
        run_layout(r, Layout(pp=2, dp=2, schedule=schedule, micro_batch_size=1, overlap=True)) for schedule in ("1f1b", "zb-h1")
    ]
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(runs[0].weights_after[name], weight) for name, weight in runs[1].weights_after.items())
