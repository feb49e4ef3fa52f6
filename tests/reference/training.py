"""Training steps of the reference model: one mean over all tokens of the global batch, clipping, and the update written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tests.reference.model import Weights, token_losses
from tests.reference.shape import ReferenceShape, decays

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, labels and loss mask of a global batch, each [B, s]."""


@dataclass(frozen=True)
class ReferenceRun:
    """What a run gave; the framework's runs are put into the same form to be compared."""

    losses: list[float]
    """Of each step, before its update."""
    grad_norms: list[float]
    """Of each step, before clipping."""
    first_gradients: dict[str, Tensor]
    """Of the first step, before clipping."""
    weights_after: dict[str, Tensor]
    """After the last step."""


def mean_loss(shape: ReferenceShape, weights: Weights, batch: Batch) -> Tensor:
    """Mean cross entropy over the tokens of the batch that the mask keeps."""
    tokens, labels, mask = batch
    mask = mask.to(torch.float64)
    return (token_losses(shape, weights, tokens, labels) * mask).sum() / mask.sum()


Loss = Callable[[ReferenceShape, Weights, Batch], Tensor]


def train(
    shape: ReferenceShape,
    weights: Weights,
    batches: Sequence[Batch],
    *,
    loss: Loss = mean_loss,
    lr: float | Sequence[float],
    weight_decay: float = 0.0,
    clip: float | None = None,
    optimizer: Literal["adam", "sgd"] = "adam",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.0,
) -> ReferenceRun:
    """One step on every batch.

    Args:
        shape: the model.
        weights: float64 start values; not changed.
        batches: one global batch a step.
        loss: what is made small, a scalar.
        lr: learning rate, of every step or one a step.
        weight_decay: of matrices and embeddings, not of norms and biases.
        clip: greatest norm of the whole gradient; None for no clipping.
        optimizer: adam (with decoupled decay, Loshchilov and Hutter 2019) or sgd (decay added to the gradient).
        betas: of adam.
        eps: of adam.
        momentum: of sgd.
    """
    assert all(w.dtype == torch.float64 for w in weights.values()), "the reference is float64 throughout"
    rates = [lr] * len(batches) if isinstance(lr, int | float) else list(lr)
    assert len(rates) == len(batches)
    weights = {name: w.detach().clone() for name, w in weights.items()}
    first_moments = {name: torch.zeros_like(w) for name, w in weights.items()}
    second_moments = {name: torch.zeros_like(w) for name, w in weights.items()}
    losses, grad_norms, first_gradients = [], [], {}

    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True), start=1):
        value, gradients = loss_and_gradients(shape, weights, batch, loss)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        losses.append(value)
        grad_norms.append(norm)
        if step == 1:
            first_gradients = gradients
        factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        for name, w in weights.items():
            g = gradients[name] * factor
            decay = weight_decay if decays(name) else 0.0
            if optimizer == "adam":
                first_moments[name] = m = betas[0] * first_moments[name] + (1 - betas[0]) * g
                second_moments[name] = v = betas[1] * second_moments[name] + (1 - betas[1]) * g.square()
                m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
                weights[name] = w * (1 - rate * decay) - rate * m / (v.sqrt() + eps)
            else:
                first_moments[name] = m = momentum * first_moments[name] + g + decay * w
                weights[name] = w - rate * m
    return ReferenceRun(losses, grad_norms, first_gradients, weights)


def loss_and_gradients(
    shape: ReferenceShape, weights: Weights, batch: Batch, loss: Loss = mean_loss
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and its gradient with respect to every weight."""
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    value = loss(shape, leaves, batch)
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return value.item(), dict(zip(leaves, gradients, strict=True))
