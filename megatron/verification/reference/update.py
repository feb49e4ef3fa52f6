"""One update of the reference's weights, written out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.verification.reference.model import Weights
from megatron.verification.reference.shape import decays


@dataclass(frozen=True)
class Rule:
    """How gradients change weights."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam has decoupled decay (Loshchilov and Hutter 2019), with sgd the decay is added to the gradient."""
    clip: float | None = None
    """Greatest norm of the whole gradient; None for no clipping."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of adam."""
    eps: float = 1e-8
    """Of adam."""
    momentum: float = 0.0
    """Of sgd."""


class State:
    """Weights and moments in float64. The weights that it is made from are not changed."""

    def __init__(self, weights: Weights) -> None:
        assert all(w.dtype == torch.float64 for w in weights.values()), "the reference is float64 throughout"
        self.weights = {name: w.detach().clone() for name, w in weights.items()}
        self.first_moments = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.second_moments = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.updates = 0


def update(state: State, gradients: dict[str, Tensor], rule: Rule, rate: float, weight_decay: float) -> float:
    """Clip the gradients and change the weights.

    Args:
        rate: learning rate.
        weight_decay: of matrices and embeddings, not of norms and biases.

    Returns:
        the norm of the whole gradient before clipping.
    """
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    factor = 1.0 if rule.clip is None else min(1.0, rule.clip / (norm + 1e-6))
    state.updates += 1
    beta1, beta2 = rule.betas
    for name, w in state.weights.items():
        g = gradients[name] * factor
        decay = weight_decay if decays(name) else 0.0
        if rule.optimizer == "adam":
            state.first_moments[name] = m = beta1 * state.first_moments[name] + (1 - beta1) * g
            state.second_moments[name] = v = beta2 * state.second_moments[name] + (1 - beta2) * g.square()
            m, v = m / (1 - beta1**state.updates), v / (1 - beta2**state.updates)
            state.weights[name] = w * (1 - rate * decay) - rate * m / (v.sqrt() + rule.eps)
        else:
            state.first_moments[name] = m = rule.momentum * state.first_moments[name] + g + decay * w
            state.weights[name] = w - rate * m
    return norm
