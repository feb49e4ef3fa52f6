"""Token dispatch of mixture-of-experts layers: send each token to the ranks of its experts and return the expert outputs.

The router assigns each token to `k` experts; one (token, expert) pair is an *assignment*. The ranks of an expert group (etp x ep,
`ParallelContext.expert_group`) together hold every expert once: the rank with index etp + ETP x ep in the group holds shard `etp`
of the experts ep x E/EP to (ep + 1) x E/EP - 1. There are two dispatchers:

========== ============================================== ==============================================================
           forward                                        backward
========== ============================================== ==============================================================
alltoall   send each assignment to the ranks of its       the two exchanges in reverse, with gradients
           expert, return the expert's output, add the weighted outputs on the token's rank
allgather  gather all tokens on all ranks, add the        all-gather the gradients of the outputs, reduce-scatter the
           weighted outputs of the local experts,         gradients of tokens and router weights
           reduce-scatter the sums
========== ============================================== ==============================================================

The host waits for the device once per forward, to read the number of rows per expert. It never waits in backward.

Shapes: `t` local tokens, `h` hidden size, `k` experts per token, `n` rows for the local experts, `E` experts, `G` ranks of the
expert group; `s` local tokens and `S` all tokens of a sequence, `b` microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.memory.recompute import reuse_in_recompute
from megatron.parallel.collectives import (
    Pending,
    all_gather,
    all_gather_forward,
    all_to_all,
    reduce_scatter_forward,
    start_all_to_all,
)
from megatron.parallel.context import Group, ParallelContext
from megatron.spec.mlps import RouterSpec

ExpertFunction = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Function that applies the local experts to rows [n, h] sorted by expert. The second argument is the number of rows of each local
expert."""
Overlapped = Callable[[], torch.Tensor | None]
"""Computation that runs while tokens are in flight, such as the shared expert; returns its result or None."""


@dataclass(frozen=True)
class Dispatcher:
    """Token dispatcher of one mixture-of-experts layer: sends each token to the ranks of its experts and adds up the experts'
    outputs.

    Args:
        num_experts: experts of the layer, over all ranks.
        uses_allgather: use the allgather dispatcher instead of alltoall.
    """

    group: Group
    num_experts: int
    etp: int
    """Expert tensor-parallel size: number of ranks that hold shards of the same experts."""
    uses_allgather: bool
    assumed_imbalance: float | None = None
    """Assumed number of rows for the local experts, as a multiple of the mean over the ranks; None to count by the router's
    expert ids.

    It is set in dry runs, where expert ids have no values (meta device) or no other rank answers (fake process group). The rows
    are divided equally among the local experts. Their number is capped at the largest possible number of rows.
    """
    assignment_ratio: int = 1
    """Number of experts of the layer divided by `num_experts`. It is above 1 only within the allgather dispatcher, which runs a
    dispatcher for only the local experts with the tokens of all ranks. With a balanced router, one of `assignment_ratio`
    assignments is then to a local expert."""

    @classmethod
    def of(cls, context: ParallelContext, num_experts: int, *, uses_allgather: bool) -> Dispatcher:
        """Build the dispatcher of this rank."""
        group = context.expert_group
        has_no_values = context.device.type == "meta" or context.backend == "fake"
        return cls(group, num_experts, context.topology.etp, uses_allgather and group.size > 1, 1.0 if has_no_values else None)

    def run(
        self,
        x: torch.Tensor,
        router_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        apply_experts: ExpertFunction,
        overlapped: Overlapped,
        capacity: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the experts to each token and add the experts' outputs, weighted by the router.

        Args:
            x: t tokens [t, h].
            router_weights: [t, k] for k experts per token.
            expert_ids: int64 [t, k]; the number of experts as an id marks an assignment that is dropped or of a padding token.
            apply_experts: applies the local experts to rows sorted by expert.
            overlapped: function that is called while the tokens are in flight, for example to compute a shared expert.
            capacity: largest number of tokens that one expert accepts from all ranks of the expert group; None for no limit.

        Returns:
            the weighted sum of each token's expert outputs [t, h], and the result of `overlapped`.
        """
        if not self.uses_allgather:
            return self._exchange(x, router_weights, expert_ids, apply_experts, overlapped, capacity)
        num_local_experts = self.num_experts * self.etp // self.group.size
        x, router_weights = all_gather_forward(x, self.group), all_gather_forward(router_weights, self.group)
        all_expert_ids = reuse_in_recompute(lambda: all_gather(expert_ids, self.group))
        first_local_expert = self.group.rank // self.etp * num_local_experts
        local_expert_ids = (all_expert_ids - first_local_expert).where(
            (all_expert_ids >= first_local_expert) & (all_expert_ids < first_local_expert + num_local_experts), num_local_experts
        )
        local = replace(
            self,
            group=Group("alone", self.group.ranks[:1], 0),
            num_experts=num_local_experts,
            etp=1,
            assignment_ratio=self.num_experts // num_local_experts,
        )
        partial_sum, overlap_result = local._exchange(x, router_weights, local_expert_ids, apply_experts, overlapped, capacity)
        return reduce_scatter_forward(partial_sum, self.group), overlap_result

    def _exchange(
        self,
        x: torch.Tensor,
        router_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        apply_experts: ExpertFunction,
        overlapped: Overlapped,
        capacity: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send tokens to their experts by all-to-all, apply the experts and combine the outputs."""
        routes = reuse_in_recompute(lambda: self._build_routes(expert_ids, capacity))
        exchange = _PendingExchange(routes)
        in_flight = _SendTokens.apply(x, exchange)
        overlap_result = overlapped()
        expert_outputs = apply_experts(_ReceiveTokens.apply(in_flight, exchange), routes.rows_per_expert)
        return _CombineOutputs.apply(expert_outputs, router_weights, routes), overlap_result

    def _build_routes(self, expert_ids: torch.Tensor, capacity: int | None) -> _Routes:
        """Build the routes of a microbatch's tokens from the expert ids, or in a dry run for the assumed imbalance.

        Args:
            capacity: largest number of tokens that one expert accepts from all ranks of the expert group; None for no limit.
        """
        if self.assumed_imbalance is None:
            return _Routes.of(expert_ids, self.group, self.num_experts, self.etp)
        (num_tokens, k), num_local_experts = expert_ids.shape, self.num_experts * self.etp // self.group.size
        mean_rows, num_group_tokens = num_tokens * k * self.etp // self.assignment_ratio, num_tokens * self.group.size
        # A token selects each expert at most once.
        max_rows = min(
            num_group_tokens * min(k, num_local_experts), num_local_experts * (num_group_tokens if capacity is None else capacity)
        )
        num_rows = (
            mean_rows
            if self.assumed_imbalance == 1.0
            else max_rows
            if self.assumed_imbalance * mean_rows >= max_rows
            else round(self.assumed_imbalance * mean_rows)
        )
        return _Routes.assumed(
            expert_ids, self.group, num_local_experts, self.etp, num_rows, num_tokens * k if self.group.size > 1 else num_rows
        )


@dataclass(frozen=True)
class _Routes:
    """Routes of one microbatch's all-to-all: which (token, expert) assignments this rank sends to which rank, and how many rows it
    receives for which of its experts."""

    group: Group
    etp: int
    num_tokens: int
    k: int
    sorted_assignments: torch.Tensor
    """Assignments that are not dropped, sorted by expert; int64. Column j of token i in `expert_ids` is the assignment i * k +
    j, with k experts per token."""
    expert_order: torch.Tensor | None
    """Permutation that sorts the received rows by local expert; None if they arrive sorted."""
    send_splits: Sequence[int]
    """Number of rows that this rank sends to each rank."""
    receive_splits: Sequence[int]
    """Number of rows that this rank receives from each rank."""
    rows_per_expert: Sequence[int]
    """Number of rows of each local expert."""

    @classmethod
    def of(cls, expert_ids: torch.Tensor, group: Group, num_experts: int, etp: int) -> _Routes:
        """Build the routes: sort the (token, expert) assignments by expert, and exchange their numbers with the other ranks of the
        expert group.

        Args:
            expert_ids: [tokens, experts per token].
            num_experts: experts of the layer, over all ranks.
            etp: number of ranks that hold shards of the same experts.
        """
        (num_tokens, k), num_local_experts, num_ranks = expert_ids.shape, num_experts * etp // group.size, group.size
        flat_ids = expert_ids.flatten()
        tokens_per_expert = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat_ids.device)
        tokens_per_expert = tokens_per_expert.scatter_add_(0, flat_ids, torch.ones_like(flat_ids))[:num_experts]
        send_counts = (
            tokens_per_expert.view(-1, 1, num_local_experts).expand(-1, etp, -1).reshape(num_ranks, num_local_experts)
        )  # the etp ranks that share an expert receive the same rows
        receive_counts = all_to_all(send_counts, group)
        send_table, receive_table = torch.stack([send_counts, receive_counts]).tolist()  # the host waits for the device here
        send_splits, receive_splits = [sum(row) for row in send_table], [sum(row) for row in receive_table]
        expert_order = None
        if num_local_experts > 1 and num_ranks > 1:
            local_ids = torch.arange(num_local_experts, device=flat_ids.device).repeat(num_ranks)
            expert_order = local_ids.repeat_interleave(receive_counts.flatten(), output_size=sum(receive_splits)).argsort(
                stable=True
            )
        rows_per_expert = [sum(column) for column in zip(*receive_table, strict=True)]
        return cls(
            group,
            etp,
            num_tokens,
            k,
            flat_ids.argsort(stable=True)[: sum(send_splits[::etp])],
            expert_order,
            send_splits,
            receive_splits,
            rows_per_expert,
        )

    @classmethod
    def assumed(
        cls, expert_ids: torch.Tensor, group: Group, num_local_experts: int, etp: int, num_rows: int, num_sent: int
    ) -> _Routes:
        """Build routes for an assumed number of received rows, where the router's expert ids are unknown.

        This rank receives `num_rows` rows: equal numbers from each rank and for each local expert, up to rounding. It sends as many
        rows to its local experts as it receives from itself, and divides the remaining assignments equally among the experts of the
        other ranks.

        Args:
            expert_ids: [tokens, experts per token]; only the shape and the device are read.
            num_rows: rows for the local experts.
            num_sent: assignments of the local tokens that are not dropped.
        """
        (num_tokens, k), num_peers = expert_ids.shape, group.size // etp - 1
        receive_splits = _split_evenly(num_rows, group.size)
        num_local = min(receive_splits[group.rank], num_sent) if num_peers else num_sent
        rows_per_ep_rank = _split_evenly(num_sent - num_local, num_peers) if num_peers else []
        rows_per_ep_rank.insert(group.rank // etp, num_local)
        send_splits = [count for count in rows_per_ep_rank for _ in range(etp)]
        # The allocations and the exchange of counts that `of` makes, so that a dry run measures them.
        sorted_assignments = torch.arange(num_tokens * k, device=expert_ids.device)[:num_sent]
        count_buffers = expert_ids.new_empty(2, group.size, num_local_experts)
        if group.size > 1:
            all_to_all(count_buffers[0], group)
        expert_order = torch.arange(num_rows, device=expert_ids.device) if num_local_experts > 1 and group.size > 1 else None
        return cls(
            group,
            etp,
            num_tokens,
            k,
            sorted_assignments,
            expert_order,
            send_splits,
            receive_splits,
            _split_evenly(num_rows, num_local_experts),
        )

    def start(self, rows: torch.Tensor, *, reverse: bool = False) -> Pending:
        """Start the all-to-all that sends rows to the ranks of their experts or, with `reverse`, back to the ranks of their tokens.

        Args:
            rows: [rows to send, h].

        Returns:
            the running exchange, whose result is [rows to receive, h].
        """
        if self.group.size == 1:
            return Pending(rows)
        send_splits, receive_splits, width = (
            (self.receive_splits, self.send_splits, rows.shape[1])
            if reverse
            else (self.send_splits, self.receive_splits, rows.shape[1])
        )
        received, rows = rows.new_empty(sum(receive_splits), width), rows.contiguous()
        element_splits = [count * width for count in receive_splits], [count * width for count in send_splits]
        return Pending(received, start_all_to_all(received.view(-1), rows.view(-1), element_splits, self.group))

    def repeat_for_etp(self, rows: torch.Tensor) -> torch.Tensor:
        """Repeat rows, sorted by expert, for each of the ranks that hold shards of the row's expert (expert tensor parallelism).
        The result is sorted by destination rank."""
        if self.etp == 1:
            return rows
        return torch.cat([chunk for chunk in rows.split(self.send_splits[:: self.etp]) for _ in range(self.etp)])

    def sort_by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Sort received rows, which arrive sorted by sending rank, by local expert."""
        return rows if self.expert_order is None else rows.index_select(0, self.expert_order)

    def restore_arrival_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Undo `sort_by_expert`: sort rows by the rank from which they were received."""
        return rows if self.expert_order is None else torch.empty_like(rows).index_copy_(0, self.expert_order, rows)

    def collect_by_assignment(self, rows: torch.Tensor) -> torch.Tensor:
        """Arrange rows that came back from the experts by token and experts of the token: [tokens, experts per token, h].

        The partial outputs of the ranks that share an expert (expert tensor parallelism) are added. A dropped assignment gets
        zeros.
        """
        if self.etp > 1:
            rows_per_rank = rows.split(self.send_splits)
            summed = [torch.stack(rows_per_rank[i : i + self.etp]).sum(0) for i in range(0, len(rows_per_rank), self.etp)]
            rows = torch.cat(summed)
        shape = (self.num_tokens * self.k, rows.shape[1])
        out = rows.new_empty(shape) if len(rows) == shape[0] else rows.new_zeros(shape)
        return out.index_copy_(0, self.sorted_assignments, rows).view(self.num_tokens, self.k, -1)


def _split_evenly(count: int, num_shares: int) -> list[int]:
    """Split `count` rows as evenly as possible: return `num_shares` row counts that differ by at most 1. A dry run uses them in
    place of the counts that the router would give."""
    return [count // num_shares + (i < count % num_shares) for i in range(num_shares)]


class _PendingExchange:
    """All-to-all in flight, which one autograd function starts and another autograd function waits for."""

    def __init__(self, routes: _Routes) -> None:
        self.routes = routes
        self.pending: Pending | None = None

    def start(self, rows: torch.Tensor, *, reverse: bool = False) -> torch.Tensor:
        """Start the exchange and return its result buffer, which must not be read before `wait`."""
        self.pending = self.routes.start(rows, reverse=reverse)
        return self.pending.result_buffer

    def wait(self) -> torch.Tensor:
        """Wait for the exchange and return the received rows."""
        assert self.pending is not None
        rows, self.pending = self.pending.wait(), None
        return rows


class _SendTokens(torch.autograd.Function):
    """Autograd function that starts to send tokens [t, h] to the ranks of their experts. Backward waits for the gradients of the
    tokens.

    `_ReceiveTokens` waits for the exchange. Computation between the two functions overlaps with it, in forward and in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: _PendingExchange) -> torch.Tensor:  # type: ignore[override]
        ctx.exchange, routes = exchange, exchange.routes
        return exchange.start(routes.repeat_for_etp(x.index_select(0, routes.sorted_assignments // routes.k)))

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        exchange, ctx.exchange = ctx.exchange, None  # freed after its use in backward, as saved tensors are, not with the graph
        return exchange.routes.collect_by_assignment(exchange.wait()).sum(1), None


class _ReceiveTokens(torch.autograd.Function):
    """Autograd function that waits for the n rows [n, h] of the local experts. Backward starts to send the rows' gradients back."""

    @staticmethod
    def forward(ctx: Any, in_flight: torch.Tensor, exchange: _PendingExchange) -> torch.Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        rows = exchange.routes.sort_by_expert(exchange.wait())
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        exchange, ctx.exchange = ctx.exchange, None
        rows = exchange.routes.restore_arrival_order(grad)
        exchange.start(rows, reverse=True)
        return rows, None  # only the shape matters: `_SendTokens.backward` takes the rows from `exchange`


class _CombineOutputs(torch.autograd.Function):
    """Autograd function that sends expert outputs back to the ranks of their tokens, and sums the outputs of each token, weighted
    by the router. The n outputs [n, h] of local experts become the outputs of t tokens [t, h]."""

    @staticmethod
    def forward(ctx: Any, expert_outputs: torch.Tensor, router_weights: torch.Tensor, routes: _Routes) -> torch.Tensor:  # type: ignore[override]
        outputs = routes.collect_by_assignment(routes.start(routes.restore_arrival_order(expert_outputs), reverse=True).wait())
        ctx.save_for_backward(outputs, router_weights)
        ctx.routes = routes
        return torch.bmm(router_weights.unsqueeze(1), outputs.to(router_weights.dtype)).squeeze(1).to(expert_outputs.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        (outputs, router_weights), routes, ctx.routes = ctx.saved_tensors, ctx.routes, None
        upcast_grad = grad.to(router_weights.dtype)
        grad_router_weights = torch.bmm(outputs.to(router_weights.dtype), upcast_grad.unsqueeze(2)).squeeze(2)
        grad_rows = (router_weights.unsqueeze(2) * upcast_grad.unsqueeze(1)).to(grad.dtype).flatten(0, 1)
        rows = routes.start(routes.repeat_for_etp(grad_rows.index_select(0, routes.sorted_assignments))).wait()
        return routes.sort_by_expert(rows), grad_router_weights, None


# ---- Expert capacity: an expert accepts a limited number of assignments per sequence (docs/moe.md, "Capacity").
#
# Shapes: `s` local tokens of a sequence, `S` tokens of the full sequence, `b` microbatch, `k` experts per token, `E` experts,
# `n` rows for the local experts, `h` hidden size.


def select_within_capacity(
    router_weights: torch.Tensor,
    expert_ids: torch.Tensor,
    spec: RouterSpec,
    sequence_group: Group,
    token_order: tuple[torch.Tensor, torch.Tensor] | None = None,
    num_data_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return for each (token, expert) assignment of local tokens whether it fits into the capacity of its expert: bool [s, b, k].

    Of each sequence an expert accepts the assignments with the largest router weights or, with `spec.drops_by_position`, those of
    the earliest tokens. Weights are compared in steps of 1/4096; of equal weights the earlier token goes first. The result does not
    depend on the layout: the ranks that share a sequence gather the expert ids and weights of all its tokens.

    Args:
        router_weights: [s, b, k] for k experts per token.
        expert_ids: int64 [s, b, k]; the number of experts as an id marks an assignment of a padding token.
        sequence_group: ranks that share each sequence.
        token_order: position in the sequence of each token in the order of the ranks, and the inverse permutation; [tokens of the
            sequence] each. None if the ranks hold consecutive tokens in order.
        num_data_tokens: number of tokens of each sequence that are not padding, from which the capacity is computed, int64 [b].
            None for all tokens.
    """
    local_slice = slice(sequence_group.rank * len(expert_ids), (sequence_group.rank + 1) * len(expert_ids))
    router_weights, expert_ids = all_gather(router_weights.detach(), sequence_group), all_gather(expert_ids, sequence_group)
    if token_order is not None:
        router_weights, expert_ids = router_weights[token_order[1]], expert_ids[token_order[1]]
    capacity: int | torch.Tensor | None = spec.get_capacity(len(expert_ids))
    if num_data_tokens is not None:
        capacity = _build_capacity_table(spec, len(expert_ids), expert_ids.device)[num_data_tokens].unsqueeze(1)
    assert capacity is not None
    by_sequence = (router_weights.transpose(0, 1).flatten(1), expert_ids.transpose(0, 1).flatten(1))  # [b, S k]
    is_accepted = _is_within_capacity(*by_sequence, capacity, spec).unflatten(1, (-1, spec.top_k)).transpose(0, 1)
    return (is_accepted if token_order is None else is_accepted[token_order[0]])[local_slice]


@functools.lru_cache(maxsize=8)
def _build_capacity_table(spec: RouterSpec, seq_length: int, device: torch.device) -> torch.Tensor:
    """Return the capacity of an expert for sequences of 0 to `seq_length` tokens that are not padding: int64 [seq_length + 1]. With
    this table on the device, the host needs no wait and no copy to find the capacities of a microbatch."""
    return torch.tensor([spec.get_capacity(num_tokens) for num_tokens in range(seq_length + 1)], device=device)


_NUM_WEIGHT_STEPS = 1 << 12
"""Number of steps per unit of router weight when weights are compared. Equal tokens at the start of a sequence have equal
weights up to rounding, and rounding differs between layouts. Steps hide it, so the earlier token goes first at every layout."""


def _is_within_capacity(
    router_weights: torch.Tensor, expert_ids: torch.Tensor, capacity: int | torch.Tensor, spec: RouterSpec
) -> torch.Tensor:
    """Return for each (token, expert) assignment of full sequences whether it fits into the capacity of its expert.

    Args:
        router_weights, expert_ids: [sequences, tokens * experts per token], in the order of the tokens.
        capacity: number of assignments that an expert accepts from a sequence, or from each of the sequences: [sequences, 1].

    Returns:
        bool, of the shape of `expert_ids`.
    """
    if spec.drops_by_position:
        priority_order = torch.arange(expert_ids.shape[1], device=expert_ids.device).expand_as(expert_ids)
    else:
        priority_order = (router_weights * _NUM_WEIGHT_STEPS).round().sort(dim=1, descending=True, stable=True).indices
    sorted_expert_ids, expert_order = expert_ids.gather(1, priority_order).sort(dim=1, stable=True)
    assignments_per_expert = torch.zeros(len(expert_ids), spec.num_experts + 1, dtype=torch.int64, device=expert_ids.device)
    assignments_per_expert.scatter_add_(1, sorted_expert_ids, torch.ones_like(sorted_expert_ids))
    starts = assignments_per_expert.cumsum(1) - assignments_per_expert
    queue_position = torch.arange(expert_ids.shape[1], device=expert_ids.device) - starts.gather(1, sorted_expert_ids)
    return torch.empty_like(queue_position, dtype=torch.bool).scatter_(
        1, priority_order.gather(1, expert_order), queue_position < capacity
    )


def apply_with_padding(
    apply_experts: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    capacity: int,
    rows: torch.Tensor,
    rows_per_expert: Sequence[int],
) -> torch.Tensor:
    """Apply experts to rows padded with zeros to `capacity` rows per expert, and return the outputs of the real rows.

    Args:
        rows: [n, h], sorted by expert.
        rows_per_expert: number of rows of each expert, each at most `capacity`.
    """
    starts = [capacity * expert for expert in range(len(rows_per_expert))]
    padded_index = torch.cat(
        [torch.arange(start, start + count, device=rows.device) for start, count in zip(starts, rows_per_expert, strict=True)]
    )
    padded_rows = rows.new_zeros(capacity * len(rows_per_expert), rows.shape[1]).index_copy(0, padded_index, rows)
    return apply_experts(padded_rows, [capacity] * len(rows_per_expert)).index_select(0, padded_index)
