"""The proof: in float64, every layout trains exactly as one process written plainly does, with every feature of a run.

Losses and gradient norms of each step, every gradient of the first and every weight after the last are compared. The second step
begins from what the first left behind; in the normal run some cases do with one. The normal run takes few cases, each with many
features, in which every pair of settings of each feature occurs (`python -m tests.layouts.pairs` counts them); `--full` takes the
whole product of every feature.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lab.verification.reference.rotary import RotaryScaling
from megatron_lab.verification.reference.shape import build_random_weights, is_trained
from megatron_lab.verification.reference.update_rules import RuleOptions
from tests.layouts.case import DEFAULTS, LORA, layout_of, recipe_of, reference_of
from tests.layouts.features import FEATURES
from tests.layouts.pairs import written_cases, written_steps
from tests.support.covering import Case, full_but
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import gpt2_like, llama_like, random_batches, train

VOCAB = 61  # divides by no tensor size: the last rank holds padding


def name(case: Case) -> str:
    """Changes of the usual case."""
    usual = {axis: value for axis, value in case.items() if value != DEFAULTS[axis]}
    words = [value if isinstance(value, str) else axis if value is True else f"{axis}{value}" for axis, value in usual.items()]
    return "-".join(words) or "nothing"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases: list[tuple[Case, int | None]] = [*zip(written_cases(), written_steps(), strict=True)]
        if metafunc.config.getoption("--full"):
            cases = [(case, None) for feature in FEATURES.values() for case in feature.cases()]
        metafunc.parametrize(("case", "steps"), cases, ids=[name(case) for case, _ in cases])


def check(case: Case, steps: int | None = None) -> None:
    recipe = recipe_of(case, steps)
    found = run_layout(recipe, layout_of(case))
    assert_equal_runs(found, reference_of(recipe))
    if case["lora"]:
        for name, before in recipe.weights.items():
            assert torch.equal(found.weights_after[name], before) is not is_trained(recipe.shape, name), name
        assert all(is_trained(recipe.shape, name) for name in found.first_gradients)


def test_layout_equals_one_plain_process(case: Case, steps: int | None) -> None:
    check(case, steps)


BETWEEN = {"tp": 2, "sequence_parallel": True}
COMPILED: list[dict[str, Any]] = [
    {"style": "norms over all heads", "documents": "all", "depths": 2, "z_loss": 0.05, "smoothing": 0.3, **BETWEEN},
    {"style": "two bases", "documents": "all", "lora": LORA[0], "memory": "full, host"},
    {"style": "sinks", "documents": "all", "cp": 2, "way": "each"},
    {"experts": "top 2", "dispatcher": "alltoall", "schedule": "zb-h1", "documents": "all", "ep": 2, "etp": 1, **BETWEEN},
]
APART: list[dict[str, Any]] = [
    {"style": "sinks"},
    {"style": "two bases", "documents": "all"},
    {"style": "norms over all heads", **BETWEEN},
    {"style": "latents", **BETWEEN},
    {"style": "latents, windows", "documents": "all"},
    {"style": "latents, windows", "documents": "all", **BETWEEN},
    *({"style": "yarn", "documents": "all", "cp": 2, "way": way} for way in ("all_gather", "p2p", "a2a")),
    {"lora": LORA[0], **BETWEEN},
    {"depths": 2, "documents": "all", "z_loss": 0.05, "smoothing": 0.3, "memory": "full, host"},
    {"depths": 2, "documents": "all", "z_loss": 0.05, "smoothing": 0.3, **BETWEEN},
    {"experts": "top 4, gated shared, dropped by probability", "dispatcher": "alltoall", "depths": 1},
    {"experts": "sigmoids in groups with biases, shared", "dispatcher": "alltoall", "dp": 2, "ep": 2},
    {"experts": "dropped by position, padded", "dispatcher": "allgather", **BETWEEN},
    {"experts": "top 2", "dispatcher": "alltoall", "pp": 2, "schedule": "zb-h1", "documents": "all"},
]


@pytest.mark.parametrize(
    "settings",
    full_but(COMPILED, COMPILED + APART, "the other compiled cases, which have several of these parts each"),
    ids=lambda settings: name({**DEFAULTS, **settings}),
)
def test_compiled_layers_do_the_same(settings: dict[str, Any]) -> None:
    """Operations without a kernel of torch stand between two graphs; sums over tensor ranks within one are summed both ways."""
    check({**DEFAULTS, **settings, "compiled": True})


# Within a sequence of 16 tokens each of these changes some frequencies, by its own formula.
YARN = RotaryScaling("yarn", 4.0, 12, 0.05, 1.0, rounds_bounds=False, attention_factor=1.2)
DYNAMIC = RotaryScaling("dynamic", 3.0, 6)
LONGROPE = RotaryScaling(
    "longrope", 1.0, 9, attention_factor=0.9, short_factors=(9.0, 9.0, 9.0, 9.0), long_factors=(1.0, 1.5, 2.0, 4.0)
)

VARIANTS = {
    "squared-relu": gpt2_like(num_layers=2, vocab=VOCAB, activation="squared_relu", bias=False, qkv_bias=True),
    "qk-norm": llama_like(num_layers=2, vocab=VOCAB, qk_norm=True, tied=True, rope_scaling=DYNAMIC),
    # With rotary positions: without, the bias of the key norm has no true gradient, and Adam makes noise of its rounding error.
    "qk-layernorm": gpt2_like(num_layers=2, vocab=VOCAB, qk_norm=True, positions="rope"),
    "rope-part-scaled": llama_like(
        num_layers=2, vocab=VOCAB, rotary_percent=0.5, rope_scaling=RotaryScaling("llama3", 4.0, 8192), rotary_base=1e6
    ),
    "swiglu-bias": llama_like(num_layers=2, vocab=VOCAB, bias=True, norm="LayerNorm", rope_scaling=LONGROPE),
    "no-positions": gpt2_like(num_layers=2, vocab=VOCAB, positions="none", norm="RMSNorm"),
    "long-position-table": gpt2_like(num_layers=2, vocab=VOCAB, num_positions=40),
    "one-query-group-a-rank": llama_like(num_layers=2, vocab=VOCAB, kv_heads=2, rotary_interleaved=True, rope_scaling=YARN),
    "tiny-vocabulary": gpt2_like(num_layers=2, vocab=3),
}


PLACES = {"one": Layout(), "tp2-pp2-sp": Layout(tp=2, pp=2, sequence_parallel=True), "tp2-dp2": Layout(tp=2, dp=2)}
VARIANTS_AT_PLACES = [(variant, place) for place in PLACES for variant in VARIANTS]


@pytest.mark.parametrize(
    ("variant", "place"),
    full_but(
        [(variant, "tp2-pp2-sp") for variant in VARIANTS], VARIANTS_AT_PLACES, "the same variant over tensor ranks and stages"
    ),
)
def test_model_variants_equal_the_reference(variant: str, place: str) -> None:
    shape, layout = VARIANTS[variant], PLACES[place]
    r = Recipe(shape, build_random_weights(shape, seed=3), random_batches(shape, 2, 4, 2, seed=4))
    expected = train(shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert_equal_runs(run_layout(r, layout), expected)


SHARED = {"heads": 8, "head_size": 4, "ffn": 32, "num_layers": 2, "vocab": VOCAB}


@pytest.mark.parametrize(
    "kv_heads, layout",
    [
        (1, Layout(tp=2, sequence_parallel="overlapping", schedule="zb-h1")),
        (2, Layout(tp=4, dp=2, sequence_parallel=True, sharding="optim_grads_params")),
        pytest.param(1, Layout(tp=4, pp=2, schedule="zb-h1"), marks=pytest.mark.full("1 on 2, with late weight gradients too")),
        pytest.param(2, Layout(tp=8, sequence_parallel=True), marks=pytest.mark.full("2 on 4")),
    ],
    ids=["1 on 2", "2 on 4", "1 on 4", "2 on 8"],
)
def test_tensor_ranks_share_key_value_heads(kv_heads: int, layout: Layout) -> None:
    """Fewer heads than ranks: nothing is held twice, and all gradients are whole."""
    shape = llama_like(**SHARED, kv_heads=kv_heads, qk_norm=True, bias=True, sink="learned")
    r = Recipe(shape, build_random_weights(shape, seed=3), random_batches(shape, 2, 4, 2, seed=4))
    expected = train(shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert_equal_runs(run_layout(r, layout), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_the_reference(momentum: float) -> None:
    shape = gpt2_like(vocab=VOCAB)
    batches = random_batches(shape, 4, 4, 2, seed=4)
    r = Recipe(shape, build_random_weights(shape, seed=3), batches, lr=0.1, optimizer="sgd", update={"sgd_momentum": momentum})
    expected = train(
        shape,
        r.weights,
        r.batches,
        lr=r.lr,
        weight_decay=r.weight_decay,
        clip=r.clip,
        optimizer="sgd",
        numbers=RuleOptions(momentum),
    )
    assert_equal_runs(run_layout(r, Layout(tp=2, dp=2)), expected)
