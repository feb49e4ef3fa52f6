"""Rules about sharding over the data ranks, and what optim_grads_params leaves to buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks.finding import (
    RANKS,
    Change,
    Finding,
    change,
    data_size,
    divisors,
    multiples_near,
    rule,
    try_values,
    without,
)
from megatron.config.checks.pipeline import COUNT, LAYERS_EACH, LAYOUT, PP
from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.spec.layers import alike, layers
from megatron.spec.schedules import SCHEDULES, default_schedule
from megatron.spec.weights import Weight, layer_weights, outside_layers


def left_to_buckets(config: Config) -> list[str]:
    """What optim_grads_params leaves to buckets, in words: what is tied, and what tensor ranks sum their gradients of."""
    weights, parallel = list(_weights(config.model)), config.parallel
    left = {
        "the tied word embedding": any(weight.tied for weight in weights),
        "the norms of queries and keys": any(weight.partial_over_tp(False) for weight in weights),
        "what sequence parallelism leaves whole on each tensor rank": parallel.sequence_parallel
        and parallel.tensor_model_parallel_size > 1,
        "the experts": _experts_of_a_copy(config) <= 1 and any(weight.of_experts for weight in weights),
    }
    return [what for what, is_left in left.items() if is_left]


def _weights(model: ModelConfig) -> Iterator[Weight]:
    """Parameters outside the layers, and those of one layer of each kind."""
    yield from outside_layers(model, vocab_size=1)
    for kind in alike(layers(model)):
        yield from layer_weights(model, kind, 0)


def _experts_of_a_copy(config: Config) -> float:
    """How many copies of each expert the ranks have that share one copy of the rest of the model."""
    parallel = config.parallel
    if parallel.fsdp_shard_size is None:
        return math.inf  # where all ranks hold them once there is nothing to share
    ranks = parallel.fsdp_shard_size * parallel.tensor_model_parallel_size
    return ranks / (parallel.expert_tensor_size * parallel.expert_model_parallel_size)


STRATEGY, SHARD_SIZE, RESHARD = "data_parallel_sharding_strategy", "fsdp_shard_size", "fsdp_reshard_after_forward"

_OF_EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")
SHARDING = (STRATEGY, "use_distributed_optimizer")
_ALL = "--data-parallel-sharding-strategy optim_grads_params"


@rule(SHARD_SIZE, "tensor_model_parallel_size", PP, reads=(*SHARDING, *RANKS))
def shard_size_divides_data(config: Config, world_size: int) -> Iterator[Finding]:
    """Each group of --fsdp-shard-size data ranks shares one copy of the parameters. Without it, all data ranks do."""
    size, ranks = config.parallel.fsdp_shard_size, data_size(config, world_size)
    if config.parallel.sharding == "optim_grads_params" and size is not None and ranks is not None and ranks % size:
        yield Finding(
            f"--fsdp-shard-size {size} does not divide the {ranks} data rank{'s' * (ranks > 1)} "
            f"(world size {world_size} / (TP x CP x PP)).",
            [try_values(SHARD_SIZE, size, divisors(ranks))],
        )


@rule(SHARD_SIZE, "tensor_model_parallel_size", *_OF_EXPERTS, reads=("num_experts", *SHARDING))
def copies_hold_experts_alike(config: Config, world_size: int) -> Iterator[Finding]:
    """The ranks that share one copy of the model have each expert as often; or several copies share one of the experts."""
    parallel, copies = config.parallel, _experts_of_a_copy(config)
    size, tp = parallel.fsdp_shard_size, parallel.tensor_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if config.model.num_experts and parallel.sharding == "optim_grads_params" and size and copies > 1 and copies % 1:
        unit = ep * etp // math.gcd(ep * etp, tp)
        yield Finding(
            f"The {size * tp} ranks of --fsdp-shard-size {size} x TP {tp} do not divide by ETP x EP = {etp} x {ep} = {etp * ep}.",
            [try_values(SHARD_SIZE, size, multiples_near(size, unit)), without(config, SHARD_SIZE)],
        )


@rule("pipeline_schedule", STRATEGY, reads=("use_distributed_optimizer", SHARD_SIZE, RESHARD, PP, LAYOUT, LAYERS_EACH, COUNT))
def late_gradients_find_their_block(config: Config, world_size: int) -> Iterator[Finding]:
    """It puts weight gradients off, but those of a block are reduced, and its parameters freed, when backward leaves the block."""
    schedule = config.parallel.schedule
    if config.parallel.sharding == "optim_grads_params" and SCHEDULES[schedule].splits_backward:
        interleaved = default_schedule(several_chunks=True)
        other_schedules = [
            change(pipeline_schedule=interleaved),
            without(config, COUNT, LAYERS_EACH, pipeline_schedule=default_schedule(several_chunks=False)),
            change(pipeline_schedule=interleaved, num_virtual_stages_per_pipeline_rank=2),
        ]
        message = f"--pipeline-schedule {schedule} cannot be used with {_ALL}."
        yield Finding(message, [other_schedules, other_strategy(config)])


@rule("grad_reduce_in_bf16", STRATEGY, reads=("use_distributed_optimizer", SHARD_SIZE, RESHARD))
def blocks_reduce_in_float32(config: Config, world_size: int) -> Iterator[Finding]:
    """Its blocks always reduce gradients in float32; the other strategies can send them in bfloat16."""
    if config.parallel.grad_reduce_in_bf16 and config.parallel.sharding == "optim_grads_params":
        message = f"--grad-reduce-in-bf16 cannot be used with {_ALL}."
        yield Finding(message, [without(config, "grad_reduce_in_bf16"), other_strategy(config)])


def other_strategy(config: Config) -> Change:
    """The strongest strategy that leaves parameters whole."""
    return without(config, SHARD_SIZE, RESHARD, **{STRATEGY: "optim_grads"})
