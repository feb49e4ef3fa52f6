"""Causal self-attention, heads split over the tensor group.

Shapes: `s` sequence, `b` microbatch, `h` hidden, `g` this rank's key-value heads, `r` query heads of each, `n = g * r` query heads,
`d` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.attention.backends import keeps_probabilities
from megatron.attention.core import core_attention, one_kernel
from megatron.config.imports import named
from megatron.memory.recompute import recomputed
from megatron.model.rope import rotate, turn
from megatron.parallel.accumulate import through
from megatron.parallel.collectives import all_gather
from megatron.parallel.params import Scope
from megatron.parallel.random import DropoutKey
from megatron.spec.layers import AttentionSpec, NormSpec, ScoreSpec
from megatron.tensor_parallel.layers import ColumnParallelLinear, Norm, RowParallelLinear
from megatron.tensor_parallel.linear import Remade

if TYPE_CHECKING:
    from megatron.attention.documents import Documents
    from megatron.attention.largest import LayerScores
    from megatron.context_parallel.attention import Sharers
    from megatron.model.all_heads_norm import Sharing
    from megatron.model.key_value_cache import KeyValueCache


class _Split(torch.autograd.Function):
    """Cuts what the layer before attention gives, [s, b, g, r + 2, d], into queries [s, b, g, r, d], keys and values [s, b, g, d].

    With a rotary table it turns queries and keys where they lie, both at once: nobody else reads them before. Backward joins the
    three gradients and turns those of the two back, again in place.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, qkv: torch.Tensor, rotary: torch.Tensor | None, interleaved: bool
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(rotary)
        ctx.interleaved = interleaved
        if rotary is not None:
            _turn_queries_and_keys(qkv, rotary, interleaved)
        return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        # In four dimensions: CUDA joins parts of more by one copy each.
        joined = torch.cat([grad_q.flatten(3), grad_k, grad_v], -1).unflatten(-1, (-1, grad_v.shape[-1]))
        (rotary,) = ctx.saved_tensors
        if rotary is not None:
            _turn_queries_and_keys(joined, rotary.transpose(-3, -2), ctx.interleaved)
        return joined, None, None


def _turn_queries_and_keys(qkv: torch.Tensor, rotary: torch.Tensor, interleaved: bool) -> None:
    queries_and_keys = qkv[..., :-1, :]
    turn(queries_and_keys, rotary, out=queries_and_keys, interleaved=interleaved)


def _traced_split(
    qkv: torch.Tensor, rotary: torch.Tensor | None, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in operations that a compiler fuses and differentiates."""
    q, k, v = qkv.split([qkv.shape[3] - 2, 1, 1], dim=3)
    if rotary is not None:
        q, k = (rotate(part, rotary, interleaved) for part in (q, k))
    return q, k.squeeze(3), v.squeeze(3)


class CoreAttention(nn.Module):
    """What all kinds of attention have between the layers before it and the one behind it.

    Args:
        scores: how products of queries and keys become probabilities.
        queries_per_group: query heads that share a key-value head.
        recomputes_core: probabilities are computed again in backward, where the kernel would keep them.
    """

    sinks: nn.Parameter | None

    def __init__(
        self, scope: Scope, scores: ScoreSpec, queries_per_group: int, layer: int, dropout: float, *, recomputes_core: bool
    ) -> None:
        super().__init__()
        self.scores, self.sequence_ranks = scores, scope.tp.size if scope.sequence_parallel else 1
        self.recomputes_core, self.queries_per_group = recomputes_core, queries_per_group
        self.layer, self.dropout, self.tensor_rank = layer, dropout, scope.tp.index
        self.largest: LayerScores | None = None
        """What takes the largest scores, in runs that ask for them."""
        self.context_ranks = scope.context.context_group
        self.sharers: Sharers | None = None
        self.attention_of_sharers: Callable[..., torch.Tensor] | None = None
        if scope.context.context_group.size > 1:
            way = scope.context_ways[min(layer, len(scope.context_ways) - 1)]
            self.sharers = named("megatron.context_parallel.attention:Sharers")(
                way, scope.context.context_group, scope.context.context_rings
            )
            self.attention_of_sharers = named("megatron.context_parallel.attention:context_attention")

    def of_all_ranks(self, cache: KeyValueCache, documents: Documents | None, *kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a cache keeps of all tokens of the prompts, [s, b, ...], in their order: what context ranks have of them, put
        together. A token after them is on every rank."""
        if self.sharers is None or not cache.empty:
            return kept
        assert documents is not None, "context ranks need to know who holds which tokens"
        from megatron.attention.documents import reorder

        order, places = documents.order_of_holders
        # What fills the last of them up to a length that the ranks can share is left out.
        return tuple(reorder(all_gather(x, self.sharers.group), places, order)[: cache.longest] for x in kept)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key: DropoutKey | None,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """What lies between the two layers: [s, b, n * d]."""
        sinks = None if self.sinks is None else through(self.sinks)
        if self.largest is not None:
            first = self.tensor_rank * k.shape[2] * self.queries_per_group
            watch = self.largest
            watch.largest.take(watch.row, first, q, k, self.scores, documents, self.context_ranks, watch.beyond)
        if cache is not None:
            all_k, all_v = self.of_all_ranks(cache, documents, k, v)
            cache.append(self.layer, all_k, all_v, self.scores.window)
            if not cache.empty:
                return cache.attend(self.layer, q, self.scores, sinks)
        probability, seed = 0.0, None
        if key is not None and self.dropout > 0.0:
            probability, seed = self.dropout, key.site(self.layer, "attention", self.tensor_rank)
        if self.sharers is not None and self.attention_of_sharers is not None:
            assert documents is not None, "context ranks need to know who holds which tokens"
            how = (self.scores, sinks, probability, seed)
            return self.attention_of_sharers(self.sharers, q, k, v, documents, *how, core=self.core)
        return self.core(q, k, v, documents, probability, scores=self.scores, sinks=sinks, seed=seed)

    def core(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: Documents | None,
        dropout: float,
        *,
        scores: ScoreSpec,
        sinks: torch.Tensor | None,
        seed: int | None,
    ) -> torch.Tensor:
        """`core_attention`, run again in backward where it is asked for and helps."""

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, again: bool = False) -> torch.Tensor:
            return core_attention(q, k, v, documents, dropout, scores=scores, sinks=sinks, seed=seed)

        if self.recomputes_core:
            plain = one_kernel(scores, len(q) if documents is None else documents.longest)
            if plain and keeps_probabilities(q, v, grouped=self.queries_per_group > 1, dropout=dropout):
                return recomputed(run, q, k, v)
        return run(q, k, v)


class Attention(CoreAttention):
    """Query, key and value from one column-parallel layer, grouped by key-value head; a row-parallel layer joins the heads."""

    def __init__(
        self, scope: Scope, spec: AttentionSpec, norm: NormSpec, layer: int, dropout: float, *, recomputes_core: bool = False
    ) -> None:
        sharing: Sharing | None = None
        if spec.kv_heads < scope.tp.size:  # else each rank has key-value heads of its own
            sharing = named("megatron.model.all_heads_norm:Sharing").of(scope.tp, spec.heads, spec.kv_heads, spec.head_size)
        queries = spec.heads // spec.kv_heads // (1 if sharing is None else sharing.ranks)
        super().__init__(scope, spec.scores, queries, layer, dropout, recomputes_core=recomputes_core)
        self.head_size, self.sharing = spec.head_size, sharing
        self.exchanged = None if sharing is None else named("megatron.model.all_heads_norm:exchanged")
        self.interleaved = spec.rotary is not None and spec.rotary.interleaved
        self.qkv = ColumnParallelLinear(scope.child("qkv"))
        sizes = [heads * spec.head_size if spec.qk_norm == "all_heads" else spec.head_size for heads in (spec.heads, spec.kv_heads)]
        self.q_norm = Norm(scope.child("q_norm"), norm, sizes[0]) if spec.qk_norm is not None else None
        self.k_norm = Norm(scope.child("k_norm"), norm, sizes[1]) if spec.qk_norm is not None else None
        self.group_of_heads = scope.tp if spec.qk_norm == "all_heads" else None
        self.norm_all_heads = None if self.group_of_heads is None else named("megatron.model.all_heads_norm:norm_all_heads")
        scope.optional(self, "sinks")
        self.output = RowParallelLinear(scope.child("output"))

    def mixed(
        self,
        x: torch.Tensor | Remade,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h] under sequence parallelism) to the output layer's input, [s, b, n * d]."""
        return self.attend(*self.split(x, rotary), key, documents, cache)

    def split(self, x: torch.Tensor | Remade, rotary: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [s, b, g, r, d], keys and values [s, b, g, d] of hidden states."""
        qkv = self.qkv(x)
        if self.exchanged is not None:
            qkv = self.exchanged(qkv, self.sharing)
        qkv = qkv.view(*qkv.shape[:2], -1, self.queries_per_group + 2, self.head_size)  # [s, b, g, r + 2, d]
        normed = self.q_norm is not None and self.k_norm is not None
        split = _traced_split if torch.compiler.is_compiling() else _Split.apply
        q, k, v = split(qkv, None if normed else rotary, self.interleaved)  # [s, b, g, r, d] and [s, b, g, d]
        if self.q_norm is not None and self.k_norm is not None:
            if self.norm_all_heads is None:  # each on this rank's heads only
                q, k = self.q_norm(q), self.k_norm(k)
            else:
                q, k = self.norm_all_heads(q, k, self.q_norm, self.k_norm, self.group_of_heads)
            if rotary is not None:
                q, k = (rotate(part, rotary, self.interleaved) for part in (q, k))
        return q, k, v
