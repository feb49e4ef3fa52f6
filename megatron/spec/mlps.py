"""What follows attention in a layer: an MLP, or experts with a router. Their meaning is in docs/moe.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.model import Balancing, ModelConfig, RouterDtype, ScoreFunction
from megatron.spec.activations import Activation, activation_of
from megatron.spec.layer_pattern import marked, read_pattern


@dataclass(frozen=True)
class MLPSpec:
    """Two products with an activation between them."""

    width: int
    activation: Activation
    bias: bool
    offset: float = 0.0
    """What quick_geglu adds to its second half."""
    clamp: float | None = None
    """The bound to which quick_geglu clamps its input."""


@dataclass(frozen=True)
class RouterSpec:
    """How experts are chosen for a token, and what balances them."""

    experts: int
    chosen: int
    """Experts that a token passes (k)."""
    score_function: ScoreFunction
    pre_softmax: bool
    """Whether softmax is over all experts, and not over the chosen ones."""
    scaling: float
    """Factor of the probabilities."""
    groups: int
    """Groups of neighbouring experts; 1 for no groups."""
    open_groups: int
    """Groups that a token may choose from."""
    dtype: RouterDtype | None
    """Dtype of the product, in place of the model's."""
    balancing: Balancing
    balance_coeff: float
    z_coeff: float
    bias_step: float | None = None
    """By how much an update moves the bias of the scores that experts are chosen by; None: there is no bias."""
    jitter: float = 0.0
    """Noise on the input of the router: each number of it times one between 1 - jitter and 1 + jitter."""
    capacity: float | None = None
    """How many times the mean number of choices of an expert in a sequence it takes at most; None: all."""
    drops_last: bool = False
    """Whether choices of late tokens are dropped first, not those with small probabilities."""
    pads: bool = False
    """Whether the input of an expert is filled up with zeros to the most that it takes."""

    def taken(self, length: int) -> int | None:
        """Choices that an expert takes of a sequence of so many tokens, of which each chooses it once at most; None: all."""
        return None if self.capacity is None else min(length, math.ceil(self.capacity * length * self.chosen / self.experts))


@dataclass(frozen=True)
class ExpertsSpec:
    """A router, equal experts, and perhaps an expert that all tokens pass."""

    router: RouterSpec
    expert: MLPSpec
    shared: MLPSpec | None
    shared_gate: bool
    """Whether the result of the shared expert is multiplied by a sigmoid."""


def mlp_of(model: ModelConfig, width: int) -> MLPSpec:
    """An MLP of a width, as all of the model are otherwise."""
    bias = not model.disable_bias_linear or model.add_mlp_bias
    return MLPSpec(width, activation_of(model), bias, model.glu_linear_offset, model.activation_func_clamp_value)


def experts_of(model: ModelConfig) -> ExpertsSpec:
    """The experts of a layer that has some."""
    assert model.num_experts is not None
    shared = model.moe_shared_expert_intermediate_size
    router = RouterSpec(
        model.num_experts,
        model.moe_router_topk,
        model.moe_router_score_function,
        model.moe_router_pre_softmax and model.moe_router_score_function == "softmax",
        model.moe_router_topk_scaling_factor or 1.0,
        *_groups(model),
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
        mlp_of(model, model.moe_ffn_hidden_size or model.ffn_size),
        None if shared is None else mlp_of(model, shared),
        model.moe_shared_expert_gate,
    )


def _groups(model: ModelConfig) -> tuple[int, int]:
    """Groups of experts, and how many are open to a token. All open are none."""
    groups, opened = model.moe_router_num_groups or 1, model.moe_router_group_topk
    return (groups, opened) if opened < groups else (1, 1)


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether a layer, counted from 0, has experts. A number N marks the first and every N-th after it."""
    if model.num_experts is None:
        return False
    pattern = read_pattern(model.moe_layer_freq)
    return layer % pattern == 0 if isinstance(pattern, int) else marked(pattern, layer)


def has_dense_layers(model: ModelConfig) -> bool:
    """Whether a layer has one MLP. (The layers are not gone through: rules ask of models with any number of them.)"""
    pattern = read_pattern(model.moe_layer_freq)
    if model.num_experts is None or pattern is None:
        return True
    return pattern > 1 and model.num_layers > 1 if isinstance(pattern, int) else not all(pattern)
