"""The group of each parameter: by which rule it is updated, at which rate, with which decay. Rules of update read it, nothing else
decides any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron.config.param_groups import merged
from megatron.config.training import OptimizerConfig
from megatron.spec.weights import OUTPUT, WORD_EMBEDDING, ParamFacts, Role, Weight, in_layer


@dataclass(frozen=True)
class RateEnds:
    """The ends of a learning rate's course that differ from the run's. None: as in the run."""

    lr: float | None = None
    min_lr: float | None = None


RUN_ENDS = RateEnds()
"""Those of --lr and --min-lr."""


@dataclass(frozen=True)
class ParamGroup:
    """What parameters of one group have in common."""

    optimizer: str
    """The value of --optimizer that updates them: adam too for what muon leaves to it."""
    lr_mult: float = 1.0
    """Factor on the learning rate."""
    ends: RateEnds = RUN_ENDS
    wd_mult: float = 1.0
    """Factor on the weight decay; 0 for biases and the weights of norms."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""
    eps: float = 1e-8
    """Added to the root of Adam's second moment."""


GroupOf = Callable[[ParamFacts], ParamGroup]
"""Gives the group of a parameter."""


MUP_RULES = {"adam": "adam", "adam8bit": "adam", "lion": "adam", "ademamix": "adam", "sgd": "sgd"}
"""The optimizers whose learning rates muP is known to scale, each with its column of table 8 in Yang et al. 2022: that of Adam
where every element moves by about the rate, however large the gradient is."""


def mup_factor(column: str, role: Role, width: float) -> float:
    """Factor on the learning rate of a parameter in a model `width` times as wide as the base (Yang et al. 2022, table 8)."""
    if column == "adam":
        return 1.0 / width if role == "hidden" else 1.0
    return 1.0 if role == "hidden" else width


def groups_of(config: OptimizerConfig) -> GroupOf:
    """The group of each parameter in a run with these settings."""
    found: dict[str, ParamGroup] = {}

    def group_of(facts: ParamFacts) -> ParamGroup:
        if facts.name not in found:
            found[facts.name] = _group(config, facts)
        return found[facts.name]

    return group_of


_MOST_NAMES = 5  # of a group that are listed


def describe_groups(config: OptimizerConfig, weights: Iterable[Weight]) -> list[str]:
    """A table of the groups for the start-up log: how many parameters, how they are updated, and which they are."""
    group_of, members = groups_of(config), dict[ParamGroup, list[Weight]]()
    for weight in weights:
        if weight.by_counts is None and not weight.frozen:  # choices of experts move the others
            members.setdefault(group_of(weight), []).append(weight)
    rows = [("tensors", "parameters", "optimizer", "learning rate", "weight decay", "")]
    for group, found in members.items():
        high, low = (own or run for own, run in ((group.ends.lr, config.lr), (group.ends.min_lr, config.min_lr)))
        rate = f"{high:g} to {low:g}" if config.lr_decay_style != "constant" else f"{high:g}"
        decay = "none" if not group.wd_mult else "all of it" if group.wd_mult == 1.0 else f"x {group.wd_mult:g}"
        moments = f"{group.optimizer}" + (f", betas {group.betas}, eps {group.eps:g}" if group.optimizer == "adam" else "")
        which = list(dict.fromkeys(_in_any_layer(weight.name) for weight in found))
        if len(which) > _MOST_NAMES:
            which[_MOST_NAMES - 1 :] = [f"and {len(which) - _MOST_NAMES + 1} more like these"]
        rate += f" x {group.lr_mult:g}" if group.lr_mult != 1.0 else ""
        rows.append((f"{len(found):,}", f"{sum(weight.numel for weight in found):,}", moments, rate, decay, ", ".join(which)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["parameter groups:", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]


def is_hidden_matrix(facts: ParamFacts) -> bool:
    """Whether Muon updates a parameter: a matrix of a layer. Embeddings, the output layer and vectors are left to AdamW (Jordan et
    al. 2024)."""
    return facts.kind == "matrix" and facts.name != OUTPUT


def _in_any_layer(name: str) -> str:
    layer, part = in_layer(name)
    return name if layer is None else f"layers.*.{part}"


def _group(config: OptimizerConfig, facts: ParamFacts) -> ParamGroup:
    own = merged(config.param_groups, facts.name)
    decoupled = config.decoupled_lr is not None and facts.name in (WORD_EMBEDDING, OUTPUT)
    ends = RateEnds(config.decoupled_lr, config.decoupled_min_lr) if decoupled else RUN_ENDS
    decays = facts.decay and (config.decay_embeddings or facts.kind != "table")
    optimizer = own.get("optimizer", config.optimizer)
    if optimizer == "muon" and not is_hidden_matrix(facts):
        optimizer = "adam"
    scaled = facts.width != 1.0 and optimizer in MUP_RULES  # others are refused beside muP, by a rule that looks at groups
    mup = mup_factor(MUP_RULES[optimizer], facts.role, facts.width) if scaled else 1.0
    return ParamGroup(
        optimizer,
        own.get("lr_mult", 1.0) * mup,
        RateEnds(own.get("lr", ends.lr), own.get("min_lr", ends.min_lr)),
        own.get("wd_mult", 1.0 if decays else 0.0) / mup,  # an update takes off as much at every width
        (own.get("adam_beta1", config.adam_beta1), own.get("adam_beta2", config.adam_beta2)),
        own.get("adam_eps", config.adam_eps),
    )
