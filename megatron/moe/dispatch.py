"""How tokens reach the ranks of their experts, and results come back.

A *choice* is a token with one of its k experts. The ranks of an expert group (etp x ep, `ParallelContext.expert_group`) hold each
expert once: place etp + ETP x ep of the group holds part etp of the experts ep x E/EP, ... Two dispatchers:

========== ========================================= ==============================================================
           forward                                   backward
========== ========================================= ==============================================================
alltoall   each choice goes to the ranks of its      the same ways back and forth
           expert, its result comes back, and the
           token's rank adds them up
allgather  all tokens go to all ranks, each adds up  all-gather of the results' gradients, reduce-scatter of those
           its experts' results, reduce-scatter      of tokens and probabilities
========== ========================================= ==============================================================

The host waits for the device once in each forward, for the number of rows that each expert gets; never in backward.

Shapes: `t` this rank's tokens, `h` hidden size, `k` experts of a token, `n` rows for this rank's experts, `G` ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.memory.recompute import decided
from megatron.parallel.collectives import (
    Pending,
    all_gather,
    all_gather_forward,
    all_to_all,
    reduce_scatter_forward,
    start_exchange,
)
from megatron.parallel.context import Group, ParallelContext
from megatron.spec.mlps import RouterSpec

Apply = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Runs this rank's experts over rows [n, h], of which each expert has so many."""
Meanwhile = Callable[[], torch.Tensor | None]
"""What else there is to compute while tokens travel."""


@dataclass(frozen=True)
class Dispatcher:
    """One of the two ways, for the experts of a layer.

    Args:
        experts: of the layer, on all ranks.
        gathers: allgather instead of alltoall.
    """

    group: Group
    experts: int
    etp: int
    """Ranks that hold parts of the same experts."""
    gathers: bool
    planned: float | None = None
    """Where tokens have no values, or nobody answers: how many times the mean of choices the experts of this rank are taken to get,
    each of them as many. More than can be is as many as can be."""
    elsewhere: int = 1
    """How many times as many choices there are as go to these experts, if all get as many."""

    @classmethod
    def of(cls, context: ParallelContext, experts: int, *, gathers: bool) -> Dispatcher:
        """The dispatcher of a rank."""
        group = context.expert_group
        alone = context.device.type == "meta" or context.backend == "fake"
        return cls(group, experts, context.topology.etp, gathers and group.size > 1, 1.0 if alone else None)

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        apply: Apply,
        meanwhile: Meanwhile,
        most: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sum over each token's experts of its weight x what the expert gives; and what was computed meanwhile.

        Args:
            x: [t, h].
            weights: [t, k].
            chosen: int64 [t, k]; the number E stands for no expert.
            most: choices that an expert takes at most of all that these ranks have; by default all.
        """
        if not self.gathers:
            return self._exchanged(x, weights, chosen, apply, meanwhile, most)
        here = self.experts * self.etp // self.group.size
        x, weights = all_gather_forward(x, self.group), all_gather_forward(weights, self.group)
        everywhere = decided(lambda: all_gather(chosen, self.group))
        first = self.group.index // self.etp * here
        mine = (everywhere - first).where((everywhere >= first) & (everywhere < first + here), here)
        alone = replace(self, group=Group("alone", self.group.ranks[:1], 0), experts=here, etp=1, elsewhere=self.experts // here)
        partial, beside = alone._exchanged(x, weights, mine, apply, meanwhile, most)
        return reduce_scatter_forward(partial, self.group), beside

    def _exchanged(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        apply: Apply,
        meanwhile: Meanwhile,
        most: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        way = decided(lambda: self._way(chosen, most))
        trip = _Trip(way)
        unfinished = _Send.apply(x, trip)
        beside = meanwhile()
        results = apply(_Arrive.apply(unfinished, trip), way.counts)
        return _Collect.apply(results, weights, way), beside

    def _way(self, chosen: torch.Tensor, most: int | None) -> _Dispatch:
        if self.planned is None:
            return _Dispatch.of(chosen, self.group, self.experts, self.etp)
        (tokens, k), here = chosen.shape, self.experts * self.etp // self.group.size
        mean, everywhere = tokens * k * self.etp // self.elsewhere, tokens * self.group.size
        # A token chooses an expert once at most.
        bound = min(everywhere * min(k, here), here * (everywhere if most is None else most))
        rows = mean if self.planned == 1.0 else bound if self.planned * mean >= bound else round(self.planned * mean)
        return _Dispatch.planned(chosen, self.group, here, self.etp, rows, tokens * k if self.group.size > 1 else rows)


@dataclass(frozen=True)
class _Dispatch:
    """Where each choice of a microbatch goes."""

    group: Group
    etp: int
    tokens: int
    k: int
    order: torch.Tensor
    """The choices that go to an expert, in the order of the experts, by number: token x k + place; int64."""
    place: torch.Tensor | None
    """The rows that arrive, in the order of the experts; None where they arrive so."""
    goes: Sequence[int]
    """Rows to each rank."""
    comes: Sequence[int]
    """Rows from each rank."""
    counts: Sequence[int]
    """Rows of each expert of this rank."""

    @classmethod
    def of(cls, chosen: torch.Tensor, group: Group, experts: int, etp: int) -> _Dispatch:
        """Sort the choices by expert, and tell the other ranks how many come."""
        (tokens, k), here, ranks = chosen.shape, experts * etp // group.size, group.size
        flat = chosen.flatten()
        of_expert = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
        of_expert = of_expert.scatter_add_(0, flat, torch.ones_like(flat))[:experts]
        to_rank = of_expert.view(-1, 1, here).expand(-1, etp, -1).reshape(ranks, here)  # neighbours along etp get the same
        from_rank = all_to_all(to_rank, group)
        go, come = torch.stack([to_rank, from_rank]).tolist()  # the host waits
        goes, comes = [sum(row) for row in go], [sum(row) for row in come]
        place = None
        if here > 1 and ranks > 1:
            labels = torch.arange(here, device=flat.device).repeat(ranks)
            place = labels.repeat_interleave(from_rank.flatten(), output_size=sum(comes)).argsort(stable=True)
        counts = [sum(column) for column in zip(*come, strict=True)]
        return cls(group, etp, tokens, k, flat.argsort(stable=True)[: sum(goes[::etp])], place, goes, comes, counts)

    @classmethod
    def planned(cls, chosen: torch.Tensor, group: Group, here: int, etp: int, rows: int, sent: int) -> _Dispatch:
        """The same where only the number of rows that this rank gets is known: from each rank as many, and for each of its experts,
        as near as may be. Of the choices that this rank sends the other ranks' experts get equal shares.

        Args:
            here: experts of this rank.
            sent: choices of this rank that go to an expert.
        """
        (tokens, k), others = chosen.shape, group.size // etp - 1
        comes = _even(rows, group.size)
        own = min(comes[group.index], sent) if others else sent
        to_each = _even(sent - own, others) if others else []
        to_each.insert(group.index // etp, own)
        goes = [count for count in to_each for _ in range(etp)]
        # What it takes to find out: the counts.
        order = torch.arange(tokens * k, device=chosen.device)[:sent]
        counts = chosen.new_empty(2, group.size, here)
        if group.size > 1:
            all_to_all(counts[0], group)
        place = torch.arange(rows, device=chosen.device) if here > 1 and group.size > 1 else None
        return cls(group, etp, tokens, k, order, place, goes, comes, _even(rows, here))

    def start(self, rows: torch.Tensor, *, back: bool = False) -> Pending:
        """Begin to send rows [.., h] to the ranks of their experts, or back. The result is [.., h] too."""
        if self.group.size == 1:
            return Pending(rows)
        goes, comes, width = (self.comes, self.goes, rows.shape[1]) if back else (self.goes, self.comes, rows.shape[1])
        received, rows = rows.new_empty(sum(comes), width), rows.contiguous()
        counts = [count * width for count in comes], [count * width for count in goes]
        return Pending(received, start_exchange(received.view(-1), rows.view(-1), counts, self.group))

    def to_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of choices, in the order of the experts, as they are sent."""
        if self.etp == 1:
            return rows
        return torch.cat([part for part in rows.split(self.goes[:: self.etp]) for _ in range(self.etp)])

    def by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that have arrived, in the order of the experts."""
        return rows if self.place is None else rows.index_select(0, self.place)

    def as_arrived(self, rows: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return rows if self.place is None else torch.empty_like(rows).index_copy_(0, self.place, rows)

    def by_choice(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that have come back, by token and choice: [t, k, h]. Those of the etp ranks are added; a choice of no expert has
        zeros."""
        if self.etp > 1:
            parts = rows.split(self.goes)
            sums = [torch.stack(parts[i : i + self.etp]).sum(0) for i in range(0, len(parts), self.etp)]
            rows = torch.cat(sums)
        shape = (self.tokens * self.k, rows.shape[1])
        found = rows.new_empty(shape) if len(rows) == shape[0] else rows.new_zeros(shape)
        return found.index_copy_(0, self.order, rows).view(self.tokens, self.k, -1)


def _even(count: int, parts: int) -> list[int]:
    """So many in nearly equal parts."""
    return [count // parts + (i < count % parts) for i in range(parts)]


class _Trip:
    """What is on its way, forward or backward."""

    def __init__(self, way: _Dispatch) -> None:
        self.way = way
        self.pending: Pending | None = None

    def set_out(self, rows: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Start. The result must not be read before it has arrived."""
        self.pending = self.way.start(rows, back=back)
        return self.pending.unfinished

    def arrive(self) -> torch.Tensor:
        """Wait."""
        assert self.pending is not None
        found, self.pending = self.pending.wait(), None
        return found


class _Send(torch.autograd.Function):
    """Tokens [t, h] set out, and in backward their gradients arrive. What `_Arrive` waits for may be computed beside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trip: _Trip) -> torch.Tensor:  # type: ignore[override]
        ctx.trip, way = trip, trip.way
        return trip.set_out(way.to_ranks(x.index_select(0, way.order // way.k)))

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        trip, ctx.trip = ctx.trip, None  # as saved tensors, it goes when backward has used it, not when the whole graph goes
        return trip.way.by_choice(trip.arrive()).sum(1), None


class _Arrive(torch.autograd.Function):
    """Rows [n, h] arrive, and in backward their gradients set out."""

    @staticmethod
    def forward(ctx: Any, unfinished: torch.Tensor, trip: _Trip) -> torch.Tensor:  # type: ignore[override]
        ctx.trip = trip
        rows = trip.way.by_expert(trip.arrive())
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        trip, ctx.trip = ctx.trip, None
        rows = trip.way.as_arrived(grad)
        trip.set_out(rows, back=True)
        return rows, None  # of the right shape; what `_Send` takes is on its way


class _Collect(torch.autograd.Function):
    """Results [n, h] go back to their tokens, and are added with weights [t, k]: [t, h]."""

    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, weights: torch.Tensor, way: _Dispatch) -> torch.Tensor:  # type: ignore[override]
        found = way.by_choice(way.start(way.as_arrived(results), back=True).wait())
        ctx.save_for_backward(found, weights)
        ctx.way = way
        return torch.bmm(weights.unsqueeze(1), found.to(weights.dtype)).squeeze(1).to(results.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        (found, weights), way, ctx.way = ctx.saved_tensors, ctx.way, None
        wide = grad.to(weights.dtype)
        grad_weights = torch.bmm(found.to(weights.dtype), wide.unsqueeze(2)).squeeze(2)
        scaled = (weights.unsqueeze(2) * wide.unsqueeze(1)).to(grad.dtype).flatten(0, 1)
        rows = way.start(way.to_ranks(scaled.index_select(0, way.order))).wait()
        return way.by_expert(rows), grad_weights, None


# ---- Experts that take only so many choices of a sequence (docs/moe.md, "Capacity").
#
# Shapes: `s` tokens of a sequence on this rank, `S` of a whole sequence, `b` microbatch, `k` experts of a token, `E` experts.


def taken(
    weights: torch.Tensor,
    chosen: torch.Tensor,
    spec: RouterSpec,
    sequence_ranks: Group,
    order: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Which choices of this rank's tokens their experts take, bool [s, b, k].

    Of each sequence an expert takes those with the largest weights, in steps of 1/4096, of equal ones the earlier; or the earliest.
    So that the answer is the same at every layout, the ranks that share a sequence tell each other all of it: b S k choices and
    weights.

    Args:
        weights: [s, b, k].
        chosen: int64 [s, b, k].
        sequence_ranks: those that share each sequence.
        order: place in the sequence of the tokens of all these ranks, one after the other, and where each place is then: [S] each.
            By default they are in order.
    """
    here = slice(sequence_ranks.index * len(chosen), (sequence_ranks.index + 1) * len(chosen))
    weights, chosen = all_gather(weights.detach(), sequence_ranks), all_gather(chosen, sequence_ranks)
    if order is not None:
        weights, chosen = weights[order[1]], chosen[order[1]]
    most = spec.taken(len(chosen))
    assert most is not None
    by_token = (weights.transpose(0, 1).flatten(1), chosen.transpose(0, 1).flatten(1))  # [b, S k]
    found = _first(*by_token, most, spec).unflatten(1, (-1, spec.chosen)).transpose(0, 1)
    return (found if order is None else found[order[0]])[here]


_STEPS = 1 << 12
"""Weights are compared in so many steps. Equal tokens at the begin of a sequence have equal weights but for rounding, which
differs between layouts: so the earlier one goes first."""


def _first(weights: torch.Tensor, chosen: torch.Tensor, most: int, spec: RouterSpec) -> torch.Tensor:
    """The same of whole sequences whose choices lie in the order of the tokens, [b, S k]."""
    if spec.drops_last:
        order = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    else:
        order = (weights * _STEPS).round().sort(dim=1, descending=True, stable=True).indices
    experts, of_experts = chosen.gather(1, order).sort(dim=1, stable=True)
    counts = torch.zeros(len(chosen), spec.experts, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(1, experts, torch.ones_like(experts))
    begins = counts.cumsum(1) - counts
    number = torch.arange(chosen.shape[1], device=chosen.device) - begins.gather(1, experts)
    return torch.empty_like(number, dtype=torch.bool).scatter_(1, order.gather(1, of_experts), number < most)


def padded(
    apply: Callable[[torch.Tensor, Sequence[int]], torch.Tensor], most: int, rows: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """What `apply` gives for rows [n, h], of which each expert has so many, where it gets `most` for each, zeros behind them."""
    begins = [most * expert for expert in range(len(counts))]
    place = torch.cat([torch.arange(a, a + count, device=rows.device) for a, count in zip(begins, counts, strict=True)])
    filled = rows.new_zeros(most * len(counts), rows.shape[1]).index_copy(0, place, rows)
    return apply(filled, [most] * len(counts)).index_select(0, place)
