"""Attention of sequences that are split over the context-parallel ranks, with three communication types (`--cp-comm-type`).

Each rank has the queries, keys and values of its own tokens (`parallel/sequence_split.py`):

==========  =================================================  ==========================================================
type        forward                                            backward
==========  =================================================  ==========================================================
all_gather  all-gather keys and values, while attention to     all-gather keys and values again, reduce-scatter their
            the local keys is computed                         gradients
p2p         pass keys and values around the ring of ranks,     pass keys and values around the ring again, followed by
            one step ahead of the matrix products              their gradients
            (Liu et al. 2023, Ring Attention)
a2a         all-to-all: each rank receives all tokens of       all-to-all in the reverse direction
            some heads (Jacobs et al. 2023, DeepSpeed-Ulysses)
==========  =================================================  ==========================================================

The first two types compute attention in range pairs: the queries of one token range and the keys of another. The results of the
pairs are merged by their logsumexp. With the logsumexp over all keys, the gradient of each pair is exact (Dao et al. 2022,
FlashAttention, appendix B). Only the local queries, keys, values and outputs are saved for backward.

Shapes: `t` tokens of this rank, `s` tokens of the sequence, `q` queries of a range pair, `b` microbatch, `g` key-value heads, `r`
query heads per key-value head, `n = g * r` query heads, `d` size of a query or key head, `e` size of a value head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from megatron.attention.core import core_attention
from megatron.attention.documents import Documents, reorder
from megatron.attention.range_pairs import KeyValueGrads, RangePair, attend_pair, attend_pair_backward, is_pair_visible
from megatron.config.parallel import CpCommType
from megatron.parallel.collectives import Pending, all_to_all, start_all_gather, start_reduce_scatter, start_ring_shift
from megatron.parallel.context import Group
from megatron.spec.layers import ScoreSpec

# ---- Transfer of keys and values of all context-parallel ranks to each rank, and of their gradients back. Transfers overlap with
# matrix products.

RankKeyValues = tuple[int, torch.Tensor, torch.Tensor]
"""A rank of the group, and its keys [t, b, g, d] and values [t, b, g, e]."""
AddKeyGrads = Callable[[int, torch.Tensor, torch.Tensor, KeyValueGrads], None]
"""Function that adds the contribution of the local queries to the gradients of a rank's keys and values.

Arguments: the rank, its keys, its values, and the gradients to add to.
"""


class KeyValueTransfer(Protocol):
    """Interface of the communication that brings the keys and values of all context ranks to each rank."""

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[RankKeyValues]:
        """Yield (index of a context rank, its keys, its values) for each context rank, starting with this rank.

        Args:
            k, v: keys and values of this rank.
        """

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, add_key_grads: AddKeyGrads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's keys and values, summed over the queries of all context ranks.

        Args:
            k, v: keys and values of this rank.
            dtype: dtype in which the gradients are summed.
            add_key_grads: function that adds what the local queries contribute to the gradients of one rank's keys and values.
                Called once per context rank.
        """


class AllGatherTransfer:
    """Exchange of keys and values between context ranks by all-gather, which overlaps with the attention to the local keys.

    Backward all-gathers keys and values again, and reduce-scatters their gradients.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[RankKeyValues]:
        """Yield (index of a context rank, its keys, its values) for each context rank, starting with this rank."""
        pending = start_all_gather(_pack(k, v), self._group)
        yield self._group.rank, k, v
        yield from self._iter_remote_key_values(pending, k, v)

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, add_key_grads: AddKeyGrads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's keys and values, summed over the queries of all context ranks by a reduce-scatter in
        `dtype`."""
        grads = torch.zeros((self._group.size, *_get_packed_shape(k, v)), dtype=dtype, device=k.device)
        for key_rank, keys, values in self.forward(k, v):
            add_key_grads(key_rank, keys, values, KeyValueGrads.from_buffer(grads[key_rank], k.shape[-1]))
        del keys, values  # views of the gathered keys and values, which can be freed now
        return _unpack(start_reduce_scatter(grads.flatten(0, 1), self._group).wait(), k, v)

    def _iter_remote_key_values(self, pending: Pending, k: torch.Tensor, v: torch.Tensor) -> Iterator[RankKeyValues]:
        gathered = pending.wait().unflatten(0, (self._group.size, -1))
        for key_rank in range(self._group.size):
            if key_rank != self._group.rank:
                yield key_rank, *_unpack(gathered[key_rank], k, v)


class RingTransfer:
    """Exchange of keys and values between context ranks around a ring (Ring Attention).

    Each rank sends keys and values to the next rank while it computes attention to them. In backward, their gradients follow in a
    second ring.
    """

    def __init__(self, group: Group, grad_group: Group) -> None:
        self._group, self._grad_group = group, grad_group

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[RankKeyValues]:
        """Yield (index of a context rank, its keys, its values) for each context rank, starting with this rank."""
        key_values, keys, values = _pack(k, v), k, v
        for step in range(self._group.size):
            pending = start_ring_shift(key_values, self._group) if step < self._group.size - 1 else None
            yield (self._group.rank - step) % self._group.size, keys, values
            if pending is not None:
                key_values = pending.wait()
                keys, values = _unpack(key_values, k, v)

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, add_key_grads: AddKeyGrads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's keys and values, summed over the queries of all context ranks in `dtype`.

        The gradients pass once around the ring, and every rank adds to them. The last shift brings the complete sum back to this
        rank.
        """
        pending: Pending | None = None
        for key_rank, keys, values in self.forward(k, v):
            grads = torch.zeros(_get_packed_shape(k, v), dtype=dtype, device=k.device)
            add_key_grads(key_rank, keys, values, KeyValueGrads.from_buffer(grads, k.shape[-1]))
            if pending is not None:
                grads += pending.wait()
            pending = start_ring_shift(grads, self._grad_group)
        assert pending is not None
        return _unpack(pending.wait(), k, v)


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Concatenate keys [t, b, g, d] and values [t, b, g, e] into one message [t, b, g, d + e]: t tokens of the rank, b microbatch,
    g key-value heads, d and e channels of a key and a value head."""
    return torch.cat([k, v], -1)


def _get_packed_shape(k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    return (*k.shape[:-1], k.shape[-1] + v.shape[-1])


def _unpack(packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = packed.split([k.shape[-1], v.shape[-1]], -1)
    return keys, values


_SEEDS_PER_PAIR = 1 << 24
"""Dropout seeds reserved for each range pair. Each block of a pair uses a different seed."""


class ContextRanks(NamedTuple):
    """Process groups of the context-parallel ranks, and how they communicate (`--cp-comm-type`)."""

    comm_type: CpCommType
    group: Group
    ring_groups: tuple[Group, Group]
    """Two process groups of the context ranks with separate communicators: for the ring of keys and values, and for the ring of
    their gradients."""


class _AttentionCall(NamedTuple):
    """Arguments of a context-parallel attention call, except for its tensors."""

    context_ranks: ContextRanks
    documents: Documents
    score_spec: ScoreSpec
    dropout: float
    seed: int

    def create_transfer(self) -> KeyValueTransfer:
        """Create the exchange of keys and values between context ranks that `--cp-comm-type` selects: ring or all-gather."""
        if self.context_ranks.comm_type == "p2p":
            return RingTransfer(*self.context_ranks.ring_groups)
        return AllGatherTransfer(self.context_ranks.group)

    def iter_range_pairs(self, key_rank: int) -> Iterator[RangePair]:
        """Yield the pairs of a token range of this rank (queries) and a token range of the context rank `key_rank` (keys).

        Pairs in which no query sees a key are left out.
        """
        sequence_split, rank = self.documents.sequence_split, self.context_ranks.group.rank
        assert sequence_split is not None
        query_offset = 0
        for query_index, query_range in enumerate(sequence_split.get_token_ranges(rank)):
            key_offset = 0
            for key_index, key_range in enumerate(sequence_split.get_token_ranges(key_rank)):
                if is_pair_visible(query_range, key_range, self.documents, self.score_spec.window):
                    pair_index = (key_rank * len(sequence_split.segments[rank]) + query_index) * len(
                        sequence_split.segments[key_rank]
                    ) + key_index
                    # Attention sinks enter the softmax sum only once, after all pairs are merged.
                    score_spec = dataclasses.replace(self.score_spec, softmax="vanilla")
                    seed = self.seed + pair_index * _SEEDS_PER_PAIR
                    yield RangePair(
                        query_range, key_range, query_offset, key_offset, score_spec, self.documents, self.dropout, seed
                    )
                key_offset += key_range[1] - key_range[0]
            query_offset += query_range[1] - query_range[0]


def context_attention(
    context_ranks: ContextRanks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    score_spec: ScoreSpec,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    core: Callable[..., torch.Tensor] = core_attention,
) -> torch.Tensor:
    """Compute softmax(score(q k^T)) v for the tokens of this rank, with the keys and values of all context-parallel ranks.

    Args:
        q: queries, [t, b, g, r, d] (tokens of this rank, microbatch, key-value heads, query heads per key-value head, channels) or
            [t, b, n, d] with n = g * r.
        k, v: keys [t, b, g, d] and values [t, b, g, e]; each head serves r query heads.
        documents: documents of the complete microbatch, with the split over the ranks.
        sinks: learnable attention sinks, [n], if the softmax has them.
        seed: seed for the dropout masks of this rank.
        core: `core_attention` or an equivalent function. With `--cp-comm-type a2a` it computes complete samples for some of the
            heads; the other types do not use it.

    Returns:
        [t, b, n * e].
    """
    if q.dim() == 4:
        q = q.unflatten(2, (k.shape[2], -1))
    if context_ranks.comm_type == "a2a":
        return _all_to_all_attention(context_ranks.group, q, k, v, documents, score_spec, sinks, dropout, seed, core)
    out: torch.Tensor = _PairwiseAttention.apply(
        q, k, v, sinks, _AttentionCall(context_ranks, documents, score_spec, dropout, seed or 0)
    )
    return out.flatten(2)


class _PairwiseAttention(torch.autograd.Function):
    """Autograd function of attention between pairs of token ranges (queries of one, keys of another). For backward it saves inputs,
    output and logsumexp only of this rank's tokens."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: _AttentionCall
    ) -> torch.Tensor:
        sum_dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:4], v.shape[-1]), dtype=sum_dtype)
        logsumexp = q.new_full(q.shape[:4], -torch.inf, dtype=sum_dtype)
        for key_rank, keys, values in call.create_transfer().forward(k, v):
            for pair in call.iter_range_pairs(key_rank):
                rows = pair.query_rows
                pair_out, pair_logsumexp = attend_pair(pair, q[rows], keys[pair.key_rows], values[pair.key_rows])
                _merge_pair(out[rows], logsumexp[rows], pair_out, pair_logsumexp)
        if call.score_spec.softmax != "vanilla":
            sink = logsumexp.new_zeros(()) if sinks is None else sinks.to(sum_dtype).view(q.shape[2:4])
            logsumexp_with_sink = torch.logaddexp(logsumexp, sink.expand_as(logsumexp))
            out.mul_((logsumexp - logsumexp_with_sink).exp_()[..., None])
            logsumexp = logsumexp_with_sink
        rounded_out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, rounded_out, logsumexp)
        ctx.call = call
        return rounded_out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, logsumexp = ctx.saved_tensors
        call: _AttentionCall = ctx.call
        grad = grad.contiguous()
        grad_q = torch.zeros(q.shape, dtype=logsumexp.dtype, device=q.device)

        def add_key_grads(key_rank: int, keys: torch.Tensor, values: torch.Tensor, grads: KeyValueGrads) -> None:
            for pair in call.iter_range_pairs(key_rank):
                query_rows, key_rows = pair.query_rows, pair.key_rows
                attend_pair_backward(
                    pair,
                    *(grad[query_rows], q[query_rows], keys[key_rows], values[key_rows], out[query_rows], logsumexp[query_rows]),
                    grads.select_pair(pair, grad_q),
                )

        grad_k, grad_v = call.create_transfer().backward(k, v, logsumexp.dtype, add_key_grads)
        grad_sinks = None
        if sinks is not None:
            delta = (grad.to(logsumexp.dtype) * out).sum(-1)
            sink_probs = (sinks.to(logsumexp.dtype).view(q.shape[2:4]) - logsumexp).exp_()
            grad_sinks = -(sink_probs * delta).sum((0, 1)).flatten().to(sinks.dtype)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None


def _merge_pair(out: torch.Tensor, logsumexp: torch.Tensor, pair_out: torch.Tensor, pair_logsumexp: torch.Tensor) -> None:
    """Merge the attention output over the keys of one token range into the output over earlier ranges, for the same queries.

    The merged output is the average of the two, weighted by their softmax sums, exp(logsumexp).

    Args:
        out, pair_out: earlier and new output, [q, b, g, r, e]; `out` is updated in place.
        logsumexp, pair_logsumexp: earlier and new logsumexp, [q, b, g, r]; `logsumexp` is updated in place.
    """
    total_logsumexp = torch.logaddexp(logsumexp, pair_logsumexp)
    # Queries without visible keys so far have -inf in both, and -inf - -inf would be NaN.
    has_keys = total_logsumexp.isfinite()
    out_weight, pair_weight = (
        torch.where(has_keys, (x - total_logsumexp).exp_(), 0.0)[..., None] for x in (logsumexp, pair_logsumexp)
    )
    out.mul_(out_weight).addcmul_(pair_out, pair_weight)
    logsumexp.copy_(total_logsumexp)


class _AllToAll(torch.autograd.Function):
    """All-to-all along dimension 0: slice i is sent to rank i of the context group. The backward is the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_to_all(grad, ctx.group), None


def _all_to_all_attention(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    score_spec: ScoreSpec,
    sinks: torch.Tensor | None,
    dropout: float,
    seed: int | None,
    core: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Compute attention by two all-to-alls in the context group. The first gives each rank all tokens of some heads. The second
    gives each rank all heads of its local tokens again."""
    num_ranks, sequence_split = group.size, documents.sequence_split
    assert sequence_split is not None
    t, _, g, r, d = q.shape
    sizes = [r * d, d, v.shape[-1]]
    qkv = torch.cat([q.flatten(3), k, v], -1).unflatten(2, (num_ranks, g // num_ranks))  # [t, b, num_ranks, g / num_ranks, ...]
    received: torch.Tensor = _AllToAll.apply(qkv.permute(2, 0, 1, 3, 4), group)
    order, positions = documents.context_rank_order
    full_qkv = reorder(received.flatten(0, 1), positions, order)  # [s, b, g / num_ranks, ...], in the order of the sequence
    q, k, v = full_qkv.split(sizes, -1)
    if sinks is not None:
        sinks = sinks.unflatten(0, (num_ranks, -1))[group.rank]
    packed_documents = documents if documents.is_packed else None
    out = core(q.unflatten(3, (r, d)), k, v, packed_documents, dropout, score_spec=score_spec, sinks=sinks, seed=seed)
    out_by_rank = reorder(out, order, positions).unflatten(0, (num_ranks, t))
    local_out: torch.Tensor = _AllToAll.apply(out_by_rank, group)  # [num_ranks, t, b, n / num_ranks * e]
    return local_out.permute(1, 2, 0, 3).flatten(2)
