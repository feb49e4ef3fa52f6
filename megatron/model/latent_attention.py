"""Causal self-attention whose keys and values are made of a latent (multi-head latent attention; DeepSeek-V2, section 2.1).

Shapes: `s` sequence, `b` microbatch, `h` hidden, `n` this rank's heads, `p` plain and `r` rotated channels of a query or key head,
`e` channels of a value head, `c` size of the latent.

The layers that make latents are whole on every tensor rank, since all heads need the same latent; those that make heads of them are
split by heads. Under sequence parallelism a rank makes and normalises the latents of its part of the sequence, and what is gathered
is a latent, not a hidden state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatron.model.attention import CoreAttention
from megatron.model.rope import rotate, turn
from megatron.parallel.accumulate import through
from megatron.parallel.params import Scope
from megatron.parallel.random import DropoutKey
from megatron.spec.layers import LatentAttentionSpec, NormSpec
from megatron.tensor_parallel.layers import ColumnParallelLinear, Norm, ReplicatedLinear, RowParallelLinear
from megatron.tensor_parallel.linear import Remade

if TYPE_CHECKING:
    from megatron.attention.documents import Documents
    from megatron.model.key_value_cache import KeyValueCache

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Join(torch.autograd.Function):
    """Makes queries and keys [s, b, n, p + r] and values [s, b, n, e] of what the layers before give. All heads get the one
    rotated key.

    Queries are turned where they lie: nobody else reads them before. Values are copied, so that attention does not keep the plain
    channels of keys a second time.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, k_rotary: torch.Tensor, rotary: torch.Tensor | None, interleaved: bool
    ) -> Heads:
        ctx.save_for_backward(rotary)
        ctx.interleaved = interleaved
        ctx.plain = plain = q.shape[-1] - k_rotary.shape[-1]
        k = q.new_empty((*kv.shape[:-1], q.shape[-1]))
        k[..., :plain] = kv[..., :plain]
        shared = k_rotary.unsqueeze(2)
        if rotary is not None:
            turn(q[..., plain:], rotary, out=q[..., plain:], interleaved=interleaved)
            turned = torch.empty_like(shared)
            turn(shared, rotary, out=turned, interleaved=interleaved)
            shared = turned
        k[..., plain:] = shared
        return q, k, kv[..., plain:].contiguous()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        plain, interleaved, (rotary,) = ctx.plain, ctx.interleaved, ctx.saved_tensors
        shared = grad_k[..., plain:].sum(2, keepdim=True)
        if rotary is not None:
            back, turned = rotary.transpose(-3, -2), torch.empty_like(grad_q, memory_format=torch.contiguous_format)
            turned[..., :plain] = grad_q[..., :plain]
            turn(grad_q[..., plain:], back, out=turned[..., plain:], interleaved=interleaved)
            grad_q = turned
            turn(shared, back, out=shared, interleaved=interleaved)
        return grad_q, torch.cat([grad_k[..., :plain], grad_v], -1), shared.squeeze(2), None, None


def _traced_join(
    q: torch.Tensor, kv: torch.Tensor, k_rotary: torch.Tensor, rotary: torch.Tensor | None, interleaved: bool
) -> Heads:
    """The same in operations that a compiler fuses and differentiates."""
    plain, shared = q.shape[-1] - k_rotary.shape[-1], k_rotary.unsqueeze(2)
    if rotary is not None:
        q = torch.cat([q[..., :plain], rotate(q[..., plain:], rotary, interleaved)], -1)
        shared = rotate(shared, rotary, interleaved)
    k = torch.cat([kv[..., :plain], shared.expand(*kv.shape[:-1], -1)], -1)
    return q, k, kv[..., plain:]


class LatentAttention(CoreAttention):
    """Attention of queries with keys and values that are made of a latent.

    Args:
        norm: the kind of the latents' norms, if they have any.
        remakes_norms: what a latent's norm gives is made again in backward instead of being kept.
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
        remakes_norms: bool = False,
    ) -> None:
        super().__init__(scope, spec.scores, 1, layer, dropout, recomputes_core=recomputes_core)
        self.spec, self.remakes_norms = spec, remakes_norms
        self.interleaved = spec.rotary is not None and spec.rotary.interleaved
        through_latent = spec.query_rank is not None
        self.q = None if through_latent else ColumnParallelLinear(scope.child("q"))
        self.q_down = ReplicatedLinear(scope.child("q_down")) if through_latent else None
        self.q_latent_norm = None
        if spec.query_rank is not None and spec.latent_norm:
            self.q_latent_norm = Norm(scope.child("q_latent_norm"), norm, spec.query_rank)
        self.q_up = ColumnParallelLinear(scope.child("q_up")) if through_latent else None
        self.kv_down = ReplicatedLinear(scope.child("kv_down"))
        self.k_rotary = ReplicatedLinear(scope.child("k_rotary"), for_heads=True)
        self.kv_latent_norm = Norm(scope.child("kv_latent_norm"), norm, spec.rank) if spec.latent_norm else None
        self.kv_up = ColumnParallelLinear(scope.child("kv_up"))
        scope.optional(self, "sinks")
        self.output = RowParallelLinear(scope.child("output"))

    def split(self, x: torch.Tensor | Remade, rotary: torch.Tensor | None) -> Heads:
        """Queries and keys [s, b, n, p + r] and values [s, b, n, e] of hidden states [s, b, h] (or [s/n, b, h])."""
        return self._joined(x, self._normed(self.kv_latent_norm, self.kv_down(x)), self.k_rotary(x), rotary)

    def mixed(
        self,
        x: torch.Tensor | Remade,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h] under sequence parallelism) to the output layer's input, [s, b, n * e].

        The cache keeps latents and rotated keys, as those of one head: [s, b, 1, c + r]. After the prompts no head is made of them.
        A query goes through the product that would make keys, q (W c) = (q W) c, and what the latents are mixed to through the one
        that would make values (DeepSeek-V2, section 2.1.2).
        """
        if cache is None:
            return self.attend(*self.split(x, rotary), key, documents, None)
        latent = self.kv_down(x)
        if self.kv_latent_norm is not None:
            latent = self.kv_latent_norm(latent)
        k_rotary = self.k_rotary(x)
        shared = k_rotary.unsqueeze(2)
        if rotary is not None:
            shared = rotate(shared, rotary, self.interleaved)
        (kept,) = self.of_all_ranks(cache, documents, torch.cat([latent.unsqueeze(2), shared], -1))
        cache.append(self.layer, kept, None, self.scores.window)
        if cache.empty:
            return self.attend(*self._joined(x, latent, k_rotary, rotary), key, documents, None)
        return self._attend_to_latents(self._queries(x), rotary, cache)

    def _queries(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Queries [s, b, n, p + r], not yet turned."""
        if self.q is not None:
            q = self.q(x)
        else:
            assert self.q_down is not None and self.q_up is not None, "one or the other"
            q = self.q_up(self._normed(self.q_latent_norm, self.q_down(x)))
        return q.unflatten(-1, (-1, self.spec.head_size))

    def _joined(
        self, x: torch.Tensor | Remade, latent: torch.Tensor | Remade, k_rotary: torch.Tensor, rotary: torch.Tensor | None
    ) -> Heads:
        kv = self.kv_up(latent).unflatten(-1, (-1, self.spec.plain_size + self.spec.value_size))
        join = _traced_join if torch.compiler.is_compiling() else _Join.apply
        heads: Heads = join(self._queries(x), kv, k_rotary, rotary, self.interleaved)
        return heads

    def _attend_to_latents(self, q: torch.Tensor, rotary: torch.Tensor | None, cache: KeyValueCache) -> torch.Tensor:
        """One token's attention to what is stored: q [1, b, n, p + r] to [1, b, n * e]."""
        spec, plain = self.spec, self.spec.plain_size
        to_keys, to_values = self.kv_up.weight.unflatten(0, (-1, plain + spec.value_size)).split([plain, spec.value_size], 1)
        turned = q[..., plain:] if rotary is None else rotate(q[..., plain:], rotary, self.interleaved)
        of_latents = torch.einsum("sbnp,npc->sbnc", q[..., :plain], to_keys)
        scale = spec.head_size**-0.5 if self.scores.scale is None else self.scores.scale
        sinks = None if self.sinks is None else through(self.sinks)
        queries = torch.cat([of_latents, turned], -1).unsqueeze(2)  # [1, b, 1, n, c + r]: all heads share the one key
        mixed = cache.attend(self.layer, queries, replace(self.scores, scale=scale), sinks, value_size=spec.rank)
        heads = torch.einsum("sbnc,nec->sbne", mixed.unflatten(-1, (-1, spec.rank)), to_values)
        return heads.flatten(2)

    def _normed(self, norm: Norm | None, latent: torch.Tensor) -> torch.Tensor | Remade:
        if norm is None:
            return latent
        return norm.remade(latent) if self.remakes_norms else norm(latent)
