"""Rules about LoRA: the settings that can be combined with adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.config.checks.finding import Change, Finding, create_change, format_setting, require_exclusive, reset, rule
from megatron.config.checks.groups import parse_valid_entries
from megatron.config.checks.sharding import RESHARD, SHARD_SIZE, SHARDING_SETTINGS, STRATEGY, suggest_optim_grads
from megatron.config.config import Config

_RANK = "lora_rank"
_ADAPTED_LAYERS = (
    "Adapters are supported for the query-key-value projection, attention's output projection and the MLP of dense layers."
)
_ONLY_ADAPTERS_TRAIN = "Only adapters are updated."

check_no_lora_with_experts = require_exclusive(_RANK, "num_experts", reason=_ADAPTED_LAYERS)
check_no_lora_with_latent_attention = require_exclusive(_RANK, "multi_latent_attention", reason=_ADAPTED_LAYERS)
check_no_lora_with_mtp = require_exclusive(_RANK, "mtp_num_layers", reason=_ADAPTED_LAYERS)
check_no_lora_with_fp8 = require_exclusive(_RANK, "fp8_format", reason="Frozen weights in FP8 are not supported.")
check_no_lora_with_mup = require_exclusive(_RANK, "mup_base_width", reason="The scaling of adapters with the width is unknown.")
check_no_lora_with_qk_clip = require_exclusive(
    _RANK, "qk_clip", reason=f"It changes the query and key projections. {_ONLY_ADAPTERS_TRAIN}"
)
check_no_lora_with_decoupled_lr = require_exclusive(
    _RANK, "decoupled_lr", reason=f"It is the learning rate of the embedding and the output layer. {_ONLY_ADAPTERS_TRAIN}"
)


def _forbid_with_lora(config: Config, message: str, nearest: Sequence[Change], *fields: str) -> Iterator[Finding]:
    if config.model.lora_rank is not None:
        without_lora = reset(config, _RANK, "lora_alpha", "lora_targets")
        yield Finding(f"{format_setting(config, _RANK)} {message}", [tuple(nearest), without_lora], fields=(_RANK, *fields))


@rule(_RANK, STRATEGY, depends_on=(*SHARDING_SETTINGS, SHARD_SIZE, RESHARD))
def check_lora_sharding(config: Config, world_size: int) -> Iterator[Finding]:
    """--lora-rank cannot be used with --data-parallel-sharding-strategy optim_grads_params. Frozen weights have no gradients, main
    parameters or moments, so every data rank holds them in full. Only the state of the adapters would be sharded, which is small.
    """
    if config.parallel.sharding == "optim_grads_params":
        yield from _forbid_with_lora(
            config,
            "cannot be used with --data-parallel-sharding-strategy optim_grads_params.",
            [suggest_optim_grads(config)],
            STRATEGY,
        )


@rule(_RANK, "optimizer", depends_on=("param_groups",))
def check_no_lora_with_muon(config: Config, world_size: int) -> Iterator[Finding]:
    """--lora-rank cannot be used with the optimizer muon. Muon equalizes the singular values of the update of one matrix. It would
    treat the two factors of an adapter's product B A separately, which is not known to help."""
    groups = parse_valid_entries(config.optimizer.param_groups)
    if config.optimizer.optimizer == "muon":
        yield from _forbid_with_lora(
            config, "cannot be used with --optimizer muon.", [create_change(optimizer="adam")], "optimizer"
        )
    elif any(entry.optimizer == "muon" for entry in groups):
        yield from _forbid_with_lora(
            config, "cannot be used with muon in --param-groups.", [create_change(param_groups=())], "param_groups"
        )


@rule("lora_targets")
def check_lora_targets(config: Config, world_size: int) -> Iterator[Finding]:
    """--lora-targets must name at least one target, and each target only once, because a linear layer has one adapter."""
    targets = config.model.lora_targets
    if len(set(targets)) < len(targets):
        yield Finding(
            f"{format_setting(config, 'lora_targets')} names a target twice.",
            [create_change(lora_targets=tuple(dict.fromkeys(targets)))],
        )
    elif not targets and config.model.lora_rank is not None:
        yield Finding("--lora-targets names no target.", [reset(config, "lora_targets")])
