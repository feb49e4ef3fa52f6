"""Plan of a model's experts (`ExpertsPlan`): traffic of the token dispatch, and memory of ranks whose experts get more tokens than
the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.config.model import ModelConfig
from megatron.data_parallel.traffic import format_axes
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.mlps import has_experts
from megatron_lab.planner.plan import ExpertsPlan, RankProfile


def get_worst_imbalance(model: ModelConfig, requested: float | None) -> float:
    """Return the imbalance that a plan assumes for the memory of experts: the number of token assignments to the experts of the
    busiest rank, divided by the mean over the ranks.

    This is `requested` (--plan-expert-imbalance) if that is set. Otherwise it is 1 if the experts have no capacity. With a capacity
    it is infinity, because the capacity then limits the assignments.

    Raises:
        ValueError: an imbalance was requested for a model without experts.
    """
    if requested is not None and model.num_experts is None:
        raise ValueError(
            "--plan-expert-imbalance needs a model with experts. Give --num-experts, or remove --plan-expert-imbalance."
        )
    if requested is None:
        return 1.0 if model.num_experts is None or model.moe_expert_capacity_factor is None else math.inf
    return requested


def build_experts_plan(
    model: ModelConfig,
    layer_table: Sequence[Chunk],
    profiles: Sequence[RankProfile],
    context: ParallelContext,
    requested: float | None,
    unbalanced_profiles: Sequence[RankProfile],
) -> ExpertsPlan:
    """Compute the traffic of the token dispatch, and collect the memory of ranks whose experts get more tokens than the mean.

    Args:
        layer_table: model chunks, with the stage and the layers of each.
        profiles: memory and traffic of the ranks if all experts get equally many tokens.
        context: parallel context of any rank.
        requested: value of --plan-expert-imbalance, or None.
        unbalanced_profiles: memory and traffic of the ranks at the imbalance that `get_worst_imbalance` returns.
    """
    moe_layers = [layer for layer in range(model.num_layers) if has_experts(model, layer)]
    # MTP layers have the type of the last layer.
    num_mtp_layers = model.mtp_num_layers if has_experts(model, model.num_layers - 1) else 0
    layers_by_stage: dict[int, int] = {}
    for chunk in layer_table:
        layers_by_stage[chunk.stage] = layers_by_stage.get(chunk.stage, 0) + len(set(moe_layers) & set(chunk.layers))
        layers_by_stage[chunk.stage] += num_mtp_layers * chunk.is_last
    group_name = format_axes(("etp", "ep"), context)
    ranks = context.expert_group.ranks
    is_shared = any(context.group(*axes).ranks == ranks for axes in (("tp",), ("cp",), ("tp", "cp"))) and len(ranks) > 1
    bytes_by_stage = {
        stage: sum(entry.bytes for entry in profile.traffic if (entry.over, entry.what) == (group_name, "activations"))
        for profile in profiles
        for stage in profile.stages
        if layers_by_stage[stage]
    }
    busiest = max(bytes_by_stage, key=lambda stage: bytes_by_stage[stage])
    return ExpertsPlan(
        len(moe_layers) + num_mtp_layers,
        None if is_shared else bytes_by_stage[busiest],
        None if is_shared else bytes_by_stage[busiest] // layers_by_stage[busiest],
        requested,
        tuple(unbalanced_profiles),
    )
