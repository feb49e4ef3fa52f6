"""Rules about LoRA: which settings its adapters go with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.config.checks.finding import Change, Finding, change, exclude_each_other, rule, shown, without
from megatron.config.checks.groups import readable
from megatron.config.checks.sharding import RESHARD, SHARD_SIZE, SHARDING, STRATEGY, other_strategy
from megatron.config.config import Config

_RANK = "lora_rank"
_OF_LAYERS = "Adapters are built for the query-key-value projection, attention's output and the MLP of dense layers."
_OF_UPDATES = "Beside adapters nothing else is updated."

not_beside_experts = exclude_each_other(_RANK, "num_experts", why=_OF_LAYERS)
not_beside_latents = exclude_each_other(_RANK, "multi_latent_attention", why=_OF_LAYERS)
not_beside_depths = exclude_each_other(_RANK, "mtp_num_layers", why=_OF_LAYERS)
not_in_8_bits = exclude_each_other(_RANK, "fp8_format", why="Weights that do not change could be rounded once, which is not built.")
not_scaled_by_width = exclude_each_other(_RANK, "mup_base_width", why="How adapters are scaled with the width is not known.")
not_beside_clipped_scores = exclude_each_other(
    _RANK, "qk_clip", why=f"It changes the projections to queries and keys. {_OF_UPDATES}"
)
not_beside_rates_of_tables = exclude_each_other(_RANK, "decoupled_lr", why=f"It is the rate of embedding and output. {_OF_UPDATES}")


def _refused(config: Config, message: str, nearest: Sequence[Change], *fields: str) -> Iterator[Finding]:
    if config.model.lora_rank is not None:
        plain = without(config, _RANK, "lora_alpha", "lora_targets")
        yield Finding(f"{shown(config, _RANK)} {message}", [tuple(nearest), plain], fields=(_RANK, *fields))


@rule(_RANK, STRATEGY, reads=(*SHARDING, SHARD_SIZE, RESHARD))
def frozen_weights_are_whole(config: Config, world_size: int) -> Iterator[Finding]:
    """The frozen weights have neither gradients nor main parameters nor moments, so every data rank holds them whole. What is left
    to be sharded, of the adapters, is small."""
    if config.parallel.sharding == "optim_grads_params":
        yield from _refused(
            config, "cannot be used with --data-parallel-sharding-strategy optim_grads_params.", [other_strategy(config)], STRATEGY
        )


@rule(_RANK, "optimizer", reads=("param_groups",))
def adapters_are_no_hidden_matrices(config: Config, world_size: int) -> Iterator[Finding]:
    """Muon makes the singular values of an update equal. It would see the factors of B A one by one, of which that is not known to
    help."""
    groups = readable(config.optimizer.param_groups)
    if config.optimizer.optimizer == "muon":
        yield from _refused(config, "cannot be used with --optimizer muon.", [change(optimizer="adam")], "optimizer")
    elif any(entry.optimizer == "muon" for entry in groups):
        yield from _refused(config, "cannot be used with muon in --param-groups.", [change(param_groups=())], "param_groups")


@rule("lora_targets")
def targets_are_named_once(config: Config, world_size: int) -> Iterator[Finding]:
    """Each of them is a linear layer that gets one adapter."""
    targets = config.model.lora_targets
    if len(set(targets)) < len(targets):
        yield Finding(f"{shown(config, 'lora_targets')} names one twice.", [change(lora_targets=tuple(dict.fromkeys(targets)))])
    elif not targets and config.model.lora_rank is not None:
        yield Finding("--lora-targets names none.", [without(config, "lora_targets")])
