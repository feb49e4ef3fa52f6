"""Choice of the layout after ranks are lost: the requested layout with fewer data-parallel ranks, or the nearest layout with
smaller parallel sizes.

The rules for command lines decide which layouts are valid. The planner decides which layouts fit into the memory of a device.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config.checks.finding import (
    MODEL_PARALLEL_SIZES,
    Change,
    create_change,
    find_divisors,
    get_data_parallel_size,
    get_value,
)
from megatron.config.cli import parse
from megatron.config.config import Config
from megatron.config.rules import RULES

_MAX_DRY_RUNS = 8
"""Maximum number of layouts for which a dry run is made, since each may take seconds."""
_SIZES = (*MODEL_PARALLEL_SIZES, "expert_model_parallel_size", "expert_tensor_parallel_size")
FitCheck = Callable[[Config, int, int], str | None]
"""Function of the settings, the world size and the ranks per node. Returns why the run does not fit into device memory, or
None."""


@dataclass(frozen=True)
class Layout:
    """Number of ranks on each node, and the changes to the user's settings that this number requires."""

    ranks_per_node: Mapping[str, int]
    """Number of ranks on each node, by name of the node."""
    change: Change
    messages: tuple[str, ...] = ()
    """Log lines that explain why layouts with more ranks do not fit into device memory."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return sum(self.ranks_per_node.values())


def find_nearest_layout(config: Config, slots_per_node: Mapping[str, int], max_ranks: int, check_fit: FitCheck) -> Layout | None:
    """Find the layout with the most ranks that is valid, fits into device memory, and is nearest to the requested layout.

    The first attempt keeps all parallel sizes and only reduces the number of data-parallel ranks. If no such layout is valid and
    fits, the parallel sizes become smaller divisors of the requested sizes. Among layouts with equally many ranks, the one with the
    smallest change is chosen.

    Args:
        config: settings of the user, with the global batch size that the job must keep.
        slots_per_node: number of slots (a slot runs one rank) of each node, by name, in the order of the nodes.
        max_ranks: maximum number of ranks of the job.
        check_fit: returns why settings do not fit into device memory, or None if they fit.

    Returns:
        the layout, or None if no layout is valid and fits. At most `_MAX_DRY_RUNS` valid layouts are checked.
    """
    messages: list[str] = []
    num_dry_runs = 0
    for uses_smaller_sizes in (False, True):
        for ranks_per_node, layout_change in _iterate_candidates(
            config, slots_per_node, max_ranks, uses_smaller_sizes=uses_smaller_sizes
        ):
            world_size = sum(ranks_per_node.values())
            new_config, _ = layout_change.apply(config, world_size)
            if any(True for rule in RULES for _ in rule(new_config, world_size)):
                continue
            if num_dry_runs == _MAX_DRY_RUNS:
                return None
            num_dry_runs += 1
            reason = check_fit(new_config, world_size, max(ranks_per_node.values()))
            if reason is None:
                return Layout(ranks_per_node, layout_change, tuple(messages))
            messages.append(f"{world_size} ranks{f' with {layout_change}' if layout_change.fields else ''} would not fit: {reason}")
    return None


def _iterate_candidates(
    config: Config, slots_per_node: Mapping[str, int], max_ranks: int, *, uses_smaller_sizes: bool
) -> Iterator[tuple[dict[str, int], Change]]:
    candidates: list[tuple[int, float, dict[str, int], Change]] = []  # world size, distance, usable slots, change
    requested_sizes = [get_value(config, name) for name in _SIZES]
    size_options = [[size] if size is None or not uses_smaller_sizes else find_divisors(size) for size in requested_sizes]
    for sizes in itertools.product(*size_options):
        layout_change = create_change(
            **{name: new for name, old, new in zip(_SIZES, requested_sizes, sizes, strict=True) if new != old}
        )
        if uses_smaller_sizes and not layout_change.fields:
            continue
        tensor_size, model_parallel_size = sizes[0], math.prod(sizes[: len(MODEL_PARALLEL_SIZES)])
        usable_slots = _count_usable_slots(slots_per_node, tensor_size)
        for world_size in range(
            min(max_ranks, sum(usable_slots.values())) // model_parallel_size * model_parallel_size, 0, -model_parallel_size
        ):
            candidates.append((world_size, layout_change.compute_distance(config, world_size), usable_slots, layout_change))
    candidates.sort(key=lambda item: (-item[0], item[1]))
    return (
        (_distribute_ranks(usable_slots, world_size), layout_change) for world_size, _, usable_slots, layout_change in candidates
    )


def _count_usable_slots(slots_per_node: Mapping[str, int], tensor_size: int) -> dict[str, int]:
    """Return how many slots of each node (a slot runs one rank) can be used without splitting a tensor-parallel group between
    nodes.

    If a tensor-parallel group is larger than every node, all slots can be used.

    Args:
        slots_per_node: number of slots of each node, by name.
    """
    fits_in_node = any(count >= tensor_size for count in slots_per_node.values())
    return {name: count // tensor_size * tensor_size if fits_in_node else count for name, count in slots_per_node.items()}


def _distribute_ranks(usable_slots: Mapping[str, int], num_remaining: int) -> dict[str, int]:
    ranks_per_node = {}
    for name, count in usable_slots.items():
        ranks_per_node[name] = min(count, num_remaining)
        num_remaining -= ranks_per_node[name]
    return ranks_per_node


def get_global_batch_size(config: Config, world_size: int) -> int:
    """Return the global batch size of a run with `world_size` ranks, after the ramp-up if there is one. The settings must be
    valid."""
    return config.training.get_final_batch_size(get_data_parallel_size(config, world_size) or 1)


def format_extra_flags(layout: Layout, argv: Sequence[str], global_batch_size: int) -> list[str]:
    """Format the flags that must be added to the user's command line to run with a layout.

    Args:
        argv: the user's command line.
        global_batch_size: global batch size of the job. Its flag is added if the user did not set one.
    """
    has_batch_size = parse(argv).training.global_batch_size is not None
    return [*shlex.split(str(layout.change)), *([] if has_batch_size else ["--global-batch-size", str(global_batch_size)])]


def format_layout_messages(layout: Layout, config: Config, requested_world_size: int) -> list[str]:
    """Format the log lines that describe how a layout differs from the layout that the user requested.

    Args:
        config: settings of the user.
        requested_world_size: number of ranks that the user requested.
    """
    new_config, world_size = layout.change.apply(config, layout.world_size)
    if world_size == requested_world_size and not layout.change.fields:
        return []
    num_data_ranks, training = get_data_parallel_size(new_config, world_size) or 1, new_config.training
    global_batch_size = training.get_final_batch_size(num_data_ranks)
    num_microbatches = global_batch_size // (training.micro_batch_size * num_data_ranks)
    sizes = f" with {layout.change}" if layout.change.fields else ""
    ranks = f"{world_size} rank{'s' * (world_size > 1)} instead of {requested_world_size}{sizes}"
    each = " each" * (num_data_ranks > 1)
    batch = f"the unchanged global batch of {global_batch_size} samples"
    share = f"{num_microbatches} microbatch{'es' * (num_microbatches > 1)}{each} of {batch}"
    return [*layout.messages, f"{ranks}: {num_data_ranks} data rank{'s' * (num_data_ranks > 1)} with {share}"]


def parse_with_batch_size(argv: Sequence[str], global_batch_size: int | None) -> Config:
    """Parse a command line, and set the global batch size if the user did not set one.

    Args:
        global_batch_size: global batch size with which the ranks of the job were first started; None before the first start.

    Raises:
        ConfigError: the command line is invalid.
    """
    config = parse(argv)
    if global_batch_size is None or config.training.global_batch_size is not None:
        return config
    return create_change(global_batch_size=global_batch_size).apply(config, 0)[0]


def check_memory(config: Config, world_size: int, ranks_per_node: int) -> str | None:
    """Check by a dry run whether a run fits into device memory.

    Never call this function in a process that forks ranks, because it may initialize CUDA.

    Returns:
        the problem as text; None if the run fits or the device memory is unknown.
    """
    from megatron.config.parsed_flags import DryRun, fill_plan_defaults
    from megatron.data.tokenizer import predict_embedding_rows
    from megatron_lab.planner.dry_run import Planner
    from megatron_lab.planner.fit import get_device_memory, get_usable_bytes, resolve_auto_recompute_layers
    from megatron_lab.planner.units import format_bytes

    device_memory = get_device_memory(config)
    if device_memory is None:
        return None
    try:
        dry_run, vocab_size = DryRun(world_size, ranks_per_node, None), predict_embedding_rows(config.data)
        planned_config = fill_plan_defaults(resolve_auto_recompute_layers(config, dry_run, vocab_size))
        required_bytes = max(Planner(planned_config, dry_run, vocab_size, shortened=True).compute_fullest_device_bytes())
    except ValueError as error:
        return str(error)
    if required_bytes <= get_usable_bytes(device_memory):
        return None
    return f"the fullest rank needs {format_bytes(required_bytes)} of {format_bytes(get_usable_bytes(device_memory))} usable memory"
