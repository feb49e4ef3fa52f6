"""What a plan says of experts (`ExpertsPlan`): what tokens travel, and the memory of ranks whose experts get more than the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.config.model import ModelConfig
from megatron.data_parallel.traffic import axes_in_words
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.mlps import has_experts
from megatron_lab.planner.plan import ExpertsPlan, RankKind


def worst_factor(model: ModelConfig, asked: float | None) -> float:
    """How many times the mean of choices the busiest experts are planned to get: what was asked for, or any number, which their
    capacity bounds; 1 where neither is known.

    Raises:
        ValueError: it was asked for, of a model without experts.
    """
    if asked is not None and model.num_experts is None:
        raise ValueError(
            "--plan-expert-imbalance is about experts, of which the model has none. Give --num-experts, or leave it out."
        )
    if asked is None:
        return 1.0 if model.num_experts is None or model.moe_expert_capacity_factor is None else math.inf
    return asked


def experts_plan(
    model: ModelConfig,
    table: Sequence[Chunk],
    kinds: Sequence[RankKind],
    context: ParallelContext,
    asked: float | None,
    unbalanced: Sequence[RankKind],
) -> ExpertsPlan:
    """What a plan says of experts.

    Args:
        kinds: with as many choices for all experts.
        context: that of any rank.
        asked: the factor of the command line.
        unbalanced: kinds at the worst factor.
    """
    numbers = [layer for layer in range(model.num_layers) if has_experts(model, layer)]
    depths = model.mtp_num_layers if has_experts(model, model.num_layers - 1) else 0  # they are as the last layer
    by_stage: dict[int, int] = {}
    for chunk in table:
        by_stage[chunk.stage] = by_stage.get(chunk.stage, 0) + len(set(numbers) & set(chunk.layers))
        by_stage[chunk.stage] += depths * chunk.last
    over = axes_in_words(("etp", "ep"), context)
    ranks = context.expert_group.ranks
    shared = any(context.group(*axes).ranks == ranks for axes in (("tp",), ("cp",), ("tp", "cp"))) and len(ranks) > 1
    sent = {
        stage: sum(one.bytes for one in kind.sent if (one.over, one.what) == (over, "activations"))
        for kind in kinds
        for stage in kind.stages
        if by_stage[stage]
    }
    most = max(sent, key=lambda stage: sent[stage])
    return ExpertsPlan(
        len(numbers) + depths,
        None if shared else sent[most],
        None if shared else sent[most] // by_stage[most],
        asked,
        tuple(unbalanced),
    )
