"""What the settings say of single parameters, for the plain reference: rates, decay and rules of parameter groups."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from megatron.config.training import OptimizerConfig
from megatron_lab.verification.reference.shape import decays
from megatron_lab.verification.reference.training import Course, Own, Rule

_EMBEDDINGS = ("embedding.word.weight", "embedding.position.weight")
_DECOUPLED = ("embedding.word.weight", "output.weight")
At = Callable[[int], Own]
"""How a parameter is updated after updates with so many samples."""


def own_updates(
    names: Iterable[str], settings: OptimizerConfig, rule: Rule, rates: Course, decay: Course, width: float
) -> dict[str, At]:
    """How each parameter is updated of which the settings say something of its own.

    Args:
        rule: the update rule of all others; rates and decay are theirs too.
        width: that of the model over the base of muP.
    """
    found = {name: _words(name, settings) for name in names}
    return {name: _own(name, words, rule, rates, decay, width) for name, words in found.items() if words or width != 1}


def _words(name: str, settings: OptimizerConfig) -> dict[str, str]:
    """Key and value of what is said of a parameter; what is said later counts."""
    found: dict[str, str] = {}
    if settings.decoupled_lr is not None and name in _DECOUPLED:
        found["lr"] = str(settings.decoupled_lr)
        if settings.decoupled_min_lr is not None:
            found["min-lr"] = str(settings.decoupled_min_lr)
    if not settings.decay_embeddings and name in _EMBEDDINGS:
        found["wd-mult"] = "0"
    for text in settings.param_groups:
        pattern, *said = text.split()
        if re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*").replace("?", "."), name):
            found |= dict(one.replace("_", "-").split("=") for one in said)
    return found


def _own(name: str, words: dict[str, str], rule: Rule, rates: Course, decay: Course, width: float) -> At:
    number = {key: float(value) for key, value in words.items() if key != "optimizer"}
    betas = number.get("adam-beta1", rule.betas[0]), number.get("adam-beta2", rule.betas[1])
    optimizer: Any = words.get("optimizer", rule.optimizer)
    own_rule = dataclasses.replace(rule, optimizer=optimizer, betas=betas, eps=number.get("adam-eps", rule.eps))
    course = dataclasses.replace(rates, high=number.get("lr", rates.high), low=number.get("min-lr", rates.low))
    more, less = number.get("lr-mult", 1.0), number.get("wd-mult", 1.0 if decays(name) else 0.0)
    mup = _mup(name, optimizer, width)
    return lambda samples: Own(own_rule, more * mup * course.at(samples), less / mup * decay.at(samples))


def _mup(name: str, optimizer: str, width: float) -> float:
    """The column of table 8 of Yang et al. 2022 that is on learning rates. Rate x decay stays the same."""
    hidden = name.startswith(("layers.", "mtp.")) and name.endswith(".weight") and "norm" not in name
    if optimizer == "sgd":
        return 1 if hidden else width
    return 1 / width if hidden else 1
