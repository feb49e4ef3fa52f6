"""Rules about mixtures of experts: what routers choose from, and how ranks divide experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    RANKS,
    Finding,
    at_most,
    change,
    divides,
    divisors,
    exclude_each_other,
    multiples_near,
    rule,
    shown,
    try_values,
    without,
)
from megatron.config.checks.groups import readable
from megatron.config.config import Config
from megatron.config.setting import GIVEN, acts_with
from megatron.spec.activations import SETTINGS
from megatron.spec.layer_pattern import pattern_problem, read_pattern
from megatron.spec.mlps import has_experts

_HERE = acts_with(num_experts=GIVEN)
_EP, _ETP, _TP = "expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size"

tokens_pass_some = at_most("moe_router_topk", "num_experts", "A token passes each of its experts once.", where=_HERE)
groups_are_equal = divides("num_experts", "moe_router_num_groups", "Groups hold as many experts each.")
open_groups_exist = at_most("moe_router_group_topk", "moe_router_num_groups", "Of each group a token passes it may be one.")
groups_are_judged_alike = divides(
    "moe_router_topk",
    "moe_router_group_topk",
    "A group is judged by as many of its experts as a token would pass in each of its groups.",
    where=acts_with(moe_router_num_groups=GIVEN),
)
ranks_hold_as_many = divides("num_experts", _EP, "Each of the expert ranks holds as many experts.")


@rule("moe_layer_freq", "num_layers", reads=("num_experts",))
def layers_with_experts_are_named(config: Config, world_size: int) -> Iterator[Finding]:
    """It is a number N, which means the first layer and every N-th after it, or a list with 0 or 1 for each layer."""
    text, count = config.model.moe_layer_freq, config.model.num_layers
    problem = pattern_problem(text, count) if config.model.num_experts else None
    if problem is not None:
        pattern = read_pattern(text)
        other = [change(num_layers=len(pattern))] if isinstance(pattern, tuple) and pattern else []
        yield Finding(
            f"{shown(config, 'moe_layer_freq')} does not say which layers it means. {problem}",
            [other, without(config, "moe_layer_freq")],
        )
    elif config.model.num_experts and not any(has_experts(config.model, layer) for layer in range(count)):
        yield Finding(f"{shown(config, 'moe_layer_freq')} leaves no layer with experts.", [without(config, "moe_layer_freq")])


@rule("moe_router_topk", "moe_router_num_groups", "moe_router_group_topk", reads=("num_experts",))
def open_groups_have_enough(config: Config, world_size: int) -> Iterator[Finding]:
    """The open groups hold all experts that a token passes."""
    model = config.model
    groups, experts = model.moe_router_num_groups, model.num_experts
    if (
        groups
        and experts
        and experts % groups == 0
        and model.moe_router_topk > (held := model.moe_router_group_topk * experts // groups)
    ):
        yield Finding(
            f"{shown(config, 'moe_router_topk')} is more than the {held} experts of {model.moe_router_group_topk} open groups.",
            [
                try_values("moe_router_topk", model.moe_router_topk, divisors(held)),
                try_values("moe_router_group_topk", model.moe_router_group_topk, divisors(groups)),
            ],
        )


@rule("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", reads=("num_experts",))
def chosen_alone_has_a_gradient(config: Config, world_size: int) -> Iterator[Finding]:
    """The softmax over one expert is 1 whatever the router says, so that what the experts give could not teach it."""
    model = config.model
    if (
        model.num_experts
        and model.moe_router_topk == 1
        and model.moe_router_score_function == "softmax"
        and not model.moe_router_pre_softmax
    ):
        yield Finding(
            "--moe-router-topk 1 gives the router no gradient of the loss without --moe-router-pre-softmax.",
            [change(moe_router_pre_softmax=True), change(moe_router_topk=2)],
        )


@rule("moe_ffn_hidden_size", _ETP, _TP, reads=("num_experts", "ffn_hidden_size", "hidden_size", *SETTINGS))
def experts_divide_by_their_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """Each of the ranks that split an expert holds the same part of its width."""
    model, ranks = config.model, config.parallel.expert_tensor_size
    width = model.moe_ffn_hidden_size or model.ffn_size
    if model.num_experts and width > 0 and width % ranks:
        yield Finding(
            f"The width of an expert {width} does not divide by the {ranks} ranks that split it "
            "(--expert-tensor-parallel-size, by default --tensor-model-parallel-size).",
            [try_values("moe_ffn_hidden_size", width, multiples_near(width, ranks)), try_values(_ETP, ranks, divisors(width))],
        )


@rule("moe_shared_expert_intermediate_size", _TP)
def shared_expert_divides_by_tensor(config: Config, world_size: int) -> Iterator[Finding]:
    """Each tensor rank holds the same part of the shared expert's width."""
    width, ranks = config.model.moe_shared_expert_intermediate_size, config.parallel.tensor_model_parallel_size
    if width and width % ranks:
        yield Finding(
            f"{shown(config, 'moe_shared_expert_intermediate_size')} does not divide by {shown(config, _TP)}.",
            [
                try_values("moe_shared_expert_intermediate_size", width, multiples_near(width, ranks)),
                try_values(_TP, ranks, divisors(width)),
            ],
        )


@rule(_EP, _ETP, *RANKS, reads=("num_experts",))
def expert_grid_fits(config: Config, world_size: int) -> Iterator[Finding]:
    """The ranks of a pipeline stage, TP x CP x DP, are ETP x EP x copies of the experts."""
    parallel = config.parallel
    ep, etp, stages = parallel.expert_model_parallel_size, parallel.expert_tensor_size, parallel.pipeline_model_parallel_size
    stage = world_size // stages
    if config.model.num_experts and world_size >= 1 and world_size % stages == 0 and stage % (ep * etp):
        yield Finding(
            f"The {stage} ranks of a pipeline stage do not divide by ETP x EP = {etp} x {ep} = {etp * ep} "
            "(--expert-tensor-parallel-size, --expert-model-parallel-size).",
            [try_values(_EP, ep, divisors(stage)), try_values(_ETP, etp, divisors(stage))],
        )


@rule(_TP, "sequence_parallel", "num_experts")
def tensor_ranks_have_tokens_of_their_own(config: Config, world_size: int) -> Iterator[Finding]:
    """Without --sequence-parallel all tensor ranks would send the same tokens to the experts."""
    parallel = config.parallel
    if config.model.num_experts and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield Finding(f"--num-experts with {shown(config, _TP)} needs --sequence-parallel.", [change(sequence_parallel=True)])


@rule("num_experts", "disable_bias_linear", "add_mlp_bias")
def experts_have_no_biases(config: Config, world_size: int) -> Iterator[Finding]:
    """The matrices of experts have no biases."""
    model = config.model
    if model.num_experts and (not model.disable_bias_linear or model.add_mlp_bias):
        yield Finding(
            "--num-experts needs --disable-bias-linear, without --add-mlp-bias: experts with biases are not built yet.",
            [change(disable_bias_linear=True, add_mlp_bias=False)],
            fields=("num_experts", "disable_bias_linear", *(["add_mlp_bias"] if model.add_mlp_bias else [])),
        )


@rule("num_experts", "optimizer", "param_groups")
def rules_know_experts(config: Config, world_size: int) -> Iterator[Finding]:
    """Rules of update that look at whole matrices, or at blocks, do not know yet how ranks divide experts."""
    unknown = ("muon", "adafactor", "lamb", "adam8bit")
    if not config.model.num_experts:
        return
    if config.optimizer.optimizer in unknown:
        yield Finding(f"--num-experts with {shown(config, 'optimizer')} is not built yet.", [change(optimizer="adam")])
    elif used := sorted({str(entry.optimizer) for entry in readable(config.optimizer.param_groups)} & {*unknown}):
        message = f"--num-experts with {' and '.join(used)} for some parameters (--param-groups) is not built yet."
        yield Finding(message, [without(config, "param_groups")], fields=("num_experts", "param_groups"))


experts_compute_in_their_dtype = exclude_each_other(
    "num_experts", "fp8_format", why="Products of experts in 8 bits are not built yet."
)
noise_is_of_own_samples = exclude_each_other(
    "num_experts", "log_gradient_noise", why="A rank's gradients of experts are of the samples of other data ranks too."
)
experts_are_not_scaled_with_the_width = exclude_each_other(
    "num_experts", "mup_base_width", why="What muP asks of experts is not built yet."
)
