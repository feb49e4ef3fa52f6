"""Random start weights and batches for the reference model."""

from __future__ import annotations

import torch

from megatron.verification.reference.model import Weights
from megatron.verification.reference.shape import ReferenceShape, is_norm, weight_shapes
from megatron.verification.reference.training import Batch


def random_weights(shape: ReferenceShape, seed: int, std: float = 0.1) -> Weights:
    """Normal values; also biases are not zero and norm weights not one, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in weight_shapes(shape).items():
        values = torch.randn(size, generator=generator, dtype=torch.float64) * std
        weights[name] = values + 1 if is_norm(name) and name.endswith(".weight") else values
    return weights


def random_batches(shape: ReferenceShape, steps: int, batch: int, microbatch: int, seed: int) -> list[Batch]:
    """Global batches of random tokens whose loss masks differ much between microbatches.

    Each run of `microbatch` sequences keeps all tokens, half of them, a single one, or none at all, in turn and in an order that
    changes with the step; a batch of few microbatches takes the fuller ones.
    """
    generator = torch.Generator().manual_seed(seed)
    count = batch // microbatch
    assert count * microbatch == batch, "the batch must divide into microbatches"
    batches = []
    for _ in range(steps):
        window = torch.randint(shape.vocab, (batch, shape.seq + 1), generator=generator)
        mask = torch.zeros(count, microbatch * shape.seq, dtype=torch.float64)
        for place, part in enumerate(torch.randperm(count, generator=generator).tolist()):
            kept = (mask.shape[1], mask.shape[1] // 2, 1, 0)[place % 4]
            mask[part, torch.randperm(mask.shape[1], generator=generator)[:kept]] = 1.0
        batches.append((window[:, :-1], window[:, 1:], mask.view(batch, shape.seq)))
    return batches
