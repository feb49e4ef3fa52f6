"""How many layers each chunk gets, so that the dearest stage is as cheap as can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron.pipeline_parallel.cuts import exact_cuts, exchange, quality
from megatron.pipeline_parallel.split_problem import Memory, Problem, at_the_ends, room, sum_on_stages


def balance(
    layer_costs: Sequence[float],
    stage_of_chunk: Sequence[int],
    *,
    embedding_cost: float = 0.0,
    loss_cost: float = 0.0,
    min_layers: Sequence[int] | None = None,
    max_layers: Sequence[int] | None = None,
    memory: Memory | None = None,
) -> list[int]:
    """Layers of each chunk, in the order of the depth.

    The split has the least maximum cost over the stages. Among such splits it is the most even one: the sum of squares over the
    stages is least, so that one dear stage (a large loss, a size given by hand) does not let the others be anything. Then the same
    two over the chunks. Where several are still equal, the longer chunks are those of stages without embedding and loss, then those
    of the stage with the embedding; then the earlier ones.

    What is guaranteed:

    - All layers cost and need the same, as in a model of equal layers: exactly that, for any placement, in no time.
    - One chunk a stage: exactly that for any costs, the last sentence aside, by dynamic programming.
    - Several chunks a stage and unequal layers: a split that no exchange of a layer between two chunks improves, and whose dearest
      stage costs at most as many times the least possible as it has chunks (unless memory binds: then it fits, but a split that
      fits may be missed). Of small random cases about nine in ten are the best possible, the others some percent above.

    Args:
        layer_costs: Time of each layer, in any unit.
        stage_of_chunk: Stage of each chunk (see `schedules.placement`).
        embedding_cost: Time of the embedding, added to the first chunk.
        loss_cost: Time of the output layer and the loss, added to the last chunk.
        min_layers: At least so many layers in each chunk; by default 1.
        max_layers: At most so many layers in each chunk; by default all.
        memory: What must fit on each stage; by default anything does.

    Raises:
        ValueError: the bounds or the memory leave no split (the message names the stage and what it would need), a cost is negative
            or not finite, or the memory is that of other layers or stages.
    """
    num_layers, num_chunks = len(layer_costs), len(stage_of_chunk)
    if not all(0 <= cost < math.inf for cost in (*layer_costs, embedding_cost, loss_cost)):
        raise ValueError("costs must be finite and not negative")
    if memory is not None and (len(memory.layers), len(memory.limits)) != (num_layers, max(stage_of_chunk) + 1):
        raise ValueError(
            f"memory is given for {len(memory.layers)} layers and {len(memory.limits)} stages, "
            f"but there are {num_layers} and {max(stage_of_chunk) + 1}"
        )
    problem = Problem(
        tuple(stage_of_chunk),
        tuple(layer_costs),
        at_the_ends(num_chunks, embedding_cost, loss_cost),
        tuple(min_layers) if min_layers is not None else (1,) * num_chunks,
        tuple(max_layers) if max_layers is not None else (num_layers,) * num_chunks,
        memory,
    )
    if not sum(problem.min_layers) <= num_layers <= sum(problem.max_layers):
        raise ValueError(
            f"{num_layers} layers do not go into {num_chunks} chunks that hold "
            f"at least {sum(problem.min_layers)} and at most {sum(problem.max_layers)} together"
        )
    counts = _solve(problem)
    if counts is None:
        raise ValueError(_does_not_fit(problem))
    return counts


def _solve(problem: Problem) -> list[int] | None:
    """The split, or None where none fits into the memory."""
    if _equal_layers(problem):
        return _deal_out(problem)
    if problem.num_stages == problem.num_chunks:
        return exact_cuts(problem)
    mean = sum(problem.costs) / problem.num_layers
    starts = [_deal_out(replace(problem, costs=(mean,) * problem.num_layers, memory=None)), exact_cuts(problem)]
    if problem.memory is not None:
        starts.append(_solve(_memory_as_cost(problem)))
    found = [exchange(problem, start) for start in starts if start is not None and problem.fits(start)]
    return min(found, key=lambda counts: quality(problem, counts), default=None)


def _deal_out(problem: Problem) -> list[int] | None:
    """For equal layers: one after another goes where the load is least with it.

    That is the best there is, as loads grow evenly with the number of layers: exchanging two layers cannot help afterwards.
    Memory counts only if it is the same for each layer too.
    """
    places, last = problem.stage_of_chunk, problem.num_chunks - 1
    counts = list(problem.min_layers)
    cost = problem.costs[0] if problem.costs else 0
    fixed = sum_on_stages(places, problem.fixed_costs)
    on_stage = sum_on_stages(places, counts)
    most = _layers_that_fit(problem)

    def ends(chunks: Iterable[int]) -> int:
        return (0 in chunks) + 2 * (last in chunks)

    burden = [ends([c for c in range(last + 1) if places[c] == stage]) for stage in range(problem.num_stages)]

    def after(chunk: int) -> tuple[float, ...]:
        stage = places[chunk]
        stage_load = fixed[stage] + (on_stage[stage] + 1) * cost
        chunk_load = problem.fixed_costs[chunk] + (counts[chunk] + 1) * cost
        return stage_load, chunk_load, burden[stage], ends([chunk]), chunk

    if any(held > limit for held, limit in zip(on_stage, most, strict=True)):
        return None
    for _ in range(problem.num_layers - sum(counts)):
        free = [c for c in range(last + 1) if counts[c] < problem.max_layers[c] and on_stage[places[c]] < most[places[c]]]
        if not free:
            return None
        chunk = min(free, key=after)
        counts[chunk] += 1
        on_stage[places[chunk]] += 1
    return counts


def _layers_that_fit(problem: Problem) -> list[int]:
    """How many equal layers each stage has memory for; below zero where not even what is fixed fits."""
    if problem.memory is None:
        return [problem.num_layers] * problem.num_stages
    layer = problem.memory.layers[0] if problem.memory.layers else 0
    fixed = sum_on_stages(problem.stage_of_chunk, problem.fixed_memory)
    left = [room(limit) - used for limit, used in zip(problem.memory.limits, fixed, strict=True)]
    return [
        -1 if free < 0 else math.floor(min(free / layer, problem.num_layers)) if layer > 0 else problem.num_layers for free in left
    ]


def _equal_layers(problem: Problem) -> bool:
    return len(set(problem.costs)) <= 1 and (problem.memory is None or len(set(problem.memory.layers)) <= 1)


def _memory_as_cost(problem: Problem) -> Problem:
    """The problem whose dearest stage is the one with the least memory left."""
    assert problem.memory is not None
    fixed, seen = list(problem.fixed_memory), set[int]()
    enough = sum(problem.memory.layers) + sum(fixed)
    for chunk, stage in enumerate(problem.stage_of_chunk):
        if stage not in seen:
            fixed[chunk] -= min(problem.memory.limits[stage], enough)
            seen.add(stage)
    return replace(problem, costs=tuple(problem.memory.layers), fixed_costs=tuple(fixed), memory=None)


def _does_not_fit(problem: Problem) -> str:
    counts = _solve(_memory_as_cost(problem))
    assert counts is not None and problem.memory is not None
    needs, limits = problem.memory_of_stages(counts), problem.memory.limits
    stage = max(range(problem.num_stages), key=lambda stage: needs[stage] - limits[stage])
    proven = _equal_layers(problem) or problem.num_stages == problem.num_chunks
    return (
        f"{problem.num_layers} layers do not fit into the memory of {problem.num_stages} stages: "
        f"in the split that comes nearest, stage {stage} needs {needs[stage]:g} and has {limits[stage]:g}"
        + ("" if proven else " (no better split was found)")
    )
