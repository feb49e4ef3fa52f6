"""How many layers each chunk gets, so that the dearest stage is as cheap as possible.

Equal layers are dealt out one by one. Unequal ones are cut by dynamic programming, which is exact with one chunk a stage. With
several chunks a stage, layers are then exchanged between chunks until no exchange helps.
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

_BITS = 40  # of the sum of all costs while searching: as whole numbers, sums are exact and equal loads compare equal


@dataclass(frozen=True)
class _SplitProblem:
    """Consecutive layers to be cut into chunks that lie on stages."""

    stage_of_chunk: tuple[int, ...]
    costs: tuple[float, ...]
    """The cost of each layer."""
    fixed_costs: tuple[float, ...]
    """The cost of each chunk beside its layers (embedding, loss)."""
    min_layers: tuple[int, ...]
    """The fewest layers of each chunk."""
    max_layers: tuple[int, ...]
    """The most layers of each chunk."""

    @property
    def num_stages(self) -> int:
        """The number of pipeline ranks."""
        return max(self.stage_of_chunk) + 1

    @cached_property
    def _scale(self) -> float:
        """A power of two that makes whole numbers of the costs, but for some rounding."""
        return 2.0 ** (_BITS - math.frexp(sum(self.costs) + sum(self.fixed_costs))[1])

    @cached_property
    def sums(self) -> _Array:
        """The scaled costs of the first layers together: [layer + 1]."""
        return np.cumsum(np.rint(np.array([0.0, *self.costs]) * self._scale))

    @cached_property
    def fixed(self) -> _Array:
        """The scaled fixed costs: [chunk]."""
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
    """Layers of each chunk, in the order of the depth.

    The split has the least maximum cost over the stages. Among such splits it is the most even one: the sum of squares over the
    stages is least, so that one dear stage (a large loss, a size given by hand) does not let the others be anything. Then the same
    two over the chunks. Where several are still equal, the longer chunks are those of stages without embedding and loss, then those
    of the stage with the embedding; then the earlier ones.

    What is guaranteed:

    - All layers cost the same, as in a model of equal layers: exactly that, for any placement, in no time.
    - One chunk a stage: exactly that for any costs, the last sentence aside, by dynamic programming.
    - Several chunks a stage and unequal layers: a split that no exchange of a layer between two chunks improves, and whose dearest
      stage costs at most as many times the least possible as it has chunks. Of small random cases about nine in ten are the best
      possible, the others some percent above.

    Args:
        layer_costs: Time of each layer, in any unit.
        stage_of_chunk: Stage of each chunk (see `megatron.spec.schedules.placement`).
        embedding_cost: Time of the embedding, added to the first chunk.
        loss_cost: Time of the output layer and the loss, added to the last chunk.
        min_layers: At least so many layers in each chunk; by default 1.
        max_layers: At most so many layers in each chunk; by default all.

    Raises:
        ValueError: the bounds leave no split, or a cost is negative or not finite.
    """
    num_layers, num_chunks = len(layer_costs), len(stage_of_chunk)
    if not all(0 <= cost < math.inf for cost in (*layer_costs, embedding_cost, loss_cost)):
        raise ValueError("costs must be finite and not negative")
    fixed: list[float] = [0] * num_chunks
    fixed[0] += embedding_cost
    fixed[-1] += loss_cost
    problem = _SplitProblem(
        tuple(stage_of_chunk),
        tuple(layer_costs),
        tuple(fixed),
        tuple(min_layers) if min_layers is not None else (1,) * num_chunks,
        tuple(max_layers) if max_layers is not None else (num_layers,) * num_chunks,
    )
    if not sum(problem.min_layers) <= num_layers <= sum(problem.max_layers):
        raise ValueError(
            f"{num_layers} layers do not go into {num_chunks} chunks that hold "
            f"at least {sum(problem.min_layers)} and at most {sum(problem.max_layers)} together"
        )
    if len(set(problem.costs)) <= 1:
        return _deal_out(problem)
    if problem.num_stages == num_chunks:
        return _exact_cuts(problem)
    mean = sum(problem.costs) / num_layers
    starts = (_deal_out(replace(problem, costs=(mean,) * num_layers)), _exact_cuts(problem))
    found = [_exchanged(problem, np.cumsum([0, *start])) for start in starts]
    return np.diff(found[_best(problem, np.stack(found))]).tolist()


def _deal_out(problem: _SplitProblem) -> list[int]:
    """Deal out equal layers one by one, each to where the load with it is least.

    That is the best split: loads grow evenly with the number of layers, so exchanging two layers cannot help afterwards.
    """
    places, last = problem.stage_of_chunk, len(problem.stage_of_chunk) - 1
    counts = list(problem.min_layers)
    cost = problem.costs[0] if problem.costs else 0
    fixed, on_stage = (np.bincount(places, weights).tolist() for weights in (problem.fixed_costs, counts))

    def after(chunk: int) -> tuple[float, ...]:
        stage = places[chunk]
        stage_load = fixed[stage] + (on_stage[stage] + 1) * cost
        chunk_load = problem.fixed_costs[chunk] + (counts[chunk] + 1) * cost
        stage_ends, chunk_ends = (stage == places[0]) + 2 * (stage == places[last]), (chunk == 0) + 2 * (chunk == last)
        return stage_load, chunk_load, stage_ends, chunk_ends, chunk

    for _ in range(len(problem.costs) - sum(counts)):
        chunk = min((c for c in range(last + 1) if counts[c] < problem.max_layers[c]), key=after)
        counts[chunk] += 1
        on_stage[places[chunk]] += 1
    return counts


# ---- cuts of unequal layers


def _exact_cuts(problem: _SplitProblem) -> list[int]:
    """Layers of each chunk so that the dearest chunk is as cheap as possible and, among such splits, the sum of squares is least.

    Dynamic programming over the number of layers in the first chunks: chunks x layers^2 steps. It looks at chunks, not stages, so
    the split is the best one only with one chunk a stage.
    """
    num_layers = len(problem.costs)
    size = np.subtract.outer(np.arange(num_layers + 1), np.arange(num_layers + 1)).T  # [start, stop]
    between = problem.sums[None, :] - problem.sums[:, None]

    def loads() -> Iterator[_Array]:
        """The cost of each chunk if it holds the layers start to stop - 1, [start, stop]; infinite if it may not."""
        for low, high, fixed in zip(problem.min_layers, problem.max_layers, problem.fixed, strict=True):
            yield np.where((low <= size) & (size <= high), between + fixed, np.inf)

    at_first = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)
    dearest = at_first
    for load in loads():
        dearest = np.maximum(dearest[:, None], load).min(axis=0)
    squares, origins = at_first, []
    for load in loads():
        totals = squares[:, None] + np.where(load <= dearest[-1], load * load, np.inf)
        origins.append(totals.argmin(axis=0))
        squares = totals.min(axis=0)
    starts = [num_layers]
    for origin in reversed(origins):
        starts.append(int(origin[starts[-1]]))
    return np.diff(starts[::-1]).tolist()


def _exchanged(problem: _SplitProblem, starts: _Ints) -> _Ints:
    """Improve a split until no single exchange improves it further.

    An exchange takes a layer from one chunk and gives one to another; the chunks between keep their sizes and shift by a layer.

    Args:
        starts: the first layer of each chunk, and the number of layers: [chunk + 1].
    """
    bounds = np.arange(len(starts))
    takers, givers = np.triu_indices(len(starts) - 1, 1)
    shifts = (takers[:, None] < bounds) & (bounds <= givers[:, None])
    while True:
        tried = np.concatenate([starts + shifts, starts - shifts])
        counts = np.diff(tried)
        allowed = ((problem.min_layers <= counts) & (counts <= problem.max_layers)).all(axis=1)
        tried = np.concatenate([starts[None], tried[allowed]])
        best = _best(problem, tried)
        if best == 0:
            return starts
        starts = tried[best]


def _best(problem: _SplitProblem, starts: _Ints) -> int:
    """The first of the best splits [split, chunk + 1]. Better means, in this order: a cheaper dearest stage, a smaller sum of
    squares over the stages, the same two over the chunks."""
    chunks = np.diff(problem.sums[starts]) + problem.fixed
    stages = chunks @ np.eye(problem.num_stages)[list(problem.stage_of_chunk)]
    measures = [measure for loads in (stages, chunks) for measure in (loads.max(axis=1), (loads**2).sum(axis=1))]
    return int(np.lexsort(measures[::-1])[0])
