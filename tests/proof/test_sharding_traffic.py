"""What each strategy sends in a step, counted at the collectives, whoever calls them: our buckets or torch's `fully_shard`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.data_parallel.bucket import main_grad_dtype
from megatron.data_parallel.buckets import BucketedParams
from megatron.data_parallel.traffic import StepTotals
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import GRADIENT_AXES
from megatron.spec.schedules import build_schedule
from megatron_lab.planner.state_report import build_state_report
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.covering import full_but
from tests.support.layout import (
    Layout,
    Recipe,
    build_step,
    context_of,
    microbatches,
    model_on_meta,
    optimizer_config,
    parallel_config,
)
from tests.support.reference_runs import gpt2_like, llama_like, random_batches
from tests.support.shared_memory import GroupCall, recorded_calls
from tests.support.warm import run_warm_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

Sent = dict[tuple[tuple[int, ...], str], Fraction]
"""Elements that a rank sends, by the ranks of the group, of gradients (reduced) and of parameters (gathered)."""


KINDS = {"all-reduce": "gradients", "reduce-scatter": "gradients", "all-gather": "parameters"}


def sent_of(calls: Iterable[GroupCall]) -> Sent:
    """What calls send, without messages between pipeline stages and sums of a few scalars."""
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    for call in calls:
        if call.what not in ("send", "barrier") and not (call.what == "all-reduce" and call.elements <= len(StepTotals._fields)):
            found[call.ranks, KINDS[call.what]] += call.sent  # type: ignore[assignment]
    return dict(found)  # type: ignore[arg-type]


@functools.cache
def recipe(style: str, sequences: int) -> Recipe:
    """Of small vocabulary and sequences, so that no activation is taken for scalars."""
    like = {"gpt2": gpt2_like, "llama": llama_like}[style]
    shape = like(
        num_layers=4 if style == "gpt2" else 2,
        hidden=32,
        ffn=64,
        heads=4,
        kv_heads=4,
        head_size=8,
        vocab=64,
        seq=8,
        tied=style == "gpt2",
    )
    return Recipe(shape, build_random_weights(shape, seed=1), random_batches(shape, 1, sequences, 1, seed=2))


def counted(context: ParallelContext, layout: Layout, style: str, num_microbatches: int) -> tuple[Sent, int]:
    """What a rank sends in a step after the first, and the padding of its buckets in elements."""
    r = recipe(style, num_microbatches * layout.dp)
    step = build_step(context, r, layout)
    inputs = microbatches(r.batches[0], context, 1)
    step.run(inputs, iteration=1, learning_rate=0.1, weight_decay=0.1)
    with recorded_calls() as calls:
        step.run(inputs, iteration=2, learning_rate=0.1, weight_decay=0.1)
    step.finish_param_gather()
    dist.barrier()
    buckets = [bucket for provider in step.providers if isinstance(provider, BucketedParams) for bucket in provider.buckets]
    return sent_of(calls), sum(bucket.plan.size - sum(placed.numel for placed in bucket.plan.params) for bucket in buckets)


def layout(sharding: str, **settings: Any) -> Layout:
    basis: dict[str, Any] = dict(micro_batch_size=1, bucket_size=5000, dtype=torch.bfloat16, sharding=sharding)
    return Layout(**{**basis, **settings})


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "no_shard": ({}, lambda n, m: 2 * (n - 1) / n),
    "optim": ({}, lambda n, m: 2 * (n - 1) / n),
    "optim, waiting": ({"overlap": False}, lambda n, m: 2 * (n - 1) / n),
    "optim, gathered late": ({"overlap_param_gather": True}, lambda n, m: 2 * (n - 1) / n),
    "optim_grads": ({}, lambda n, m: (m + 1) * (n - 1) / n),
    "optim_grads, waiting": ({"overlap": False}, lambda n, m: (m + 1) * (n - 1) / n),
    "optim_grads_params": ({}, lambda n, m: 3 * m * (n - 1) / n),
    "optim_grads_params, never": ({"fsdp_reshard": "never"}, lambda n, m: (m + 1) * (n - 1) / n),
    "optim_grads_params, once": ({"reduce_once": True}, lambda n, m: (2 * m + 1) * (n - 1) / n),
    "optim_grads_params, never and once": ({"fsdp_reshard": "never", "reduce_once": True}, lambda n, m: 2 * (n - 1) / n),
    "optim_grads_params, host": ({"params_cpu": True}, lambda n, m: 3 * m * (n - 1) / n),
}
"""Settings, and what a rank sends in elements of the model, on n data ranks with m microbatches."""


def counted_in_each_case(rank: int, dp: int, num_microbatches: int) -> dict[str, tuple[Sent, int]]:
    found = {}
    for name, (settings, _) in CASES.items():
        case = layout(name.partition(",")[0], dp=dp, **settings)
        found[name] = counted(context_of(case, rank), case, "llama", num_microbatches)
    return found


@pytest.mark.parametrize(
    ("dp", "num_microbatches"),
    [(2, 3), pytest.param(4, 1, marks=pytest.mark.full("the same test with two ranks, and what four replicas send"))],
)
def test_a_step_sends_what_the_formula_says(dp: int, num_microbatches: int) -> None:
    """Element by element, the padding of the buckets included, which is stated."""

    parameters = sum(weights.numel() for weights in recipe("llama", num_microbatches * dp).weights.values())
    for found in run_warm_ranks(dp, counted_in_each_case, dp, num_microbatches):
        for name, (_, formula) in CASES.items():
            sent, padding = found[name]
            assert {ranks for ranks, _ in sent} == {tuple(range(dp))}
            factor = formula(Fraction(dp), num_microbatches)
            assert sum(sent.values()) == factor * (parameters + padding), name
            assert padding < 0.04 * parameters


def counted_at(rank: int, case: Layout, num_microbatches: int) -> Sent:
    return counted(context_of(case, rank), case, "llama", num_microbatches)[0]


@pytest.mark.parametrize(
    ("num_microbatches", "reshard"),
    [
        (3, "always"),
        (1, "never"),
        *(pytest.param(*case, marks=pytest.mark.full("the other two cases")) for case in ((1, "always"), (3, "never"))),
    ],
)
def test_replicas_send_sums_once_a_step(num_microbatches: int, reshard: str) -> None:
    """--fsdp-shard-size 2 of 4 data ranks: as much as on two ranks among two, and half of the gradient across, once."""
    case = layout("optim_grads_params", dp=4, fsdp_shard_size=2, fsdp_reshard=reshard)
    parameters = sum(weights.numel() for weights in recipe("llama", 4).weights.values())
    gathers = 2 * num_microbatches if reshard == "always" else 1
    ranks = run_warm_ranks(4, counted_at, case, num_microbatches)
    for rank, sent in enumerate(ranks):
        near, across = tuple(range(rank // 2 * 2, rank // 2 * 2 + 2)), (rank % 2, rank % 2 + 2)
        half = Fraction(parameters, 2)
        assert sent == {
            (near, "parameters"): gathers * half,
            (near, "gradients"): num_microbatches * half,
            (across, "gradients"): half,  # 2 x 1/2 of the rank's half
        }


REPORTED: dict[str, dict[str, Any]] = {
    "one stage": {"dp": 2},
    "sequence parallel": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "two stages": {"pp": 2, "dp": 2},
    "late": {"pp": 2, "dp": 2, "schedule": "zb-h1"},
    "both ends on one rank": {"pp": 2, "dp": 2, "schedule": "zb-v", "virtual_stages": 2},
}


def counted_and_reported(rank: int, case: Layout) -> tuple[Sent, Sent]:
    context, r = context_of(case, rank), recipe("gpt2", 3 * case.dp)
    sent, _ = counted(context, case, "gpt2", 3)
    activations = context.group("tp").ranks
    found = {key: elements for key, elements in sent.items() if key[0] != activations or case.tp == 1}
    schedule = build_schedule(case.schedule, case.pp, 3, case.virtual_stages or 1)
    model = model_on_meta(context, r, case)
    report = build_state_report(model, context, parallel_config(case), optimizer_config(r, case), schedule)
    groups = {
        "dp": context.gradient_group,
        "tp x dp": context.group("tp", *GRADIENT_AXES),
        "pipeline ends": context.pipeline_ends,
    }
    sizes = {"parameters": model.dtype.itemsize, "gradients": main_grad_dtype(model.dtype).itemsize}
    return found, {(groups[some.over].ranks, some.kind): Fraction(some.bytes, sizes[some.kind]) for some in report.traffic}


REPORTS = [(w, s) for w in REPORTED for s in STRATEGIES if s != STRATEGIES[-1] or "zb" not in REPORTED[w].get("schedule", "")]


@pytest.mark.parametrize(
    ("where", "sharding"),
    full_but(
        [(w, s) for w, s in REPORTS if ([*REPORTED].index(w) + STRATEGIES.index(s)) % 2 == 0],
        REPORTS,
        "each strategy and each layout at another pair of them",
    ),
)
def test_the_report_tells_what_a_step_sends(where: str, sharding: str) -> None:
    """With ties, in pipelines, with parameters whose gradients are summed over tensor ranks too: by group, element by element."""
    case = layout(sharding, **REPORTED[where])
    for found, told in run_warm_ranks(case.world_size, counted_and_reported, case):
        assert found == told
