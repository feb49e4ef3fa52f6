"""Ranks of a stage that keep the same are found without asking each: against asking each, in worlds with far more data ranks than a
bucket has parameters, so that most slices lie within one of them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.cli import LoadedConfig
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.topology import Topology
from megatron.spec.schedules import build_schedule
from megatron_lab.planner.plan import RankRange
from megatron_lab.planner.rank_profiles import RankContent, group_ranks_by_content
from megatron_lab.planner.state_layout import StateMemory
from megatron_lab.planner.state_report import build_stage_layout
from megatron_lab.planner.state_size import OptimizerState
from tests.support.other_places import elsewhere
from tests.support.planned import real_model, settings

RANKS = 2 * 2 * 150
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 26,
    "disable_bias_linear": True,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "make_vocab_size_divisible_by": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "no_shard": {},
    "optim": {"data_parallel_sharding_strategy": "optim", "ddp_bucket_size": 9000},
    "optim_grads": {"data_parallel_sharding_strategy": "optim_grads"},
    "offloaded in part": {
        "data_parallel_sharding_strategy": "optim",
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.3,
        "ddp_bucket_size": 20000,
    },
    "rows, columns": {
        "data_parallel_sharding_strategy": "optim",
        "optimizer": "adafactor",
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.3,
        "ddp_bucket_size": 9000,
    },
    "blocks": {"data_parallel_sharding_strategy": "optim_grads", "optimizer": "adam8bit", "adam_8bit_block_size": 4},
    "offloaded": {"data_parallel_sharding_strategy": "optim_grads", "optimizer_cpu_offload": True},
    "in parts, some empty": {"data_parallel_sharding_strategy": "optim_grads_params", "fsdp_params_cpu": True},
    "in parts": {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "fsdp_shard_size": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "experts": {**EXPERTS, "data_parallel_sharding_strategy": "optim_grads", "ddp_bucket_size": 9000},
    "experts, fully": {**EXPERTS, "data_parallel_sharding_strategy": "optim_grads_params"},
    "experts, in parts": {**EXPERTS, "data_parallel_sharding_strategy": "optim_grads_params", "fsdp_shard_size": 6},
}


def found_and_asked(one: LoadedConfig) -> list[tuple[dict[RankContent, list[RankRange]], dict[tuple[int, int], StateMemory]]]:
    """Of both stages: what is found, and the memory of each place."""
    config, topology = one.config, Topology.of(one.config.parallel, RANKS)
    schedule = build_schedule("1f1b", 2, 2)
    result = []
    for stage in range(2):
        context = connect_fake(topology, topology.find_rank(pp=stage, dp=7), config.parallel.fsdp_shard_size)
        model = real_model(config, context)
        layout = build_stage_layout(model, context, config.parallel, config.optimizer, schedule.ops[stage], 2)
        state = OptimizerState(config.optimizer, context.axis_sizes, "cuda")
        asked = {
            (tensor, data): layout.compute_memory(
                layout.compute_rank_states(elsewhere(context, tensor=tensor, data=data, stage=stage)), state.compute_memory
            )
            for tensor in range(topology.tp)
            for data in range(topology.dp)
        }
        result.append((group_ranks_by_content(model, layout, context, state), asked))
        disconnect()
    return result


@pytest.mark.parametrize(
    ("case", "sequence_parallel"),
    [
        pytest.param(
            case,
            split,
            marks=() if "experts" in case or split == bool(number % 2) else pytest.mark.full("each case at one of the two"),
        )
        for number, case in enumerate(CASES)
        for split in (False, True)
        if split or "experts" not in case
    ],
)
def test_every_place_is_found_once_with_its_memory(case: str, sequence_parallel: bool) -> None:
    layout: dict[str, Any] = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    # A hidden size that no multiple of 64 divides, so that padding differs from slice to slice.
    shape: dict[str, Any] = {"hidden_size": 40, "num_attention_heads": 4, "global_batch_size": None, "bf16": True}
    one = settings(RANKS, **layout, **shape, **CASES[case], sequence_parallel=sequence_parallel)
    for found, asked in found_and_asked(one):
        told = [((places.tensor, data), memory) for (_, memory), each in found.items() for places in each for data in places.data]
        assert len(told) == len(asked) == 2 * 150 and dict(told) == asked
        if case != "no_shard" and "in parts" not in case.split(", ")[-1:]:
            assert 1 < len(set(asked.values())) < 150, "some differ, most do not"
