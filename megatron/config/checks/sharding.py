"""Rules about sharding over the data ranks, and the parameters that optim_grads_params leaves in gradient buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks.finding import (
    MODEL_PARALLEL_SIZES,
    Change,
    Finding,
    create_change,
    find_divisors,
    find_multiples_near,
    get_data_parallel_size,
    reset,
    rule,
    try_values,
)
from megatron.config.checks.pipeline import CHUNKS_PER_STAGE, LAYERS_PER_CHUNK, LAYOUT, PP
from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.spec.layers import build_layer_specs, group_equal
from megatron.spec.schedules import SCHEDULES, get_default_schedule
from megatron.spec.weights import WeightSpec, iter_layer_weights, iter_non_layer_weights


def list_bucketed_params(config: Config) -> list[str]:
    """Return descriptions of the parameters that --data-parallel-sharding-strategy optim_grads_params does not shard but keeps in
    gradient buckets: tied parameters, parameters whose gradients are summed over tensor ranks, and experts."""
    weights, parallel = list(_iter_sample_weights(config.model)), config.parallel
    bucketed = {
        "the tied word embedding": any(weight.tied for weight in weights),
        "the norms of queries and keys": any(weight.has_partial_tp_grad(False) for weight in weights),
        "the parameters that sequence parallelism replicates on tensor ranks": parallel.sequence_parallel
        and parallel.tensor_model_parallel_size > 1,
        "the experts": _count_expert_copies_per_shard_group(config) <= 1 and any(weight.is_expert for weight in weights),
    }
    return [name for name, is_bucketed in bucketed.items() if is_bucketed]


def _iter_sample_weights(model: ModelConfig) -> Iterator[WeightSpec]:
    """Yield a sample of the model's parameters in which every kind occurs: all parameters outside the layers, and those of one
    layer of each type."""
    yield from iter_non_layer_weights(model, vocab_size=1)
    for layer in group_equal(build_layer_specs(model)):
        yield from iter_layer_weights(model, layer, 0)


def _count_expert_copies_per_shard_group(config: Config) -> float:
    """Return the number of copies of each expert in a shard group, which is a fraction if the group holds only some of the experts.

    A shard group is the ranks that together hold one copy of all other parameters. The result is infinite without
    --fsdp-shard-size.
    """
    parallel = config.parallel
    if parallel.fsdp_shard_size is None:
        return math.inf  # all data ranks share one copy
    ranks = parallel.fsdp_shard_size * parallel.tensor_model_parallel_size
    return ranks / (parallel.expert_tensor_size * parallel.expert_model_parallel_size)


STRATEGY, SHARD_SIZE, RESHARD = "data_parallel_sharding_strategy", "fsdp_shard_size", "fsdp_reshard_after_forward"

_EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
SHARDING_SETTINGS = (STRATEGY, "use_distributed_optimizer")
_FULL_SHARDING = "--data-parallel-sharding-strategy optim_grads_params"


@rule(SHARD_SIZE, "tensor_model_parallel_size", PP, depends_on=(*SHARDING_SETTINGS, *MODEL_PARALLEL_SIZES))
def check_data_size_divisible_by_shard_size(config: Config, world_size: int) -> Iterator[Finding]:
    """The data-parallel size must be a multiple of --fsdp-shard-size, because each group of this number of data ranks shares one
    copy of the parameters. Without the flag, all data ranks share one copy."""
    shard_size, ranks = config.parallel.fsdp_shard_size, get_data_parallel_size(config, world_size)
    if config.parallel.sharding == "optim_grads_params" and shard_size is not None and ranks is not None and ranks % shard_size:
        yield Finding(
            f"--fsdp-shard-size {shard_size} does not divide the {ranks} data rank{'s' * (ranks > 1)} "
            f"(world size {world_size} / (TP x CP x PP)).",
            [try_values(SHARD_SIZE, shard_size, find_divisors(ranks))],
        )


@rule(SHARD_SIZE, "tensor_model_parallel_size", *_EXPERT_SIZES, depends_on=("num_experts", *SHARDING_SETTINGS))
def check_shard_groups_fit_experts(config: Config, world_size: int) -> Iterator[Finding]:
    """With --fsdp-shard-size, each group of shard size x tensor-parallel size ranks shares one copy of the model. Either a group
    holds a whole number of copies of all experts, or a copy of the experts is distributed over a whole number of groups."""
    parallel, num_expert_replicas = config.parallel, _count_expert_copies_per_shard_group(config)
    shard_size, tp = parallel.fsdp_shard_size, parallel.tensor_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if (
        config.model.num_experts
        and parallel.sharding == "optim_grads_params"
        and shard_size
        and num_expert_replicas > 1
        and num_expert_replicas % 1
    ):
        unit = ep * etp // math.gcd(ep * etp, tp)
        yield Finding(
            f"The {shard_size * tp} ranks of --fsdp-shard-size {shard_size} x TP {tp} are not divisible by "
            f"ETP x EP = {etp} x {ep} = {etp * ep}.",
            [try_values(SHARD_SIZE, shard_size, find_multiples_near(shard_size, unit)), reset(config, SHARD_SIZE)],
        )


@rule(
    "pipeline_schedule",
    STRATEGY,
    depends_on=("use_distributed_optimizer", SHARD_SIZE, RESHARD, PP, LAYOUT, LAYERS_PER_CHUNK, CHUNKS_PER_STAGE),
)
def check_no_split_backward_with_full_sharding(config: Config, world_size: int) -> Iterator[Finding]:
    """--data-parallel-sharding-strategy optim_grads_params cannot be used with a --pipeline-schedule that delays weight gradients.
    The strategy reduces the gradients of a transformer block, and frees its parameters, as soon as backward leaves the block."""
    schedule = config.parallel.schedule
    if config.parallel.sharding == "optim_grads_params" and SCHEDULES[schedule].splits_backward:
        interleaved = get_default_schedule(has_multiple_chunks=True)
        schedule_candidates = [
            create_change(pipeline_schedule=interleaved),
            reset(config, CHUNKS_PER_STAGE, LAYERS_PER_CHUNK, pipeline_schedule=get_default_schedule(has_multiple_chunks=False)),
            create_change(pipeline_schedule=interleaved, num_virtual_stages_per_pipeline_rank=2),
        ]
        message = f"--pipeline-schedule {schedule} cannot be used with {_FULL_SHARDING}."
        yield Finding(message, [schedule_candidates, suggest_optim_grads(config)])


@rule("grad_reduce_in_bf16", STRATEGY, depends_on=("use_distributed_optimizer", SHARD_SIZE, RESHARD))
def check_no_bf16_reduce_with_full_sharding(config: Config, world_size: int) -> Iterator[Finding]:
    """--grad-reduce-in-bf16 cannot be used with --data-parallel-sharding-strategy optim_grads_params, which always reduces
    gradients in float32. The other strategies can reduce them in bfloat16."""
    if config.parallel.grad_reduce_in_bf16 and config.parallel.sharding == "optim_grads_params":
        message = f"--grad-reduce-in-bf16 cannot be used with {_FULL_SHARDING}."
        yield Finding(message, [reset(config, "grad_reduce_in_bf16"), suggest_optim_grads(config)])


def suggest_optim_grads(config: Config) -> Change:
    """Return a change of --data-parallel-sharding-strategy to optim_grads, the strategy with the most sharding that does not shard
    parameters."""
    return reset(config, SHARD_SIZE, RESHARD, **{STRATEGY: "optim_grads"})
