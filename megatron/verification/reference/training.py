"""Training steps of the reference model: one mean over all tokens of the global batch, clipping, and the update written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.verification.reference.model import Weights, token_losses
from megatron.verification.reference.shape import ReferenceShape
from megatron.verification.reference.update import Rule, State, update

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
    rule = Rule(optimizer, clip, betas, eps, momentum)
    state = State(weights)
    losses: list[float] = []
    grad_norms: list[float] = []
    first_gradients: dict[str, Tensor] = {}

    for batch, rate in zip(batches, rates, strict=True):
        value, gradients = loss_and_gradients(shape, state.weights, batch, loss)
        losses.append(value)
        first_gradients = first_gradients or gradients
        grad_norms.append(update(state, gradients, rule, rate, weight_decay))
    return ReferenceRun(losses, grad_norms, first_gradients, state.weights)


def loss_and_gradients(
    shape: ReferenceShape, weights: Weights, batch: Batch, loss: Loss = mean_loss
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and its gradient with respect to every weight."""
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    value = loss(shape, leaves, batch)
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return value.item(), dict(zip(leaves, gradients, strict=True))
