"""Mixtures of experts, written as loops over tokens (see docs/moe.md, "What is computed" and "Balance").

Shapes: B sequences of s tokens, h hidden, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertsShape:
    """The experts of the layers that have some."""

    layers: tuple[bool, ...]
    """For each layer whether it has experts."""
    count: int
    chosen: int
    width: int
    shared: int | None = None
    """Width of an expert that all tokens pass."""
    gate: bool = False
    """Whether what that gives is multiplied by a sigmoid."""
    score: Literal["softmax", "softmax first", "sigmoid"] = "softmax"
    """Softmax over the chosen experts; softmax over all, of which the chosen ones' are taken; sigmoids over their sum."""
    scaling: float = 1.0
    groups: int = 1
    open_groups: int = 1
    balance: Literal["none", "microbatch", "sequence"] = "none"
    """The tokens of which the load-balancing loss is made."""
    balance_coeff: float = 0.0
    z_coeff: float = 0.0
    microbatch: int = 1
    """Sequences of a microbatch."""


def choices(shape: ExpertsShape, logits: list[float]) -> list[int]:
    """The experts of one token, the best first; of equal ones the lower number."""
    scores = logits
    if shape.score == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    elif shape.score == "softmax first":
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    candidates = list(range(shape.count))
    if shape.groups > 1:
        size, best = shape.count // shape.groups, shape.chosen // shape.open_groups
        groups = [sorted(scores[g * size : (g + 1) * size], reverse=True)[:best] for g in range(shape.groups)]
        order = sorted(range(shape.groups), key=lambda g: (-sum(groups[g]), g))
        candidates = [expert for expert in candidates if expert // size in order[: shape.open_groups]]
    return sorted(candidates, key=lambda expert: (-scores[expert], expert))[: shape.chosen]


def weights_of(shape: ExpertsShape, logits: Tensor, chosen: list[int]) -> Tensor:
    """What the results of a token's experts are multiplied by, [k]."""
    if shape.score == "softmax":
        found = torch.exp(logits[chosen] - logits.max())
        return shape.scaling * found / found.sum()
    if shape.score == "softmax first":
        found = torch.exp(logits - logits.max())
        return shape.scaling * found[chosen] / found.sum()
    found = 1 / (1 + torch.exp(-logits[chosen]))
    return shape.scaling * (found / found.sum() if shape.chosen > 1 else found)


def mixture(
    shape: ExpertsShape, router: Tensor, x: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor, list[list[list[int]]]]:
    """What the experts give [B, s, h], the losses that balance them, with their coefficients, as a mean over the microbatches, and
    the experts of each token.

    Args:
        router: [E, h].
        x: [B, s, h].
        expert: maps a number and rows [n, h] to as many rows.
    """
    logits = x @ router.T
    chosen = [[choices(shape, token) for token in sequence] for sequence in logits.tolist()]
    rows = []
    for sequence, of_sequence, its in zip(x, logits, chosen, strict=True):
        for token, of_token, experts in zip(sequence, of_sequence, its, strict=True):
            weights = weights_of(shape, of_token, experts)
            rows.append(sum(weight * expert(number, token) for weight, number in zip(weights, experts, strict=True)))
    return torch.stack(rows).view_as(x), losses(shape, logits, chosen), chosen


def losses(shape: ExpertsShape, logits: Tensor, chosen: list[list[list[int]]]) -> Tensor:
    """Load-balancing and z-loss with their coefficients, as a mean over the microbatches."""
    size = 1 if shape.balance == "sequence" else shape.microbatch
    parts = [balance_loss(shape, logits[i : i + size], chosen[i : i + size]) for i in range(0, len(logits), size)]
    z = logits.exp().sum(-1).log().square().mean()
    balance = shape.balance_coeff * torch.stack(parts).mean() if shape.balance != "none" else 0.0
    return balance + shape.z_coeff * z


def balance_loss(shape: ExpertsShape, logits: Tensor, chosen: list[list[list[int]]]) -> Tensor:
    """E x the sum over experts of their share of the choices x the mean of their scores (Switch, equation 4)."""
    scores = 1 / (1 + torch.exp(-logits)) if shape.score == "sigmoid" else logits.exp()
    scores = (scores / scores.sum(-1, keepdim=True)).flatten(0, 1)
    flat = [number for sequence in chosen for token in sequence for number in token]
    shares = torch.tensor([flat.count(number) / len(flat) for number in range(shape.count)], dtype=logits.dtype)
    return shape.count * (shares * scores.mean(0)).sum()
