"""Chooses the number of layers of each model chunk so that the cost (time) of the most expensive pipeline stage is minimal.

Equal layers are assigned one by one. Unequal layers are split by dynamic programming, which is exact with one chunk per stage. With
several chunks per stage, a local search then moves layers between chunks until no move helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_SCALE_BITS = 40  # bits of the total cost during the search; sums of integers are exact, so that equal loads compare equal


@dataclass(frozen=True)
class _SplitProblem:
    """Input of the search for the best split of layers into model chunks: costs of the layers, and for each chunk its stage and its
    minimum and maximum number of layers."""

    stage_of_chunk: tuple[int, ...]
    layer_costs: tuple[float, ...]
    """Time of each layer, in any unit."""
    fixed_costs: tuple[float, ...]
    """Time of each chunk in addition to its layers (embedding, loss), in the unit of `layer_costs`."""
    min_layers: tuple[int, ...]
    max_layers: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return max(self.stage_of_chunk) + 1

    @cached_property
    def _scale(self) -> float:
        """Power of two by which costs are multiplied before they are rounded to integers. Sums of integers are exact, so equal
        costs compare equal."""
        return 2.0 ** (_SCALE_BITS - math.frexp(sum(self.layer_costs) + sum(self.fixed_costs))[1])

    @cached_property
    def cumulative_costs(self) -> _Array:
        """Sum of the scaled, rounded costs of the first i layers, for i from 0 to the number of layers: [layers + 1]."""
        return np.cumsum(np.rint(np.array([0.0, *self.layer_costs]) * self._scale))

    @cached_property
    def scaled_fixed_costs(self) -> _Array:
        """Scaled cost of each chunk in addition to its layers: [chunks]."""
        return np.rint(np.array(self.fixed_costs) * self._scale)


def balance(
    layer_costs: Sequence[float],
    stage_of_chunk: Sequence[int],
    *,
    embedding_cost: float = 0.0,
    loss_cost: float = 0.0,
    min_layers: Sequence[int] | None = None,
    max_layers: Sequence[int] | None = None,
) -> list[int]:
    """Return the number of layers of each model chunk, in the order of the forward.

    A cost is a time. The best split is chosen by these criteria, in this order:

    1. the lowest cost of the most expensive stage;
    2. the lowest sum of squared stage costs, so that one expensive stage does not leave the other stages unbalanced;
    3. the lowest cost of the most expensive chunk, then the lowest sum of squared chunk costs;
    4. longer chunks first on stages without embedding and loss, then on the stage with the embedding, then at lower chunk indices.

    A stage may be expensive because of a large loss or a size set by the user.

    Guarantees:

    - Equal layer costs, as in a model of equal layers: all criteria hold, for any assignment of chunks to stages, in negligible
      time.
    - One chunk per stage: criteria 1 to 3 hold, for any costs, by dynamic programming.
    - Several chunks per stage and unequal layers: moving a layer between two chunks improves the split no further. The most
      expensive stage costs at most k times the optimum, with k chunks per stage. Of small random cases about nine in ten are
      optimal, the others some percent above.

    Args:
        layer_costs: Time of each layer, in any unit.
        stage_of_chunk: Stage of each chunk (see `megatron.spec.schedules.assign_chunks`).
        embedding_cost: Time of the embedding, added to the first chunk.
        loss_cost: Time of the output layer and the loss, added to the last chunk.
        min_layers: Minimum number of layers of each chunk; by default 1.
        max_layers: Maximum number of layers of each chunk; by default all.

    Raises:
        ValueError: the bounds admit no split, or a cost is negative or not finite.
    """
    num_layers, num_chunks = len(layer_costs), len(stage_of_chunk)
    if invalid := [cost for cost in (*layer_costs, embedding_cost, loss_cost) if not 0 <= cost < math.inf]:
        raise ValueError(
            f"the costs of layers, embedding and loss must be finite and at least 0, but one cost is {invalid[0]}: correct this "
            "cost"
        )
    fixed_costs: list[float] = [0] * num_chunks
    fixed_costs[0] += embedding_cost
    fixed_costs[-1] += loss_cost
    problem = _SplitProblem(
        tuple(stage_of_chunk),
        tuple(layer_costs),
        tuple(fixed_costs),
        tuple(min_layers) if min_layers is not None else (1,) * num_chunks,
        tuple(max_layers) if max_layers is not None else (num_layers,) * num_chunks,
    )
    if not sum(problem.min_layers) <= num_layers <= sum(problem.max_layers):
        raise ValueError(
            f"{num_layers} layers cannot be split into {num_chunks} model chunks, "
            f"which together hold at least {sum(problem.min_layers)} and at most {sum(problem.max_layers)} layers "
            "(`min_layers` and `max_layers`): change these bounds or the number of layers"
        )
    if len(set(problem.layer_costs)) <= 1:
        return _split_equal_layers(problem)
    if problem.num_stages == num_chunks:
        return _split_exactly(problem)
    mean = sum(problem.layer_costs) / num_layers
    initial_splits = (_split_equal_layers(replace(problem, layer_costs=(mean,) * num_layers)), _split_exactly(problem))
    improved = [_improve_split(problem, np.cumsum([0, *split])) for split in initial_splits]
    return np.diff(improved[_find_best_split(problem, np.stack(improved))]).tolist()


def _split_equal_layers(problem: _SplitProblem) -> list[int]:
    """Return the number of layers of each chunk for layers of equal cost. Layers are assigned one by one, each to the chunk whose
    stage then has the lowest cost.

    The split is optimal: stage costs grow evenly with the number of layers, so exchanging two layers cannot improve the split
    afterwards.
    """
    stages, last = problem.stage_of_chunk, len(problem.stage_of_chunk) - 1
    counts = list(problem.min_layers)
    cost = problem.layer_costs[0] if problem.layer_costs else 0
    stage_fixed_costs, layers_on_stage = (np.bincount(stages, weights).tolist() for weights in (problem.fixed_costs, counts))

    def loads_with_one_more(chunk: int) -> tuple[float, ...]:
        """Return the sort key of a chunk; the chunk with the smallest key gets the next layer. The key has the cost of the chunk's
        stage with this layer, then the cost of the chunk with this layer. If both are equal, a stage or chunk in the middle of the
        pipeline comes before the first one, and the first one before the last one. Then the lower index decides."""
        stage = stages[chunk]
        stage_load = stage_fixed_costs[stage] + (layers_on_stage[stage] + 1) * cost
        chunk_load = problem.fixed_costs[chunk] + (counts[chunk] + 1) * cost
        stage_ends, chunk_ends = (stage == stages[0]) + 2 * (stage == stages[last]), (chunk == 0) + 2 * (chunk == last)
        return stage_load, chunk_load, stage_ends, chunk_ends, chunk

    for _ in range(len(problem.layer_costs) - sum(counts)):
        chunk = min((c for c in range(last + 1) if counts[c] < problem.max_layers[c]), key=loads_with_one_more)
        counts[chunk] += 1
        layers_on_stage[stages[chunk]] += 1
    return counts


# ---- Splits of unequal layers.


def _split_exactly(problem: _SplitProblem) -> list[int]:
    """Return the number of layers of each chunk that minimises the maximum cost over chunks, then the sum of squared costs.

    The function uses dynamic programming over the number of layers in the first chunks, which takes chunks x layers^2 steps. It
    compares costs of chunks instead of stages, so the split is optimal only with one chunk per stage.
    """
    num_layers = len(problem.layer_costs)
    size = np.subtract.outer(np.arange(num_layers + 1), np.arange(num_layers + 1)).T  # [start, stop]
    range_costs = problem.cumulative_costs[None, :] - problem.cumulative_costs[:, None]

    def iter_loads() -> Iterator[_Array]:
        """Yield for each chunk a matrix of costs: element [start, stop] is the cost if the chunk holds the layers from start up to,
        but not including, stop. The element is infinite if the chunk may not hold this number of layers."""
        for low, high, fixed in zip(problem.min_layers, problem.max_layers, problem.scaled_fixed_costs, strict=True):
            yield np.where((low <= size) & (size <= high), range_costs + fixed, np.inf)

    initial = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)
    max_load = initial
    for load in iter_loads():
        max_load = np.maximum(max_load[:, None], load).min(axis=0)
    sq_sums, best_starts = initial, []
    for load in iter_loads():
        totals = sq_sums[:, None] + np.where(load <= max_load[-1], load * load, np.inf)
        best_starts.append(totals.argmin(axis=0))
        sq_sums = totals.min(axis=0)
    starts = [num_layers]
    for best_start in reversed(best_starts):
        starts.append(int(best_start[starts[-1]]))
    return np.diff(starts[::-1]).tolist()


def _improve_split(problem: _SplitProblem, starts: _Ints) -> _Ints:
    """Improve a split until no single move of a layer improves it further.

    A move takes a layer from one chunk and adds one to another chunk. The chunks between them keep their sizes and shift by one
    layer.

    Args:
        starts: first layer of each chunk, followed by the number of layers: [chunks + 1].
    """
    bounds = np.arange(len(starts))
    takers, givers = np.triu_indices(len(starts) - 1, 1)
    shifts = (takers[:, None] < bounds) & (bounds <= givers[:, None])
    while True:
        candidates = np.concatenate([starts + shifts, starts - shifts])
        counts = np.diff(candidates)
        is_allowed = ((problem.min_layers <= counts) & (counts <= problem.max_layers)).all(axis=1)
        candidates = np.concatenate([starts[None], candidates[is_allowed]])
        best = _find_best_split(problem, candidates)
        if best == 0:
            return starts
        starts = candidates[best]


def _find_best_split(problem: _SplitProblem, starts: _Ints) -> int:
    """Return the index of the best split among `starts` [splits, chunks + 1], which holds the first layer of each chunk. Of equally
    good splits, return the first.

    Splits are compared by the maximum stage cost, then the sum of squared stage costs, then the same two measures over the chunks.
    """
    chunk_loads = np.diff(problem.cumulative_costs[starts]) + problem.scaled_fixed_costs
    stage_loads = chunk_loads @ np.eye(problem.num_stages)[list(problem.stage_of_chunk)]
    criteria = [criterion for loads in (stage_loads, chunk_loads) for criterion in (loads.max(axis=1), (loads**2).sum(axis=1))]
    return int(np.lexsort(criteria[::-1])[0])
