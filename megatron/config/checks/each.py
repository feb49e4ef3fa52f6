"""Rules about each setting by itself: it is given, in its range, and acts. They read the facts that each field states."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from megatron.config.checks.finding import Change, Finding, change, data_size, in_range, is_changed, rule, shown, value_of
from megatron.config.checks.sharding import left_to_buckets
from megatron.config.config import Config
from megatron.config.flags import Flag, flags
from megatron.config.setting import Interval
from megatron.spec.schedules import default_schedule

LARGEST_WORLD = 1_048_576
"""The most ranks: no machine has as many."""


@rule()
def required_are_given(config: Config, world_size: int) -> Iterator[Finding]:
    """What has no useful default must be given."""
    for flag in flags().values():
        if flag.facts.required and value_of(config, flag.field) in (None, 0):
            bound = f", {flag.facts.interval}" if flag.facts.interval else ""
            yield Finding(f"--{flag.name} is missing.", why=f"It takes {flag.expects}{bound}.", fields=(flag.field,))


def as_given(finding: Finding, config: Config, world_size: int, given: Collection[str]) -> Finding:
    """A finding of `required_are_given` about a setting that was given, as 0: settings alone cannot tell 0 from a missing one."""
    (field,) = finding.fields
    if field not in given or value_of(config, field) != 0:
        return finding
    return next(_out_of_range(config, world_size, flag) for flag in flags().values() if flag.field == field)


@rule()
def numbers_in_range(config: Config, world_size: int) -> Iterator[Finding]:
    """Every number lies in its interval."""
    for flag in flags().values():
        missing = flag.facts.required and value_of(config, flag.field) == 0
        if not missing and not in_range(config, flag.field):
            yield _out_of_range(config, world_size, flag)


def _out_of_range(config: Config, world_size: int, flag: Flag) -> Finding:
    value, interval = value_of(config, flag.field), flag.facts.interval
    assert interval is not None
    nearest = _nearest_bounds(flag.field, value, interval)
    if flag.field == "global_batch_size" and config.training.micro_batch_size > 0:  # the bound itself is seldom a whole step
        ranks = data_size(config, world_size) or 1
        nearest += (change(global_batch_size=config.training.micro_batch_size * ranks),)
    return Finding(
        f"{shown(config, flag.field)} is out of range.",
        [tuple(dict.fromkeys(nearest))],
        f"{'Each number' if isinstance(value, tuple) else 'It'} must be {interval}.",
        (flag.field,),
    )


def _nearest_bounds(field: str, value: Any, interval: Interval) -> tuple[Change, ...]:
    """The end of the interval on the number's side, if it belongs to the interval."""
    if isinstance(value, tuple) or math.isnan(value):
        return ()
    end, belongs = (interval.low, interval.with_low) if value <= interval.low else (interval.high, interval.with_high)
    return (change(**{field: type(value)(end)}),) if belongs and math.isfinite(end) else ()


@rule()
def world_has_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """There is at least one rank, and not more than any machine has."""
    if not 1 <= world_size <= LARGEST_WORLD:
        nearest = Change(world_size=min(max(world_size, 1), LARGEST_WORLD))
        bounds = f"It must be at least 1 and at most {LARGEST_WORLD:,}."
        yield Finding(f"The world size {world_size:,} is out of range.", [nearest], bounds)


@rule()
def changed_settings_act(config: Config, world_size: int) -> Iterator[Finding]:
    """A setting that differs from its default has an effect."""
    for flag in flags().values():
        acts = flag.facts.acts
        if acts is not None and is_changed(config, flag.field) and not acts.holds(_look_up(config)):
            yield Finding(
                f"{shown(config, flag.field)} would have no effect: it acts only {acts.words}.",
                [change(**acts.fix)] if acts.fix else [],
                "Leave it out, or make it act.",
                (flag.field,),
            )


def idle_settings(config: Config, data_ranks: int, chunks: int) -> Iterator[str]:
    """One line for each setting that changes nothing beside the others, with the reason."""
    look_up = _look_up(config, data_ranks=data_ranks, chunks=chunks)
    for flag in flags().values():
        for idle in flag.facts.idle:
            if is_changed(config, flag.field) and idle.holds(look_up):
                yield f"{shown(config, flag.field)} has no effect: {idle.words}."


def _look_up(config: Config, **counted: int) -> Callable[[str], Any]:
    """A function that gives the value of a setting, or of a number that was counted from the settings, by its name."""
    return lambda name: counted[name] if name in counted else value_of(config, name)


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
    """One line for each setting without effect, with the reason. The settings must have passed the rules."""
    parallel = config.parallel
    data_ranks = data_size(config, world_size) or 1
    chunks = parallel.pipeline_model_parallel_size * parallel.chunks_per_stage(config.model.num_layers)
    return [*idle_settings(config, data_ranks, chunks), *_without_pipeline(config, chunks), *_of_sharding(config, data_ranks)]


def _without_pipeline(config: Config, chunks: int) -> list[str]:
    """Lines about settings that order the work of a pipeline where there is none: they cost or save memory, but no time."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size > 1 or (chunks == 1 and parallel.schedule == default_schedule(several_chunks=False)):
        return []
    fields = (field for field in (_SCHEDULING if chunks > 1 else _SCHEDULING[:1]) if is_changed(config, field))
    return [
        f"{shown(config, field)} saves no time: there is one pipeline stage, which never waits for another." for field in fields
    ]


def _of_sharding(config: Config, data_ranks: int) -> Iterator[str]:
    """Lines about settings of sharding and offload that do less than one might think."""
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
    """Lines about settings of buckets where most parameters are sharded by blocks."""
    left = left_to_buckets(config)
    for field, instead in _ALWAYS.items():
        if is_changed(config, field):
            effect = f"acts only on {', '.join(left)}" if left else "has no effect"
            yield f"{shown(config, field)} {effect}: with optim_grads_params {instead}."
