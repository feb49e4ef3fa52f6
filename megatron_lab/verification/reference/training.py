"""The reference's training: its update written out, and the batch size, learning rate and weight decay of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lab.verification.reference.qk_clip import ScoreClip
from megatron_lab.verification.reference.shape import Weights, decays
from megatron_lab.verification.reference.update_rules import Kept, Numbers, One, updated


@dataclass(frozen=True)
class Rule:
    """The update rule."""

    optimizer: str = "adam"
    """The name of a function in `update_rules.py`."""
    clip: float | None = None
    """The largest norm of the whole gradient; None for no clipping."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    """These two are adam's and those of rules like it."""
    numbers: Numbers = field(default_factory=Numbers)
    """What other rules have of their own."""
    ema: float | None = None
    """Decay of the average of the weights, if there is one."""
    clips_scores: ScoreClip | None = None
    """What is done to heads with large scores."""
    bias_step: float | None = None
    """By how much an update moves the biases of experts' choices."""


class State:
    """Weights, and what rules keep of them, in float64. The weights that it is made from are not changed."""

    def __init__(self, weights: Weights) -> None:
        assert all(w.dtype == torch.float64 for w in weights.values()), "the reference is float64 throughout"
        self.weights = {name: w.detach().clone() for name, w in weights.items()}
        self.kept: dict[str, Kept] = {name: {} for name in weights}
        self.averages = dict(self.weights)
        """Exponential moving averages of the weights."""
        self.updates = 0


BY_COUNTS = ("router.bias", "router.shares")
"""Ends of the names of what choices of experts move: up for one chosen less often than the mean; or to its share over the mean."""


class Own(NamedTuple):
    """How one parameter is updated, where that differs from the others."""

    rule: Rule
    """Its clipping is that of all."""
    rate: float
    weight_decay: float


def update(
    state: State,
    gradients: dict[str, Tensor],
    rule: Rule,
    rate: float,
    weight_decay: float,
    own: Mapping[str, Own] = MappingProxyType({}),
    largest: Mapping[str, Tensor] = MappingProxyType({}),
) -> float:
    """Clip the gradients and change the weights.

    Args:
        rate: learning rate.
        weight_decay: for matrices and embeddings, not for norms and biases.
        own: what holds in their place for the parameters of these names.
        largest: the largest scores of the batch, as `ScoreClip` takes them.

    Returns:
        the norm of the whole gradient before clipping.
    """
    decay_of_average, clips_scores = rule.ema, rule.clips_scores
    plain = {name: Own(rule, rate, weight_decay if decays(name) else 0.0) for name in state.weights}
    norm = math.sqrt(sum(g.square().sum().item() for name, g in gradients.items() if not name.endswith(BY_COUNTS)))
    bias_step = rule.bias_step
    factor = 1.0 if rule.clip is None else min(1.0, rule.clip / (norm + 1e-6))
    state.updates += 1
    for name, w in state.weights.items():
        if name not in gradients:  # it is not trained
            continue
        if name.endswith(BY_COUNTS):
            assert bias_step is not None
            # Rounded, as autograd adds the choices up as fractions: an expert chosen as often as the mean is not moved.
            moved = bias_step * gradients[name].round(decimals=9).sign()
            state.weights[name] = 1 + gradients[name] if name.endswith("shares") else w - moved
            continue
        g = gradients[name] * factor
        rule, rate, decay = own.get(name, plain[name])
        vector = not decays(name)
        one = One(w, g, state.kept[name], state.updates, rate, decay, rule.betas, rule.eps, is_vector=vector, name=name)
        state.weights[name] = updated(one, rule.optimizer, rule.numbers)
    if clips_scores is not None:
        clips_scores.apply(state.weights, largest)
    if decay_of_average is not None:
        for name, w in state.weights.items():
            state.averages[name] = decay_of_average * state.averages[name] + (1 - decay_of_average) * w
    return norm


class Again(NamedTuple):
    """A second course: where it begins, how long it rises, to how many times the value of the first, and where it ends."""

    begin: int
    warmup: int
    factor: float
    end: int


@dataclass(frozen=True)
class Course:
    """A value that goes from `start` over a warm-up to `high`, and from there to `low`. Places are counted in samples."""

    high: float
    low: float = 0.0
    start: float = 0.0
    warmup: float = 0.0
    style: str = "linear"
    """constant, linear, cosine, inverse-square-root, or WSD: `high` until the final decay begins."""
    end: float = 0.0
    """The place where `low` is reached."""
    final: float = 0.0
    """Length of the final decay of WSD, which ends at `end`."""
    final_style: str = "exponential"
    """exponential (halves from 1 to 1/2, stretched to reach 0), linear, cosine or minus_sqrt."""
    again: Again | None = None
    """What comes after this course."""

    def at(self, samples: int) -> float:
        """The value of the next update, after updates with so many samples."""
        if self.again is not None and samples > self.again.begin:
            first, rest = replace(self, again=None), self.again.end - self.again.begin
            second = replace(
                first,
                high=self.again.factor * self.high,
                start=first.at(self.again.begin),
                warmup=self.again.warmup,
                end=rest,
                final=min(self.final, rest - self.again.warmup),
            )
            return second.at(samples - self.again.begin)
        if 0 < self.warmup and samples <= self.warmup:
            return self.start + (self.high - self.start) * (samples / self.warmup)
        if self.style == "constant":
            return self.high
        if samples > self.end:
            return self.low
        if self.style == "inverse-square-root":
            return max(self.low, self.high * math.sqrt(max(1, self.warmup) / max(1, samples)))
        begin, style = (self.end - self.final, self.final_style) if self.style == "WSD" else (self.warmup, self.style)
        if samples <= begin:
            return self.high
        way = (samples - begin) / (self.end - begin)
        left = {
            "linear": 1 - way,
            "cosine": (1 + math.cos(math.pi * way)) / 2,
            "exponential": 2 ** (1 - way) - 1,
            "minus_sqrt": 1 - math.sqrt(way),
        }[style]
        return self.low + left * (self.high - self.low)


def scheduled_sizes(text: str) -> dict[float, int]:
    """Batch sizes by the tokens from which on they hold, of a schedule such as `0:768 250B:1536`."""
    powers = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

    def number(word: str) -> float:
        power = powers.get(word[-1].upper())
        return float(word) if power is None else float(word[:-1]) * power

    pairs = (entry.split(":") for entry in text.replace(",", " ").split())
    return {number(tokens): int(number(size)) for tokens, size in pairs}


def batch_size(
    consumed: int, full: int, ramp: tuple[int, int, int] | None, scheduled: dict[float, int] | None = None, seq_length: int = 1
) -> int:
    """Number of samples in the step that begins after `consumed` samples.

    Args:
        full: batch size at the end.
        ramp: (first size, growth, samples): the sizes first, first + growth, ... below `full` share the samples equally.
        scheduled: batch sizes by the tokens from which on they hold, in place of both.
        seq_length: tokens of a sample.
    """
    if scheduled:
        return scheduled[max(tokens for tokens in scheduled if tokens // seq_length <= consumed)]
    if ramp is None or consumed >= ramp[2]:
        return full
    first, growth, samples = ramp
    sizes = range(first, full, growth)
    return sizes[consumed * len(sizes) // samples]
