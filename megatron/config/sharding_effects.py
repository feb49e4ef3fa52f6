"""Settings of sharding and offload that do less than one might think beside the others: named in the start-up log."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import is_changed, shown
from megatron.config.checks.fsdp_parts import left_to_buckets
from megatron.config.config import Config

_ALWAYS = {
    "overlap_grad_reduce": "the gradients of a block are always reduced while backward goes on",
    "overlap_param_gather": "the parameters of the next block are always fetched ahead",
    "ddp_bucket_size": "the parameters of a block are always sent together",
}
"""Settings of buckets, and what optim_grads_params does instead."""


def sharding_notes(config: Config, copies: int) -> Iterator[str]:
    """One line for each such setting, with the reason.

    Args:
        copies: data ranks.
    """
    parallel = config.parallel
    if copies == 1:
        for field in ("data_parallel_sharding_strategy", "use_distributed_optimizer"):
            if is_changed(config, field):
                yield f"{shown(config, field)} hardly saves memory: there is one data rank."
                break
    elif parallel.sharding == "optim_grads_params":
        if parallel.fsdp_shard_size == 1:
            yield "--fsdp-shard-size 1 leaves parameters whole: it makes optim_grads_params the same as optim_grads."
        else:
            yield from _blocks(config)
    if (parallel.fsdp_shard_size or copies) == 1 and is_changed(config, "fsdp_reshard_after_forward"):
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
