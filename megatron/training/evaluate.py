"""Loss on a held-out split."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron.model.inputs import ModelInputs
from megatron.training.step import TrainStep


def evaluate(step: TrainStep, batches: Iterable[list[ModelInputs]]) -> float:
    """Sum of mask x loss over all tokens of all batches, divided by the sum of the mask; the same on every rank."""
    loss, count = 0.0, 0.0
    for batch in batches:
        batch_loss, batch_count = step.evaluate(batch)
        loss, count = loss + batch_loss, count + batch_count
    return loss / count if count else math.nan
