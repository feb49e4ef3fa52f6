"""Output layer and loss as one operation over chunks of tokens: the logits of a microbatch are never there.

Forward keeps the hidden states and a few numbers of each token. Backward computes the logits [c, v/n] of each chunk of c
tokens again, over `n` tensor ranks, writes the gradient over them, and makes its two products: the gradient of the hidden states,
and a piece of the weight's gradient, whose sink is opened once. So there are four products of the output layer's size, of which the
whole loss has three.

Communication is that of a column-parallel layer (`linear.py`) and of the whole loss (`cross_entropy.py`): two reductions of one
number a token, however many chunks there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.parallel.accumulate import accumulate_products
from megatron.parallel.collectives import Pending, all_gather, start_all_reduce, start_reduce_scatter
from megatron.parallel.products import product_into
from megatron.tensor_parallel.cross_entropy import Columns, RowGradients, Targets, joined, loss_sums, one_factor, write_gradient

# ---- Loops of which each turn does the same as the one before, on tensors of the same shapes. A run takes every turn. A plan,
# whose
# tensors have no numbers, takes three of them, and counts the second as often as it would come.

T = TypeVar("T")

Repeats = Callable[[int], contextlib.AbstractContextManager[None]]
"""What happens while it is entered counts so many times."""

_repeats: Repeats | None = None


@contextlib.contextmanager
def few_turns(repeats: Repeats) -> Iterator[None]:
    """While it is entered, of each loop only the first, the second and the last turn are taken."""
    global _repeats
    before, _repeats = _repeats, repeats
    try:
        yield
    finally:
        _repeats = before


def turns(places: Sequence[T]) -> Iterator[T]:
    """The places of a loop, one a turn. Those between the first and the last are as large as each other, and a turn at one of them
    leaves no memory behind that it did not find."""
    if _repeats is None or len(places) <= 3:
        yield from places
        return
    yield places[0]
    with _repeats(len(places) - 2):
        yield places[1]
    yield places[-1]


def _places(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        labels: torch.Tensor,
        mask: torch.Tensor,
        columns: Columns,
        gathers: bool,
        size: int,
    ) -> torch.Tensor:
        rows = (all_gather(x, columns.group) if gathers else x).flatten(0, -2)
        targets = Targets(labels.reshape(-1), columns, x.dtype)
        logits = rows.new_empty(min(size, len(rows)), len(weight))
        for place in turns(_places(len(rows), size)):
            targets.reduce(product_into(logits[: place.stop - place.start], rows[place], weight.t()), place)
        log_sum, target = targets.sums()
        log_z, target = joined(log_sum, target, columns.group)
        mask = mask.reshape(-1).to(targets.dtype)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, *targets.for_gradient(log_sum, log_z, mask))
        # Parameters are leaves and outlive the graph, so they need no saving; their identity is what finds their sink.
        ctx.weight, ctx.columns, ctx.gathers, ctx.size = weight, columns, gathers, size
        return loss_sums(log_z, target, mask, columns.z_coeff)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None, None]:  # type: ignore[override]
        x, *saved = ctx.saved_tensors
        weight, columns, group = ctx.weight, ctx.columns, ctx.columns.group
        whole = all_gather(x, group) if ctx.gathers else x
        rows, grad_input = whole.flatten(0, -2), torch.empty_like(whole)
        grad_rows = grad_input.view(rows.shape)
        of_rows = RowGradients(*saved).times(one_factor(grad))
        reduced: list[Pending] = []

        def pieces() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            logits = rows.new_empty(min(ctx.size, len(rows)), len(weight))
            for place in turns(_places(len(rows), ctx.size)):
                part = product_into(logits[: place.stop - place.start], rows[place], weight.t())
                write_gradient(part, columns, of_rows.at(place))
                product_into(grad_rows[place], part, weight)
                if place.stop == len(rows):  # on its way while the last chunk's weight gradient is computed
                    reduced.append((start_reduce_scatter if ctx.gathers else start_all_reduce)(grad_input, group))
                yield part, rows[place]

        accumulate_products(weight, pieces())
        return reduced[0].wait(), None, None, None, None, None, None


def chunked_loss(
    x: torch.Tensor,
    weight: nn.Parameter,
    labels: torch.Tensor,
    mask: torch.Tensor,
    columns: Columns,
    *,
    gathers: bool,
    size: int,
) -> torch.Tensor:
    """Sum over tokens of mask x loss, as `vocab_parallel_cross_entropy` of x weight^T.

    Args:
        x: hidden states [s, b, h], or [s/n, b, h] where it `gathers` (sequence parallelism).
        weight: this rank's part of the output layer, [v/n, h].
        labels: token ids [s, b] in the whole vocabulary.
        mask: weight of each token's loss [s, b].
        size: tokens of a chunk; the last may be smaller.

    Returns:
        see `loss_sums`; in float32 or wider, the same on every rank of the group.
    """
    return _ChunkedLoss.apply(x, weight, labels, mask, columns, gathers, size)
