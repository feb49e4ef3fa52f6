"""Rules about individual settings: required settings are set, values are in range, and settings have an effect. The rules read the
metadata of the settings fields (`setting.py`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator

from megatron.config.checks.finding import (
    Change,
    Finding,
    create_change,
    format_setting,
    get_bounded_fields,
    get_data_parallel_size,
    get_flag,
    get_value,
    has_effect,
    is_in_range,
    is_set,
    rule,
)
from megatron.config.checks.sharding import list_bucketed_params
from megatron.config.config import Config
from megatron.config.flags import get_flags
from megatron.config.param_groups import parse_entry
from megatron.config.regular_file import find_path_problem, shorten_path
from megatron.spec.activations import get_added_choices

MAX_WORLD_SIZE = 1_048_576
"""Upper bound of the world size, which is larger than any existing system."""


@rule()
def check_required_settings(config: Config, world_size: int) -> Iterator[Finding]:
    """A required setting, which has no useful default, must be set."""
    for flag in get_flags().values():
        if flag.metadata.required and get_value(config, flag.field) in (None, 0):
            bound = f", {flag.metadata.interval}" if flag.metadata.interval else ""
            reason = f"It takes {flag.expected}{bound}."
            yield Finding(f"--{flag.name} is missing.", reason=reason, fields=(flag.field,), is_missing=True)


def report_explicit_zero(finding: Finding, config: Config, world_size: int, explicit_fields: Collection[str]) -> Finding:
    """Return the finding to report for a required setting. If the user set the setting to 0, the finding says that it is out of
    range. Otherwise it is `finding`, which says that the setting is missing.

    The rules cannot distinguish the two, because a missing required number is also 0.

    Args:
        finding: a finding of `check_required_settings`.
        explicit_fields: names of the settings that the user set.
    """
    (field,) = finding.fields
    return (
        _build_range_finding(config, world_size, field) if field in explicit_fields and get_value(config, field) == 0 else finding
    )


@rule()
def check_ranges(config: Config, world_size: int) -> Iterator[Finding]:
    """Every number must be in the allowed range of its setting."""
    for field in get_bounded_fields():
        is_missing = get_flag(field).metadata.required and get_value(config, field) == 0
        if not is_missing and not is_in_range(config, field):
            yield _build_range_finding(config, world_size, field)


@rule()
def check_paths(config: Config, world_size: int) -> Iterator[Finding]:
    """A path must be one that a file system accepts, with room for the names of the files that a run creates below it."""
    for field in get_path_fields():
        value = get_value(config, field)
        for path in (value,) if isinstance(value, str) else value or ():
            if problem := find_path_problem(path):
                yield Finding(
                    f"--{get_flag(field).name} {shorten_path(path)} is not a valid path: {problem}.",
                    [],
                    "Give another path.",
                    (field,),
                )
                break


@functools.cache
def get_path_fields() -> tuple[str, ...]:
    """Return the names of the settings that are paths of files or folders."""
    return tuple(flag.field for flag in get_flags().values() if flag.metadata.is_path)


def _build_range_finding(config: Config, world_size: int, field: str) -> Finding:
    value, interval = get_value(config, field), get_flag(field).metadata.interval
    assert interval is not None
    nearest = []
    if not isinstance(value, tuple) and not math.isnan(value):  # the nearer bound, if it is included
        bound, is_included = (
            (interval.low, interval.includes_low) if value <= interval.low else (interval.high, interval.includes_high)
        )
        nearest = [create_change(**{field: type(value)(bound)})] if is_included and math.isfinite(bound) else []
    if field == "global_batch_size" and config.training.micro_batch_size > 0:
        # The bound itself is rarely a whole number of microbatches.
        nearest.append(
            create_change(global_batch_size=config.training.micro_batch_size * (get_data_parallel_size(config, world_size) or 1))
        )
    return Finding(
        f"{format_setting(config, field)} is out of range.",
        [tuple(dict.fromkeys(nearest))],
        f"{'Each number' if isinstance(value, tuple) else 'It'} must be {interval}.",
        (field,),
    )


@rule()
def check_world_size(config: Config, world_size: int) -> Iterator[Finding]:
    """The world size must be at least 1 and at most 1,048,576."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        nearest = Change(world_size=min(max(world_size, 1), MAX_WORLD_SIZE))
        bounds = f"It must be at least 1 and at most {MAX_WORLD_SIZE:,}."
        yield Finding(f"The world size {world_size:,} is out of range.", [nearest], bounds)


@rule()
def check_strict_conditions(config: Config, world_size: int) -> Iterator[Finding]:
    """If a setting that changes the trained model or the saved state is set, it must have an effect."""
    for flag in get_flags().values():
        condition = flag.metadata.active_if
        if condition is not None and condition.strict and is_set(config, flag.field) and not has_effect(config, flag.field):
            yield Finding(
                f"{format_setting(config, flag.field)} would have no effect: it acts only {condition.description}.",
                [create_change(**condition.fix)] if condition.fix else [],
                "Remove the setting, or meet its condition.",
                (flag.field,),
            )


def list_idle_settings(config: Config, world_size: int, checkpoint_fields: Collection[str] = ()) -> list[str]:
    """Return one line for each setting that has no effect, or less effect than expected, with the reason. The settings must be
    valid.

    Args:
        checkpoint_fields: fields whose values come from a checkpoint, not from the user. They get no line.
    """
    parallel = config.parallel
    data_ranks = get_data_parallel_size(config, world_size) or 1
    chunks = parallel.pipeline_model_parallel_size * parallel.get_chunks_per_stage(config.model.num_layers)
    microbatches = config.training.get_final_batch_size(data_ranks) // (config.training.micro_batch_size * data_ranks)
    sharing_ranks = data_ranks * parallel.context_parallel_size  # they hold the same parameters
    expert_ranks = parallel.expert_model_parallel_size * parallel.expert_tensor_size  # they hold each expert once
    derived = {"data_ranks": data_ranks, "sharing_ranks": sharing_ranks, "expert_ranks": expert_ranks}
    derived |= {"chunks": chunks, "microbatches": microbatches}
    lines = [
        f"{format_setting(config, flag.field)} {idle.effect}: {idle.description}."
        for flag in get_flags().values()
        if is_set(config, flag.field) and flag.field not in checkpoint_fields
        for idle in flag.metadata.idle_if
        if idle.is_met(lambda name: derived[name] if name in derived else get_value(config, name))
    ]
    shards_params = parallel.sharding == "optim_grads_params" and sharing_ranks > 1 and parallel.fsdp_shard_size != 1
    bucketed = list_bucketed_params(config) if shards_params else []
    replacements = _BUCKETS_REPLACED_BY | (_OFFLOAD_REPLACED_BY if parallel.fsdp_params_cpu else {})
    for field, replacement in replacements.items():
        if shards_params and is_set(config, field):
            effect = f"acts only on {', '.join(bucketed)}" if bucketed else "has no effect"
            lines.append(f"{format_setting(config, field)} {effect}: with optim_grads_params {replacement}.")
    return lines


def list_plan_caveats(config: Config) -> Iterator[str]:
    """Yield a warning for each user-defined optimizer of the run, because a dry run does not know the computation and communication
    of a user-defined optimizer."""
    optimizers = [config.optimizer.optimizer, *(entry.optimizer for entry in map(parse_entry, config.optimizer.param_groups))]
    for name in [name for name in get_added_choices("optimizer") if name in optimizers]:
        yield (
            f"--optimizer {name}: the plan takes the size of its state from its module and assumes that an update reads and "
            "writes the state once; its other computation and communication are unknown."
        )


_BUCKETS_REPLACED_BY = {
    "overlap_grad_reduce": "the gradients of a block are always reduced during backward",
    "overlap_param_gather": "the parameters of the next block are always prefetched",
    "ddp_bucket_size": "the parameters of a block are always communicated together",
}
"""Settings of gradient buckets, and the behavior of optim_grads_params that replaces them."""


_OFFLOAD_REPLACED_BY = {"optimizer_cpu_offload": "--fsdp-params-cpu keeps the whole state of a block in host memory"}
"""Settings of the offload of optimizer state, and the behavior of --fsdp-params-cpu that replaces them."""
