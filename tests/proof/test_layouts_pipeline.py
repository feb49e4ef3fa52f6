"""The proof again, for what a pipeline may be: every schedule with uneven splits, empty chunks, few and many microbatches.

In float64 all of them train as one plain process does. Every pair of settings occurs; `--full` takes every case.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.spec.schedules import SCHEDULES
from megatron.verification.reference.shape import random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, random_batches, train

AXES: dict[str, list[Any]] = {
    "sizes": [(1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)],
    "schedule": sorted(SCHEDULES),
    "virtual_stages": [1, 2, 3],
    "split": ["even", "first", "layout"],
    "microbatches": [1, 2, 5],
    "style": ["gpt2 tied", "llama"],
    "overlap": [True, False],
    "overlap_p2p": [True, False],
    "sharding": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
}


def fits(case: dict[str, Any]) -> bool:
    """Schedules with the chunks that they can have, and not refused; reductions where there is something to reduce."""
    chunks = SCHEDULES[case["schedule"]].chunks_per_stage
    return (
        case["virtual_stages"] == (chunks or max(2, case["virtual_stages"]))
        and not (case["sizes"][2] == 1 and (case["overlap"] or case["sharding"] != "no_shard"))
        and not (case["sharding"] == "optim_grads_params" and SCHEDULES[case["schedule"]].splits_backward)
    )


def layout_string(num_chunks: int, num_layers: int) -> str:
    """The embedding alone, then chunks of two layers while there are any, then chunks of none, then the loss."""
    words = ["E"]
    for _ in range(num_chunks - 1):
        words.append("t" * min(2, num_layers))
        num_layers -= len(words[-1])
    words[0] += "t" * num_layers
    words[-1] += "L"
    return "|".join(words)


@functools.cache
def recipe(style: str, layers: int, batch: int) -> Recipe:
    like = llama_like if style == "llama" else gpt2_like
    shape = like(num_layers=layers, hidden=8, ffn=16, heads=2, kv_heads=2, head_size=4, vocab=29, seq=4, tied="tied" in style)
    return Recipe(shape, random_weights(shape, seed=5), random_batches(shape, 2, batch, 1, seed=6))


@functools.cache
def reference(style: str, layers: int, batch: int) -> ReferenceRun:
    r = recipe(style, layers, batch)
    return train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def name(case: dict[str, Any]) -> str:
    tp, pp, dp = case["sizes"]
    words = [f"tp{tp}-pp{pp}-dp{dp}", f"{case['schedule']}-v{case['virtual_stages']}", f"m{case['microbatches']}", case["split"]]
    words.append(case["sharding"])
    return "-".join([*words, case["style"].replace(" ", "-"), *(flag for flag in ("overlap", "overlap_p2p") if case[flag])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 11, fits)
        metafunc.parametrize("case", cases, ids=name)


def layout_of(case: dict[str, Any], layers: int) -> Layout:
    tp, pp, dp = case["sizes"]
    chunks = pp * case["virtual_stages"]
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        schedule=case["schedule"],
        virtual_stages=None if case["split"] == "layout" else case["virtual_stages"],
        first_stage_layers=case["virtual_stages"] if case["split"] == "first" else None,
        split=layout_string(chunks, layers) if case["split"] == "layout" else None,
        overlap=case["overlap"],
        overlap_p2p=case["overlap_p2p"],
        sharding=case["sharding"],
        overlap_param_gather=case["sharding"] in ("optim", "optim_grads"),
        micro_batch_size=1,
        bucket_size=700,
    )


def test_every_pipeline_trains_as_one_process_does(case: dict[str, Any]) -> None:
    _, pp, dp = case["sizes"]
    layers = pp * case["virtual_stages"] + 1
    key = (case["style"], layers, case["microbatches"] * dp)
    assert_equal_runs(run_layout(recipe(*key), layout_of(case, layers)), reference(*key))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_waiting_for_messages_changes_no_bit(schedule: str) -> None:
    r = recipe("gpt2 tied", 5, 5)
    layout = Layout(pp=2, schedule=schedule, virtual_stages=SCHEDULES[schedule].chunks_per_stage or 2, micro_batch_size=1)
    overlapped, waiting = run_layout(r, layout), run_layout(r, replace(layout, overlap_p2p=False))
    assert overlapped.losses == waiting.losses
    assert all(torch.equal(overlapped.weights_after[name], weight) for name, weight in waiting.weights_after.items())


def test_putting_weight_gradients_off_changes_no_bit() -> None:
    """zb-h1 and 1f1b sum every gradient over the microbatches in the same order."""
    r = recipe("gpt2 tied", 3, 10)
    runs = [
        run_layout(r, Layout(pp=2, dp=2, schedule=schedule, micro_batch_size=1, overlap=True)) for schedule in ("1f1b", "zb-h1")
    ]
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(runs[0].weights_after[name], weight) for name, weight in runs[1].weights_after.items())
