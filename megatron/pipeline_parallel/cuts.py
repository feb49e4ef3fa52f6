"""Where to cut a row of unequal layers: exactly with one chunk a stage, by exchange with several."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron.pipeline_parallel.split_problem import Problem, room

_Array = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_BITS = 40  # of the sum of all costs while searching: as whole numbers, sums are exact and equal loads compare equal


def exact_cuts(problem: Problem) -> list[int] | None:
    """Layers of each chunk so that the dearest chunk is as cheap as can be and, among such splits, the sum of squares is least.

    Dynamic programming over the number of layers in the first chunks, chunks x layers^2 steps. Chunks are looked at one by one:
    with one a stage the split is the best, and it respects the memory of the stages. With several, memory is left out.

    Returns None where no split fits.
    """
    layers, fixed = _whole_costs(problem)
    cost = _between(layers)
    dearest = np.full(problem.num_layers + 1, np.inf)
    dearest[0] = -np.inf
    for chunk in range(problem.num_chunks):
        reached = np.maximum(dearest[:, None], cost + fixed[chunk])
        dearest = np.where(_allowed(problem, chunk), reached, np.inf).min(axis=0)
    if dearest[-1] == np.inf:
        return None

    squares = np.full(problem.num_layers + 1, np.inf)
    squares[0] = 0
    origins = []
    least = dearest[-1]
    for chunk in range(problem.num_chunks):
        load = cost + fixed[chunk]
        totals = np.where(_allowed(problem, chunk) & (load <= least), squares[:, None] + load * load, np.inf)
        origins.append(totals.argmin(axis=0))
        squares = totals.min(axis=0)
    starts = [problem.num_layers]
    for origin in reversed(origins):
        starts.append(int(origin[starts[-1]]))
    return [int(count) for count in np.diff(starts[::-1])]


def _allowed(problem: Problem, chunk: int) -> npt.NDArray[np.bool_]:
    """`[start, stop]` whether a chunk may hold the layers start to stop - 1."""
    size = _between(np.ones(problem.num_layers))
    allowed = (problem.min_layers[chunk] <= size) & (size <= problem.max_layers[chunk])
    if problem.memory is not None and problem.num_stages == problem.num_chunks:
        need = _between(np.array(problem.memory.layers, dtype=float)) + problem.fixed_memory[chunk]
        allowed &= need <= room(problem.memory.limits[problem.stage_of_chunk[chunk]])
    return allowed


def exchange(problem: Problem, counts: Sequence[int]) -> list[int]:
    """Improves a split until no single exchange does; a split that fits stays one.

    An exchange takes a layer from one chunk and gives one to another; the chunks between keep their sizes and shift by a layer.
    Better means, in this order: a cheaper dearest stage, a smaller sum of squares over the stages, the same two over the chunks.
    """
    layers, fixed = _whole_costs(problem)
    starts = np.cumsum([0, *counts])
    best = _quality(problem, _loads(layers, fixed, starts))
    while True:
        loads = _loads(layers, fixed, starts)
        found = []
        for step in (1, -1):
            takers, givers = _exchanges(problem, starts, step)
            if len(takers):
                change = _shifts(layers, starts, step)
                of_stages = _on_stages(problem, change)
                # Few are best for the stages: only these are compared chunk by chunk.
                few = _best_rows(_on_stages(problem, loads) + of_stages[givers] - of_stages[takers])
                one = few[_best_rows(loads + change[givers[few]] - change[takers[few]])[0]]
                moved = starts.copy()
                moved[takers[one] + 1 : givers[one] + 1] += step
                found.append((_quality(problem, _loads(layers, fixed, moved)), moved.tolist()))
        if not found or min(found)[0] >= best:
            return [int(count) for count in np.diff(starts)]
        best, starts = min(found)[0], np.array(min(found)[1])


def quality(problem: Problem, counts: Sequence[int]) -> tuple[float, ...]:
    """What is compared of two splits, the most important first; less is better."""
    layers, fixed = _whole_costs(problem)
    return _quality(problem, _loads(layers, fixed, np.cumsum([0, *counts])))


def _exchanges(problem: Problem, starts: _Ints, step: int) -> tuple[_Ints, _Ints]:
    """All allowed exchanges that move bounds by a step: pairs of chunks a < b, of which a takes `step` layers and b gives them."""
    counts = np.diff(starts)
    low, high = np.array(problem.min_layers), np.array(problem.max_layers)
    a, b = np.triu_indices(problem.num_chunks, 1)
    more, less = counts[a] + step, counts[b] - step
    allowed = (low[a] <= more) & (more <= high[a]) & (low[b] <= less) & (less <= high[b])
    if problem.memory is not None:
        memory = np.array(problem.memory.layers, dtype=float)
        needs = _on_stages(problem, _loads(memory, np.array(problem.fixed_memory, dtype=float), starts))
        change = _on_stages(problem, _shifts(memory, starts, step))
        allowed &= (needs + change[b] - change[a] <= np.array([room(limit) for limit in problem.memory.limits])).all(axis=1)
    return a[allowed], b[allowed]


def _shifts(values: _Array, starts: _Ints, step: int) -> _Array:
    """Changes of the chunks' sums when bounds move by a step, as [b, chunk] for the bounds 1 to b.

    So when the bounds a + 1 to b move, row b - row a says what changes. Bound c lies between the chunks c - 1 and c.
    """
    bounds = np.arange(1, len(starts) - 1)
    crossing = starts[bounds] if step > 0 else starts[bounds] - 1
    # A bound at an end has no layer to cross; what stands here is not used, as the exchange would leave a chunk less than no layer.
    crossed = step * values[np.clip(crossing, 0, len(values) - 1)]
    changes = np.zeros((len(starts) - 1, len(starts) - 1))
    changes[bounds, bounds - 1] = crossed
    changes[bounds, bounds] = -crossed
    return changes.cumsum(axis=0)


def _quality(problem: Problem, loads: _Array) -> tuple[float, ...]:
    stages = _on_stages(problem, loads)
    return float(stages.max()), float((stages**2).sum()), float(loads.max()), float((loads**2).sum())


def _best_rows(loads: _Array) -> _Ints:
    """Of rows `[row, place]` those with the least maximum and, among them, the least sum of squares."""
    highest = loads.max(axis=1)
    rows = np.flatnonzero(highest == highest.min())
    squares = (loads[rows] ** 2).sum(axis=1)
    return rows[squares == squares.min()]


def _on_stages(problem: Problem, chunks: _Array) -> _Array:
    """Sums `[..., stage]` of what the chunks have."""
    return chunks @ np.eye(problem.num_stages)[list(problem.stage_of_chunk)]


def _loads(layers: _Array, fixed: _Array, starts: _Ints) -> _Array:
    """`[chunk]` sums."""
    return fixed + np.diff(_running_sum(layers)[starts])


def _whole_costs(problem: Problem) -> tuple[_Array, _Array]:
    """Costs of layers and what is fixed for each chunk, scaled by a power of two and rounded to whole numbers."""
    layers, fixed = np.array(problem.costs, dtype=float), np.array(problem.fixed_costs, dtype=float)
    scale = 2.0 ** (_BITS - math.frexp(np.abs(layers).sum() + np.abs(fixed).sum())[1])
    return np.rint(layers * scale), np.rint(fixed * scale)


def _between(values: _Array) -> _Array:
    """`[start, stop]` sums of the values start to stop - 1; nonsense where start > stop."""
    sums = _running_sum(values)
    return sums[None, :] - sums[:, None]


def _running_sum(values: _Array) -> _Array:
    return np.concatenate([[0.0], np.cumsum(values)])
