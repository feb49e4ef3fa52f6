"""Causal self-attention with heads split over the tensor group.

Shapes: `s` sequence, `b` microbatch, `h` hidden size, `g` local key-value heads, `r` query heads per key-value head, `n = g * r`
local query heads, `d` head size, `tp` tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.attention.backends import saves_probabilities
from megatron.attention.core import core_attention, has_fused_kernel
from megatron.config.imports import import_object
from megatron.memory.recompute import run_with_recompute
from megatron.model.rope import rotate, rotate_into
from megatron.parallel.accumulate import route_grad
from megatron.parallel.collectives import all_gather
from megatron.parallel.params import Scope
from megatron.parallel.random import DropoutKey
from megatron.spec.layers import AttentionSpec, NormSpec, ScoreSpec
from megatron.tensor_parallel.layers import ColumnParallelLinear, Norm, RowParallelLinear
from megatron.tensor_parallel.linear import RecomputableInput

if TYPE_CHECKING:
    from megatron.attention.documents import Documents
    from megatron.attention.max_logits import LayerLogitTracker
    from megatron.context_parallel.attention import ContextRanks
    from megatron.model.all_heads_norm import KVHeadSharing
    from megatron.model.key_value_cache import KeyValueCache


class _SplitQKV(torch.autograd.Function):
    """Split the output of the fused projection, [s, b, g, r + 2, d], into queries [s, b, g, r, d], keys and values [s, b, g, d].

    There are g key-value heads on this rank, each with r query heads. With a rotary table, queries and keys are rotated together
    and in place: nothing else reads the projection's output. Backward concatenates the three gradients and rotates those of queries
    and keys back in place.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, qkv: torch.Tensor, rotary: torch.Tensor | None, interleaved: bool
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(rotary)
        ctx.interleaved = interleaved
        if rotary is not None:
            _rotate_qk_in_place(qkv, rotary, interleaved)
        return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        # Concatenated with four dimensions: with more, CUDA copies each tensor in a kernel of its own.
        grad_qkv = torch.cat([grad_q.flatten(3), grad_k, grad_v], -1).unflatten(-1, (-1, grad_v.shape[-1]))
        (rotary,) = ctx.saved_tensors
        if rotary is not None:
            _rotate_qk_in_place(grad_qkv, rotary.transpose(-3, -2), ctx.interleaved)
        return grad_qkv, None, None


def _rotate_qk_in_place(qkv: torch.Tensor, rotary: torch.Tensor, interleaved: bool) -> None:
    qk = qkv[..., :-1, :]
    rotate_into(qk, rotary, out=qk, interleaved=interleaved)


def _split_qkv_in_traceable_ops(
    qkv: torch.Tensor, rotary: torch.Tensor | None, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split and rotate queries, keys and values as `_SplitQKV` does, but in operations that torch.compile can fuse and
    differentiate."""
    q, k, v = qkv.split([qkv.shape[3] - 2, 1, 1], dim=3)
    if rotary is not None:
        q, k = (rotate(x, rotary, interleaved) for x in (q, k))
    return q, k.squeeze(3), v.squeeze(3)


class CoreAttention(nn.Module):
    """Base class of attention layers: computes everything between the query-key-value projection and the output projection.

    Handles attention within documents, context parallelism, the key-value cache, dropout, sinks and recomputation.

    Args:
        score_spec: how products of queries and keys become probabilities (scale, softcap, window, type of softmax).
        query_heads_per_group: number of query heads that share a key-value head.
        recomputes_core: recompute the attention probabilities in backward, if the attention kernel would save them.
    """

    sinks: nn.Parameter | None

    def __init__(
        self, scope: Scope, score_spec: ScoreSpec, query_heads_per_group: int, layer: int, dropout: float, *, recomputes_core: bool
    ) -> None:
        super().__init__()
        self.score_spec, self.num_sequence_ranks = score_spec, scope.tp.size if scope.sequence_parallel else 1
        self.recomputes_core, self.query_heads_per_group = recomputes_core, query_heads_per_group
        self.layer, self.dropout, self.tp_rank = layer, dropout, scope.tp.rank
        self.logit_tracker: LayerLogitTracker | None = None
        """Records the largest attention logits, if the run asks for them."""
        self.context_group = scope.context.context_group
        self.cp_ranks: ContextRanks | None = None
        self.context_attention: Callable[..., torch.Tensor] | None = None
        if scope.context.context_group.size > 1:
            cp_comm_type = scope.cp_comm_types[min(layer, len(scope.cp_comm_types) - 1)]
            self.cp_ranks = import_object("megatron.context_parallel.attention:ContextRanks")(
                cp_comm_type, scope.context.context_group, scope.context.context_rings
            )
            self.context_attention = import_object("megatron.context_parallel.attention:context_attention")

    def gather_for_cache(
        self, cache: KeyValueCache, documents: Documents | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather the prompt's tensors for a key-value cache, [s, b, ...], from the context ranks, and arrange them in the order of
        the sequence.

        Only the prompts are split over context ranks. Every rank computes all generated tokens, so their tensors are returned
        unchanged.
        """
        if self.cp_ranks is None or not cache.is_prefill:
            return tensors
        assert documents is not None, "context parallelism needs documents that say which rank holds which tokens"
        from megatron.attention.documents import reorder

        order, inverse_order = documents.context_rank_order
        # Leave out the padding that makes the sequence length divisible by the ranks.
        return tuple(reorder(all_gather(x, self.cp_ranks.group), inverse_order, order)[: cache.max_length] for x in tensors)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key: DropoutKey | None,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Compute attention from queries, keys and values, with dropout, documents, the key-value cache and context parallelism.

        Args:
            q: queries of this rank's n heads, [s, b, n, d], or [s, b, g, r, d] with r query heads for each of g key-value heads.
            k, v: keys and values, [s, b, g, channels].
            key: key of the dropout masks; None for no dropout.
            documents: document bounds that attention does not cross, and the split of the sequence over context ranks.
            cache: keys and values of earlier tokens, in text generation.

        Returns:
            the outputs of the n query heads, [s, b, n * channels of a value head].
        """
        sinks = None if self.sinks is None else route_grad(self.sinks)
        if self.logit_tracker is not None:
            first_head = self.tp_rank * k.shape[2] * self.query_heads_per_group
            layer_tracker = self.logit_tracker
            layer_tracker.tracker.record(
                layer_tracker.row,
                first_head,
                q,
                k,
                self.score_spec,
                documents,
                self.context_group,
                layer_tracker.num_ahead,
            )
        if cache is not None:
            all_k, all_v = self.gather_for_cache(cache, documents, k, v)
            cache.append(self.layer, all_k, all_v, self.score_spec.window)
            if not cache.is_prefill:
                return cache.attend(self.layer, q, self.score_spec, sinks)
        probability, seed = 0.0, None
        if key is not None and self.dropout > 0.0:
            probability, seed = self.dropout, key.get_site_seed(self.layer, "attention", self.tp_rank)
        if self.cp_ranks is not None and self.context_attention is not None:
            assert documents is not None, "context parallelism needs documents that say which rank holds which tokens"
            softmax_args = (self.score_spec, sinks, probability, seed)
            return self.context_attention(self.cp_ranks, q, k, v, documents, *softmax_args, core=self.run_core)
        return self.run_core(q, k, v, documents, probability, score_spec=self.score_spec, sinks=sinks, seed=seed)

    def run_core(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: Documents | None,
        dropout: float,
        *,
        score_spec: ScoreSpec,
        sinks: torch.Tensor | None,
        seed: int | None,
    ) -> torch.Tensor:
        """Compute attention on this rank by `core_attention`. With `recomputes_core`, backward recomputes it if the kernel would
        save the attention probabilities."""

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_recompute: bool = False) -> torch.Tensor:
            return core_attention(q, k, v, documents, dropout, score_spec=score_spec, sinks=sinks, seed=seed)

        if self.recomputes_core:
            has_kernel = has_fused_kernel(score_spec, len(q) if documents is None else documents.max_seqlen)
            if has_kernel and saves_probabilities(q, v, is_grouped=self.query_heads_per_group > 1, dropout=dropout):
                return run_with_recompute(run, q, k, v)
        return run(q, k, v)


class Attention(CoreAttention):
    """Multi-head or grouped-query attention. The fused query-key-value projection is column-parallel, with its rows grouped by
    key-value head. The output projection is row-parallel."""

    def __init__(
        self, scope: Scope, spec: AttentionSpec, norm: NormSpec, layer: int, dropout: float, *, recomputes_core: bool = False
    ) -> None:
        kv_sharing: KVHeadSharing | None = None
        if spec.num_kv_heads < scope.tp.size:  # otherwise each rank has key-value heads of its own
            kv_sharing = import_object("megatron.model.all_heads_norm:KVHeadSharing").of(
                scope.tp, spec.num_heads, spec.num_kv_heads, spec.head_size
            )
        query_heads_per_group = spec.num_heads // spec.num_kv_heads // (1 if kv_sharing is None else kv_sharing.ranks_per_kv_head)
        super().__init__(scope, spec.scores, query_heads_per_group, layer, dropout, recomputes_core=recomputes_core)
        self.head_size, self.kv_sharing = spec.head_size, kv_sharing
        self.exchange_kv_groups = None if kv_sharing is None else import_object("megatron.model.all_heads_norm:exchange_kv_groups")
        self.interleaved = spec.rotary is not None and spec.rotary.is_interleaved
        self.qkv = ColumnParallelLinear(scope.get_child("qkv"))
        norm_sizes = [
            num_heads * spec.head_size if spec.qk_norm == "all_heads" else spec.head_size
            for num_heads in (spec.num_heads, spec.num_kv_heads)
        ]
        self.q_norm = Norm(scope.get_child("q_norm"), norm, norm_sizes[0]) if spec.qk_norm is not None else None
        self.k_norm = Norm(scope.get_child("k_norm"), norm, norm_sizes[1]) if spec.qk_norm is not None else None
        self.norm_group = scope.tp if spec.qk_norm == "all_heads" else None
        self.norm_all_heads = (
            None if self.norm_group is None else import_object("megatron.model.all_heads_norm:normalize_all_heads")
        )
        scope.register_optional_param(self, "sinks")
        self.output = RowParallelLinear(scope.get_child("output"))

    def attend_hidden_states(
        self,
        x: torch.Tensor | RecomputableInput,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Map hidden states to the input of the output projection.

        Args:
            x: hidden states [s, b, h], or [s/tp, b, h] under sequence parallelism.

        Returns:
            [s, b, n * d], the outputs of this rank's n query heads.
        """
        return self.attend(*self.project_qkv(x, rotary), key, documents, cache)

    def project_qkv(
        self, x: torch.Tensor | RecomputableInput, rotary: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project hidden states to queries [s, b, g, r, d], keys and values [s, b, g, d], with norms and rotary embedding. There
        are g key-value heads on this rank, each with r query heads."""
        qkv = self.qkv(x)
        if self.exchange_kv_groups is not None:
            qkv = self.exchange_kv_groups(qkv, self.kv_sharing)
        qkv = qkv.view(*qkv.shape[:2], -1, self.query_heads_per_group + 2, self.head_size)  # [s, b, g, r + 2, d]
        has_qk_norm = self.q_norm is not None and self.k_norm is not None
        split_qkv = _split_qkv_in_traceable_ops if torch.compiler.is_compiling() else _SplitQKV.apply
        q, k, v = split_qkv(qkv, None if has_qk_norm else rotary, self.interleaved)  # [s, b, g, r, d] and [s, b, g, d]
        if self.q_norm is not None and self.k_norm is not None:
            if self.norm_all_heads is None:  # a norm per head, which needs no communication
                q, k = self.q_norm(q), self.k_norm(k)
            else:
                q, k = self.norm_all_heads(q, k, self.q_norm, self.k_norm, self.norm_group)
            if rotary is not None:
                q, k = (rotate(heads, rotary, self.interleaved) for heads in (q, k))
        return q, k, v
