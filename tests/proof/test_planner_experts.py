"""The planned memory of a rank whose experts get more than the mean is that of a run whose routers send everything to them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron.config.parsed_flags import DryRun
from megatron.model.build import Model
from megatron_lab.planner.dry_run import build_plan
from megatron_lab.planner.plan import Plan, plan_to_json
from megatron_lab.planner.plan_text import format_plan
from tests.proof.test_planner_activations_measured import LLAMA
from tests.support.activation_runs import measure, plan_ranks, settings
from tests.support.shared_memory import SHARED_MEMORY

_EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "expert_model_parallel_size": 2,
    **LLAMA,
}
_CAPACITY = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}


def _all_to_the_first(model: Model) -> None:
    """Biases beside which no score counts: each token passes experts 0 and 1, both of which the first rank has."""
    for entry in model.params:
        if entry.record.name.endswith("router.bias"):
            entry.param.data[:2] = 100.0


@pytest.mark.parametrize(
    ("changes", "imbalance"),
    [
        ({}, 2.0),
        pytest.param(
            {"moe_token_dispatcher_type": "allgather", "recompute_granularity": "full"},
            2.0,
            marks=pytest.mark.full("exchanged tokens here; gathered ones in even numbers in test_planner_activations_measured.py"),
        ),
        (_CAPACITY, math.inf),
    ],
    ids=["exchange", "gather", "capacity"],
)
def test_the_busiest_rank_takes_what_is_planned(changes: dict[str, Any], imbalance: float) -> None:
    """And the other one less."""
    config = settings(2, num_layers=2, **_EXPERTS | changes)
    busiest, idle = measure(config, 2, SHARED_MEMORY, _all_to_the_first)
    planned, balanced = (plan_ranks(config, 2, expert_imbalance=factor)[0].beside_inputs for factor in (imbalance, 1.0))
    print(f"planned {planned} ({balanced} balanced), measured {busiest.device} and {idle.device} bytes")
    assert abs(planned / busiest.device - 1) < 0.01
    assert idle.device < balanced < 0.98 * planned


def test_the_dry_run_tells_both() -> None:
    """Memory at even choices and at the worst, with what a layer sends."""
    changes = {**_EXPERTS, "device": "cpu", "data_parallel_sharding_strategy": "no_shard"}

    def plan(factor: float | None = None, **more: Any) -> Plan:
        return build_plan(settings(2, **changes | more), DryRun(2, 2, None, factor), 501)

    even, twice, most, whole = plan(), plan(2.0), plan(1000.0), plan(**_CAPACITY)
    assert even.experts is not None and not even.experts.unbalanced_profiles
    microbatches, choices, stays = 2, 1024 * 2, 0.5
    each_way, counts = choices * 64 * 4, 2 * 2 * 8  # float32; int64
    sent = microbatches * stays * (4 * each_way + counts)  # there and back, forward and backward
    assert even.experts.dispatched_bytes_per_layer == sent and even.experts.dispatched_bytes == 4 * sent
    for found in (twice, most):
        assert found.experts is not None and found.profiles == even.profiles
        assert found.experts.fullest.memory.total.device > even.profiles[even.fullest_index].memory.total.device
    assert twice.experts == replace(most.experts, imbalance=2.0)  # type: ignore[type-var]  # all there is goes to two experts of one rank
    assert whole.experts is not None and whole.experts.imbalance is None and whole.experts.unbalanced_profiles
    for found, words in (
        (even, "--plan-expert-imbalance FACTOR"),
        (twice, "get 2 x the mean"),
        (whole, "take their whole capacity"),
    ):
        assert any(words in line for line in format_plan(found)[:4])
        plan_to_json(found)
    with pytest.raises(ValueError, match="needs a model with experts"):
        build_plan(settings(1), DryRun(1, 1, None, 2.0), 501)
