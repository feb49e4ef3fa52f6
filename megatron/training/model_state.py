"""Who holds what of the model's state: the providers that a sharding strategy asks for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.buckets import Buckets
from megatron.data_parallel.fsdp_plan import is_fully_sharded
from megatron.data_parallel.provider import Provider
from megatron.model.build import Model
from megatron.model.init import fill
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry
from megatron.parallel.shards import Granularity


def make_providers(model: Model, context: ParallelContext, config: ParallelConfig, *, granularity: Granularity) -> list[Provider]:
    """Give the model's parameters memory, each rank what the strategy leaves it, and initial values where they have none.

    Args:
        granularity: which parameters the optimizer must see whole.
    """
    values = partial(fill, seed=model.seed)
    units = [unit for chunk in model.chunks.values() for unit in chunk.units()]

    def buckets(entries: Sequence[ParamEntry], sharding: str) -> Buckets:
        return Buckets(entries, units, context, config, values, sharding=sharding, granularity=granularity)

    if config.sharding != "optim_grads_params":
        return [buckets(list(model.params), config.sharding)]
    inside = [entry for entry in model.params if is_fully_sharded(entry, context)]
    outside = [entry for entry in model.params if not is_fully_sharded(entry, context)]
    providers: list[Provider] = [buckets(outside, "optim_grads")] if outside else []
    if inside:
        from megatron.data_parallel.fsdp import FullyShardedParams  # a second of imports, for those who need it

        made = FullyShardedParams(
            inside, model.chunks, context, dtype=model.dtype, fill=values, reshard=config.fsdp_reshard_after_forward
        )
        providers.append(made)
    return providers
