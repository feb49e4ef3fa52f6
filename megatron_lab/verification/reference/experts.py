"""Mixtures of experts, written as loops over tokens (see docs/moe.md, "What is computed" and "Balance").

Shapes: B sequences of s tokens, h hidden, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    balance: Literal["none", "microbatch", "sequence", "update before"] = "none"
    """The tokens of which the load-balancing loss is made; of the update before it takes the shares of the experts."""
    balance_coeff: float = 0.0
    z_coeff: float = 0.0
    microbatch: int = 1
    """Sequences of a microbatch."""
    bias_step: float | None = None
    """By how much an update moves the bias of the choices; None: there is none."""
    capacity: float | None = None
    """How many times its mean share of the choices of a sequence an expert takes at most."""
    drops_last: bool = False
    """Whether late choices are dropped; else those with small weights."""


def choices(shape: ExpertsShape, logits: list[float], bias: list[float] | None = None) -> list[int]:
    """The experts of one token, the best first; of equal ones the lower number."""
    scores = logits
    if shape.score == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    elif shape.score == "softmax first":
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    if bias is not None:
        scores = [score + more for score, more in zip(scores, bias, strict=True)]
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


def dropped(shape: ExpertsShape, chosen: list[list[int]], weights: list[list[float]]) -> set[tuple[int, int]]:
    """The choices of a sequence (token, expert) that are more than an expert takes: the last ones, or those with the smallest
    weights (in steps of 1/4096), of equal ones the later."""
    if shape.capacity is None:
        return set()
    most = math.ceil(shape.capacity * len(chosen) * shape.chosen / shape.count)
    out: set[tuple[int, int]] = set()
    for expert in range(shape.count):
        mine = [
            (0 if shape.drops_last else -round(4096 * weight), token)
            for token, (its, of_them) in enumerate(zip(chosen, weights, strict=True))
            for number, weight in zip(its, of_them, strict=True)
            if number == expert
        ]
        out |= {(token, expert) for _, token in sorted(mine)[most:]}
    return out


def mixture(
    shape: ExpertsShape, weights: Mapping[str, Tensor], x: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor, list[list[list[int]]]]:
    """What the experts give [B, s, h], the losses that balance them, with their coefficients, as a mean over the microbatches, and
    the experts of each token.

    Args:
        weights: the layer's: "mlp.router.weight" [E, h], perhaps "mlp.router.bias" and "mlp.router.shares" [E].
        x: [B, s, h].
        expert: maps a number and rows [n, h] to as many rows.
    """
    logits = x @ weights["mlp.router.weight"].T
    bias = weights["mlp.router.bias"].tolist() if "mlp.router.bias" in weights else None
    chosen = [[choices(shape, token, bias) for token in sequence] for sequence in logits.tolist()]
    rows = []
    for sequence, of_sequence, its in zip(x, logits, chosen, strict=True):
        factors = [weights_of(shape, of_token, experts) for of_token, experts in zip(of_sequence, its, strict=True)]
        out = dropped(shape, its, [each.tolist() for each in factors])
        for place, (token, experts) in enumerate(zip(sequence, its, strict=True)):
            taken = [(w, number) for w, number in zip(factors[place], experts, strict=True) if (place, number) not in out]
            rows.append(sum((w * expert(number, token) for w, number in taken), torch.zeros_like(token)))
    return torch.stack(rows).view_as(x), losses(shape, weights, logits, chosen), chosen


def losses(shape: ExpertsShape, weights: Mapping[str, Tensor], logits: Tensor, chosen: list[list[list[int]]]) -> Tensor:
    """Load-balancing and z-loss with their coefficients, as a mean over the microbatches. In place of the gradients of bias and
    shares stand the choices of each expert over the mean, less 1."""
    size = 1 if shape.balance == "sequence" else shape.microbatch
    before = weights["mlp.router.shares"].detach() / shape.count if shape.balance == "update before" else None
    parts = [balance_loss(shape, logits[i : i + size], chosen[i : i + size], before) for i in range(0, len(logits), size)]
    z = logits.exp().sum(-1).log().square().mean()
    balance = shape.balance_coeff * torch.stack(parts).mean() if shape.balance != "none" else 0.0
    total = balance + shape.z_coeff * z
    for name in ("mlp.router.bias", "mlp.router.shares"):
        if name in weights:
            more = (weights[name] * (shares_of(shape, chosen) * shape.count - 1)).sum()
            total = total + (more - more.detach())
    return total


def shares_of(shape: ExpertsShape, chosen: list[list[list[int]]]) -> Tensor:
    """The share of each expert in all choices [E]."""
    flat = [number for sequence in chosen for token in sequence for number in token]
    return torch.tensor([flat.count(number) / len(flat) for number in range(shape.count)], dtype=torch.float64)


def balance_loss(shape: ExpertsShape, logits: Tensor, chosen: list[list[list[int]]], shares: Tensor | None = None) -> Tensor:
    """E x the sum over experts of their share of the choices x the mean of their scores (Switch, equation 4).

    Args:
        shares: in place of those of these choices.
    """
    scores = 1 / (1 + torch.exp(-logits)) if shape.score == "sigmoid" else logits.exp()
    scores = (scores / scores.sum(-1, keepdim=True)).flatten(0, 1)
    shares = shares_of(shape, chosen) if shares is None else shares
    return shape.count * (shares * scores.mean(0)).sum()
