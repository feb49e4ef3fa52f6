"""Products in 8 bits are the same at every layout: scales are those of one process. In float64, where the formats are emulated and
sums are exact enough that no number falls to the other side of a rounding, this is seen to 1e-10.

The reference rounds by arithmetic of its own. It computes microbatch by microbatch, since scales follow from a microbatch.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.memory import MemoryConfig
from megatron_lab.verification.reference.eight_bits import Fp8Spec
from megatron_lab.verification.reference.model import Batch, compute_token_losses
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, Weights, build_random_weights
from tests.support.covering import covering, product
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, deepseek_like, gpt2_like, llama_like, random_batches, train

STEPS, MICRO = 2, 2
AXES: dict[str, list[Any]] = {
    "sizes": [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2)],
    "cp": [1, 2],
    "recipe": ["tensorwise", "rowwise", "blockwise"],
    "style": ["gpt2", "llama", "deepseek"],
    "hybrid": [True, False],
    "ends": [(0, 0), (1, 1)],
    "sequence_parallel": [False, True],
    "schedule": ["1f1b", "zb-h1"],
    "sharding": ["no_shard", "optim", "optim_grads_params"],
    "memory": ["kept", "full", "selective"],
}
MEMORY = {
    "kept": MemoryConfig(),
    "full": MemoryConfig(recompute_granularity="full"),
    "selective": MemoryConfig(
        recompute_granularity="selective", recompute_modules=("core_attn", "layernorm", "mlp_act"), cpu_offload_activations=True
    ),
}


def fits(case: dict[str, Any]) -> bool:
    tp, pp, dp = case["sizes"]
    return (
        not (case["sequence_parallel"] and tp == 1)
        and not (case["sharding"] != "no_shard" and dp == 1)
        and not (case["schedule"] != "1f1b" and pp == 1)
        and not (case["schedule"] != "1f1b" and case["sharding"] == "optim_grads_params")
        and not (case["cp"] > 1 and case["recipe"] == "blockwise")  # refused
        and not (tp * pp * dp > 2 and case["recipe"] == "blockwise")  # blocks of 128 need a larger model
    )


@functools.cache
def recipe(style: str, eight: Fp8Spec, ends: tuple[int, int]) -> Recipe:
    like, gated = (gpt2_like, 1) if style == "gpt2" else (llama_like, 2)
    more: dict[str, Any] = {"mtp_depths": 1, "mtp_factor": 0.6} if style == "gpt2" else {}
    if style == "deepseek":
        like, unit = deepseek_like, 128 if eight.recipe == "blockwise" else 4
        more = {"latent": LatentShape(None, unit, qk_head_dim=unit // 2, qk_pos_emb_head_dim=unit, v_head_dim=unit)}
    if eight.recipe == "blockwise":  # on two tensor ranks whole blocks everywhere; 128 tokens in a microbatch
        # 768 rows of queries, keys and values, or 512: two query heads for each key-value head
        sizes = {"hidden": 128, "ffn": 256, "heads": 4, "kv_heads": 4 // gated, "head_size": 64, "seq": 64}
    else:
        sizes = {"hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 4, "head_size": 8, "seq": 8}
    if eight.recipe == "blockwise" and style == "deepseek":
        sizes |= {"kv_heads": 4, "seq": 128}  # tensor ranks divide the tokens of latents
    shape = like(**more, num_layers=2 + ends[0], vocab=61, fp8=eight, num_unquantized_layers=ends, **sizes)
    return Recipe(shape, build_random_weights(shape, seed=1), random_batches(shape, STEPS, 2 * MICRO, MICRO, seed=2))


def loss_by_microbatch(shape: ReferenceShape, weights: Weights, batch: Batch) -> Tensor:
    """Mean over the tokens of the batch that the mask keeps, computed microbatch by microbatch."""
    parts = zip(*(tensor.split(MICRO) for tensor in batch), strict=True)
    sums = [(compute_token_losses(shape, weights, tokens, labels, mask=mask) * mask).sum() for tokens, labels, mask in parts]
    return torch.stack(sums).sum() / batch[2].sum()


@functools.cache
def reference(*key: Any) -> ReferenceRun:
    r = recipe(*key)
    return train(r.shape, r.weights, r.batches, loss=loss_by_microbatch, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 2693, fits)
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(str(value).replace(", ", "") for value in case.values()))


def test_a_layout_equals_one_plain_process(case: dict[str, Any]) -> None:
    tp, pp, dp = case["sizes"]
    key = (case["style"], Fp8Spec(case["recipe"], case["hybrid"]), case["ends"])
    settings = {name: case[name] for name in ("sequence_parallel", "schedule", "sharding")}
    layout = Layout(cp=case["cp"], tp=tp, pp=pp, dp=dp, micro_batch_size=MICRO, memory=MEMORY[case["memory"]], **settings)
    assert_equal_runs(run_layout(recipe(*key), layout), reference(*key))
