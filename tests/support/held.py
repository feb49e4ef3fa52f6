"""What providers and optimizers keep, by purpose: the tensors, or the sizes of the storages that these lie in, each once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from megatron.config.training import OptimizerConfig
from megatron.data_parallel.bucket import FullGradBucket
from megatron.data_parallel.buckets import BucketedParams, FrozenParams
from megatron.data_parallel.fsdp import FullyShardedParams
from megatron.data_parallel.provider import ShardProvider
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.optimizer.placement import OnHost, select_offloaded


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of these tensors, each once."""
    return sum(storage_sizes(tensors))


def storage_sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Bytes of each storage that these tensors lie in."""
    return list({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass
class HeldTensors:
    """Tensors that a provider keeps. Their bytes are those that the report at the start counts."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Memory that tensors only pass through: gradients of a bucket before they are reduced, and those that FSDP has not taken."""
    on_host: bool = False
    """Whether parameters (but for gathered ones) and gradients are in host memory."""


def held_by(provider: ShardProvider) -> HeldTensors:
    """The tensors that are kept now."""
    if isinstance(provider, BucketedParams):
        return HeldTensors(
            [bucket.weights for bucket in provider.buckets],
            [bucket.grads if isinstance(bucket, FullGradBucket) else bucket.owned_grads for bucket in provider.buckets],
            [buffer for pool in provider._pools.values() for buffer in pool.buffers],
        )
    if isinstance(provider, FrozenParams):
        return HeldTensors([shard.weights for shard in provider.frozen])
    assert isinstance(provider, FullyShardedParams)
    held = HeldTensors(
        [shard.weights for group in provider.groups for shard in group.shards],
        [unit.grads for unit in provider._units],
        on_host=any(unit._policy.params_cpu for unit in provider._units),
    )
    for unit in provider._units:
        held.parameters += [param.detach() for param in unit._unsharded_params if param.untyped_storage().size()]
        places = [*(sink.main_grad for sink in unit._sinks), *(param.grad for param in unit._unsharded_params)]
        held.buffers += [grad for grad in places if grad is not None]
    return held


@dataclass
class HeldState:
    """Sizes, in bytes, of the storages that an optimizer keeps."""

    main_params: list[int]
    """Those of main parameters that are not the weights themselves."""
    moments: list[int]
    averages: list[int]
    buffers: list[int]
    """Host memory that gradients and weights pass through."""


def state_held_by(optimizer: ShardedOptimizer, config: OptimizerConfig) -> tuple[HeldState, HeldState]:
    """What is kept on the device, and in the host memory that offloading takes."""
    fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
    movable = {shard.record.name: shard.grad.numel() for shard in optimizer.shards if not shard.on_host}
    chosen = select_offloaded(movable, fraction)
    placements = list(itertools.chain.from_iterable(optimizer._placements))
    found = []
    for on_host in (False, True):
        shards = [shard for shard in optimizer.shards if (shard.on_host or shard.record.name in chosen) == on_host]
        copies = [shard.main_param for shard in shards if shard.main_param is not shard.weights]
        moments = [moment for shard in shards for moment in shard.moments.values()]
        averages = [shard.average for shard in shards if shard.average is not None]
        staging = [one for one in placements if isinstance(one, OnHost) and on_host]
        buffers = [tensor for one in staging for tensor in (*one._host_grads, *one._transfer.buffers)]
        found.append(HeldState(storage_sizes(copies), storage_sizes(moments), storage_sizes(averages), storage_sizes(buffers)))
    return found[0], found[1]
