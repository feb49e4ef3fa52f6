"""Causal multi-head latent attention: keys and values are projected from a latent vector per token (DeepSeek-V2, section 2.1).

Shapes: `s` sequence, `b` microbatch, `h` hidden size, `n` local heads, `p` channels of a query or key head without rotary embedding
(nope), `r` channels with rotary embedding, `e` channels of a value head, `c` size of the latent. Under sequence
parallelism hidden states are [s/tp, b, h], where `tp` is the number of tensor ranks.

The down-projections to the latents are replicated on every tensor rank, since all heads need the latents. The up-projections to the
heads are split by heads. Under sequence parallelism a rank computes and normalizes the latents of its part of the sequence, and the
ranks gather latents instead of hidden states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatron.model.attention import CoreAttention
from megatron.model.rope import rotate, rotate_into
from megatron.parallel.accumulate import route_grad
from megatron.parallel.params import Scope
from megatron.parallel.random import DropoutKey
from megatron.spec.layers import LatentAttentionSpec, NormSpec
from megatron.tensor_parallel.layers import ColumnParallelLinear, Norm, ReplicatedLinear, RowParallelLinear
from megatron.tensor_parallel.linear import RecomputableInput

if TYPE_CHECKING:
    from megatron.attention.documents import Documents
    from megatron.model.key_value_cache import KeyValueCache

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries and keys [s, b, n, p + r], and values [s, b, n, e]."""


class _AssembleHeads(torch.autograd.Function):
    """Autograd function that assembles queries and keys [s, b, n, p + r] and values [s, b, n, e] from the outputs of the
    projections.

    There are n local heads. A query or key has p channels without rotary embedding (nope) and r channels with rotary embedding, a
    value has e channels. All heads share one key with rotary embedding.

    Queries are rotated in place: nothing else reads the projection's output. Values are copied, so that attention does not keep the
    nope channels of the keys in memory a second time.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, k_rotary: torch.Tensor, rotary: torch.Tensor | None, interleaved: bool
    ) -> Heads:
        ctx.save_for_backward(rotary)
        ctx.interleaved = interleaved
        ctx.nope_dim = nope_dim = q.shape[-1] - k_rotary.shape[-1]
        k = q.new_empty((*kv.shape[:-1], q.shape[-1]))
        k[..., :nope_dim] = kv[..., :nope_dim]
        shared_key = k_rotary.unsqueeze(2)
        if rotary is not None:
            rotate_into(q[..., nope_dim:], rotary, out=q[..., nope_dim:], interleaved=interleaved)
            rotated_key = torch.empty_like(shared_key)
            rotate_into(shared_key, rotary, out=rotated_key, interleaved=interleaved)
            shared_key = rotated_key
        k[..., nope_dim:] = shared_key
        return q, k, kv[..., nope_dim:].contiguous()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        nope_dim, interleaved, (rotary,) = ctx.nope_dim, ctx.interleaved, ctx.saved_tensors
        grad_shared_key = grad_k[..., nope_dim:].sum(2, keepdim=True)
        if rotary is not None:
            inverse_rotary, rotated_grad = rotary.transpose(-3, -2), torch.empty_like(grad_q, memory_format=torch.contiguous_format)
            rotated_grad[..., :nope_dim] = grad_q[..., :nope_dim]
            rotate_into(grad_q[..., nope_dim:], inverse_rotary, out=rotated_grad[..., nope_dim:], interleaved=interleaved)
            grad_q = rotated_grad
            rotate_into(grad_shared_key, inverse_rotary, out=grad_shared_key, interleaved=interleaved)
        return grad_q, torch.cat([grad_k[..., :nope_dim], grad_v], -1), grad_shared_key.squeeze(2), None, None


def _assemble_heads_in_traceable_ops(
    q: torch.Tensor, kv: torch.Tensor, k_rotary: torch.Tensor, rotary: torch.Tensor | None, interleaved: bool
) -> Heads:
    """Assemble queries, keys and values as `_AssembleHeads` does, in operations that torch.compile can fuse and differentiate."""
    nope_dim, shared_key = q.shape[-1] - k_rotary.shape[-1], k_rotary.unsqueeze(2)
    if rotary is not None:
        q = torch.cat([q[..., :nope_dim], rotate(q[..., nope_dim:], rotary, interleaved)], -1)
        shared_key = rotate(shared_key, rotary, interleaved)
    k = torch.cat([kv[..., :nope_dim], shared_key.expand(*kv.shape[:-1], -1)], -1)
    return q, k, kv[..., nope_dim:]


class LatentAttention(CoreAttention):
    """Multi-head latent attention: an attention layer whose keys and values are projected from one latent vector per token.

    Args:
        norm: specification of the norms of the latents; used only if the model has these norms.
        recomputes_norms: recompute the outputs of the latents' norms in backward instead of storing them.
    """

    def __init__(
        self,
        scope: Scope,
        spec: LatentAttentionSpec,
        norm: NormSpec,
        layer: int,
        dropout: float,
        *,
        recomputes_core: bool = False,
        recomputes_norms: bool = False,
    ) -> None:
        super().__init__(scope, spec.scores, 1, layer, dropout, recomputes_core=recomputes_core)
        self.spec, self.recomputes_norms = spec, recomputes_norms
        self.interleaved = spec.rotary is not None and spec.rotary.is_interleaved
        has_query_latent = spec.q_lora_rank is not None
        self.q = None if has_query_latent else ColumnParallelLinear(scope.get_child("q"))
        self.q_down = ReplicatedLinear(scope.get_child("q_down")) if has_query_latent else None
        self.q_latent_norm = None
        if spec.q_lora_rank is not None and spec.has_latent_norm:
            self.q_latent_norm = Norm(scope.get_child("q_latent_norm"), norm, spec.q_lora_rank)
        self.q_up = ColumnParallelLinear(scope.get_child("q_up")) if has_query_latent else None
        self.kv_down = ReplicatedLinear(scope.get_child("kv_down"))
        self.k_rotary = ReplicatedLinear(scope.get_child("k_rotary"), for_heads=True)
        self.kv_latent_norm = Norm(scope.get_child("kv_latent_norm"), norm, spec.kv_lora_rank) if spec.has_latent_norm else None
        self.kv_up = ColumnParallelLinear(scope.get_child("kv_up"))
        scope.register_optional_param(self, "sinks")
        self.output = RowParallelLinear(scope.get_child("output"))

    def project_qkv(self, x: torch.Tensor | RecomputableInput, rotary: torch.Tensor | None) -> Heads:
        """Project hidden states to the queries, keys and values of the n local heads.

        Args:
            x: [s, b, h], or [s/tp, b, h] under sequence parallelism.

        Returns:
            queries and keys [s, b, n, p + r], with p channels without and r channels with rotary embedding; values [s, b, n, e].
        """
        return self._build_heads(x, self._apply_norm(self.kv_latent_norm, self.kv_down(x)), self.k_rotary(x), rotary)

    def attend_hidden_states(
        self,
        x: torch.Tensor | RecomputableInput,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Map hidden states to the outputs of the n local heads, which are the input of the output projection: [s, b, n * e], with
        e channels of a value.

        The cache stores for each token its latent (c channels) and its rotated key (r channels), as the key of a single head: [s,
        b, 1, c + r]. After the prefill, the keys and values of the heads are never computed from the cache. Instead, the key
        up-projection W is applied to the query q, because q (W latent) = (q W) latent. The value up-projection is applied to the
        weighted sum of the latents (weight absorption; DeepSeek-V2, section 2.1.2).

        Args:
            x: [s, b, h], or [s/tp, b, h] under sequence parallelism.
        """
        if cache is None:
            return self.attend(*self.project_qkv(x, rotary), key, documents, None)
        latent = self.kv_down(x)
        if self.kv_latent_norm is not None:
            latent = self.kv_latent_norm(latent)
        k_rotary = self.k_rotary(x)
        shared_key = k_rotary.unsqueeze(2)
        if rotary is not None:
            shared_key = rotate(shared_key, rotary, self.interleaved)
        (cached,) = self.gather_for_cache(cache, documents, torch.cat([latent.unsqueeze(2), shared_key], -1))
        cache.append(self.layer, cached, None, self.score_spec.window)
        if cache.is_prefill:
            return self.attend(*self._build_heads(x, latent, k_rotary, rotary), key, documents, None)
        return self._attend_to_latents(self._project_queries(x), rotary, cache)

    def _project_queries(self, x: torch.Tensor | RecomputableInput) -> torch.Tensor:
        """Project hidden states to the queries of the n local heads, [s, b, n, p + r]. The last r channels are not rotated yet."""
        if self.q is not None:
            q = self.q(x)
        else:
            assert self.q_down is not None and self.q_up is not None, "queries are projected either directly or by way of a latent"
            q = self.q_up(self._apply_norm(self.q_latent_norm, self.q_down(x)))
        return q.unflatten(-1, (-1, self.spec.head_size))

    def _build_heads(
        self,
        x: torch.Tensor | RecomputableInput,
        latent: torch.Tensor | RecomputableInput,
        k_rotary: torch.Tensor,
        rotary: torch.Tensor | None,
    ) -> Heads:
        kv = self.kv_up(latent).unflatten(-1, (-1, self.spec.qk_head_dim + self.spec.v_head_dim))
        assemble = _assemble_heads_in_traceable_ops if torch.compiler.is_compiling() else _AssembleHeads.apply
        heads: Heads = assemble(self._project_queries(x), kv, k_rotary, rotary, self.interleaved)
        return heads

    def _attend_to_latents(self, q: torch.Tensor, rotary: torch.Tensor | None, cache: KeyValueCache) -> torch.Tensor:
        """Compute the attention of one new token to the cached latents.

        Args:
            q: queries [1, b, n, p + r] of the n local heads; the last r channels are not rotated yet.

        Returns:
            outputs of the heads, [1, b, n * e], with e channels of a value.
        """
        spec, nope_dim = self.spec, self.spec.qk_head_dim
        key_weight, value_weight = self.kv_up.weight.unflatten(0, (-1, nope_dim + spec.v_head_dim)).split(
            [nope_dim, spec.v_head_dim], 1
        )
        rotated_q = q[..., nope_dim:] if rotary is None else rotate(q[..., nope_dim:], rotary, self.interleaved)
        latent_q = torch.einsum("sbnp,npc->sbnc", q[..., :nope_dim], key_weight)
        scale = spec.head_size**-0.5 if self.score_spec.scale is None else self.score_spec.scale
        sinks = None if self.sinks is None else route_grad(self.sinks)
        latent_and_rotated_q = torch.cat([latent_q, rotated_q], -1).unsqueeze(2)  # [1, b, 1, n, c + r]: all heads share the one key
        mixed_latents = cache.attend(
            self.layer, latent_and_rotated_q, replace(self.score_spec, scale=scale), sinks, value_size=spec.kv_lora_rank
        )
        heads = torch.einsum("sbnc,nec->sbne", mixed_latents.unflatten(-1, (-1, spec.kv_lora_rank)), value_weight)
        return heads.flatten(2)

    def _apply_norm(self, norm: Norm | None, latent: torch.Tensor) -> torch.Tensor | RecomputableInput:
        if norm is None:
            return latent
        return norm.build_recomputable(latent) if self.recomputes_norms else norm(latent)
