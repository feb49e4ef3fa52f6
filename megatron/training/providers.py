"""Selection of the shard providers of a run: the objects that shard parameters and gradients over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megatron.config.imports import import_object
from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.buckets import BucketedParams
from megatron.data_parallel.fsdp_plan import FsdpPolicy, is_fully_sharded
from megatron.data_parallel.provider import ShardProvider
from megatron.model.build import Model, fill
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry


def make_providers(model: Model, context: ParallelContext, config: ParallelConfig) -> list[ShardProvider]:
    """Build the shard providers for the sharding strategy of the run. Shard providers hold the model's parameters and gradients on
    this rank, and communicate them over the data-parallel ranks.

    Each provider allocates the memory that this rank needs for the provider's parameters. It initialises parameters that have no
    values yet.
    """
    fill_values = partial(fill, seed=model.seed)
    units = [unit for chunk in model.chunks.values() for unit in chunk.get_units()]

    def build_buckets(entries: Sequence[ParamEntry], sharding: str) -> BucketedParams:
        return BucketedParams(entries, units, context, config, fill_values, sharding=sharding)

    frozen_params = [entry for entry in model.params if entry.record.frozen]
    if config.sharding != "optim_grads_params":
        frozen_providers: list[ShardProvider] = []
        if frozen_params:
            frozen_providers = [import_object("megatron.data_parallel.buckets:FrozenParams")(frozen_params, context, fill_values)]
        return [*frozen_providers, build_buckets([entry for entry in model.params if not entry.record.frozen], config.sharding)]
    assert not frozen_params, "the settings rules refuse LoRA with this strategy"
    fsdp_params = [entry for entry in model.params if is_fully_sharded(entry, context)]
    bucket_params = [entry for entry in model.params if not is_fully_sharded(entry, context)]
    providers: list[ShardProvider] = [build_buckets(bucket_params, "optim_grads")] if bucket_params else []
    if fsdp_params:
        from megatron.data_parallel.fsdp import FullyShardedParams  # imported only if needed: the import takes a second

        chunks = {chunk_index: (chunk, chunk.get_units()) for chunk_index, chunk in model.chunks.items()}
        policy = FsdpPolicy.from_config(config)
        providers.append(FullyShardedParams(fsdp_params, chunks, context, dtype=model.dtype, fill=fill_values, policy=policy))
    return providers
