"""The settings of a model with defaults filled in, so that two spellings of one model are equal."""

from __future__ import annotations

import dataclasses

from megatron.config.model import ModelConfig
from megatron.spec.layer_pattern import pattern_text
from megatron.spec.mlps import experts_of, has_experts


def effective(model: ModelConfig) -> ModelConfig:
    """The settings with defaults filled in, so that a missing one equals the default. What has no effect is the same in all."""
    learned = model.position_embedding_type == "learned_absolute"
    return dataclasses.replace(
        _with_experts_spelt_out(model),
        kv_channels=model.head_size,
        num_query_groups=model.num_key_value_heads,
        group_query_attention=False,  # only the number of key-value heads counts
        max_position_embeddings=model.num_positions if learned else None,
        lora_alpha=None if model.lora_rank is None else model.lora_scale * model.lora_rank,
        lora_targets=tuple(sorted(model.lora_targets)),
    )


def _with_experts_spelt_out(model: ModelConfig) -> ModelConfig:
    """The same of MLPs and experts."""
    found = dataclasses.replace(model, ffn_hidden_size=model.ffn_size)
    if model.num_experts is None:
        return found
    marks, of_layer = tuple(has_experts(model, layer) for layer in range(model.num_layers)), experts_of(model)
    router = of_layer.router
    return dataclasses.replace(
        found,
        ffn_hidden_size=None if all(marks) else model.ffn_size,
        moe_layer_freq=pattern_text(marks),
        moe_ffn_hidden_size=of_layer.expert.width,
        moe_router_pre_softmax=router.pre_softmax,
        moe_router_topk_scaling_factor=router.scaling,
        moe_router_num_groups=router.groups,
        moe_router_group_topk=router.open_groups,
    )
