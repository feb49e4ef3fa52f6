"""Parameter groups: which optimizer updates a parameter, at which learning rate and with which weight decay.

All optimizers take these properties from the parameter's group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron.config.param_groups import merge_entries
from megatron.config.training import OptimizerConfig
from megatron.spec.weights import OUTPUT_WEIGHT, WORD_EMBEDDING, ParamInfo, Role, WeightSpec, split_layer_name


@dataclass(frozen=True)
class LearningRateBounds:
    """Maximum and minimum learning rate of a parameter group. None stands for the run's value (--lr or --min-lr)."""

    lr: float | None = None
    min_lr: float | None = None


DEFAULT_LR_BOUNDS = LearningRateBounds()
"""Bounds from --lr and --min-lr."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameter group: optimizer settings that all its parameters share."""

    optimizer: str
    """Optimizer (value of --optimizer) that updates the group. With muon, the parameters that Muon does not update are in groups of
    adam."""
    lr_mult: float = 1.0
    """Factor of the group's learning rate, relative to the learning rate of the run."""
    lr_bounds: LearningRateBounds = DEFAULT_LR_BOUNDS
    wd_mult: float = 1.0
    """Factor of the group's weight decay, relative to the weight decay of the run; 0 for biases and the weights of norms."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""
    eps: float = 1e-8
    """Constant added to the square root of Adam's second moment."""


GroupLookup = Callable[[ParamInfo], ParamGroup]
"""Function that returns the parameter group of a parameter."""


MUP_COLUMNS = {"adam": "adam", "adam8bit": "adam", "lion": "adam", "ademamix": "adam", "sgd": "sgd"}
"""Optimizers whose learning rate muP can scale, each with its column in table 8 of Yang et al. 2022.

The column of Adam holds for every optimizer that changes each element by about the learning rate, independent of the gradient's
size.
"""


def compute_mup_lr_factor(optimizer: str, role: Role, width: float) -> float:
    """Return the factor by which muP multiplies a parameter's learning rate (Yang et al. 2022, table 8).

    Args:
        optimizer: column of the table, "adam" or "sgd".
        role: role of the parameter in muP (`ParamInfo.role`): "input", "hidden" or "output".
        width: width of the model divided by the width of the base model.
    """
    if optimizer == "adam":
        return 1.0 / width if role == "hidden" else 1.0
    return 1.0 if role == "hidden" else width


def build_group_lookup(config: OptimizerConfig) -> GroupLookup:
    """Build a function that returns the parameter group of a parameter. The function caches groups by parameter name."""
    groups: dict[str, ParamGroup] = {}

    def group_of(param: ParamInfo) -> ParamGroup:
        if param.name not in groups:
            groups[param.name] = _build_group(config, param)
        return groups[param.name]

    return group_of


_MAX_LISTED_NAMES = 5  # per group in the start-up log


def format_groups(config: OptimizerConfig, weights: Iterable[WeightSpec]) -> list[str]:
    """Return the lines of the start-up log about parameter groups. A group has two lines: the number of its parameters, with their
    optimizer, learning rate and weight decay; and their names.

    Args:
        weights: all parameters of the model.
    """
    group_of, weights_of_group = build_group_lookup(config), dict[ParamGroup, list[WeightSpec]]()
    for weight in weights:
        # Weights outside the groups are updated from the experts' assignment counts, or frozen.
        if weight.count_update is None and not weight.frozen:
            weights_of_group.setdefault(group_of(weight), []).append(weight)
    lines = ["parameter groups:"]
    for group, group_weights in weights_of_group.items():
        max_lr, min_lr = (
            group_value or default
            for group_value, default in ((group.lr_bounds.lr, config.lr), (group.lr_bounds.min_lr, config.min_lr))
        )
        rate = f"{max_lr:g} to {min_lr:g}" if config.lr_decay_style != "constant" else f"{max_lr:g}"
        decay = (
            "no weight decay" if not group.wd_mult else "weight decay" + (f" x {group.wd_mult:g}" if group.wd_mult != 1.0 else "")
        )
        update_rule = f"{group.optimizer}" + (f", betas {group.betas}, eps {group.eps:g}" if group.optimizer == "adam" else "")
        names = list(dict.fromkeys(_replace_layer_index(weight.name) for weight in group_weights))
        if len(names) > _MAX_LISTED_NAMES:
            names[_MAX_LISTED_NAMES - 1 :] = [f"and {len(names) - _MAX_LISTED_NAMES + 1} more like these"]
        rate += f" x {group.lr_mult:g}" if group.lr_mult != 1.0 else ""
        num_parameters = sum(weight.numel for weight in group_weights)
        lines += [
            f"  {num_parameters:,} in {len(group_weights):,} tensors: {update_rule}, learning rate {rate}, {decay}",
            f"    {', '.join(names)}",
        ]
    return lines


def is_hidden_matrix(param: ParamInfo) -> bool:
    """Return whether a parameter is a matrix within a layer, which Muon can update.

    Embeddings, the output layer and vectors are left to AdamW (Jordan et al. 2024).
    """
    return param.param_type == "matrix" and param.name != OUTPUT_WEIGHT


def _replace_layer_index(name: str) -> str:
    layer_index, name_in_layer = split_layer_name(name)
    return name if layer_index is None else f"layers.*.{name_in_layer}"


def _build_group(config: OptimizerConfig, param: ParamInfo) -> ParamGroup:
    overrides = merge_entries(config.param_groups, param.name)
    uses_decoupled_lr = config.decoupled_lr is not None and param.name in (WORD_EMBEDDING, OUTPUT_WEIGHT)
    lr_bounds = LearningRateBounds(config.decoupled_lr, config.decoupled_min_lr) if uses_decoupled_lr else DEFAULT_LR_BOUNDS
    has_decay = param.has_weight_decay and (config.decay_embeddings or param.param_type != "table")
    optimizer = overrides.get("optimizer", config.optimizer)
    if optimizer == "muon" and not is_hidden_matrix(param):
        optimizer = "adam"
    # A check of the settings rejects muP with optimizers that are not in MUP_COLUMNS.
    has_mup_scaling = param.mup_width != 1.0 and optimizer in MUP_COLUMNS
    mup_lr_mult = compute_mup_lr_factor(MUP_COLUMNS[optimizer], param.role, param.mup_width) if has_mup_scaling else 1.0
    return ParamGroup(
        optimizer,
        overrides.get("lr_mult", 1.0) * mup_lr_mult,
        LearningRateBounds(overrides.get("lr", lr_bounds.lr), overrides.get("min_lr", lr_bounds.min_lr)),
        # A step decays by rate x weight decay. The division makes this product independent of the model's width.
        overrides.get("wd_mult", 1.0 if has_decay else 0.0) / mup_lr_mult,
        (overrides.get("adam_beta1", config.adam_beta1), overrides.get("adam_beta2", config.adam_beta2)),
        overrides.get("adam_eps", config.adam_eps),
    )
