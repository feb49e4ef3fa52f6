"""Causal self-attention, heads split over the tensor group.

Shapes: `s` sequence, `b` microbatch, `h` hidden, `g` this rank's key-value heads, `r` query heads of each, `n = g * r` query heads,
`d` head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.memory.recompute import recomputed
from megatron.model.attention_kernel import keeps_probabilities
from megatron.model.document_attention import Documents, attention_within_documents
from megatron.model.key_value_cache import KeyValueCache
from megatron.model.norms import Norm
from megatron.model.rope import rotate
from megatron.parallel.products import slow_half
from megatron.parallel.random import DropoutKey, seed_device
from megatron.parallel.scope import Scope
from megatron.spec.layers import AttentionSpec, NormSpec
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.linear import Remade

RotaryTable = tuple[torch.Tensor, torch.Tensor]


def core_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents | None = None, dropout: float = 0.0
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v with a causal mask; the softmax is in at least float32.

    Args:
        q: [s, b, n, d].
        k, v: [s, b, g, d]; each serves n/g neighbouring query heads.
        documents: a token attends only to its own; None to its whole sample.

    Returns:
        [s, b, n * d].
    """
    dtype = q.dtype
    if slow_half(q):
        q, k, v = q.float(), k.float(), v.float()
    if documents is not None:
        return attention_within_documents(q, k, v, documents, dropout).to(dtype)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s, d]
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3).flatten(2).to(dtype)


class Attention(nn.Module):
    """Query, key and value from one column-parallel layer, grouped by key-value head; a row-parallel layer joins the heads.

    Args:
        recomputes_core: probabilities are computed again in backward, where the kernel would keep them.
    """

    def __init__(
        self, scope: Scope, spec: AttentionSpec, norm: NormSpec, layer: int, dropout: float, *, recomputes_core: bool = False
    ) -> None:
        super().__init__()
        self.recomputes_core = recomputes_core
        self.head_size, self.queries_per_group = spec.head_size, spec.heads // spec.kv_heads
        self.layer, self.dropout, self.tensor_rank = layer, dropout, scope.tp.index
        self.qkv = ColumnParallelLinear(scope.child("qkv"))
        # These act on this rank's heads only.
        self.q_norm = Norm(scope.child("q_norm"), norm) if spec.qk_norm else None
        self.k_norm = Norm(scope.child("k_norm"), norm) if spec.qk_norm else None
        self.output = RowParallelLinear(scope.child("output"))

    def forward(
        self,
        x: torch.Tensor | Remade,
        rotary: RotaryTable | None,
        key: DropoutKey | None,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h] under sequence parallelism) to the same shape."""
        qkv = self.qkv(x)
        qkv = qkv.view(*qkv.shape[:2], -1, self.queries_per_group + 2, self.head_size)  # [s, b, g, r + 2, d]
        # One split, whose backward is one concatenation.
        q, k, v = (x.flatten(2, 3) for x in qkv.split([self.queries_per_group, 1, 1], dim=3))  # [s, b, n or g, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            cache.append(self.layer, k, v)
            if not cache.empty:
                return self.output(cache.attend(self.layer, q))
        probability = 0.0 if key is None else self.dropout

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, again: bool = False) -> torch.Tensor:
            if probability > 0.0 and key is not None:
                seed_device(q.device, key.site(self.layer, "attention", self.tensor_rank))
            return core_attention(q, k, v, documents, probability)

        if self.recomputes_core and keeps_probabilities(q, grouped=self.queries_per_group > 1, dropout=probability):
            return self.output(recomputed(attend, q, k, v))
        return self.output(attend(q, k, v))
