"""What sharding and overlap may not change by a single bit, at one layout: losses, norms, gradients and weights.

`optim` is `no_shard` where the library's reduce-scatter sums as its all-reduce does, which gloo's do. `optim_grads` is too with one
microbatch; with several it sums over the ranks before it sums over the microbatches. `optim_grads_params` sums in other groups.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.covering import full_but
from tests.support.equality import assert_same_bits
from tests.support.layout import Layout, LayoutRun, Recipe, run_layout
from tests.support.reference_runs import gpt2_like, random_batches

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp3": {"dp": 3},
    "dp4": {"dp": 4},
    "tp2-dp2-sp": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "pp2-dp2": {"pp": 2, "dp": 2},
    "pp2-dp2-interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "pp2-dp2-zb-h1": {"pp": 2, "dp": 2, "schedule": "zb-h1"},
    "pp2-dp2-zb-v": {"pp": 2, "dp": 2, "schedule": "zb-v", "virtual_stages": 2},
}
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@functools.cache
def recipe(chunks: int, sequences: int) -> Recipe:
    """A tied model; microbatches of one sequence."""
    # Every dimension divides by two, three and four, so that no strategy pads the vocabulary, which would cut it otherwise.
    shape = gpt2_like(num_layers=chunks, hidden=24, ffn=48, heads=6, kv_heads=6, head_size=4, vocab=60, seq=12, tied=True)
    return Recipe(shape, build_random_weights(shape, seed=1), random_batches(shape, STEPS, sequences, 1, seed=2), clip=0.3)


@functools.cache
def trained(where: str, precision: str, microbatches: int, sharding: str, **settings: Any) -> LayoutRun:
    basis = Layout(bucket_size=2000, micro_batch_size=1, overlap=False, sharding=sharding, dtype=PRECISIONS[precision])  # type: ignore[arg-type]
    layout = replace(basis, **LAYOUTS[where], **settings)
    chunks = layout.pp * (layout.virtual_stages or 1)
    found = run_layout(recipe(chunks, microbatches * layout.dp), layout)
    assert all(norm > 0.3 for norm in found.grad_norms), "else clipping is not seen"
    return found


CASES = [(where, "bfloat16") for where in LAYOUTS] + [("dp3", "float16"), ("dp3", "float32"), ("pp2-dp2", "float64")]
MICROBATCHES = 3


only = functools.partial(full_but, instead="the same test at layouts that have more axes")


@pytest.mark.parametrize(
    ("where", "precision"), only([("tp2-dp2-sp", "bfloat16"), ("pp2-dp2-zb-v", "bfloat16"), ("dp3", "float16")], CASES)
)
def test_sharding_the_optimizers_state_changes_no_bit(where: str, precision: str) -> None:
    assert_same_bits(trained(where, precision, MICROBATCHES, "optim"), trained(where, precision, MICROBATCHES, "no_shard"))


@pytest.mark.parametrize("where", only(["tp2-dp2-sp"], ["dp3", "tp2-dp2-sp", "pp2-dp2-zb-h1"]))
def test_with_one_microbatch_sharding_gradients_changes_no_bit(where: str) -> None:
    assert_same_bits(trained(where, "bfloat16", 1, "optim_grads"), trained(where, "bfloat16", 1, "no_shard"))


@pytest.mark.parametrize(
    ("where", "sharding"),
    only(
        [
            ("dp3", "no_shard"),
            ("tp2-dp2-sp", "optim"),
            ("tp2-dp2-sp", "optim_grads_params"),
            ("pp2-dp2-interleaved", "optim_grads_params"),
            ("pp2-dp2-zb-v", "optim_grads"),
        ],
        [
            (where, sharding)
            for where in LAYOUTS
            for sharding in ("no_shard", "optim", "optim_grads", "optim_grads_params")
            if where not in ("dp2", "dp4") and not (sharding == "optim_grads_params" and "zb" in where)
        ],
    ),
)
def test_overlap_changes_no_bit(where: str, sharding: str) -> None:
    """Of reductions and gathers; under optim_grads_params of what is tied and, under sequence parallelism, of norms."""
    overlap: dict[str, Any] = {"overlap": True, "overlap_param_gather": sharding in ("optim", "optim_grads")}
    waiting = trained(where, "bfloat16", MICROBATCHES, sharding)
    assert_same_bits(trained(where, "bfloat16", MICROBATCHES, sharding, **overlap), waiting)


@pytest.mark.parametrize("sharding", ["optim", "optim_grads"])
def test_gathering_late_changes_no_bit(sharding: str) -> None:
    """Without any other overlap."""
    waiting = trained("pp2-dp2", "bfloat16", MICROBATCHES, sharding)
    assert_same_bits(trained("pp2-dp2", "bfloat16", MICROBATCHES, sharding, overlap_param_gather=True), waiting)


NEVER = ("pp2-dp2-interleaved", {"fsdp_reshard": "never", "offload": 0.5})


@pytest.mark.parametrize(("where", "settings"), only([NEVER], [("dp3", {}), NEVER]))
def test_parameters_in_host_memory_change_no_bit(where: str, settings: dict[str, Any]) -> None:
    here = trained(where, "bfloat16", MICROBATCHES, "optim_grads_params", **settings)
    assert_same_bits(trained(where, "bfloat16", MICROBATCHES, "optim_grads_params", **settings, params_cpu=True), here)


def test_with_one_microbatch_reducing_once_changes_no_bit() -> None:
    each = trained("dp3", "bfloat16", 1, "optim_grads_params")
    assert_same_bits(trained("dp3", "bfloat16", 1, "optim_grads_params", reduce_once=True), each)


@pytest.mark.parametrize(
    ("where", "sharding"),
    only(
        [("dp3", "optim_grads"), ("tp2-dp2-sp", "optim_grads_params")],
        [(where, sharding) for where in ("dp3", "tp2-dp2-sp", "pp2-dp2") for sharding in ("optim_grads", "optim_grads_params")],
    ),
)
def test_elsewhere_only_the_order_of_float32_sums_differs(where: str, sharding: str) -> None:
    """The first loss is the same, bit for bit, and gradients are as near as float32 sums in two orders are. (Sums in bfloat16 are
    a thousand times further away.)"""
    found, expected = trained(where, "bfloat16", MICROBATCHES, sharding), trained(where, "bfloat16", MICROBATCHES, "no_shard")
    assert found.losses[0] == expected.losses[0]
    assert found.first_gradients.keys() == expected.first_gradients.keys()
    for name, gradient in expected.first_gradients.items():
        assert (found.first_gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
