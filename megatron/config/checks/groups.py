"""Rules about parameter groups (--param-groups): entries can be parsed, their patterns match parameters, and their values have an
effect."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Sequence

from megatron.config.checks.finding import (
    Finding,
    create_change,
    format_setting,
    get_flag,
    get_value,
    is_in_range,
    require_exclusive,
    require_not_above,
    rule,
)
from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.config.param_groups import GroupEntry, parse_entry
from megatron.config.training import ADAM_LIKE
from megatron.spec.groups import MUP_COLUMNS, build_group_lookup
from megatron.spec.weights import WeightSpec, iter_weights

check_decoupled_min_lr = require_not_above(
    "decoupled_min_lr", "decoupled_lr", "--decoupled-lr is the maximum learning rate of embedding and output layer."
)


@rule("decoupled_lr", "min_lr", depends_on=("decoupled_min_lr",))
def check_decoupled_lr_not_below_min_lr(config: Config, world_size: int) -> Iterator[Finding]:
    """--decoupled-lr must not be below --min-lr unless --decoupled-min-lr is set. By default the learning rate of embedding and
    output layer also decays to --min-lr, and --decoupled-min-lr sets a different minimum."""
    optimizer = config.optimizer
    if optimizer.decoupled_lr is not None and optimizer.decoupled_min_lr is None and optimizer.min_lr > optimizer.decoupled_lr:
        message = f"{format_setting(config, 'decoupled_lr')} is below {format_setting(config, 'min_lr')}, at which its decay ends."
        yield Finding(message, [create_change(decoupled_min_lr=optimizer.decoupled_lr)])


_SCALE = "Each of them sets the factor of the attention scores."
check_mup_or_softmax_scale = require_exclusive("mup_base_kv_channels", "softmax_scale", reason=_SCALE)
check_mup_or_latent_attention = require_exclusive("mup_base_kv_channels", "multi_latent_attention", reason=_SCALE)


@rule()
def check_param_groups(config: Config, world_size: int) -> Iterator[Finding]:
    """Each entry of --param-groups must have valid syntax, name a known optimizer if any, and match at least one parameter that an
    optimizer updates. With --mup-base-width, muP must support every optimizer of the run."""
    texts = config.optimizer.param_groups
    optimizers = {config.optimizer.optimizer, *(entry.optimizer for entry in parse_valid_entries(texts) if entry.optimizer)}
    without_mup = sorted(name for name in optimizers if name not in MUP_COLUMNS and name in get_flag("optimizer").choices)
    if config.model.mup_base_width is not None and without_mup:
        yield Finding(
            f"{format_setting(config, 'mup_base_width')} does not support the optimizer {without_mup[0]}.",
            [create_change(mup_base_width=None)],
            f"muP scales the learning rates of {', '.join(MUP_COLUMNS)} (Yang et al. 2022, table 8).",
            ("mup_base_width", "optimizer", "param_groups"),
        )
    for text in texts:
        try:
            entry = parse_entry(text)
        except ValueError as error:
            yield _build_param_groups_finding(
                f"{error}.",
                "An entry is a pattern, followed by values of the form key=value.",
            )
            continue
        update_rules = get_flag("optimizer").choices
        if entry.optimizer is not None and entry.optimizer not in update_rules:
            near = difflib.get_close_matches(entry.optimizer, update_rules, n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            yield _build_param_groups_finding(
                f"--param-groups {text!r}: there is no optimizer {entry.optimizer}.",
                reason=f"{guess}There are {', '.join(update_rules)}.",
            )
        matched = (
            [weight for weight in _list_params(config.model) if entry.matches(weight.name)] if _can_list_params(config) else None
        )
        if matched == []:
            yield _build_param_groups_finding(
                f"--param-groups {text!r}: no parameter has a name like {entry.pattern}.",
                reason=f"The nearest names are {', '.join(_find_nearest_names(entry.pattern, config.model))}. * matches any text.",
            )
        elif matched and all(weight.count_update is not None for weight in matched):
            yield _build_param_groups_finding(
                f"--param-groups {text!r}: {matched[0].name} is updated from the assignments to experts, not by an optimizer.",
                reason="--moe-router-bias-update-rate sets the size of these updates.",
            )
        elif matched and all(weight.frozen for weight in matched):
            yield _build_param_groups_finding(
                f"--param-groups {text!r}: with --lora-rank, {matched[0].name} is not trained.",
                reason="Adapters have names like layers.*.attention.qkv.lora_a.weight.",
            )


@rule("ademamix_warmup_iters", "optimizer", depends_on=("param_groups", "train_iters"))
def check_ademamix_warmup(config: Config, world_size: int) -> Iterator[Finding]:
    """The optimizer ademamix needs --ademamix-warmup-iters. Its slow gradient average starts with few gradients, so the weight of
    this average must grow over a warm-up."""
    optimizer = config.optimizer
    optimizers = [optimizer.optimizer, *(entry.optimizer for entry in parse_valid_entries(optimizer.param_groups))]
    if "ademamix" in optimizers and optimizer.ademamix_warmup_iters is None:
        length = config.training.train_iters
        candidates = [create_change(ademamix_warmup_iters=length)] if length else []
        yield Finding("The optimizer ademamix needs --ademamix-warmup-iters.", candidates)


@rule()
def check_param_group_values(config: Config, world_size: int) -> Iterator[Finding]:
    """In --param-groups, min-lr must not be above lr for any parameter. adam-beta1, adam-beta2 and adam-eps must apply to at least
    one parameter that adam or a similar optimizer updates, or they would have no effect."""
    entries = parse_valid_entries(config.optimizer.param_groups)
    if len(entries) < len(config.optimizer.param_groups) or not entries or not _can_list_params(config):
        return
    group_of, optimizer = build_group_lookup(config.optimizer), config.optimizer
    is_unused = {
        entry: entry.adam_beta1 is not None or entry.adam_beta2 is not None or entry.adam_eps is not None for entry in entries
    }
    inverted: dict[str, str] = {}
    for weight in _list_params(config.model):
        group = group_of(weight)
        for entry in entries:
            if is_unused[entry] and group.optimizer in ADAM_LIKE and entry.matches(weight.name):
                is_unused[entry] = False
        max_lr = optimizer.lr if group.lr_bounds.lr is None else group.lr_bounds.lr
        min_lr = optimizer.min_lr if group.lr_bounds.min_lr is None else group.lr_bounds.min_lr
        if max_lr is not None and min_lr > max_lr:
            inverted.setdefault(f"{min_lr:g} is above {max_lr:g}", weight.name)
    for entry in (entry for entry, unused_entry in is_unused.items() if unused_entry):
        supported = ", ".join(ADAM_LIKE)
        yield _build_param_groups_finding(
            f"--param-groups {entry.pattern}: adam-beta1, adam-beta2 and adam-eps act only on parameters that {supported} update."
        )
    for comparison, name in inverted.items():
        yield _build_param_groups_finding(
            f"--param-groups: the minimum learning rate of {name} {comparison}, its maximum.", reason="Set min-lr together with lr."
        )


def _build_param_groups_finding(message: str, reason: str = "") -> Finding:
    return Finding(message, reason=reason, fields=("param_groups",))


def _can_list_params(config: Config) -> bool:
    """Return whether the model's settings are valid enough to list the model's parameters. If not, other rules report the invalid
    settings."""
    required = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return all(get_value(config, field) for field in required) and all(
        is_in_range(config, field.name) for field in dataclasses.fields(ModelConfig)
    )


def parse_valid_entries(texts: Sequence[str]) -> list[GroupEntry]:
    """Parse the entries of --param-groups. Entries with invalid syntax are skipped, because another rule reports them."""
    entries = []
    for text in texts:
        try:
            entries.append(parse_entry(text))
        except ValueError:
            continue
    return entries


@functools.lru_cache(maxsize=4)
def _list_params(model: ModelConfig) -> tuple[WeightSpec, ...]:
    """Return the specifications of all parameters of the model. Their names do not depend on the vocabulary size, so it is 1."""
    return tuple(iter_weights(model, vocab_size=1))


def _find_nearest_names(pattern: str, model: ModelConfig) -> list[str]:
    """Return up to three parameter names that are similar to a pattern of --param-groups, for suggestions. Layer indices are
    replaced by *."""
    names = dict.fromkeys(re.sub(r"^layers\.\d+\.", "layers.*.", weight.name) for weight in _list_params(model))
    normalized = re.sub(r"^layers\.[^.]*\.", "layers.*.", pattern)
    return difflib.get_close_matches(normalized, names, n=3, cutoff=0.0)
