"""A loss or gradient that is not finite: where it began, told before the run ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from megatron.checkpoint.errors import listed
from megatron.model.gpt import ModelInputs
from megatron.parallel.collectives import gather_objects
from megatron.parallel.params import ParamEntry
from megatron.training.failure import NonFiniteError, ranks_in_words

if TYPE_CHECKING:
    from megatron.training.step import TrainStep


def raise_nonfinite(step: TrainStep, batch: Sequence[ModelInputs], iteration: int, loss_sum: float) -> NoReturn:
    """Find where it began, and raise the same error everywhere. All ranks call it together.

    For that the step is run again (it is a function of its inputs, dropout included).

    Args:
        batch: this data rank's microbatches.
        loss_sum: this rank's share of the loss.

    Raises:
        NonFiniteError: always.
    """
    bad = sorted(set().union(*(provider.nonfinite() for provider in step.providers)))
    again: set[str] = set()

    def look(entry: ParamEntry, grad: torch.Tensor) -> None:
        if not torch.isfinite(grad).all():
            again.add(entry.record.name)

    step.gradients(batch, inspect=look)
    seen = gather_objects((math.isfinite(loss_sum), bad, sorted(again)), step.context.world)
    lines = [f"iteration {iteration}: the loss or the gradient is not finite, so training stops before the update."]
    lossy = [rank for rank, (finite, _, _) in enumerate(seen) if not finite]
    if lossy:
        lines.append(f"  loss not finite on {ranks_in_words(lossy)}")
    repeats = any(names for _, _, names in seen)
    named: dict[str, list[int]] = {}
    for rank, (_, summed, own) in enumerate(seen):
        for name in own if repeats else summed:
            named.setdefault(name, []).append(rank)
    if named:
        lines.append(
            "  " + listed([f"gradient of {name} not finite on {ranks_in_words(ranks)}" for name, ranks in named.items()], "\n  ")
        )
    if named and not repeats:
        lines.append("  (after the sums over ranks; the step run again is finite: a passing fault, as of hardware)")
    if not named and not lossy:
        lines.append("  every gradient is finite by itself, but their squares overflow: the norm exceeds the range of the dtype")
    lines.append("  Resume from the last checkpoint with a lower --lr or a smaller --clip-grad, or leave the batch out with")
    lines.append(f"  --iterations-to-skip {iteration}.")
    raise NonFiniteError("\n".join(lines))
