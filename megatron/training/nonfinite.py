"""A NaN or infinity that may not be skipped: where it is, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext


class NonFiniteError(RuntimeError):
    """Loss or gradient is NaN or infinite in a precision without a loss scale."""


def raise_nonfinite(
    iteration: int, loss_sum: float, bad: Sequence[str], again: Sequence[str], context: ParallelContext
) -> NoReturn:
    """Gather what every rank sees and raise the same error everywhere. All ranks call it together.

    Args:
        bad: parameters whose gradient is not finite on this rank after the sums over ranks.
        again: the same when the step is run again, before any sum over ranks: so where it began.

    Raises:
        NonFiniteError: always.
    """
    seen = gather_objects((math.isfinite(loss_sum), list(bad), list(again)), context.world)
    lines = [f"iteration {iteration}: the loss or the gradient is not finite, so training stops before the update."]
    lossy = [rank for rank, (finite, _, _) in enumerate(seen) if not finite]
    if lossy:
        lines.append(f"  loss not finite on rank {', '.join(map(str, lossy))}")
    repeats = any(names for _, _, names in seen)
    named: dict[str, list[int]] = {}
    for rank, (_, summed, own) in enumerate(seen):
        for name in own if repeats else summed:
            named.setdefault(name, []).append(rank)
    for name, ranks in list(named.items())[:8]:
        lines.append(f"  gradient of {name} not finite on rank {', '.join(map(str, ranks))}")
    if len(named) > 8:
        lines.append(f"  and {len(named) - 8} parameters more")
    if named and not repeats:
        lines.append("  (after the sums over ranks; the step run again is finite: a passing fault, as of hardware)")
    if not named and not lossy:
        lines.append("  every gradient is finite by itself, but their squares overflow: the norm exceeds the range of the dtype")
    lines.append("  Resume from the last checkpoint with a lower --lr or a smaller --clip-grad, or leave the batch out with")
    lines.append(f"  --iterations-to-skip {iteration}.")
    raise NonFiniteError("\n".join(lines))


def raise_uncounted(iteration: int) -> NoReturn:
    """The loss mask of the whole global batch is zero, so there is no mean. Every rank knows and calls this.

    Raises:
        NonFiniteError: always.
    """
    raise NonFiniteError(
        f"iteration {iteration}: the loss mask is zero at every token of the global batch, so there is no loss to train on.\n"
        "  Look for documents without text in the dataset (--eod-mask-loss leaves the ends of documents out of the loss),\n"
        f"  or leave the batch out with --iterations-to-skip {iteration}."
    )
