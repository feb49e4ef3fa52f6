"""The proof: in float64, every layout trains exactly as one process written plainly does.

Losses and gradient norms of 3 steps, every gradient of the first and every weight after the third are compared: the second step
begins from what the first left behind, the third as any later one. The normal run takes a subset in which every pair of settings
occurs; `--full` takes every case, with two steps of each.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron.verification.reference.rotary import RotaryStretch
from megatron.verification.reference.shape import ReferenceShape, random_weights
from megatron.verification.reference.update_rules import Numbers
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, deepseek_like, gpt2_like, llama_like, random_batches, train

SIZES = [
    (tp, pp, dp) for n in (1, 2, 4, 8) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) for dp in (1, 2, 4, 8) if tp * pp * dp == n
]
AXES: dict[str, list[Any]] = {
    "sizes": SIZES,
    "style": ["gpt2", "llama", "deepseek"],
    "tied": [True, False],
    "sequence_parallel": [False, True, "overlapping"],
    "schedule": ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"],
    "overlap": [True, False],
    "pp_before_dp": [False, True],
    "sharding": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "overlap_param_gather": [False, True],
    "attention": ["auto", "math"],
}
VOCAB = 61  # divides by no tensor size: the last rank holds padding


def chunks_for(schedule: str) -> int:
    """Chunks a stage."""
    return 2 if schedule in ("interleaved", "zb-v") else 1


def shape_for(style: str, tied: bool, chunks: int) -> ReferenceShape:
    """Small models; one layer more than chunks, so that stages differ."""
    layers = chunks + 1
    if style == "gpt2":
        return gpt2_like(num_layers=layers, hidden=16, ffn=24, heads=8, kv_heads=8, head_size=4, vocab=VOCAB, seq=8, tied=tied)
    if style == "deepseek":
        return deepseek_like(num_layers=layers, hidden=16, ffn=24, heads=8, kv_heads=8, vocab=VOCAB, seq=8, tied=tied)
    return llama_like(num_layers=layers, hidden=16, ffn=24, heads=8, kv_heads=4, head_size=4, vocab=VOCAB, seq=8, tied=tied)


def fits(case: dict[str, Any]) -> bool:
    """Settings that mean something at this layout; whole key-value heads on every tensor rank."""
    tp, pp, dp = case["sizes"]
    return (
        not (case["style"] == "llama" and tp > 4)
        and not (case["sequence_parallel"] and tp == 1)
        # On one stage a schedule is still an order of its own; two chunks with late weight gradients stand for all, on few ranks.
        and not (pp == 1 and case["schedule"] != "1f1b" and (case["schedule"] != "zb-v" or tp * dp > 2))
        and not (case["pp_before_dp"] and (pp == 1 or dp == 1))
        and not (case["overlap"] and dp == 1)
        and not (case["sharding"] != "no_shard" and dp == 1)
        and not (case["overlap_param_gather"] and case["sharding"] not in ("optim", "optim_grads"))
        and not (case["sharding"] == "optim_grads_params" and case["schedule"] in ("zb-h1", "zb-v"))  # refused
    )


@functools.cache
def recipe(style: str, tied: bool, chunks: int, batch: int, steps: int) -> Recipe:
    shape = shape_for(style, tied, chunks)
    return Recipe(shape, random_weights(shape, seed=1), random_batches(shape, steps, batch, 1, seed=2))


@functools.cache
def reference(style: str, tied: bool, chunks: int, batch: int, steps: int) -> ReferenceRun:
    r = recipe(style, tied, chunks, batch, steps)
    return train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def check(case: dict[str, Any], steps: int) -> None:
    tp, pp, dp = case["sizes"]
    chunks = chunks_for(case["schedule"])
    microbatches = 3 if pp > 1 else 2  # so that forwards and backwards alternate, or only that there is a sum
    key = (case["style"], case["tied"], pp * chunks, microbatches * dp, steps)
    settings = {name: case[name] for name in AXES if name not in ("sizes", "style", "tied")}
    layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch_size=1, bucket_size=1500, virtual_stages=chunks, **settings)
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))


def name(case: dict[str, Any]) -> str:
    words = [f"tp{case['sizes'][0]}-pp{case['sizes'][1]}-dp{case['sizes'][2]}", case["style"], case["schedule"], case["sharding"]]
    return "-".join(
        words + [name if setting is True else setting for name, setting in case.items() if setting in (True, "overlapping", "math")]
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 7, fits)
        metafunc.parametrize("case", cases, ids=name)


def test_layout_equals_one_plain_process(case: dict[str, Any], full: bool) -> None:
    check(case, 2 if full else 3)


# Within a sequence of 16 tokens each of these changes some frequencies, by its own formula.
YARN = RotaryStretch("yarn", 4.0, 12, 0.05, 1.0, whole=False, enlarged=1.2)
DYNAMIC = RotaryStretch("dynamic", 3.0, 6)
LONGROPE = RotaryStretch("longrope", 1.0, 9, enlarged=0.9, short=(9.0, 9.0, 9.0, 9.0), long=(1.0, 1.5, 2.0, 4.0))

VARIANTS = {
    "squared-relu": gpt2_like(num_layers=2, vocab=VOCAB, activation="squared_relu", bias=False, qkv_bias=True),
    "qk-norm": llama_like(num_layers=2, vocab=VOCAB, qk_norm=True, tied=True, stretch=DYNAMIC),
    # With rotary positions: without, the bias of the key norm has no true gradient, and Adam makes noise of its rounding error.
    "qk-layernorm": gpt2_like(num_layers=2, vocab=VOCAB, qk_norm=True, positions="rope"),
    "rope-part-scaled": llama_like(
        num_layers=2, vocab=VOCAB, rotary_percent=0.5, stretch=RotaryStretch("llama3", 4.0, 8192), rotary_base=1e6
    ),
    "swiglu-bias": llama_like(num_layers=2, vocab=VOCAB, bias=True, norm="LayerNorm", stretch=LONGROPE),
    "no-positions": gpt2_like(num_layers=2, vocab=VOCAB, positions="none", norm="RMSNorm"),
    "long-position-table": gpt2_like(num_layers=2, vocab=VOCAB, num_positions=40),
    "one-query-group-a-rank": llama_like(num_layers=2, vocab=VOCAB, kv_heads=2, rotary_interleaved=True, stretch=YARN),
    "tiny-vocabulary": gpt2_like(num_layers=2, vocab=3),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, pp=2, sequence_parallel=True), Layout(tp=2, dp=2)], ids=["one", "tp2-pp2-sp", "tp2-dp2"]
)
def test_model_variants_equal_the_reference(variant: str, layout: Layout) -> None:
    shape = VARIANTS[variant]
    r = Recipe(shape, random_weights(shape, seed=3), random_batches(shape, 3, 8, 2, seed=4))
    expected = train(shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert_equal_runs(run_layout(r, layout), expected)


SHARED = {"heads": 8, "head_size": 4, "ffn": 32, "num_layers": 2, "vocab": VOCAB}


@pytest.mark.parametrize(
    "kv_heads, layout",
    [
        (1, Layout(tp=2, sequence_parallel="overlapping")),
        (1, Layout(tp=4, pp=2, schedule="zb-h1")),
        (2, Layout(tp=4, dp=2, sequence_parallel=True, sharding="optim_grads_params")),
        (2, Layout(tp=8, sequence_parallel=True)),
    ],
    ids=["1 on 2", "1 on 4", "2 on 4", "2 on 8"],
)
def test_tensor_ranks_share_key_value_heads(kv_heads: int, layout: Layout) -> None:
    """Fewer heads than ranks: nothing is held twice, and all gradients are whole."""
    shape = llama_like(**SHARED, kv_heads=kv_heads, qk_norm=True, bias=True, sink="learned")
    r = Recipe(shape, random_weights(shape, seed=3), random_batches(shape, 2, 8, 2, seed=4))
    expected = train(shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert_equal_runs(run_layout(r, layout), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_the_reference(momentum: float) -> None:
    shape = gpt2_like(vocab=VOCAB)
    batches = random_batches(shape, 4, 4, 2, seed=4)
    r = Recipe(shape, random_weights(shape, seed=3), batches, lr=0.1, optimizer="sgd", update={"sgd_momentum": momentum})
    expected = train(
        shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip, optimizer="sgd", numbers=Numbers(momentum)
    )
    assert_equal_runs(run_layout(r, Layout(tp=2, dp=2)), expected)
