"""The update rules by the value of --optimizer, and which parameters each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron.config.flags import flag_for
from megatron.config.imports import named
from megatron.config.training import OptimizerConfig
from megatron.optimizer.elementwise import SGD, AdamW, AdEMAMix, CountsRule, Lion
from megatron.optimizer.rule import UpdateRule
from megatron.parallel.params import ParamRecord
from megatron.spec.groups import groups_of
from megatron.spec.registered import add_choice

RuleOf = Callable[[ParamRecord], UpdateRule]
"""Gives the rule that updates a parameter."""


def for_all(rule: UpdateRule) -> RuleOf:
    """Use one rule for every parameter."""
    return lambda record: rule


def vectors_by(of_vectors: UpdateRule, others: UpdateRule) -> RuleOf:
    """Use one rule for biases and the weights of norms, another for matrices and tables."""
    return lambda record: of_vectors if record.kind == "vector" else others


RULES: dict[str, Callable[[OptimizerConfig], RuleOf]] = {
    "adam": lambda config: for_all(AdamW(config)),
    "sgd": lambda config: for_all(SGD(config)),
    "lion": lambda config: for_all(Lion(config)),
    "ademamix": lambda config: for_all(AdEMAMix(config)),
    "adafactor": lambda config: for_all(named("megatron.optimizer.adafactor:Adafactor")(config)),
    "adam8bit": lambda config: vectors_by(AdamW(config), named("megatron.optimizer.eight_bits:EightBitAdamW")(config)),
    "lamb": lambda config: vectors_by(AdamW(config), named("megatron.optimizer.lamb:Lamb")()),
    "muon": lambda config: for_all(named("megatron.optimizer.muon:Muon")(config)),
}
"""The rules by the value of --optimizer, or of a group's."""


def register_optimizer(name: str, make: Callable[[OptimizerConfig], UpdateRule | RuleOf], *, reads: Iterable[str] = ()) -> None:
    """Add an update rule of the user's own, for `--optimizer NAME`.

    Args:
        make: makes the rule of all parameters, or what gives each parameter its rule, for a run with these settings.
        reads: settings of other optimizers that act with this one too, by their fields: `adam_beta1`.

    Raises:
        ValueError: the name is taken, or cannot stand in a command line.
    """
    add_choice("optimizer", name, flag_for("optimizer").built_in, reads)

    def rule_of(config: OptimizerConfig) -> RuleOf:
        made = make(config)
        return for_all(made) if isinstance(made, UpdateRule) else made

    RULES[name] = rule_of


def rules_of(config: OptimizerConfig) -> RuleOf:
    """The rule of each parameter in a run with these settings: that of its group.

    It raises a ValueError where no module has registered it.
    """
    group_of = groups_of(config)
    made: dict[str, RuleOf] = {}
    by_counts = CountsRule()

    def rule_of(record: ParamRecord) -> UpdateRule:
        if record.by_counts is not None:
            return by_counts
        optimizer = group_of(record).optimizer
        if optimizer not in RULES:
            raise ValueError(f"--optimizer {optimizer} is registered by no module here: name the one that does by --imports")
        if optimizer not in made:
            made[optimizer] = RULES[optimizer](config)
        return made[optimizer](record)

    return rule_of
