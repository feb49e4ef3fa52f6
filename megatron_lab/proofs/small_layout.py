"""Layouts of few ranks, and few layers on few stages, that together show what a layout of many would."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron.config.checks.memory import AUTO
from megatron.config.checks.pipeline import COUNT, FIRST, LAST, LAYERS_EACH, LAYOUT, SPLITS, chunks_of, layout_text
from megatron.config.config import Config
from megatron.config.flags import flag_for
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import table_of
from megatron.spec.layers import alike, layers
from megatron.spec.schedules import placement

NO_SPLIT: dict[str, Any] = {field: flag_for(field).default for field in (*SPLITS, LAYOUT)}
"""The settings that spread layers, as they are by default."""
_MIDDLE = 3
"""The fewest pipeline stages of which one is neither first nor last."""
_MOST_STAGES = 4
"""With this many stages, a stage in the middle has a neighbour in the middle."""


@dataclass(frozen=True)
class RankSizes:
    """Number of ranks on each axis."""

    tp: int
    pp: int
    dp: int
    cp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks on all axes together."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def sharing(self) -> int:
        """Ranks over which the gradients of a parameter are summed and its state is shared."""
        return self.cp * self.dp

    def __str__(self) -> str:
        """In words, as `tensor 2 x pipeline 2 x data 1`."""
        return str(Topology(self.tp, self.cp, self.dp, self.pp))


def sizes_of(config: Config, world_size: int) -> RankSizes:
    """The number of ranks on each axis for these settings."""
    topology = Topology.of(config.parallel, world_size)
    return RankSizes(topology.tp, topology.pp, topology.dp, topology.cp)


def reduced_sizes(whole: RankSizes, max_ranks: int, *, hybrid: bool) -> list[RankSizes]:
    """Sizes of one or several runs: all axes together where they fit, else each pair of them, else each alone. If the pipeline has
    stages in the middle, one run has some.

    Args:
        max_ranks: the most ranks of one run.
        hybrid: groups of data ranks share a copy of the model each, which takes four data ranks to show.

    Raises:
        ValueError: so few ranks cannot show it.
    """
    if whole.world_size <= max_ranks:
        return [whole]
    small = (min(whole.tp, 2), min(whole.pp, 2), min(whole.dp, 4 if hybrid else 2), min(whole.cp, 2))
    chosen = [RankSizes(*sizes) for sizes in product(*(dict.fromkeys((size, 1)) for size in small))]
    for several in (4, 3, 2, 1):
        found = [each for each in chosen if sum(size > 1 for size in (each.tp, each.pp, each.dp, each.cp)) == several]
        if found and all(each.world_size <= max_ranks for each in found):
            break
    else:
        if hybrid and whole.dp >= 2:
            return reduced_sizes(whole, max_ranks, hybrid=False)
        raise ValueError(f"--max-ranks {max_ranks} runs nothing of this layout. Give at least 2.")
    found = [_with_middle(each, whole, max_ranks) if each.pp > 1 else each for each in found]
    if whole.pp >= _MIDDLE and not any(each.pp >= _MIDDLE for each in found):
        longer = (RankSizes(tp, pp, 1) for tp in (small[0], 1) for pp in range(min(whole.pp, _MOST_STAGES), _MIDDLE - 1, -1))
        found += [each for each in longer if each.world_size <= max_ranks][:1]
    return list(dict.fromkeys(found))


def _with_middle(sizes: RankSizes, whole: RankSizes, max_ranks: int) -> RankSizes:
    """The sizes with as many stages as there is room for, up to the number that shows a middle."""
    room = max_ranks // (sizes.tp * sizes.sharing)
    return dataclasses.replace(sizes, pp=max(sizes.pp, min(whole.pp, _MOST_STAGES, room)))


_MOST_CHUNKS = 3
"""The most chunks of one stage: the first, the last and one between them."""
_ROOM = 4
"""Up to this many chunks, each holds two layers if the model has enough, so that layers of one chunk follow each other."""


@dataclass(frozen=True)
class Pattern:
    """Number of layers of every chunk, in the order of the depth, and the stage of each chunk."""

    sizes: list[int]
    stage_of_chunk: tuple[int, ...]

    @property
    def stages(self) -> list[list[int]]:
        """For each stage, the numbers of layers of its chunks."""
        found: list[list[int]] = [[] for _ in range(max(self.stage_of_chunk) + 1)]
        for size, stage in zip(self.sizes, self.stage_of_chunk, strict=True):
            found[stage].append(size)
        return found

    def __str__(self) -> str:
        """Layers by stage, chunks joined by +; long pipelines are cut."""
        texts = ["+".join(map(str, sizes)) for sizes in self.stages]
        if len(texts) > 8:
            texts[4:-3] = ["..."]
        return " ".join(texts)


def pattern_of(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> Pattern:
    """The pattern of these settings."""
    table = table_of(model, parallel, vocab_size)
    return Pattern([len(chunk.layers) for chunk in table], tuple(chunk.stage for chunk in table))


def layers_of_all_kinds(model: ModelConfig) -> int:
    """Number of layers at the start of the model that are of all its kinds."""
    return 1 + max(places[0] for places in alike(layers(model)).values())


def reduced_pattern(whole: Pattern, schedule: str, num_stages: int, num_layers: int = 1) -> Pattern:
    """A pattern with fewer stages, chunks and layers. Chunks that differ in length still do, and in the same direction.

    First and last stage stay, and stages between them that differ from the others. The same holds for the chunks of a stage.

    Args:
        num_layers: the least number of layers.
    """
    stages = whole.stages
    kept_stages = _kept([tuple(sizes) for sizes in stages], num_stages)
    per_stage = len(stages[0])
    columns = [tuple(stages[stage][chunk] for stage in kept_stages) for chunk in range(per_stage)]
    kept_chunks = _kept(columns, min(per_stage, _MOST_CHUNKS))
    places = placement(schedule, num_stages, len(kept_chunks))
    seen = [0] * num_stages
    sizes = []
    for stage in places:
        sizes.append(stages[kept_stages[stage]][kept_chunks[seen[stage]]])
        seen[stage] += 1
    held = sorted({size for size in sizes if size})
    least = min(2 if len(places) <= _ROOM else 1, *held) if held else 1
    small = {size: least + rank for rank, size in enumerate(held)} | {0: 0}
    sizes = [small[size] for size in sizes]
    if (missing := num_layers - sum(sizes)) > 0 and held:
        filled = sum(size > 0 for size in sizes)
        sizes = [size + -(-missing // filled) if size else 0 for size in sizes]
    if not held:  # the ends alone were empty: a model has at least one layer
        sizes[-1] = 1
    return Pattern(sizes, tuple(places))


def with_pattern(model: ModelConfig, parallel: ParallelConfig, vocab_size: int, pattern: Pattern) -> tuple[ParallelConfig, bool]:
    """Settings that make a pattern: the given ones with other numbers, or else a layout by hand.

    Args:
        model: has the pattern's number of layers.
        parallel: as given, with the reduced number of stages.

    Returns:
        the settings, and whether they still split the layers in the given way.
    """
    stages = pattern.stages
    numbers = {
        COUNT: len(stages[0]),
        LAYERS_EACH: max(pattern.sizes),
        FIRST: sum(stages[0]),
        LAST: sum(stages[-1]),
    }
    given: dict[str, Any] = {field: value for field, value in numbers.items() if getattr(parallel, field) is not None}
    if parallel.pipeline_model_parallel_layout is not None:
        given[LAYOUT] = layout_text(chunks_of(pattern.sizes))
    same = dataclasses.replace(parallel, **given)
    if _makes(model, same, vocab_size, pattern):
        return same, True
    own: dict[str, Any] = {LAYOUT: layout_text(chunks_of(pattern.sizes)), "pipeline_schedule": parallel.schedule}
    by_hand = dataclasses.replace(parallel, **{**NO_SPLIT, **own})
    assert _makes(model, by_hand, vocab_size, pattern), f"no settings make {pattern}"
    return by_hand, False


def _makes(model: ModelConfig, parallel: ParallelConfig, vocab_size: int, pattern: Pattern) -> bool:
    try:
        return pattern_of(model, parallel, vocab_size) == pattern
    except ValueError:
        return False


def reduced_memory(memory: MemoryConfig, before: Pattern, after: Pattern) -> MemoryConfig:
    """Recompute and offload of fewer layers on fewer stages: where some of a chunk's were left, one is if it has two."""

    def block(number: int, most_before: int, most_after: int) -> int:
        return most_after if number >= most_before else min(number, max(1, most_after - 1))

    number, by_stage = memory.recompute_num_layers, memory.recomputed_by_stage
    stages, old = after.stages, before.stages
    if memory.recompute_layers_per_stage == AUTO:  # numbers that follow from a device's memory, which nothing small can fill
        memory = dataclasses.replace(memory, recompute_layers_per_stage=",".join("1" * len(stages)))
    elif by_stage is not None:
        of = [round(stage * (len(old) - 1) / max(1, len(stages) - 1)) for stage in range(len(stages))]
        numbers = [block(by_stage[at], sum(old[at]), sum(new)) for at, new in zip(of, stages, strict=True)]
        memory = dataclasses.replace(memory, recompute_layers_per_stage=",".join(map(str, numbers)))
    elif memory.recompute_method == "block":
        number = block(number, max(before.sizes), max(after.sizes))
    moved = memory.cpu_offloading_num_layers
    return dataclasses.replace(
        memory,
        recompute_num_layers=max(1, min(number, sum(after.sizes))),
        cpu_offloading_num_layers=block(moved, max(before.sizes), max(after.sizes)) if moved else 0,
    )


def _kept(kinds: Sequence[tuple[int, ...]], count: int) -> list[int]:
    """Indices of `count` kinds, in order: the first, the last, then new kinds, then others, evenly spread."""
    last = len(kinds) - 1
    if count == 1:
        return [0]
    kept = [0, last]
    for place in range(1, last):
        if len(kept) < count and kinds[place] not in {kinds[other] for other in kept}:
            kept.append(place)
    spread = [round(step * last / (count - 1)) for step in range(count)]
    for place in [*spread, *range(last)]:
        if len(kept) < count and place not in kept:
            kept.append(place)
    return sorted(kept)
