"""Every update rule does the same at every layout, in float64: rules that look at whole matrices see them across all ranks that
hold a part.

Linear layers have no biases: the true gradient of a key's is zero, and rules that divide by the size of a gradient make noise of
its rounding error.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron.config.training import OptimizerConfig
from megatron.verification.plain_run import rule_numbers
from megatron.verification.reference.shape import ReferenceShape, random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, random_batches, train

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "lion": ("lion", {"lion_beta1": 0.8, "lion_beta2": 0.95}),
    "ademamix": ("ademamix", {"ademamix_warmup_iters": 3, "ademamix_beta3": 0.99}),
    "adafactor": ("adafactor", {}),
    "adafactor, relative": (
        "adafactor",
        {"adafactor_relative_step": True, "adafactor_beta1": 0.9, "adafactor_clip_threshold": 0.5, "adafactor_least_scale": 0.12},
    ),
    "lamb": ("lamb", {}),
    "adam8bit": ("adam8bit", {"adam_8bit_block_size": 5}),
    "adam8bit, long blocks": ("adam8bit", {"adam_8bit_block_size": 12}),
}
AXES: dict[str, list[Any]] = {
    "rule": list(RULES),
    "sizes": [(1, 1, 1), (1, 1, 3), (1, 1, 4), (2, 1, 2), (1, 2, 2), (4, 1, 2), (2, 2, 2), (2, 1, 3)],
    "style": ["gpt2", "llama"],
    "tied": [True, False],
    "sequence_parallel": [False, True],
    "sharding": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "bucket_size": [400, 3000],
    "offload": [None, 0.5],
    "fsdp_shard_size": [None, 2],
}
VOCAB = 61  # divides by no tensor size: the last rank holds padding


def fits(case: dict[str, Any]) -> bool:
    tp, _, dp = case["sizes"]
    fsdp = case["sharding"] == "optim_grads_params"
    return (
        not (case["sequence_parallel"] and tp == 1)
        and not (case["sharding"] != "no_shard" and dp == 1)
        and not (case["fsdp_shard_size"] and (not fsdp or dp % 2))
        and case["fsdp_shard_size"] != dp
    )


@functools.cache
def recipe(rule: str, style: str, tied: bool, batch: int) -> Recipe:
    shape = shape_of(style, tied)
    optimizer, settings = RULES[rule]
    batches = random_batches(shape, 4, batch, 1, seed=2)
    return Recipe(shape, random_weights(shape, seed=1), batches, optimizer=optimizer, update=settings)


def shape_of(style: str, tied: bool) -> ReferenceShape:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden": 16, "ffn": 24, "heads": 4, "head_size": 4, "vocab": VOCAB, "seq": 8}
    if style == "gpt2":
        return gpt2_like(kv_heads=4, tied=tied, bias=False, **sizes)
    return llama_like(kv_heads=4, tied=tied, **sizes)


@functools.cache
def reference(rule: str, style: str, tied: bool, batch: int) -> ReferenceRun:
    r = recipe(rule, style, tied, batch)
    numbers = rule_numbers(OptimizerConfig(**r.update))
    return train(
        r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip, optimizer=r.optimizer, numbers=numbers
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 11, fits)
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(str(value) for value in case.values()))


def test_layout_equals_one_plain_process(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    key = case["rule"], case["style"], case["tied"], 2 * dp
    settings = {name: case[name] for name in AXES if name not in ("rule", "sizes", "style", "tied")}
    layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch_size=1, **settings)
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))
