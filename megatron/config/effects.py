"""Settings that change nothing beside the others, although what they ask for holds: accepted, and named in the start-up log."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.each import idle_settings
from megatron.config.checks.finding import data_size, is_changed, shown
from megatron.config.checks.fsdp_parts import left_to_buckets
from megatron.config.config import Config
from megatron.spec.schedules import default_schedule

_SCHEDULING = (
    "pipeline_schedule",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)
_ALWAYS = {
    "overlap_grad_reduce": "the gradients of a block are always reduced while backward goes on",
    "overlap_param_gather": "the parameters of the next block are always fetched ahead",
    "ddp_bucket_size": "the parameters of a block are always sent together",
}
"""Settings of buckets, and what optim_grads_params does instead."""


def notes(config: Config, world_size: int) -> list[str]:
    """One line for each such setting, with the reason. The settings must have passed the rules."""
    parallel = config.parallel
    data_ranks = data_size(config, world_size) or 1
    chunks = parallel.pipeline_model_parallel_size * parallel.chunks_per_stage(config.model.num_layers)
    return [
        *idle_settings(config, data_ranks, chunks),
        *_without_pipeline(config, chunks),
        *_of_sharding(config, data_ranks),
    ]


def _without_pipeline(config: Config, chunks: int) -> list[str]:
    """Settings that order the work of a pipeline where there is none: what they change costs or saves memory, but no time."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size > 1 or (chunks == 1 and parallel.schedule == default_schedule(several_chunks=False)):
        return []
    fields = (field for field in (_SCHEDULING if chunks > 1 else _SCHEDULING[:1]) if is_changed(config, field))
    return [
        f"{shown(config, field)} saves no time: there is one pipeline stage, which never waits for another." for field in fields
    ]


def _of_sharding(config: Config, data_ranks: int) -> Iterator[str]:
    """Settings of sharding and offload that do less than one might think."""
    parallel = config.parallel
    if parallel.use_distributed_optimizer and is_changed(config, "data_parallel_sharding_strategy"):
        strategy = shown(config, "data_parallel_sharding_strategy")
        yield f"--use-distributed-optimizer has no effect: {strategy} shards the optimizer's state too."
    if data_ranks == 1:
        for field in ("data_parallel_sharding_strategy", "use_distributed_optimizer"):
            if is_changed(config, field):
                yield f"{shown(config, field)} hardly saves memory: there is one data rank."
                break
    elif parallel.sharding == "optim_grads_params":
        if parallel.fsdp_shard_size == 1:
            yield "--fsdp-shard-size 1 leaves parameters whole: it makes optim_grads_params the same as optim_grads."
        else:
            yield from _blocks(config)
    if (parallel.fsdp_shard_size or data_ranks) == 1 and is_changed(config, "fsdp_reshard_after_forward"):
        yield f"{shown(config, 'fsdp_reshard_after_forward')} has no effect: every data rank holds the parameters whole."
    if config.optimizer.optimizer_cpu_offload and parallel.device == "cpu":
        yield "--optimizer-cpu-offload saves no memory: --device cpu has everything in host memory."


def _blocks(config: Config) -> Iterator[str]:
    """Settings of buckets where most parameters are sharded by blocks."""
    left = left_to_buckets(config)
    for field, instead in _ALWAYS.items():
        if is_changed(config, field):
            effect = f"acts only on {', '.join(left)}" if left else "has no effect"
            yield f"{shown(config, field)} {effect}: with optim_grads_params {instead}."
