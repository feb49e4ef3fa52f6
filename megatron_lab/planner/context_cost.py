"""Cost of context parallelism in attention: bytes that a rank sends, and bytes of the buffers for keys and values. Both are
computed by arithmetic; nothing runs.

With C context ranks, K bytes of keys and values of one rank's tokens, and G bytes of their gradients (summed in at least float32):

==========  ================  ======================  =========================================
type        sent in forward   sent in backward        keys, values and gradients in buffers
==========  ================  ======================  =========================================
all_gather  (C - 1) K         (C - 1) (K + G)         (C + 1) K + C G
p2p         (C - 1) K         (C - 1) K + C G         2 K + 3 G
a2a         (C - 1) / C x A   (C - 1) / C x A         none: tokens are exchanged for heads
==========  ================  ======================  =========================================

A is the bytes of queries, keys, values and the attention output of one rank's tokens. An all-gather needs its input and its output
at once. A ring (p2p) needs the keys and values with which it computes and those that arrive. For gradients it also needs those that
are being sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.config import Config
from megatron.config.parallel import CpCommType
from megatron.spec.layers import AttentionSpec, LatentAttentionSpec, build_layer_specs, build_mtp_layer_specs, resolve_cp_comm_types

_FLOAT32_BYTES = 4
"""Bytes of a float32 element."""


@dataclass(frozen=True)
class ContextAttention:
    """Sizes of one layer's attention on one context-parallel rank. The bytes that the rank sends and the sizes of its buffers
    follow from them."""

    cp_size: int
    """Number of context ranks that share a sequence."""
    num_tokens: int
    """Number of tokens of a microbatch on this rank."""
    query_channels: int
    """Channels of this rank's query heads (heads x head size)."""
    kv_channels: int
    """Sum of the channels of this rank's key heads and value heads."""
    output_channels: int
    """Channels of the attention output on this rank (heads x size of a value head)."""
    itemsize: int

    @classmethod
    def of(cls, spec: AttentionSpec | LatentAttentionSpec, config: Config, itemsize: int) -> ContextAttention:
        """Compute the sizes for one layer on one rank.

        Args:
            spec: attention of the layer: numbers of heads and their sizes.
            itemsize: bytes of an activation element.
        """
        parallel = config.parallel
        num_heads = max(1, spec.num_heads // parallel.tensor_model_parallel_size)
        value_size = spec.v_head_dim if isinstance(spec, LatentAttentionSpec) else spec.head_size
        num_kv_heads = spec.num_heads if isinstance(spec, LatentAttentionSpec) else spec.num_kv_heads
        num_kv_heads = max(1, num_kv_heads // parallel.tensor_model_parallel_size)
        return cls(
            parallel.context_parallel_size,
            config.tokens_per_rank * config.training.micro_batch_size,
            num_heads * spec.head_size,
            num_kv_heads * (spec.head_size + value_size),
            num_heads * value_size,
            itemsize,
        )

    @property
    def _kv_bytes(self) -> int:
        return self.num_tokens * self.kv_channels * self.itemsize

    @property
    def _kv_grad_bytes(self) -> int:
        return self.num_tokens * self.kv_channels * max(_FLOAT32_BYTES, self.itemsize)

    def count_sent_bytes(self, comm_type: CpCommType) -> int:
        """Return the bytes that a rank sends to the other context ranks in forward and backward of this layer's attention, for one
        microbatch."""
        num_peers = self.cp_size - 1
        if comm_type == "a2a":
            return (
                2
                * num_peers
                * self.num_tokens
                * (self.query_channels + self.kv_channels + self.output_channels)
                * self.itemsize
                // self.cp_size
            )
        return 2 * num_peers * self._kv_bytes + (num_peers if comm_type == "all_gather" else self.cp_size) * self._kv_grad_bytes

    def count_buffer_bytes(self, comm_type: CpCommType) -> int:
        """Return the peak bytes of the buffers in which a rank gathers, receives or sends keys, values and their gradients."""
        num_kv, num_grads = {"all_gather": (self.cp_size + 1, self.cp_size), "p2p": (2, 3), "a2a": (0, 0)}[comm_type]
        return num_kv * self._kv_bytes + num_grads * self._kv_grad_bytes


def count_attention_traffic(config: Config, itemsize: int, comm_types: tuple[CpCommType, ...] | None = None) -> int:
    """Return the bytes that a rank sends to the other context ranks for one microbatch, in the attention of all layers.

    Args:
        itemsize: bytes of an activation element.
        comm_types: context-parallel communication type of each layer; None for the types in the settings.
    """
    layer_types = comm_types or resolve_cp_comm_types(config.model, config.parallel.cp_comm_type)
    num_mtp_layers = config.model.mtp_num_layers
    layers = zip(
        (*build_layer_specs(config.model), *build_mtp_layer_specs(config.model)),
        (*layer_types, *layer_types[-1:] * num_mtp_layers),
        strict=True,
    )
    return sum(ContextAttention.of(layer.attention, config, itemsize).count_sent_bytes(comm_type) for layer, comm_type in layers)


def count_max_buffer_bytes(config: Config, itemsize: int) -> int:
    """Return the peak bytes of the buffers in which a rank gathers, receives or sends keys, values and their gradients, in the
    layer that needs most.

    Args:
        itemsize: bytes of an activation element.
    """
    layers = zip(build_layer_specs(config.model), resolve_cp_comm_types(config.model, config.parallel.cp_comm_type), strict=True)
    return max(ContextAttention.of(layer.attention, config, itemsize).count_buffer_bytes(comm_type) for layer, comm_type in layers)
