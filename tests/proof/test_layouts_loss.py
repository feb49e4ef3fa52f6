"""The proof again for the forms of the loss at every layout: whole and in chunks of any size, with z-loss or smoothed labels.

In float64 all of them train as one plain process does, which has the whole logits. Every pair of settings occurs; `--full` takes
every case. Two steps are made: weights and what the rule keeps come back once.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.memory import MemoryConfig
from megatron.data.samples import DocumentRules
from megatron.optimizer.grad_scaler import GradScaler
from megatron.spec.schedules import SCHEDULES
from megatron.verification.reference.model import Batch, Rules
from megatron.verification.reference.shape import random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, loss_with_rules, mean_loss, random_batches, train
from tests.support.warm import run_warm_ranks

EOD = 5
AXES: dict[str, list[Any]] = {
    "sizes": [(3, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2)],
    "chunk": [0, 1, 3, 4, 1000],  # of the 6 tokens of a microbatch
    "z_loss": [0.0, 0.05],
    "smoothing": [0.0, 0.3],
    "style": ["gpt2 tied", "llama", "llama capped"],
    "sequence_parallel": [False, True, "overlapping"],
    "schedule": sorted(SCHEDULES),
    "sharding": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "documents": [False, True],
}


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout, and are not refused."""
    tp, pp, dp = case["sizes"]
    return (
        not (case["sequence_parallel"] and tp == 1)
        and not (pp == 1 and case["schedule"] not in ("1f1b", "zb-v"))
        and not (dp == 1 and case["sharding"] != "no_shard")
        and not (case["sharding"] == "optim_grads_params" and SCHEDULES[case["schedule"]].splits_backward)
    )


def chunks_of(case: dict[str, Any]) -> int:
    """Chunks of the model on a stage."""
    return SCHEDULES[case["schedule"]].chunks_per_stage or (2 if case["schedule"] == "interleaved" else 1)


@functools.cache
def recipe(style: str, layers: int, batch: int, z_loss: float, documents: bool, smoothing: float = 0.0) -> Recipe:
    """One sample a microbatch; of documents, some end in each sample."""
    like = llama_like if "llama" in style else gpt2_like
    sizes = dict(num_layers=layers, hidden=12, ffn=12, heads=6, kv_heads=6, head_size=2, vocab=29, seq=6, tied="tied" in style)
    shape = replace(like(**sizes), z_loss=z_loss, smoothing=smoothing, logit_cap=0.6 if "capped" in style else None)
    batches = random_batches(shape, 2, batch, 1, seed=6)
    if documents:
        batches = [_ended(batch) for batch in batches]
    rules = DocumentRules(EOD, True, True, True) if documents else None
    return Recipe(shape, random_weights(shape, seed=5), batches, rules=rules)


def _ended(batch: Batch) -> Batch:
    tokens, labels, mask = (tensor.clone() for tensor in batch)
    tokens[:, 3] = labels[:, 2] = EOD
    return tokens, labels, torch.ones_like(mask)


@functools.cache
def reference(*key: Any) -> ReferenceRun:
    r = recipe(*key)
    loss = mean_loss if r.rules is None else functools.partial(loss_with_rules, rules=Rules(EOD))
    return train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def name(case: dict[str, Any]) -> str:
    words = ["tp{}-pp{}-dp{}".format(*case["sizes"]), f"chunk{case['chunk']}", case["style"], case["schedule"], case["sharding"]]
    sequence = {False: [], True: ["sequence_parallel"], "overlapping": ["overlapping"]}[case["sequence_parallel"]]
    return "-".join([*words, *sequence, *(name for name in ("z_loss", "smoothing", "documents") if case[name])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 3, fits)
        metafunc.parametrize("case", cases, ids=name)


def test_every_form_of_the_loss_equals_one_plain_process(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    chunks = chunks_of(case)
    of_loss = (case["z_loss"], case["documents"], case["smoothing"])
    key = (case["style"], pp * chunks + 1, dp * (3 if pp > 1 else 2), *of_loss)
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch_size=1,
        bucket_size=700,
        virtual_stages=chunks,
        memory=MemoryConfig(loss_chunk_tokens=case["chunk"]),
        **{name: case[name] for name in ("sequence_parallel", "schedule", "sharding")},
    )
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


def _step_results(rank: int, recipe: Recipe, layout: Layout) -> tuple[float, float | None, float]:
    context = context_of(layout, rank)
    step = build_step(context, recipe, layout)
    batch = microbatches(recipe.batches[0], context, layout.micro_batch_size)
    evaluated, count, *_ = step.evaluate(batch)
    result = step.run(batch, iteration=1, learning_rate=0.0, weight_decay=0.0)
    return result.loss, result.z_loss, evaluated / count


def test_the_z_loss_is_told_apart() -> None:
    """Each token counts once in the world; loss and evaluation are without it; without a coefficient there is none."""
    from megatron.verification.reference.model import logits

    key = ("gpt2 tied", 3, 6, 0.05, False)
    r = recipe(*key)
    tokens, _, mask = r.batches[0]
    log_z = logits(r.shape, r.weights, tokens).logsumexp(-1)
    z_loss = (0.05 * log_z.square() * mask).sum() / mask.sum()
    for chunk in (0, 3):
        layout = Layout(tp=2, pp=2, dp=2, micro_batch_size=1, sequence_parallel=True, memory=MemoryConfig(loss_chunk_tokens=chunk))
        for loss, found, evaluated in run_warm_ranks(8, _step_results, r, layout, timeout=120.0):
            assert found == pytest.approx(z_loss.item(), rel=1e-12)
            assert loss == pytest.approx(evaluated, rel=1e-12) == pytest.approx(reference(*key).losses[0], rel=1e-12)
    without = recipe(*key[:3], 0.0, False)
    assert run_warm_ranks(1, _step_results, without, Layout(micro_batch_size=1), timeout=60.0)[0][1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_chunks_train_as_the_whole_in_fewer_bits(dtype: torch.dtype) -> None:
    """With a loss scale in float16; two tensor ranks under sequence parallelism. Losses and gradients are as near as rounding
    allows."""
    r = replace(recipe("llama", 2, 4, 0.01, False), scaler=GradScaler(256.0 if dtype == torch.float16 else 1.0))
    one = Layout(tp=2, micro_batch_size=2, sequence_parallel=True, dtype=dtype)
    whole, chunked = (run_layout(r, replace(one, memory=MemoryConfig(loss_chunk_tokens=chunk))) for chunk in (0, 5))
    rounding = torch.finfo(dtype).eps
    assert chunked.losses == pytest.approx(whole.losses, rel=4 * rounding)
    for name, gradient in whole.first_gradients.items():
        assert (chunked.first_gradients[name] - gradient).norm() < 8 * rounding * gradient.norm(), name
