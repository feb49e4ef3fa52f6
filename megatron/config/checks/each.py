"""Rules about each setting by itself: it is given, in its range, and acts. They read the facts that each field states."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from megatron.config.checks.finding import (
    Change,
    Finding,
    change,
    data_size,
    flag_for,
    has_effect,
    in_range,
    is_changed,
    rule,
    shown,
    value_of,
    with_range,
)
from megatron.config.checks.sharding import left_to_buckets
from megatron.config.config import Config
from megatron.config.flags import flags
from megatron.config.param_groups import entry_of
from megatron.spec.activations import added

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
    return _out_of_range(config, world_size, field) if field in given and value_of(config, field) == 0 else finding


@rule()
def numbers_in_range(config: Config, world_size: int) -> Iterator[Finding]:
    """Every number lies in its interval."""
    for field in with_range():
        missing = flag_for(field).facts.required and value_of(config, field) == 0
        if not missing and not in_range(config, field):
            yield _out_of_range(config, world_size, field)


def _out_of_range(config: Config, world_size: int, field: str) -> Finding:
    value, interval = value_of(config, field), flag_for(field).facts.interval
    assert interval is not None
    nearest = []
    if not isinstance(value, tuple) and not math.isnan(value):  # the end on the number's side, if it belongs to the interval
        end, belongs = (interval.low, interval.with_low) if value <= interval.low else (interval.high, interval.with_high)
        nearest = [change(**{field: type(value)(end)})] if belongs and math.isfinite(end) else []
    if field == "global_batch_size" and config.training.micro_batch_size > 0:  # the bound itself is seldom a whole step
        nearest.append(change(global_batch_size=config.training.micro_batch_size * (data_size(config, world_size) or 1)))
    return Finding(
        f"{shown(config, field)} is out of range.",
        [tuple(dict.fromkeys(nearest))],
        f"{'Each number' if isinstance(value, tuple) else 'It'} must be {interval}.",
        (field,),
    )


@rule()
def world_has_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """There is at least one rank, and not more than any machine has."""
    if not 1 <= world_size <= LARGEST_WORLD:
        nearest = Change(world_size=min(max(world_size, 1), LARGEST_WORLD))
        bounds = f"It must be at least 1 and at most {LARGEST_WORLD:,}."
        yield Finding(f"The world size {world_size:,} is out of range.", [nearest], bounds)


@rule()
def changed_settings_act(config: Config, world_size: int) -> Iterator[Finding]:
    """A setting that says what is trained, or what is kept safe, has an effect where it is given."""
    for flag in flags().values():
        acts = flag.facts.acts
        if acts is not None and acts.strict and is_changed(config, flag.field) and not has_effect(config, flag.field):
            yield Finding(
                f"{shown(config, flag.field)} would have no effect: it acts only {acts.words}.",
                [change(**acts.fix)] if acts.fix else [],
                "Leave it out, or make it act.",
                (flag.field,),
            )


def notes(config: Config, world_size: int) -> list[str]:
    """One line for each setting that changes nothing, or less than one might think, with the reason. The settings must have passed
    the rules."""
    parallel = config.parallel
    data_ranks = data_size(config, world_size) or 1
    chunks = parallel.pipeline_model_parallel_size * parallel.chunks_per_stage(config.model.num_layers)
    microbatches = config.training.final_batch_size(data_ranks) // (config.training.micro_batch_size * data_ranks)
    sharing_ranks = data_ranks * parallel.context_parallel_size  # they hold the same parameters
    expert_ranks = parallel.expert_model_parallel_size * parallel.expert_tensor_size  # they hold each expert once
    facts = {"data_ranks": data_ranks, "sharing_ranks": sharing_ranks, "expert_ranks": expert_ranks}
    facts |= {"chunks": chunks, "microbatches": microbatches}
    found = [
        f"{shown(config, flag.field)} {idle.effect}: {idle.words}."
        for flag in flags().values()
        if is_changed(config, flag.field)
        for idle in flag.facts.idle
        if idle.holds(lambda name: facts[name] if name in facts else value_of(config, name))
    ]
    by_blocks = parallel.sharding == "optim_grads_params" and sharing_ranks > 1 and parallel.fsdp_shard_size != 1
    left = left_to_buckets(config) if by_blocks else []
    instead_of = _ALWAYS | (_ON_HOST if parallel.fsdp_params_cpu else {})
    for field, instead in instead_of.items():
        if by_blocks and is_changed(config, field):
            effect = f"acts only on {', '.join(left)}" if left else "has no effect"
            found.append(f"{shown(config, field)} {effect}: with optim_grads_params {instead}.")
    return found


def plan_notes(config: Config) -> Iterator[str]:
    """A line for what a dry run cannot know of a part of the user's own."""
    used = [config.optimizer.optimizer, *(entry.optimizer for entry in map(entry_of, config.optimizer.param_groups))]
    for name in [name for name in added("optimizer") if name in used]:
        yield (
            f"--optimizer {name}: its state is planned as its module states it. Its update is taken to read and write that once; "
            "what else it computes or sends is not known here."
        )


_ALWAYS = {
    "overlap_grad_reduce": "the gradients of a block are always reduced while backward goes on",
    "overlap_param_gather": "the parameters of the next block are always fetched ahead",
    "ddp_bucket_size": "the parameters of a block are always sent together",
}
"""Settings of buckets, and what optim_grads_params does instead."""


_ON_HOST = {"optimizer_cpu_offload": "--fsdp-params-cpu keeps the whole state of a block in host memory"}
"""The same with --fsdp-params-cpu."""
