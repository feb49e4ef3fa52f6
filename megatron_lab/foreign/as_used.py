"""A model as it is used: what is exported, and what generates text. It lacks what only training needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megatron.config.model import ModelConfig
from megatron.spec.weights import depth_of, model_weights
from megatron_lab.foreign.adapters import merged
from megatron_lab.foreign.source import OtherModel, TensorInfo, WeightSource

_OF_TRAINING = ("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity", "moe_input_jitter_eps")


def as_used(source: WeightSource) -> WeightSource:
    """The model without multi-token prediction, which predicts the next token as before, and without what balances experts: they
    take all tokens; adapters are added to the weights. A source of such a model as it is."""
    source = merged(source)
    plain: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name in _OF_TRAINING}
    if source.model.moe_router_load_balancing_type == "global_aux_loss":  # which keeps the shares of experts
        plain["moe_router_load_balancing_type"] = "aux_loss"
    model = dataclasses.replace(source.model, mtp_num_layers=0, **plain)
    return source if model == source.model else _Used(source, model)


class _Used(OtherModel):
    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        super().__init__(source, model)
        kept = {weight.name for weight in model_weights(model, source.vocab_size)}
        self.weights: Mapping[str, TensorInfo] = {name: one for name, one in source.weights.items() if name in kept}
        self.notes = [*source.notes]
        left = [math.prod(one.shape) for name, one in source.weights.items() if depth_of(name) is not None]
        if left:
            self.notes.append(
                f"the {len(left)} tensors of multi-token prediction (--mtp-num-layers {source.model.mtp_num_layers}; {sum(left):,} "
                "parameters) are left out: they change no logit of the next token"
            )
        if source.model.moe_expert_capacity_factor is not None:
            self.notes.append(
                f"experts take all tokens; in training they took --moe-expert-capacity-factor "
                f"{source.model.moe_expert_capacity_factor:g} x the mean"
            )
