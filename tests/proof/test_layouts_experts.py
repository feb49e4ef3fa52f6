"""The proof for mixtures of experts: each layout trains as one plain process does, which goes through the experts token by token.

In float64, 1e-10: losses, every gradient, the routers' too, and every weight. Every pair of settings occurs; `--full` takes every
case.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.memory import MemoryConfig
from megatron.data.samples import DocumentRules
from megatron.model.compiled import BlockCompiler
from megatron.moe.balance import BalanceResult
from megatron.verification.reference.experts import ExpertsShape
from megatron.verification.reference.model import Batch, Rules, Seen, token_losses
from megatron.verification.reference.shape import random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches, run_layout
from tests.support.reference_runs import ReferenceRun, llama_like, loss_with_rules, mean_loss, random_batches, train
from tests.support.warm import run_warm_ranks

EOD, SAMPLES, LAYERS = 0, 4, 4
SIZES = {"num_layers": LAYERS, "hidden": 12, "ffn": 20, "heads": 4, "kv_heads": 4, "head_size": 4, "vocab": 32, "seq": 4}
ALL, SOME = (True,) * LAYERS, (False, True, False, True)
KINDS = {
    "top 2": ExpertsShape(ALL, 4, 2, 8, balance="microbatch", balance_coeff=0.3),
    "top 1, first softmax, shares of the update before": ExpertsShape(
        SOME, 4, 1, 8, score="softmax first", balance="update before", balance_coeff=0.4, z_coeff=0.05
    ),
    "sigmoids in groups with biases, shared": ExpertsShape(
        *(SOME, 8, 4, 4, 8),
        score="sigmoid",
        scaling=2.5,
        groups=4,
        open_groups=2,
        balance="sequence",
        balance_coeff=0.2,
        bias_step=0.05,
    ),
    "top 4, gated shared, dropped by probability": ExpertsShape(
        *(ALL, 8, 4, 4, 8, True), score="softmax first", balance="microbatch", balance_coeff=0.5, z_coeff=0.1, capacity=1.0
    ),
    "dropped by position, padded": ExpertsShape(SOME, 4, 1, 8, 8, score="sigmoid", bias_step=0.1, capacity=1.25, drops_last=True),
}
WAYS: dict[str, dict[str, Any]] = {
    "always": {},
    "never": {"fsdp_reshard": "never"},
    "once": {"reduce_once": True},
    "host": {"params_cpu": True},
    "parts": {"fsdp_shard_size": 2},
}
"""Those of optim_grads_params, which its cases have in turn; parts of two data ranks have one copy of the experts or two."""
AXES: dict[str, list[Any]] = {
    "kind": [*KINDS],
    # (tp, cp, pp, dp), ep, etp
    "sizes": [
        ((1, 1, 1, 1), 1, None),
        ((1, 1, 1, 2), 2, None),
        ((1, 1, 1, 4), 4, None),
        ((1, 1, 1, 4), 2, None),
        ((1, 1, 1, 4), 1, None),
        ((1, 1, 2, 2), 1, None),
        ((2, 1, 1, 1), 1, None),
        ((2, 1, 1, 2), 2, 1),
        ((2, 1, 1, 2), 2, 2),
        ((1, 2, 1, 1), 2, None),
        ((1, 2, 1, 2), 1, 2),
        ((1, 1, 2, 2), 2, None),
        ((2, 2, 1, 1), 2, 1),
    ],
    "dispatcher": ["alltoall", "allgather"],
    "schedule": ["1f1b", "interleaved", "zb-h1", "zb-v"],
    "sharding": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "memory": ["kept", "full", "selective", "host"],
    "documents": [False, True],
    "micro_batch_size": [1, 2],
    "depths": [0, 1, 2],
}
MEMORIES = {
    "kept": MemoryConfig(),
    "full": MemoryConfig("full"),
    "selective": MemoryConfig("selective", recompute_modules=("layernorm", "mlp")),
    "host": MemoryConfig(cpu_offload_activations=True),
}


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout, and are not refused."""
    (tp, cp, pp, dp), ep, etp = case["sizes"]
    alone = ep * (tp if etp is None else etp) == 1
    return (
        (pp > 1 or case["schedule"] in ("1f1b", "zb-h1"))
        and (cp * dp > 1 or case["sharding"] == "no_shard")
        and not (case["sharding"] == "optim_grads_params" and case["schedule"].startswith("zb"))
        and not (alone and case["dispatcher"] == "allgather")
        and dp * case["micro_batch_size"] <= SAMPLES
    )


@functools.cache
def recipe(kind: str, micro_batch_size: int, documents: bool, depths: int = 0) -> Recipe:
    """The layer of each depth of multi-token prediction has experts too, as the last one."""
    experts = replace(KINDS[kind], microbatch=micro_batch_size)
    shape = llama_like(**SIZES, experts=experts, mtp_depths=depths, mtp_factor=0.7)
    batches = random_batches(shape, 2, SAMPLES, 1, seed=6)
    if documents:
        batches = [_ended(batch) for batch in batches]
    rules = DocumentRules(EOD, True, True, True) if documents else None
    return Recipe(shape, random_weights(shape, seed=5, std=0.3), batches, rules=rules)


def _ended(batch: Batch) -> Batch:
    tokens, labels, mask = (tensor.clone() for tensor in batch)
    tokens[:, 2] = labels[:, 1] = EOD
    return tokens, labels, mask.new_ones(mask.shape)


@functools.cache
def reference(*key: Any) -> ReferenceRun:
    r = recipe(*key)
    loss = mean_loss if r.rules is None else functools.partial(loss_with_rules, rules=Rules(EOD))
    return train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def name(case: dict[str, Any]) -> str:
    (tp, cp, pp, dp), ep, etp = case["sizes"]
    sizes = f"tp{tp}-cp{cp}-pp{pp}-dp{dp}-ep{ep}{'' if etp is None else f'-etp{etp}'}"
    words = [sizes, *(case[axis] for axis in ("kind", "dispatcher", "schedule", "sharding", "memory"))]
    words += [case["way"], f"b{case['micro_batch_size']}", f"depths{case['depths']}"]
    return "-".join([*words, *(word for word in ("documents", "compiled") if case[word])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 3, fits)
        ways, compiled = itertools.cycle(WAYS), itertools.cycle([True, *[False] * 7])
        for case in cases:
            case["way"] = next(ways) if case["sharding"] == "optim_grads_params" else "always"
            case["compiled"] = case["memory"] != "selective" and next(compiled)
        metafunc.parametrize("case", cases, ids=name)


def test_experts_train_as_one_plain_process(case: dict[str, Any]) -> None:
    (tp, cp, pp, dp), ep, etp = case["sizes"]
    layout = Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        etp=etp,
        dispatcher=case["dispatcher"],
        sequence_parallel=tp > 1,
        schedule=case["schedule"],
        virtual_stages=2 if case["schedule"] == "interleaved" else None,
        sharding=case["sharding"],
        memory=MEMORIES[case["memory"]],
        micro_batch_size=case["micro_batch_size"],
        bucket_size=900,
        compiler=BlockCompiler("aot_eager", defers=case["schedule"].startswith("zb")) if case["compiled"] else None,
        **WAYS[case["way"]],
    )
    key = (case["kind"], case["micro_batch_size"], case["documents"], case["depths"])
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


def test_experts_that_nobody_chooses_have_no_gradient() -> None:
    """Of many experts of which each rank has some; the plain process gives exactly zero."""
    shape = llama_like(**SIZES | {"num_layers": 1}, experts=ExpertsShape((True,), 32, 1, 4))
    r = Recipe(shape, random_weights(shape, seed=5, std=0.3), random_batches(shape, 1, 2, 1, seed=6))
    expected = train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    idle = (expected.first_gradients["layers.0.mlp.experts.up.weight"].flatten(1) == 0).all(1)
    assert 16 < idle.sum() < 32
    for ep in (1, 2):
        assert_equal_runs(run_layout(r, Layout(dp=2, ep=ep, micro_batch_size=1)), expected)


def test_the_balance_is_told_of_the_global_batch() -> None:
    """By every layout the same, and of the loss as it is defined, depths too; evaluations are without."""
    r = recipe("top 4, gated shared, dropped by probability", 2, False, 1)
    found = [
        run_warm_ranks(layout.world_size, _balance, r, layout, timeout=120.0)
        for layout in (Layout(), Layout(dp=2, ep=2, pp=2), Layout(tp=2, cp=1, dp=2, ep=4, etp=1, sequence_parallel=True))
    ]
    first, *_ = found[0]
    shape = r.shape.experts
    assert shape is not None
    logits: list[torch.Tensor] = []
    token_losses(
        replace(r.shape, experts=replace(shape, balance_coeff=0.0, z_coeff=1.0)),
        r.weights,
        *r.batches[0][:2],
        seen=_keeping(logits),
    )
    assert first.z_loss == pytest.approx(float(torch.stack(logits).mean()), rel=1e-12)
    assert set(first.busiest) == {*(f"layers.{layer}" for layer in range(LAYERS)), "mtp.0"}
    assert all(1.0 <= worst <= 8 / 4 for worst in first.busiest.values())
    for result in (result for results in found for result in results):
        assert result.loss == pytest.approx(first.loss, rel=1e-12)
        assert result.z_loss == pytest.approx(first.z_loss, rel=1e-12)
        assert result.busiest == pytest.approx(first.busiest)
        assert result.dropped == first.dropped and 0.0 < first.dropped < 0.5


def _keeping(values: list[torch.Tensor]) -> Seen:
    return lambda name, found: values.append(found) if name.endswith("balance") else None


def _balance(rank: int, recipe: Recipe, layout: Layout) -> BalanceResult | None:
    context = context_of(layout, rank)
    step = build_step(context, recipe, layout)
    batch = microbatches(recipe.batches[0], context, layout.micro_batch_size, recipe.shape.mtp_depths)
    step.evaluate(batch)
    return step.run(batch, iteration=1, learning_rate=0.0, weight_decay=0.0).balance
