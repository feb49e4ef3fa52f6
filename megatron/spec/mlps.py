"""Specifications of the second half of a layer: an MLP, or experts with a router. docs/moe.md explains the settings of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.model import Balancing, ModelConfig, RouterDtype, ScoreFunction
from megatron.spec.activations import Activation, get_activation
from megatron.spec.layer_pattern import is_marked, parse_pattern


@dataclass(frozen=True)
class MLPSpec:
    """Specification of an MLP: two linear layers with an activation in between."""

    ffn_size: int
    activation: Activation
    bias: bool
    linear_offset: float = 0.0
    """Constant that the quick_geglu activation adds to the linear (value) half of its input."""
    clamp_value: float | None = None
    """Limit of the inputs of the quick_geglu activation: gate values are clamped to at most this limit, and the linear (value) half
    to between minus this limit and this limit. None for no clamping."""


@dataclass(frozen=True)
class RouterSpec:
    """Specification of a router: how experts are selected for a token, and how the load of the experts is balanced."""

    num_experts: int
    top_k: int
    """Number of experts that are selected for a token."""
    score_function: ScoreFunction
    pre_softmax: bool
    """Whether the softmax is over all experts, before the top-k selection. Otherwise it is over the selected experts."""
    scaling_factor: float
    """Number by which the router's output probabilities are multiplied."""
    num_groups: int
    """Number of groups of consecutive experts for group-limited routing; 1 for no groups."""
    top_k_groups: int
    """Number of expert groups from which the experts of a token may be selected."""
    dtype: RouterDtype | None
    """Dtype of the router's matrix product; None for the dtype of the model."""
    balancing: Balancing
    aux_loss_coeff: float
    """Coefficient of the load-balancing auxiliary loss."""
    z_loss_coeff: float
    """Coefficient of the router z-loss."""
    bias_update_rate: float | None = None
    """Amount by which an optimizer step changes the per-expert bias that is added to scores for the selection; None for no bias."""
    input_jitter: float = 0.0
    """Noise on the router's input: each element is multiplied by a random number between 1 - input_jitter and 1 + input_jitter."""
    capacity_factor: float | None = None
    """Capacity of an expert (the largest number of tokens it accepts), as a multiple of the mean number of tokens per expert;
    None for no limit."""
    drops_by_position: bool = False
    """Whether an expert above its capacity drops the last tokens. Otherwise it drops the tokens with the lowest
    probabilities."""
    pads_to_capacity: bool = False
    """Whether the input of each expert is padded with zeros to its capacity."""

    def get_capacity(self, num_tokens: int) -> int | None:
        """Return how many tokens an expert accepts from a sequence of `num_tokens` tokens; None for no limit.

        A token is assigned to an expert at most once, so the capacity never exceeds `num_tokens`.
        """
        return (
            None
            if self.capacity_factor is None
            else min(num_tokens, math.ceil(self.capacity_factor * num_tokens * self.top_k / self.num_experts))
        )


@dataclass(frozen=True)
class ExpertsSpec:
    """Specification of a mixture of experts: a router, experts of equal shape, and optionally a shared expert that processes all
    tokens."""

    router: RouterSpec
    expert: MLPSpec
    shared_expert: MLPSpec | None
    has_shared_gate: bool
    """Whether the output of the shared expert is multiplied by a sigmoid gate."""


def build_mlp_spec(model: ModelConfig, ffn_size: int) -> MLPSpec:
    """Build the specification of an MLP with an intermediate size of `ffn_size`. All other properties follow from the model
    settings."""
    bias = not model.disable_bias_linear or model.add_mlp_bias
    return MLPSpec(ffn_size, get_activation(model), bias, model.glu_linear_offset, model.activation_func_clamp_value)


def build_experts_spec(model: ModelConfig) -> ExpertsSpec:
    """Build the specification of a layer's experts. The model settings must have experts."""
    assert model.num_experts is not None
    shared_ffn_size = model.moe_shared_expert_intermediate_size
    router = RouterSpec(
        model.num_experts,
        model.moe_router_topk,
        model.moe_router_score_function,
        model.moe_router_pre_softmax and model.moe_router_score_function == "softmax",
        model.moe_router_topk_scaling_factor or 1.0,
        *_resolve_group_routing(model),
        model.moe_router_dtype,
        model.moe_router_load_balancing_type,
        model.moe_aux_loss_coeff,
        model.moe_z_loss_coeff or 0.0,
        model.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else None,
        model.moe_input_jitter_eps or 0.0,
        model.moe_expert_capacity_factor,
        model.moe_token_drop_policy == "position",
        model.moe_pad_expert_input_to_capacity,
    )
    return ExpertsSpec(
        router,
        build_mlp_spec(model, model.moe_ffn_hidden_size or model.ffn_size),
        None if shared_ffn_size is None else build_mlp_spec(model, shared_ffn_size),
        model.moe_shared_expert_gate,
    )


def _resolve_group_routing(model: ModelConfig) -> tuple[int, int]:
    """Return the number of expert groups, and from how many of them the experts of a token may be selected. (1, 1) for no
    restriction."""
    num_groups, top_k_groups = model.moe_router_num_groups or 1, model.moe_router_group_topk
    return (num_groups, top_k_groups) if top_k_groups < num_groups else (1, 1)


def has_experts(model: ModelConfig, layer_index: int) -> bool:
    """Return whether a layer has experts. With a number N in --moe-layer-freq, layer 0 and every N-th layer after it have experts.

    Args:
        layer_index: counted from 0.
    """
    if model.num_experts is None:
        return False
    pattern = parse_pattern(model.moe_layer_freq)
    return layer_index % pattern == 0 if isinstance(pattern, int) else is_marked(pattern, layer_index)


def has_dense_layers(model: ModelConfig) -> bool:
    """Return whether any layer has a dense MLP instead of experts.

    The function does not iterate over the layers, because checks of the settings call it for an arbitrarily large number of layers.
    """
    pattern = parse_pattern(model.moe_layer_freq)
    if model.num_experts is None or pattern is None:
        return True
    return pattern > 1 and model.num_layers > 1 if isinstance(pattern, int) else not all(pattern)
