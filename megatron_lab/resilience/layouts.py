"""Which layout a job takes with the ranks that are there: the asked one with fewer data ranks, or the nearest smaller one.

The rules that check command lines decide what is valid, and the planner what a device can hold.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config.checks.finding import RANKS, Change, change, data_size, divisors, value_of
from megatron.config.cli import parse
from megatron.config.config import Config
from megatron.config.rules import RULES

_MOST_PLANNED = 8
"""Layouts of which a dry run is made, which may take seconds."""
_SIZES = (*RANKS, "expert_model_parallel_size", "expert_tensor_parallel_size")
Fits = Callable[[Config, int, int], str | None]
"""Says why settings do not fit into the devices with so many ranks, so many of them on a node; None if they do."""


@dataclass(frozen=True)
class Layout:
    """A number of ranks, and what changes in the settings."""

    counts: Mapping[str, int]
    """Ranks on each node."""
    change: Change
    notes: tuple[str, ...] = ()
    """What was passed over and why."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.counts.values())


def nearest(config: Config, places: Mapping[str, int], most: int, fits: Fits) -> Layout | None:
    """The layout for the places that are there. First all sizes stay as they are and there are fewer data ranks; only if that
    leaves nothing, the sizes become smaller, so that they divide those asked for. The most ranks first, then the least changes.

    Args:
        config: the settings as the user gave them, with the global batch size that they must keep.
        places: those of each node, in the nodes' order.
        most: ranks that the job may have.

    Returns:
        None if there is none.
    """
    notes: list[str] = []
    planned = 0
    for smaller in (False, True):
        for counts, changed in _candidates(config, places, most, smaller=smaller):
            world = sum(counts.values())
            after, _ = changed.apply(config, world)
            if any(True for rule in RULES for _ in rule(after, world)):
                continue
            if planned == _MOST_PLANNED:
                return None
            planned += 1
            reason = fits(after, world, max(counts.values()))
            if reason is None:
                return Layout(counts, changed, tuple(notes))
            notes.append(f"{world} ranks{f' with {changed}' if changed.fields else ''} would not fit: {reason}")
    return None


def _candidates(config: Config, places: Mapping[str, int], most: int, *, smaller: bool) -> Iterator[tuple[dict[str, int], Change]]:
    found: list[tuple[int, float, dict[str, int], Change]] = []  # with the places of which whole tensor groups can be made
    asked = [value_of(config, name) for name in _SIZES]
    choices = [[size] if size is None or not smaller else divisors(size) for size in asked]
    for sizes in itertools.product(*choices):
        changed = change(**{name: new for name, old, new in zip(_SIZES, asked, sizes, strict=True) if new != old})
        if smaller and not changed.fields:
            continue
        tensor, whole = sizes[0], math.prod(sizes[: len(RANKS)])
        usable = _usable(places, tensor)
        for world in range(min(most, sum(usable.values())) // whole * whole, 0, -whole):
            found.append((world, changed.distance(config, world), usable, changed))
    found.sort(key=lambda item: (-item[0], item[1]))
    return ((_spread(usable, world), changed) for world, _, usable, changed in found)


def _usable(places: Mapping[str, int], tensor: int) -> dict[str, int]:
    """Places of each node of which whole tensor groups can be made, if a group fits into a node."""
    inside = any(count >= tensor for count in places.values())
    return {name: count // tensor * tensor if inside else count for name, count in places.items()}


def _spread(usable: Mapping[str, int], world: int) -> dict[str, int]:
    counts = {}
    for name, count in usable.items():
        counts[name] = min(count, world)
        world -= counts[name]
    return counts


def batch_of(config: Config, world_size: int) -> int:
    """The global batch size that valid settings ask for with so many ranks."""
    return config.training.final_batch_size(data_size(config, world_size) or 1)


def words(layout: Layout, argv: Sequence[str], batch: int) -> list[str]:
    """What stands behind the user's command line for a layout that is not the asked one, or has fewer data ranks.

    Args:
        batch: global batch size of the first start, which is kept.
    """
    given = parse(argv).training.global_batch_size is not None
    return [*shlex.split(str(layout.change)), *([] if given else ["--global-batch-size", str(batch)])]


def described(layout: Layout, config: Config, asked: int) -> list[str]:
    """Lines for the log on a layout that differs from the asked one.

    Args:
        asked: number of ranks that the job should have.
    """
    after, world = layout.change.apply(config, layout.world_size)
    if world == asked and not layout.change.fields:
        return []
    data, training = data_size(after, world) or 1, after.training
    batch = training.final_batch_size(data)
    microbatches = batch // (training.micro_batch_size * data)
    sizes = f" with {layout.change}" if layout.change.fields else ""
    ranks = f"{world} rank{'s' * (world > 1)} in place of {asked}{sizes}"
    share = f"{microbatches} microbatch{'es' * (microbatches > 1)} of the same global batch of {batch}"
    return [*layout.notes, f"{ranks}: {data} data rank{'s' * (data > 1)}, of which each takes {share}"]


def pinned(argv: Sequence[str], batch: int | None) -> Config:
    """The settings of a command line, with the global batch size of the first start.

    Raises:
        ConfigError: they have problems of their own.
    """
    config = parse(argv)
    if batch is None or config.training.global_batch_size is not None:
        return config
    return change(global_batch_size=batch).apply(config, 0)[0]


def fits_memory(config: Config, world_size: int, per_node: int) -> str | None:
    """`Fits` by a dry run, where the memory of a device is known. Never called in a process that forks ranks: it may open CUDA."""
    from megatron.config.given import DryRun, without_gaps
    from megatron.data.tokenizer import planned_rows
    from megatron_lab.planner.dry_run import Planner
    from megatron_lab.planner.fit import memory_limit, usable, with_least_layers
    from megatron_lab.planner.state_report import amount

    limit = memory_limit(config)
    if limit is None:
        return None
    try:
        job, vocab_size = DryRun(world_size, per_node, None), planned_rows(config.data)
        planned = without_gaps(with_least_layers(config, job, vocab_size))
        needed = max(Planner(planned, job, vocab_size, few=True).device_bytes())
    except ValueError as error:
        return str(error)
    if needed <= usable(limit):
        return None
    return f"the fullest rank needs {amount(needed)}, but may take {amount(usable(limit))}"
