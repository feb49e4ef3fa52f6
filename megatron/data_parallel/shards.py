"""Shards from buckets: what this rank updates. Without sharding, every rank of a data group updates everything that it holds."""

from __future__ import annotations

from megatron.data_parallel.buckets import GradBuckets
from megatron.parallel.shards import Shard


def bucket_shards(buckets: GradBuckets) -> list[Shard]:
    """One shard for each parameter; the main is the parameter itself where it has its gradient's dtype, else a float32 copy."""
    shards = []
    for entry, grad in buckets.gradients():
        piece = buckets.piece(entry)
        own = entry.param.detach().view(-1)[piece.start : piece.stop]
        main = own if own.dtype == grad.dtype else own.to(grad.dtype)
        flat_grad = grad.view(-1)[piece.start : piece.stop]
        shards.append(Shard(entry.record, piece, entry.param, main, flat_grad, buckets.counts(entry.record)))
    return shards
