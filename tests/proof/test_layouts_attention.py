"""The proof for models whose layers attend in different ways: at every layout they train as one plain process does.

In float64, with one document a sample or several. Every pair of settings occurs; `--full` takes every case.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron.config.memory import MemoryConfig
from megatron.model.compiled import BlockCompiler
from megatron.verification.reference.rotary import RotaryStretch
from megatron.verification.reference.shape import LatentShape, ReferenceShape, random_weights
from tests.proof.test_layouts_packing import ALL_RULES, EOD, SEQ, VOCAB, documents
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import (
    ReferenceRun,
    deepseek_like,
    gpt2_like,
    llama_like,
    loss_of_documents_apart,
    mean_loss,
    random_batches,
    train,
)

LAYERS = 4
SIZES: dict[str, Any] = {"num_layers": LAYERS, "hidden": 16, "ffn": 24, "head_size": 4, "vocab": VOCAB, "seq": SEQ, "kv_heads": 2}
YARN = RotaryStretch("yarn", 4.0, 12, 0.05, 1.0, whole=False, enlarged=1.2)
LATENT = LatentShape(query_rank=None, rank=6, plain=3, rotated=2, value=5)  # values of the size of queries
STYLES: dict[str, ReferenceShape] = {
    "two bases": llama_like(**SIZES, windows=(3, 3, None, 3), local_base=20.0, unrotated=(False,) * 3 + (True,)),
    "sinks": llama_like(**SIZES, windows=(2, None) * 2, sink="learned", qkv_bias=True, output_bias=True),
    "capped": gpt2_like(**SIZES, windows=(None, 4) * 2, score_cap=0.5, score_scale=0.4, sink="one"),
    "norms over all heads": llama_like(**SIZES, qk_norm=True, qk_norm_all_heads=True, windows=(None, None, 1, 1)),
    "latents": deepseek_like(**SIZES | {"kv_heads": 4}, stretch=YARN, score_scale=0.3),
    "latents, windows": deepseek_like(
        **SIZES | {"kv_heads": 4}, windows=(3, None) * 2, sink="learned", latent=LATENT, qk_norm=False
    ),
}
"""Layers of several kinds, which lie otherwise on stages."""
MEMORIES = {
    "kept": MemoryConfig(),
    "full": MemoryConfig("full"),
    "selective, host": MemoryConfig("selective", recompute_modules=("core_attn", "layernorm"), cpu_offload_activations=True),
}
AXES: dict[str, list[Any]] = {
    "style": [*STYLES],
    "sizes": [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)],
    "schedule": ["1f1b", "interleaved", "zb-h1", "zb-v"],
    "sequence_parallel": [False, True],
    "samples": ["whole", "documents"],
    "memory": [*MEMORIES],
    "sharding": ["no_shard", "optim_grads", "optim_grads_params"],
}


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout, and are not refused."""
    tp, pp, dp = case["sizes"]
    chunks = pp * (2 if case["schedule"] in ("interleaved", "zb-v") else 1)
    return (
        (tp > 1 or not case["sequence_parallel"])
        and (pp > 1 or case["schedule"] == "1f1b")
        and LAYERS % chunks == 0
        and (dp > 1 or case["sharding"] == "no_shard")
    )


@functools.cache
def recipe(style: str, samples: str) -> Recipe:
    shape = STYLES[style]
    packed = samples == "documents"
    batches = documents(2, 8) if packed else random_batches(shape, 2, 8, 2, seed=2)
    return Recipe(shape, random_weights(shape, seed=5), batches, rules=ALL_RULES if packed else None)


@functools.cache
def reference(style: str, samples: str) -> ReferenceRun:
    r = recipe(style, samples)
    loss = functools.partial(loss_of_documents_apart, eod=EOD) if samples == "documents" else mean_loss
    return train(r.shape, r.weights, r.batches, loss=loss, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def name(case: dict[str, Any]) -> str:
    tp, pp, dp = case["sizes"]
    words = [case["style"], f"tp{tp}-pp{pp}-dp{dp}", case["schedule"], case["samples"], case["memory"], case["sharding"]]
    return "-".join([*words, *(["sequence_parallel"] if case["sequence_parallel"] else [])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 5, fits)
        metafunc.parametrize("case", cases, ids=name)


def test_layers_that_attend_differently_train_as_one_plain_process(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        sequence_parallel=case["sequence_parallel"],
        schedule=case["schedule"],
        virtual_stages=2 if case["schedule"] == "interleaved" else None,
        sharding=case["sharding"],
        memory=MEMORIES[case["memory"]],
        bucket_size=900,
    )
    key = (case["style"], case["samples"])
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


@pytest.mark.parametrize(
    ("style", "samples", "tp"),
    [
        ("sinks", "whole", 1),
        ("two bases", "documents", 1),
        ("norms over all heads", "whole", 2),
        ("latents", "whole", 2),
        ("latents, windows", "documents", 1),
    ],
)
def test_compiled_layers_do_the_same(style: str, samples: str, tp: int) -> None:
    """What torch has no kernel for stands between two graphs; sums over tensor ranks within one are summed both ways."""
    layout = Layout(tp=tp, sequence_parallel=tp > 1, compiler=BlockCompiler("aot_eager"))
    assert_equal_runs(run_layout(recipe(style, samples), layout), reference(style, samples))
