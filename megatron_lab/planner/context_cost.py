"""What context ranks send for attention, and hold of each other's keys and values. Pure.

With C ranks and K bytes of keys and values of one rank's tokens; gradients of these, G, are summed in at least float32:

==========  ================  ======================  ===================================
way         sent forward      sent backward           held at once, of others and in sums
==========  ================  ======================  ===================================
all_gather  (C - 1) K         (C - 1) (K + G)         (C + 1) K + C G
p2p         (C - 1) K         (C - 1) K + C G         2 K + 3 G
a2a         (C - 1) / C x A   (C - 1) / C x A         nothing: tokens are exchanged for heads
==========  ================  ======================  ===================================

A is the bytes of queries, keys, values and attention's result of one rank's tokens. What is held counts messages: of a gather what
is sent and what comes; on a ring one that is computed with and one that comes, and of sums one more, which leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.config import Config
from megatron.config.parallel import ContextWay
from megatron.spec.layers import AttentionSpec, LatentAttentionSpec, context_ways, depths, layers

_WIDE = 4
"""Bytes of float32."""


@dataclass(frozen=True)
class SharedAttention:
    """Attention of one layer on one rank, for a microbatch."""

    ranks: int
    """Context ranks."""
    tokens: int
    """Those of a microbatch on a rank."""
    queries: int
    """Channels of this rank's query heads."""
    keys: int
    """Channels of its key and its value heads together."""
    result: int
    """Channels of what attention gives."""
    itemsize: int

    @classmethod
    def of(cls, spec: AttentionSpec | LatentAttentionSpec, config: Config, itemsize: int) -> SharedAttention:
        """That of a layer."""
        parallel = config.parallel
        heads = max(1, spec.heads // parallel.tensor_model_parallel_size)
        value_size = spec.value_size if isinstance(spec, LatentAttentionSpec) else spec.head_size
        pairs = spec.heads if isinstance(spec, LatentAttentionSpec) else spec.kv_heads
        pairs = max(1, pairs // parallel.tensor_model_parallel_size)
        return cls(
            parallel.context_parallel_size,
            config.tokens_per_rank * config.training.micro_batch_size,
            heads * spec.head_size,
            pairs * (spec.head_size + value_size),
            heads * value_size,
            itemsize,
        )

    @property
    def _keys(self) -> int:
        return self.tokens * self.keys * self.itemsize

    @property
    def _sums(self) -> int:
        return self.tokens * self.keys * max(_WIDE, self.itemsize)

    def sent(self, way: ContextWay) -> int:
        """Bytes that a rank sends forward and backward."""
        others = self.ranks - 1
        if way == "a2a":
            return 2 * others * self.tokens * (self.queries + self.keys + self.result) * self.itemsize // self.ranks
        return 2 * others * self._keys + (others if way == "all_gather" else self.ranks) * self._sums

    def held(self, way: ContextWay) -> int:
        """Bytes of keys, values and their gradients that are on a rank at once, beside its own."""
        keys, sums = {"all_gather": (self.ranks + 1, self.ranks), "p2p": (2, 3), "a2a": (0, 0)}[way]
        return keys * self._keys + sums * self._sums


def sent_for_attention(config: Config, itemsize: int, ways: tuple[ContextWay, ...] | None = None) -> int:
    """Bytes that a rank would send for one microbatch through all layers.

    Args:
        itemsize: bytes of an activation.
        ways: one for each layer; by default those of the settings.
    """
    chosen = ways or context_ways(config.model, config.parallel.cp_comm_type)
    more = config.model.mtp_num_layers
    each = zip((*layers(config.model), *depths(config.model)), (*chosen, *chosen[-1:] * more), strict=True)
    return sum(SharedAttention.of(layer.attention, config, itemsize).sent(way) for layer, way in each)


def most_held(config: Config, itemsize: int) -> int:
    """Bytes of other ranks' keys and values, and of gradients of them, that the settings put on a rank at once."""
    each = zip(layers(config.model), context_ways(config.model, config.parallel.cp_comm_type), strict=True)
    return max(SharedAttention.of(layer.attention, config, itemsize).held(way) for layer, way in each)
