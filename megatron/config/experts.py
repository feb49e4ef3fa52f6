"""Mixtures of experts: the settings of the model about them. What each of them computes is in docs/moe.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import GIVEN, OtherThan, acts_with, idle_with, setting

ScoreFunction = Literal["softmax", "sigmoid"]
Balancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
RouterDtype = Literal["fp32", "fp64"]
DropPolicy = Literal["probs", "position"]

_EXPERTS = acts_with(num_experts=GIVEN, strict=True)
_GROUPS = acts_with(moe_router_num_groups=GIVEN, strict=True)
_CAPACITY = acts_with(moe_expert_capacity_factor=GIVEN, strict=True)


@dataclass(frozen=True)
class ExpertFields:
    """Layers with experts: the router, the experts, and the losses that balance them."""

    num_experts: int | None = setting(None, at_least=2, unit="experts")
    """Give layers so many MLPs, of which a router chooses a few for each token (mixture of experts)."""
    moe_layer_freq: str = setting("1", acts=_EXPERTS)
    """Which layers have experts: the first and every N-th after it, or a list with 1 for each of them, such as ([0]*3+[1]*58)."""
    moe_ffn_hidden_size: int | None = setting(None, at_least=1, unit="channels", acts=_EXPERTS)
    """Width of an expert; by default --ffn-hidden-size."""
    moe_router_topk: int = setting(2, at_least=1, unit="experts", acts=_EXPERTS)
    """Experts that a token passes."""
    moe_shared_expert_intermediate_size: int | None = setting(None, at_least=1, unit="channels", acts=_EXPERTS)
    """Width of an expert that every token passes besides; by default there is none."""
    moe_shared_expert_gate: bool = setting(False, acts=acts_with(moe_shared_expert_intermediate_size=GIVEN, strict=True))
    """Multiply what the shared expert gives by the sigmoid of a product of the token (Qwen2-MoE)."""
    moe_router_score_function: ScoreFunction = setting("softmax", acts=_EXPERTS)
    """How the router's logits become scores."""
    moe_router_pre_softmax: bool = setting(
        False, acts=_EXPERTS, idle=idle_with("sigmoids are taken of each expert by itself", moe_router_score_function="sigmoid")
    )
    """Softmax over all experts before some are chosen, whose scores then do not sum to 1; by default it is over the chosen ones."""
    moe_router_topk_scaling_factor: float | None = setting(None, above=0, unit="factor", acts=_EXPERTS)
    """Multiply the probabilities of the chosen experts by this."""
    moe_router_num_groups: int | None = setting(None, at_least=1, unit="groups of experts", acts=_EXPERTS)
    """Divide the experts into so many groups, of which --moe-router-group-topk are open to a token."""
    moe_router_group_topk: int = setting(1, at_least=1, unit="groups of experts", acts=_GROUPS)
    """Groups of experts that are open to a token: those with the largest sums of their best scores (DeepSeek-V3)."""
    moe_router_dtype: RouterDtype | None = setting(None, acts=_EXPERTS)
    """Dtype of the router's product; by default the model's. (What follows is computed in at least float32.)"""
    moe_router_load_balancing_type: Balancing = setting("aux_loss", acts=_EXPERTS)
    """Tokens of which the balance is judged that a loss rewards: those of each microbatch, of each sequence, or of the global batch
    (whose experts' shares are those of the update before)."""
    moe_aux_loss_coeff: float = setting(
        0.0,
        at_least=0,
        unit="coefficient",
        acts=acts_with(every=True, num_experts=GIVEN, moe_router_load_balancing_type=OtherThan("none"), fix={}, strict=True),
    )
    """Coefficient of the load-balancing loss of each layer."""
    moe_z_loss_coeff: float | None = setting(None, above=0, unit="coefficient", acts=_EXPERTS)
    """Coefficient of the mean square of the log-sum-exp of the router's logits in each layer (ST-MoE)."""
    moe_router_enable_expert_bias: bool = setting(
        False, acts=acts_with(every=True, num_experts=GIVEN, moe_router_score_function="sigmoid", strict=True)
    )
    """Choose experts by their scores plus a bias, which each update raises for experts that were chosen less often than the mean,
    and lowers for others (balance without a loss, DeepSeek-V3)."""
    moe_router_bias_update_rate: float = setting(1e-3, above=0, unit="score", acts=acts_with(moe_router_enable_expert_bias=True))
    """By how much an update raises or lowers these biases."""
    moe_expert_capacity_factor: float | None = setting(None, at_least=1, unit="x the mean", acts=_EXPERTS)
    """An expert takes at most so many times its mean share of the choices in a sequence; it drops the others. By default none."""
    moe_token_drop_policy: DropPolicy = setting("probs", acts=_CAPACITY)
    """Which choices beyond that are dropped: those with the smallest probabilities, or those of the last tokens."""
    moe_pad_expert_input_to_capacity: bool = setting(False, acts=_CAPACITY)
    """Fill the input of each expert up with zeros to the most that it takes, so that its products always have the same shape."""
    moe_input_jitter_eps: float | None = setting(None, above=0, below=1, unit="share", acts=_EXPERTS)
    """Multiply the input of routers in training by random numbers between 1 - eps and 1 + eps (Switch Transformer)."""
