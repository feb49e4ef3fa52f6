"""Parameter groups (--param-groups) of the reference model: parameters whose learning rate, weight decay or update rule differ from
the defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from megatron.config.training import OptimizerConfig
from megatron_lab.verification.reference.shape import has_weight_decay
from megatron_lab.verification.reference.training import ParamUpdate, ReferenceUpdateRule, ScalarSchedule

_EMBEDDINGS = ("embedding.word.weight", "embedding.position.weight")
_DECOUPLED = ("embedding.word.weight", "output.weight")
ParamUpdateFn = Callable[[int], ParamUpdate]
"""Function that returns the update of a parameter, given the number of samples in the updates before it."""


def build_param_updates(
    names: Iterable[str],
    config: OptimizerConfig,
    default_rule: ReferenceUpdateRule,
    lr_schedule: ScalarSchedule,
    wd_schedule: ScalarSchedule,
    width_multiplier: float,
) -> dict[str, ParamUpdateFn]:
    """Build, for each parameter whose options differ from the defaults, a function that returns its update rule, learning rate and
    weight decay after a number of samples. Return the functions by name.

    Args:
        names: names of all parameters.
        config: settings of the optimizer.
        default_rule: update rule of all other parameters.
        lr_schedule: learning rate of all other parameters.
        wd_schedule: weight decay of all other parameters.
        width_multiplier: hidden size divided by the base width of muP; 1 without muP.
    """
    options_by_name = {name: _collect_options(name, config) for name in names}
    return {
        name: _build_param_update(name, options, default_rule, lr_schedule, wd_schedule, width_multiplier)
        for name, options in options_by_name.items()
        if options or width_multiplier != 1
    }


def _collect_options(name: str, config: OptimizerConfig) -> dict[str, str]:
    """Return the options that --param-groups, --decoupled-lr and similar flags set for a parameter, as text by their keys in
    --param-groups, such as "lr" or "wd-mult". If several groups contain the parameter, later groups override earlier ones."""
    options: dict[str, str] = {}
    if config.decoupled_lr is not None and name in _DECOUPLED:
        options["lr"] = str(config.decoupled_lr)
        if config.decoupled_min_lr is not None:
            options["min-lr"] = str(config.decoupled_min_lr)
    if not config.decay_embeddings and name in _EMBEDDINGS:
        options["wd-mult"] = "0"
    for group_text in config.param_groups:
        pattern, *entries = group_text.split()
        if re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*").replace("?", "."), name):
            options |= dict(entry.replace("_", "-").split("=") for entry in entries)
    return options


def _build_param_update(
    name: str,
    options: dict[str, str],
    default_rule: ReferenceUpdateRule,
    lr_schedule: ScalarSchedule,
    wd_schedule: ScalarSchedule,
    width_multiplier: float,
) -> ParamUpdateFn:
    values = {key: float(value) for key, value in options.items() if key != "optimizer"}
    betas = values.get("adam-beta1", default_rule.betas[0]), values.get("adam-beta2", default_rule.betas[1])
    optimizer: Any = options.get("optimizer", default_rule.optimizer)
    param_rule = dataclasses.replace(default_rule, optimizer=optimizer, betas=betas, eps=values.get("adam-eps", default_rule.eps))
    param_schedule = dataclasses.replace(
        lr_schedule, peak=values.get("lr", lr_schedule.peak), minimum=values.get("min-lr", lr_schedule.minimum)
    )
    lr_mult, wd_mult = values.get("lr-mult", 1.0), values.get("wd-mult", 1.0 if has_weight_decay(name) else 0.0)
    mup = _get_mup_factor(name, optimizer, width_multiplier)
    return lambda samples: ParamUpdate(
        param_rule, lr_mult * mup * param_schedule.get_value_at(samples), wd_mult / mup * wd_schedule.get_value_at(samples)
    )


def _get_mup_factor(name: str, optimizer: str, width_multiplier: float) -> float:
    """Return the factor by which muP multiplies a parameter's learning rate (Yang et al. 2022, table 8).

    The weight decay is divided by this factor, so the product of learning rate and decay does not change.
    """
    is_hidden = name.startswith(("layers.", "mtp.")) and name.endswith(".weight") and "norm" not in name
    if optimizer == "sgd":
        return 1 if is_hidden else width_multiplier
    return 1 / width_multiplier if is_hidden else 1
