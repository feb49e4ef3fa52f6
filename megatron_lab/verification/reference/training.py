"""Training of the reference model: the update of all weights, and the batch size, learning rate and weight decay of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lab.verification.reference.qk_clip import QkClip
from megatron_lab.verification.reference.shape import Weights, has_weight_decay
from megatron_lab.verification.reference.update_rules import ParamState, ParamStep, RuleOptions, apply_rule


@dataclass(frozen=True)
class ReferenceUpdateRule:
    """Update rule of the optimizer with its options, and options of the full update such as gradient clipping and weight
    averaging."""

    optimizer: str = "adam"
    """Name of the update rule, such as "adam" or "lion" (functions of `update_rules.py`)."""
    max_grad_norm: float | None = None
    """Global gradient norm above which gradients are clipped; None for no clipping."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment, for Adam and similar rules."""
    eps: float = 1e-8
    """Constant added to the square root of the second moment, for Adam and similar rules."""
    options: RuleOptions = field(default_factory=RuleOptions)
    """Options of the update rules other than `betas` and `eps`."""
    ema_decay: float | None = None
    """Decay of the exponential moving average of the weights; None without an average."""
    qk_clip: QkClip | None = None
    """QK-clip, applied after the update; None without QK-clip."""
    bias_update_rate: float | None = None
    """Amount by which an update raises or lowers the router biases that balance the load of experts. Models without such biases
    do not use this option."""


class State:
    """Training state of the reference model in float64: weights, optimizer state, and moving averages of the weights. The
    constructor copies the weights."""

    def __init__(self, weights: Weights) -> None:
        assert all(w.dtype == torch.float64 for w in weights.values()), "the reference is float64 throughout"
        self.weights = {name: w.detach().clone() for name, w in weights.items()}
        self.param_states: dict[str, ParamState] = {name: {} for name in weights}
        self.averages = dict(self.weights)
        """Exponential moving averages of the weights."""
        self.num_updates = 0


COUNT_UPDATE_SUFFIXES = ("router.bias", "router.shares")
"""Name suffixes of parameters that are updated from expert counts instead of gradients. The bias of an expert rises if it is
selected less often than the mean; the share is set to the expert's count divided by the mean."""


class ParamUpdate(NamedTuple):
    """Update rule, learning rate and weight decay of one parameter in one update."""

    rule: ReferenceUpdateRule
    """Update rule of the parameter. Options that concern all parameters, such as clipping, are read from the rule of the run and
    ignored here."""
    rate: float
    weight_decay: float


def update_weights(
    state: State,
    gradients: dict[str, Tensor],
    update_rule: ReferenceUpdateRule,
    rate: float,
    weight_decay: float,
    param_updates: Mapping[str, ParamUpdate] = MappingProxyType({}),
    max_logits: Mapping[str, Tensor] = MappingProxyType({}),
) -> float:
    """Clip the gradients, update the weights in `state`, and return the norm of the full gradient before clipping.

    Args:
        gradients: gradient of each trained weight, by name.
        update_rule: update rule of the optimizer, and options of clipping and averaging.
        rate: learning rate.
        weight_decay: weight decay of matrices and embeddings; norms and biases have none.
        param_updates: for parameters whose options differ, what replaces `update_rule`, `rate` and `weight_decay`, by name.
        max_logits: largest attention score of each head in the batch, by the name of the layer; used by QK-clip.
    """
    ema_decay, qk_clip = update_rule.ema_decay, update_rule.qk_clip
    default_updates = {
        name: ParamUpdate(update_rule, rate, weight_decay if has_weight_decay(name) else 0.0) for name in state.weights
    }
    norm = math.sqrt(
        sum(grad.square().sum().item() for name, grad in gradients.items() if not name.endswith(COUNT_UPDATE_SUFFIXES))
    )
    bias_update_rate = update_rule.bias_update_rate
    clip_factor = 1.0 if update_rule.max_grad_norm is None else min(1.0, update_rule.max_grad_norm / (norm + 1e-6))
    state.num_updates += 1
    for name, weight in state.weights.items():
        if name not in gradients:  # not trained
            continue
        if name.endswith(COUNT_UPDATE_SUFFIXES):
            assert bias_update_rate is not None
            # Rounded, because autograd sums the counts as fractions: the bias of an expert with the mean count must not move.
            bias_change = bias_update_rate * gradients[name].round(decimals=9).sign()
            state.weights[name] = 1 + gradients[name] if name.endswith("shares") else weight - bias_change
            continue
        grad = gradients[name] * clip_factor
        update_rule, rate, decay = param_updates.get(name, default_updates[name])
        is_vector = not has_weight_decay(name)
        param_step = ParamStep(
            weight,
            grad,
            state.param_states[name],
            state.num_updates,
            rate,
            decay,
            update_rule.betas,
            update_rule.eps,
            is_vector=is_vector,
            name=name,
        )
        state.weights[name] = apply_rule(param_step, update_rule.optimizer, update_rule.options)
    if qk_clip is not None:
        qk_clip.apply(state.weights, max_logits)
    if ema_decay is not None:
        for name, weight in state.weights.items():
            state.averages[name] = ema_decay * state.averages[name] + (1 - ema_decay) * weight
    return norm


class Rewarm(NamedTuple):
    """Second warm-up and decay of a schedule: start of the warm-up, length of the warm-up, peak as a multiple of the first peak,
    and end of the decay. Start, length and end are numbers of samples."""

    start: int
    warmup: int
    factor: float
    end: int


@dataclass(frozen=True)
class ScalarSchedule:
    """Schedule of a learning rate or weight decay: warm-up from `initial` to `peak`, then decay to `minimum`.

    Lengths (`warmup`, `final_decay`) and the position `end` are numbers of samples.
    """

    peak: float
    minimum: float = 0.0
    initial: float = 0.0
    warmup: float = 0.0
    style: str = "linear"
    """Shape of the decay: constant, linear, cosine, inverse-square-root, or WSD (warm-up, stable, decay), which stays at `peak`
    until the final decay."""
    end: float = 0.0
    """Number of samples at which the decay reaches `minimum`."""
    final_decay: float = 0.0
    """Length, in samples, of the final decay of WSD (warm-up, stable, decay). The final decay ends at `end`."""
    final_decay_style: str = "exponential"
    """Shape of the final decay of WSD: exponential, linear, cosine or minus_sqrt. Exponential means 0.5 ** progress, where
    progress runs from 0 to 1, stretched so that it falls from 1 to 0."""
    rewarm: Rewarm | None = None
    """Second warm-up and decay after the first decay; None without them."""

    def get_value_at(self, samples: int) -> float:
        """Return the learning rate or weight decay of the update that follows after `samples` samples."""
        if self.rewarm is not None and samples > self.rewarm.start:
            first_schedule, rewarm_length = replace(self, rewarm=None), self.rewarm.end - self.rewarm.start
            rewarm_schedule = replace(
                first_schedule,
                peak=self.rewarm.factor * self.peak,
                initial=first_schedule.get_value_at(self.rewarm.start),
                warmup=self.rewarm.warmup,
                end=rewarm_length,
                final_decay=min(self.final_decay, rewarm_length - self.rewarm.warmup),
            )
            return rewarm_schedule.get_value_at(samples - self.rewarm.start)
        if 0 < self.warmup and samples <= self.warmup:
            return self.initial + (self.peak - self.initial) * (samples / self.warmup)
        if self.style == "constant":
            return self.peak
        if samples > self.end:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * math.sqrt(max(1, self.warmup) / max(1, samples)))
        decay_start, style = (
            (self.end - self.final_decay, self.final_decay_style) if self.style == "WSD" else (self.warmup, self.style)
        )
        if samples <= decay_start:
            return self.peak
        progress = (samples - decay_start) / (self.end - decay_start)
        remaining_share = {
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "exponential": 2 ** (1 - progress) - 1,
            "minus_sqrt": 1 - math.sqrt(progress),
        }[style]
        return self.minimum + remaining_share * (self.peak - self.minimum)


def parse_batch_size_schedule(schedule: str) -> dict[float, int]:
    """Parse a batch-size schedule such as `0:768 250B:1536`. The keys of the returned dict are numbers of consumed tokens; the
    values are the batch sizes, in samples, from there on."""
    powers = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

    def parse_number(word: str) -> float:
        power = powers.get(word[-1].upper())
        return float(word) if power is None else float(word[:-1]) * power

    pairs = (entry.split(":") for entry in schedule.replace(",", " ").split())
    return {parse_number(tokens): int(parse_number(size)) for tokens, size in pairs}


def compute_batch_size(
    consumed: int,
    final_size: int,
    rampup: tuple[int, int, int] | None,
    schedule: dict[float, int] | None = None,
    seq_length: int = 1,
) -> int:
    """Return the global batch size, in samples, of the step that starts after `consumed` samples.

    Args:
        final_size: batch size at the end of the ramp-up.
        rampup: (initial size, increment, samples): the sizes initial, initial + increment, ... below `final_size` each apply to an
            equal share of the samples.
        schedule: batch size from a number of tokens on; replaces `final_size` and `rampup`.
        seq_length: tokens of a sample.
    """
    if schedule:
        return schedule[max(tokens for tokens in schedule if tokens // seq_length <= consumed)]
    if rampup is None or consumed >= rampup[2]:
        return final_size
    initial_size, increment, num_samples = rampup
    sizes = range(initial_size, final_size, increment)
    return sizes[consumed * len(sizes) // num_samples]
