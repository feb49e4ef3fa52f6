"""The update rules by the value of --optimizer, and which parameters each of them gets."""

from __future__ import annotations

from collections.abc import Callable

from megatron.config.training import OptimizerConfig
from megatron.optimizer.adafactor import Adafactor
from megatron.optimizer.eight_bits import EightBitAdamW
from megatron.optimizer.elementwise import SGD, AdamW, AdEMAMix, CountsRule, Lion
from megatron.optimizer.lamb import Lamb
from megatron.optimizer.muon import Muon
from megatron.optimizer.rule import UpdateRule
from megatron.parallel.params import ParamRecord
from megatron.spec.groups import groups_of

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
    "adafactor": lambda config: for_all(Adafactor(config)),
    "adam8bit": lambda config: vectors_by(AdamW(config), EightBitAdamW(config)),
    "lamb": lambda config: vectors_by(AdamW(config), Lamb()),
    "muon": lambda config: for_all(Muon(config)),
}
"""The rules by the value of --optimizer, or of a group's."""


def rules_of(config: OptimizerConfig) -> RuleOf:
    """The rule of each parameter in a run with these settings: that of its group."""
    group_of = groups_of(config)
    made: dict[str, RuleOf] = {}
    by_counts = CountsRule()

    def rule_of(record: ParamRecord) -> UpdateRule:
        if record.by_counts is not None:
            return by_counts
        optimizer = group_of(record).optimizer
        if optimizer not in made:
            made[optimizer] = RULES[optimizer](config)
        return made[optimizer](record)

    return rule_of
