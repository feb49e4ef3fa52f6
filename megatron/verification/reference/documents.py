"""The reference model on samples of several documents: each document trained apart, and all at once with a dense mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.verification.reference.model import Seen, Weights, by_nobody, token_losses
from megatron.verification.reference.shape import ReferenceShape
from megatron.verification.reference.training import Batch


class Rules(NamedTuple):
    """What the end of a document does; it belongs to the document that it ends."""

    eod: int
    positions: bool = True
    """They start again at 0 after it."""
    attention: bool = True
    """Nothing after it attends to it or to what is before it."""
    loss: bool = True
    """What follows it need not be predicted."""


def spans(tokens: list[int], eod: int) -> list[tuple[int, int]]:
    """First token and end of each document of a sample."""
    found, start = [], 0
    for i, token in enumerate(tokens):
        if token == eod or i == len(tokens) - 1:
            found.append((start, i + 1))
            start = i + 1
    return found


def loss_of_documents_apart(shape: ReferenceShape, weights: Weights, batch: Batch, eod: int) -> Tensor:
    """Mean loss of a batch in which every document is a sample of its own; after an `eod` nothing is predicted."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for tokens, labels, mask in zip(*batch, strict=True):
        for start, end in spans(tokens.tolist(), eod):
            part = slice(start, end)
            kept = mask[part] * (tokens[part] != eod)
            total = total + (token_losses(shape, weights, tokens[None, part], labels[None, part])[0] * kept).sum()
            count += kept.sum().item()
    return total / count


def loss_with_rules(shape: ReferenceShape, weights: Weights, batch: Batch, rules: Rules) -> Tensor:
    """Mean loss of a batch of packed samples, each rule by itself."""
    losses, kept = losses_with_rules(shape, weights, batch, rules)
    return (losses * kept).sum() / kept.sum()


def losses_with_rules(
    shape: ReferenceShape, weights: Weights, batch: Batch, rules: Rules, seen: Seen = by_nobody
) -> tuple[Tensor, Tensor]:
    """Cross entropy of every token of packed samples, and whether it counts: two tensors [B, s].

    Args:
        seen: told of what layers give.
    """
    tokens, labels, mask = batch
    positions, documents = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for sample, row in enumerate(tokens.tolist()):
        for number, (start, end) in enumerate(spans(row, rules.eod)):
            positions[sample, start:end] = torch.arange(end - start)
            documents[sample, start:end] = number
    losses = token_losses(
        shape, weights, tokens, labels, positions if rules.positions else None, documents if rules.attention else None, seen
    )
    return losses, mask * (tokens != rules.eod) if rules.loss else mask
