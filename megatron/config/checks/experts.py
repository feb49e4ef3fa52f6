"""Rules about mixtures of experts: the router's selection, and the distribution of experts over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    MODEL_PARALLEL_SIZES,
    Finding,
    create_change,
    find_divisors,
    find_multiples_near,
    format_setting,
    require_divisible,
    require_exclusive,
    require_not_above,
    reset,
    rule,
    try_values,
)
from megatron.config.checks.groups import parse_valid_entries
from megatron.config.config import Config
from megatron.config.setting import IS_SET, condition
from megatron.spec.activations import ACTIVATION_FIELDS
from megatron.spec.layer_pattern import find_pattern_problem, parse_pattern
from megatron.spec.mlps import has_experts

_HAS_EXPERTS = condition(num_experts=IS_SET)
_EP, _ETP, _TP = "expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size"

check_router_topk = require_not_above(
    "moe_router_topk", "num_experts", "The router selects each expert at most once per token.", condition=_HAS_EXPERTS
)
check_experts_divisible_by_groups = require_divisible(
    "num_experts", "moe_router_num_groups", "All groups must have the same number of experts."
)
check_group_topk = require_not_above(
    "moe_router_group_topk", "moe_router_num_groups", "A token cannot use more groups than there are."
)
check_topk_divisible_by_group_topk = require_divisible(
    "moe_router_topk",
    "moe_router_group_topk",
    "A group is ranked by the sum of its best scores: topk / group-topk of them, which must be a whole number.",
    condition=condition(moe_router_num_groups=IS_SET),
)
check_experts_divisible_by_ep = require_divisible("num_experts", _EP, "Each expert rank holds the same number of experts.")


@rule("moe_layer_freq", "num_layers", depends_on=("num_experts",))
def check_moe_layer_freq(config: Config, world_size: int) -> Iterator[Finding]:
    """--moe-layer-freq must select at least one layer. Its value is a number N, for the first layer and every N-th layer after it,
    or a list with 0 or 1 for each layer."""
    pattern_text, num_layers = config.model.moe_layer_freq, config.model.num_layers
    problem = find_pattern_problem(pattern_text, num_layers) if config.model.num_experts else None
    if problem is not None:
        pattern = parse_pattern(pattern_text)
        num_layers_candidates = [create_change(num_layers=len(pattern))] if isinstance(pattern, tuple) and pattern else []
        yield Finding(
            f"{format_setting(config, 'moe_layer_freq')} does not define the layers with experts. {problem}",
            [num_layers_candidates, reset(config, "moe_layer_freq")],
        )
    elif config.model.num_experts and not any(has_experts(config.model, layer) for layer in range(num_layers)):
        yield Finding(
            f"{format_setting(config, 'moe_layer_freq')} leaves no layer with experts.", [reset(config, "moe_layer_freq")]
        )


@rule("moe_router_topk", "moe_router_num_groups", "moe_router_group_topk", depends_on=("num_experts",))
def check_selected_groups_hold_topk(config: Config, world_size: int) -> Iterator[Finding]:
    """The expert groups that a token may use (--moe-router-group-topk of --moe-router-num-groups) must together hold at least
    --moe-router-topk experts, because the router selects this number of experts from them."""
    model = config.model
    num_groups, num_experts = model.moe_router_num_groups, model.num_experts
    if (
        num_groups
        and num_experts
        and num_experts % num_groups == 0
        and model.moe_router_topk > (num_selectable := model.moe_router_group_topk * num_experts // num_groups)
    ):
        yield Finding(
            f"{format_setting(config, 'moe_router_topk')} is more than the {num_selectable} experts in "
            f"{model.moe_router_group_topk} groups (--moe-router-group-topk).",
            [
                try_values("moe_router_topk", model.moe_router_topk, find_divisors(num_selectable)),
                try_values("moe_router_group_topk", model.moe_router_group_topk, find_divisors(num_groups)),
            ],
        )


@rule("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", depends_on=("num_experts",))
def check_router_gradient(config: Config, world_size: int) -> Iterator[Finding]:
    """--moe-router-topk 1 with softmax scores needs --moe-router-pre-softmax. Otherwise the softmax is over the single selected
    expert and always 1, so the loss has no gradient with respect to the router."""
    model = config.model
    if (
        model.num_experts
        and model.moe_router_topk == 1
        and model.moe_router_score_function == "softmax"
        and not model.moe_router_pre_softmax
    ):
        yield Finding(
            "--moe-router-topk 1 gives the router no gradient of the loss without --moe-router-pre-softmax.",
            [create_change(moe_router_pre_softmax=True), create_change(moe_router_topk=2)],
        )


@rule("moe_ffn_hidden_size", _ETP, _TP, depends_on=("num_experts", "ffn_hidden_size", "hidden_size", *ACTIVATION_FIELDS))
def check_expert_width_divisible_by_etp(config: Config, world_size: int) -> Iterator[Finding]:
    """An expert's hidden size (--moe-ffn-hidden-size) must be divisible by the number of ranks that split the expert
    (--expert-tensor-parallel-size, by default --tensor-model-parallel-size), so that each of them holds an equal slice."""
    model, ranks = config.model, config.parallel.expert_tensor_size
    width = model.moe_ffn_hidden_size or model.ffn_size
    if model.num_experts and width > 0 and width % ranks:
        yield Finding(
            f"The width of an expert {width} is not divisible by the {ranks} ranks that split it "
            "(--expert-tensor-parallel-size, by default --tensor-model-parallel-size).",
            [
                try_values("moe_ffn_hidden_size", width, find_multiples_near(width, ranks)),
                try_values(_ETP, ranks, find_divisors(width)),
            ],
        )


@rule("moe_shared_expert_intermediate_size", _TP)
def check_shared_expert_width_divisible_by_tp(config: Config, world_size: int) -> Iterator[Finding]:
    """--moe-shared-expert-intermediate-size must be divisible by --tensor-model-parallel-size, so that each tensor rank holds an
    equal slice of the shared expert."""
    width, ranks = config.model.moe_shared_expert_intermediate_size, config.parallel.tensor_model_parallel_size
    if width and width % ranks:
        yield Finding(
            f"{format_setting(config, 'moe_shared_expert_intermediate_size')} is not divisible by {format_setting(config, _TP)}.",
            [
                try_values("moe_shared_expert_intermediate_size", width, find_multiples_near(width, ranks)),
                try_values(_TP, ranks, find_divisors(width)),
            ],
        )


@rule(_EP, _ETP, *MODEL_PARALLEL_SIZES, depends_on=("num_experts",))
def check_stage_divisible_by_expert_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """The number of ranks of a pipeline stage must be a multiple of --expert-tensor-parallel-size x --expert-model-parallel-size,
    because this number of ranks holds each expert once. A stage has tensor x context x data-parallel size ranks."""
    parallel = config.parallel
    ep, etp, num_stages = parallel.expert_model_parallel_size, parallel.expert_tensor_size, parallel.pipeline_model_parallel_size
    ranks_per_stage = world_size // num_stages
    if config.model.num_experts and world_size >= 1 and world_size % num_stages == 0 and ranks_per_stage % (ep * etp):
        yield Finding(
            f"The {ranks_per_stage} ranks of a pipeline stage are not divisible by ETP x EP = {etp} x {ep} = {etp * ep} "
            "(--expert-tensor-parallel-size, --expert-model-parallel-size).",
            [try_values(_EP, ep, find_divisors(ranks_per_stage)), try_values(_ETP, etp, find_divisors(ranks_per_stage))],
        )


@rule(_TP, "sequence_parallel", "num_experts")
def check_sequence_parallel_with_experts(config: Config, world_size: int) -> Iterator[Finding]:
    """--num-experts with tensor parallelism needs --sequence-parallel. Otherwise all tensor ranks would send the same tokens to the
    experts."""
    parallel = config.parallel
    if config.model.num_experts and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield Finding(
            f"--num-experts with {format_setting(config, _TP)} needs --sequence-parallel.", [create_change(sequence_parallel=True)]
        )


@rule("num_experts", "disable_bias_linear", "add_mlp_bias")
def check_no_expert_biases(config: Config, world_size: int) -> Iterator[Finding]:
    """--num-experts needs --disable-bias-linear and excludes --add-mlp-bias, because linear layers of experts have no biases."""
    model = config.model
    if model.num_experts and (not model.disable_bias_linear or model.add_mlp_bias):
        yield Finding(
            "--num-experts needs --disable-bias-linear, without --add-mlp-bias: experts with biases are not supported yet.",
            [create_change(disable_bias_linear=True, add_mlp_bias=False)],
            fields=("num_experts", "disable_bias_linear", *(["add_mlp_bias"] if model.add_mlp_bias else [])),
        )


@rule("num_experts", "optimizer", "param_groups")
def check_optimizer_supports_experts(config: Config, world_size: int) -> Iterator[Finding]:
    """--num-experts is not supported yet with the optimizers muon, adafactor, lamb and adam8bit. Their update depends on a full
    matrix, or on blocks of it, but experts are distributed over ranks."""
    unsupported = ("muon", "adafactor", "lamb", "adam8bit")
    if not config.model.num_experts:
        return
    if config.optimizer.optimizer in unsupported:
        yield Finding(
            f"--num-experts with {format_setting(config, 'optimizer')} is not supported yet.", [create_change(optimizer="adam")]
        )
    elif used := sorted({str(entry.optimizer) for entry in parse_valid_entries(config.optimizer.param_groups)} & {*unsupported}):
        message = f"--num-experts with {' and '.join(used)} for some parameters (--param-groups) is not supported yet."
        yield Finding(message, [reset(config, "param_groups")], fields=("num_experts", "param_groups"))


check_no_fp8_experts = require_exclusive(
    "num_experts", "fp8_format", reason="FP8 matrix products of experts are not supported yet."
)
check_no_gradient_noise_with_experts = require_exclusive(
    "num_experts", "log_gradient_noise", reason="A rank's expert gradients also contain samples of other data ranks."
)
check_no_mup_experts = require_exclusive("num_experts", "mup_base_width", reason="muP does not support experts yet.")
