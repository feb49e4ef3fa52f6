"""The proof for the parts of today's models: where norms stand, their weights, activations, both ends, at layouts of every kind."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron.config.memory import MemoryConfig
from megatron.verification.reference.shape import ReferenceShape, random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, random_batches, train

VOCAB = 61  # divides by no tensor size: the last rank holds padding
SMALL: dict[str, Any] = dict(num_layers=4, hidden=16, ffn=24, heads=4, head_size=4, vocab=VOCAB, seq=8)
SHAPES: dict[str, ReferenceShape] = {
    # Each has several parts that are new together; between them every part is there.
    "sandwich": llama_like(
        **SMALL,
        norms="sandwich",
        zero_centred=True,
        tied=True,
        qk_norm=True,
        activation="geglu",
        embedding_multiplier=4.0,
        logit_cap=0.5,
    ),
    "post": llama_like(**SMALL, norms="post", residual_multiplier=0.3, activation="geglu_exact", output_multiplier=0.25),
    "parallel": gpt2_like(
        **SMALL, kv_heads=4, positions="rope", rotary_percent=0.5, parallel=True, tied=False, activation="gelu_exact"
    ),
    "bare": gpt2_like(
        **SMALL,
        kv_heads=4,
        norm_weight=False,
        positions="rope",
        activation="quick_geglu",
        offset=1.0,
        clamp=0.3,
        embedding_norm=True,
    ),
    "parallel-sandwich": gpt2_like(
        **SMALL,
        kv_heads=2,
        norms="sandwich",
        parallel=True,
        norm_bias=False,
        zero_centred=True,
        activation="relu",
        logit_cap=1.0,
        embedding_norm=True,
    ),
}
AXES: dict[str, list[Any]] = {
    "shape": list(SHAPES),
    "sizes": [(1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)],
    "sequence_parallel": [False, True],
    "schedule": ["1f1b", "interleaved", "zb-v"],
    "sharding": ["no_shard", "optim", "optim_grads_params"],
    "recompute": [(), ("layernorm", "mlp_act"), ("mlp",)],
}


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout."""
    tp, pp, dp = case["sizes"]
    return (
        not (case["sequence_parallel"] and tp == 1)
        and not (case["schedule"] != "1f1b" and pp == 1)
        and not (case["sharding"] != "no_shard" and dp == 1)
        and not (case["sharding"] == "optim_grads_params" and case["schedule"] == "zb-v")  # refused
    )


@functools.cache
def recipe(name: str, batch: int) -> Recipe:
    shape = SHAPES[name]
    return Recipe(shape, random_weights(shape, seed=1), random_batches(shape, 2, batch, 1, seed=2))


@functools.cache
def reference(name: str, batch: int) -> ReferenceRun:
    r = recipe(name, batch)
    return train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 7, fits)
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(map(str, case.values())).replace(" ", ""))


def test_todays_layers_equal_the_reference(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    chunks = 1 if case["schedule"] == "1f1b" else 2
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch_size=1,
        bucket_size=1500,
        virtual_stages=chunks,
        schedule=case["schedule"],
        sequence_parallel=case["sequence_parallel"],
        sharding=case["sharding"],
        memory=MemoryConfig(recompute_granularity="selective" if case["recompute"] else None, recompute_modules=case["recompute"]),
    )
    key = (case["shape"], 3 * dp)
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))
