"""Rules about parameter groups: entries can be read, their patterns match, and what they say acts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Sequence

from megatron.config.checks.finding import (
    Finding,
    at_most,
    change,
    exclude_each_other,
    flag_for,
    in_range,
    rule,
    shown,
    value_of,
)
from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.config.param_groups import GroupEntry, entry_of
from megatron.config.training import ADAM_LIKE
from megatron.spec.groups import MUP_RULES, groups_of
from megatron.spec.weights import Weight, model_weights

decoupled_rate_is_higher = at_most("decoupled_min_lr", "decoupled_lr", "--decoupled-lr is the highest of its course.")


@rule("decoupled_lr", "min_lr", reads=("decoupled_min_lr",))
def decoupled_rate_ends_lower(config: Config, world_size: int) -> Iterator[Finding]:
    """By default the rate of embedding and output layer falls to --min-lr too; --decoupled-min-lr gives it an end of its own."""
    optimizer = config.optimizer
    if optimizer.decoupled_lr is not None and optimizer.decoupled_min_lr is None and optimizer.min_lr > optimizer.decoupled_lr:
        message = f"{shown(config, 'decoupled_lr')} is below {shown(config, 'min_lr')}, at which its course ends."
        yield Finding(message, [change(decoupled_min_lr=optimizer.decoupled_lr)])


_SCALE = "Each sets the factor of attention's scores."
mup_scale_or_given = exclude_each_other("mup_base_kv_channels", "softmax_scale", why=_SCALE)
mup_scale_or_latent = exclude_each_other("mup_base_kv_channels", "multi_latent_attention", why=_SCALE)


@rule()
def groups_act(config: Config, world_size: int) -> Iterator[Finding]:
    """Entries of --param-groups can be read, their patterns match, and muP knows how their optimizers' rates are scaled."""
    texts = config.optimizer.param_groups
    used = {config.optimizer.optimizer, *(entry.optimizer for entry in readable(texts) if entry.optimizer)}
    unknown = sorted(name for name in used if name not in MUP_RULES and name in flag_for("optimizer").choices)
    if config.model.mup_base_width is not None and unknown:
        yield Finding(
            f"{shown(config, 'mup_base_width')}: how the learning rates of {unknown[0]} are scaled is not known.",
            [change(mup_base_width=None)],
            f"It is built for {', '.join(MUP_RULES)} (Yang et al. 2022, table 8).",
            ("mup_base_width", "optimizer", "param_groups"),
        )
    for text in texts:
        try:
            entry = entry_of(text)
        except ValueError as error:
            yield _finding(f"--param-groups {text!r} cannot be read: {error}.", "An entry is a pattern and values, key=value.")
            continue
        rules = flag_for("optimizer").choices
        if entry.optimizer is not None and entry.optimizer not in rules:
            near = difflib.get_close_matches(entry.optimizer, rules, n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            yield _finding(
                f"--param-groups {text!r}: there is no optimizer {entry.optimizer}.", why=f"{guess}There are {', '.join(rules)}."
            )
        meant = [one for one in _parameters(config.model) if entry.matches(one.name)] if _has_parameters(config) else None
        if meant == []:
            yield _finding(
                f"--param-groups {text!r}: no parameter has a name like {entry.pattern}.",
                why=f"The nearest names are {', '.join(_nearest(entry.pattern, config.model))}. * stands for any characters.",
            )
        elif meant and all(one.by_counts is not None for one in meant):
            yield _finding(
                f"--param-groups {text!r}: {meant[0].name} is moved by the choices of experts, and by no optimizer.",
                why="--moe-router-bias-update-rate says by how much biases are moved.",
            )
        elif meant and all(one.frozen for one in meant):
            yield _finding(
                f"--param-groups {text!r}: beside --lora-rank {meant[0].name} is not trained.",
                why="Adapters have names like layers.*.attention.qkv.lora_a.weight.",
            )


@rule("ademamix_warmup_iters", "optimizer", reads=("param_groups", "train_iters"))
def slow_average_has_a_warmup(config: Config, world_size: int) -> Iterator[Finding]:
    """Its slow average begins with few gradients, so its weight must grow."""
    optimizer = config.optimizer
    used = [optimizer.optimizer, *(entry.optimizer for entry in readable(optimizer.param_groups))]
    if "ademamix" in used and optimizer.ademamix_warmup_iters is None:
        length = config.training.train_iters
        candidates = [change(ademamix_warmup_iters=length)] if length else []
        yield Finding("The optimizer ademamix, but no --ademamix-warmup-iters.", candidates)


@rule()
def group_values_fit(config: Config, world_size: int) -> Iterator[Finding]:
    """Rates of groups fall from lr to min-lr, and the betas are Adam's."""
    entries = readable(config.optimizer.param_groups)
    if len(entries) < len(config.optimizer.param_groups) or not entries or not _has_parameters(config):
        return
    group_of, optimizer = groups_of(config.optimizer), config.optimizer
    idle = {entry: entry.adam_beta1 is not None or entry.adam_beta2 is not None or entry.adam_eps is not None for entry in entries}
    crossed: dict[str, str] = {}
    for facts in _parameters(config.model):
        group = group_of(facts)
        for entry in entries:
            if idle[entry] and group.optimizer in ADAM_LIKE and entry.matches(facts.name):
                idle[entry] = False
        high = optimizer.lr if group.ends.lr is None else group.ends.lr
        low = optimizer.min_lr if group.ends.min_lr is None else group.ends.min_lr
        if high is not None and low > high:
            crossed.setdefault(f"{low:g} is above {high:g}", facts.name)
    for entry in (entry for entry, unused in idle.items() if unused):
        rules = ", ".join(ADAM_LIKE)
        yield _finding(f"--param-groups {entry.pattern}: adam-beta1, adam-beta2 and adam-eps act only on what {rules} update.")
    for which, name in crossed.items():
        yield _finding(f"--param-groups: the lowest learning rate of {name} {which}, its highest.", why="Give min-lr beside lr.")


def _finding(message: str, why: str = "") -> Finding:
    return Finding(message, why=why, fields=("param_groups",))


def _has_parameters(config: Config) -> bool:
    """Whether the model's numbers are such that its parameters can be named; other rules report those that are not."""
    required = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return all(value_of(config, field) for field in required) and all(
        in_range(config, field.name) for field in dataclasses.fields(ModelConfig)
    )


def readable(texts: Sequence[str]) -> list[GroupEntry]:
    """The entries that can be read."""
    found = []
    for text in texts:
        try:
            found.append(entry_of(text))
        except ValueError:
            continue
    return found


@functools.lru_cache(maxsize=4)
def _parameters(model: ModelConfig) -> tuple[Weight, ...]:
    """Every parameter. How many tokens there are changes none of the names."""
    return tuple(model_weights(model, vocab_size=1))


def _nearest(pattern: str, model: ModelConfig) -> list[str]:
    """Names that may have been meant; the layers' as patterns over all layers."""
    names = dict.fromkeys(re.sub(r"^layers\.\d+\.", "layers.*.", one.name) for one in _parameters(model))
    plain = re.sub(r"^layers\.[^.]*\.", "layers.*.", pattern)
    return difflib.get_close_matches(plain, names, n=3, cutoff=0.0)
