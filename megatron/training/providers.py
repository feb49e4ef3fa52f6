"""Which providers divide the state of a model over the data ranks, by the sharding strategy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megatron.config.imports import named
from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.buckets import Buckets
from megatron.data_parallel.fsdp_plan import FsdpPolicy, is_fully_sharded
from megatron.data_parallel.provider import Provider
from megatron.model.build import Model, fill
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry


def make_providers(model: Model, context: ParallelContext, config: ParallelConfig) -> list[Provider]:
    """Make the providers that divide the model's state under the sharding strategy.

    Each gives its parameters memory, of which this rank keeps its part, and initial values where they have none.
    """
    values = partial(fill, seed=model.seed)
    units = [unit for chunk in model.chunks.values() for unit in chunk.units()]

    def buckets(entries: Sequence[ParamEntry], sharding: str) -> Buckets:
        return Buckets(entries, units, context, config, values, sharding=sharding)

    frozen = [entry for entry in model.params if entry.record.frozen]
    if config.sharding != "optim_grads_params":
        fixed: list[Provider] = []
        if frozen:
            fixed = [named("megatron.data_parallel.buckets:FrozenParams")(frozen, context, values)]
        return [*fixed, buckets([entry for entry in model.params if not entry.record.frozen], config.sharding)]
    assert not frozen, "refused beside LoRA"
    inside = [entry for entry in model.params if is_fully_sharded(entry, context)]
    outside = [entry for entry in model.params if not is_fully_sharded(entry, context)]
    providers: list[Provider] = [buckets(outside, "optim_grads")] if outside else []
    if inside:
        from megatron.data_parallel.fsdp import FullyShardedParams  # a second of imports, only for those who need it

        chunks = {number: (chunk, chunk.units()) for number, chunk in model.chunks.items()}
        policy = FsdpPolicy.of(config)
        providers.append(FullyShardedParams(inside, chunks, context, dtype=model.dtype, fill=values, policy=policy))
    return providers
