"""How many layers each chunk gets, so that the dearest stage is as cheap as possible.

Equal layers are dealt out one by one. Unequal ones are cut by dynamic programming, which is exact with one chunk a stage. With
several chunks a stage, layers are then exchanged between chunks until no exchange helps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_BITS = 40  # of the sum of all costs while searching: as whole numbers, sums are exact and equal loads compare equal


@dataclass(frozen=True)
class SplitProblem:
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
    def num_layers(self) -> int:
        """The number of layers in the model."""
        return len(self.costs)

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return len(self.stage_of_chunk)

    @property
    def num_stages(self) -> int:
        """The number of pipeline ranks."""
        return max(self.stage_of_chunk) + 1

    def on_stages(self, of_chunks: Iterable[float]) -> list[float]:
        """Sum values of chunks over the chunks of each stage."""
        sums: list[float] = [0] * self.num_stages
        for stage, value in zip(self.stage_of_chunk, of_chunks, strict=True):
            sums[stage] += value
        return sums


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
    problem = SplitProblem(
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
    return min((_exchanged(problem, start) for start in starts), key=lambda counts: _quality(problem, counts))


def _deal_out(problem: SplitProblem) -> list[int]:
    """Deal out equal layers one by one, each to where the load with it is least.

    That is the best split: loads grow evenly with the number of layers, so exchanging two layers cannot help afterwards.
    """
    places, last = problem.stage_of_chunk, problem.num_chunks - 1
    counts = list(problem.min_layers)
    cost = problem.costs[0] if problem.costs else 0
    fixed, on_stage = problem.on_stages(problem.fixed_costs), problem.on_stages(counts)

    def ends(chunks: Collection[int]) -> int:
        return (0 in chunks) + 2 * (last in chunks)

    burden = [ends([c for c in range(last + 1) if places[c] == stage]) for stage in range(problem.num_stages)]

    def after(chunk: int) -> tuple[float, ...]:
        stage = places[chunk]
        stage_load = fixed[stage] + (on_stage[stage] + 1) * cost
        chunk_load = problem.fixed_costs[chunk] + (counts[chunk] + 1) * cost
        return stage_load, chunk_load, burden[stage], ends([chunk]), chunk

    for _ in range(problem.num_layers - sum(counts)):
        chunk = min((c for c in range(last + 1) if counts[c] < problem.max_layers[c]), key=after)
        counts[chunk] += 1
        on_stage[places[chunk]] += 1
    return counts


# ---- cuts of unequal layers


def _exact_cuts(problem: SplitProblem) -> list[int]:
    """Layers of each chunk so that the dearest chunk is as cheap as possible and, among such splits, the sum of squares is least.

    Dynamic programming over the number of layers in the first chunks: chunks x layers^2 steps. It looks at chunks, not stages, so
    the split is the best one only with one chunk a stage.
    """
    layers, fixed = _whole_costs(problem)
    cost = _between(layers)
    allowed = [_allowed(problem, chunk) for chunk in range(problem.num_chunks)]
    dearest = np.full(problem.num_layers + 1, np.inf)
    dearest[0] = -np.inf
    for chunk in range(problem.num_chunks):
        reached = np.maximum(dearest[:, None], cost + fixed[chunk])
        dearest = np.where(allowed[chunk], reached, np.inf).min(axis=0)

    squares = np.full(problem.num_layers + 1, np.inf)
    squares[0] = 0
    origins = []
    for chunk in range(problem.num_chunks):
        load = cost + fixed[chunk]
        totals = np.where(allowed[chunk] & (load <= dearest[-1]), squares[:, None] + load * load, np.inf)
        origins.append(totals.argmin(axis=0))
        squares = totals.min(axis=0)
    starts = [problem.num_layers]
    for origin in reversed(origins):
        starts.append(int(origin[starts[-1]]))
    return [int(count) for count in np.diff(starts[::-1])]


def _allowed(problem: SplitProblem, chunk: int) -> npt.NDArray[np.bool_]:
    """Whether a chunk may hold the layers start to stop - 1: [start, stop]."""
    size = _between(np.ones(problem.num_layers))
    return (problem.min_layers[chunk] <= size) & (size <= problem.max_layers[chunk])


def _exchanged(problem: SplitProblem, counts: Sequence[int]) -> list[int]:
    """Improve a split until no single exchange improves it further.

    An exchange takes a layer from one chunk and gives one to another; the chunks between keep their sizes and shift by a layer.
    Better means, in this order: a cheaper dearest stage, a smaller sum of squares over the stages, the same two over the chunks.
    """
    layers, fixed = _whole_costs(problem)
    starts = np.cumsum([0, *counts])
    best = _quality(problem, counts)
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
                found.append((_quality(problem, np.diff(moved)), moved.tolist()))
        if not found or min(found)[0] >= best:
            return [int(count) for count in np.diff(starts)]
        best, starts = min(found)[0], np.array(min(found)[1])


def _quality(problem: SplitProblem, counts: Sequence[int] | _Ints) -> tuple[float, ...]:
    """The measures by which splits are compared, the most important first; less is better."""
    layers, fixed = _whole_costs(problem)
    loads = _loads(layers, fixed, np.cumsum([0, *counts]))
    stages = _on_stages(problem, loads)
    return float(stages.max()), float((stages**2).sum()), float(loads.max()), float((loads**2).sum())


def _exchanges(problem: SplitProblem, starts: _Ints, step: int) -> tuple[_Ints, _Ints]:
    """All allowed exchanges that move bounds by `step`: pairs of chunks a < b; a takes `step` layers and b gives them."""
    counts = np.diff(starts)
    low, high = np.array(problem.min_layers), np.array(problem.max_layers)
    a, b = np.triu_indices(problem.num_chunks, 1)
    more, less = counts[a] + step, counts[b] - step
    allowed = (low[a] <= more) & (more <= high[a]) & (low[b] <= less) & (less <= high[b])
    return a[allowed], b[allowed]


def _shifts(values: _Array, starts: _Ints, step: int) -> _Array:
    """Changes of the chunks' sums when bounds move by `step`: row b, for the bounds 1 to b, has one entry for each chunk.

    When only the bounds a + 1 to b move, row b - row a says what changes. Bound c lies between the chunks c - 1 and c.
    """
    bounds = np.arange(1, len(starts) - 1)
    crossing = starts[bounds] if step > 0 else starts[bounds] - 1
    # A bound at an end has no layer to cross; the value here is not used, since the exchange would leave a chunk with -1 layers.
    crossed = step * values[np.clip(crossing, 0, len(values) - 1)]
    changes = np.zeros((len(starts) - 1, len(starts) - 1))
    changes[bounds, bounds - 1] = crossed
    changes[bounds, bounds] = -crossed
    return changes.cumsum(axis=0)


def _best_rows(loads: _Array) -> _Ints:
    """Indices of the rows [row, place] with the least maximum and, among them, the least sum of squares."""
    highest = loads.max(axis=1)
    rows = np.flatnonzero(highest == highest.min())
    squares = (loads[rows] ** 2).sum(axis=1)
    return rows[squares == squares.min()]


def _on_stages(problem: SplitProblem, chunks: _Array) -> _Array:
    """Sums over the chunks of each stage: [..., chunk] to [..., stage]."""
    return chunks @ np.eye(problem.num_stages)[list(problem.stage_of_chunk)]


def _loads(layers: _Array, fixed: _Array, starts: _Ints) -> _Array:
    """Cost of each chunk, [chunk]."""
    return np.diff(_running_sum(layers)[starts]) + fixed


def _whole_costs(problem: SplitProblem) -> tuple[_Array, _Array]:
    """Costs of layers and fixed costs of chunks, scaled by a power of two and rounded to whole numbers."""
    layers, fixed = np.array(problem.costs, dtype=float), np.array(problem.fixed_costs, dtype=float)
    scale = 2.0 ** (_BITS - math.frexp(np.abs(layers).sum() + np.abs(fixed).sum())[1])
    return np.rint(layers * scale), np.rint(fixed * scale)


def _between(values: _Array) -> _Array:
    """Sums of the values start to stop - 1, [start, stop]; meaningless where start > stop."""
    sums = _running_sum(values)
    return sums[None, :] - sums[:, None]


def _running_sum(values: _Array) -> _Array:
    return np.concatenate([[0.0], np.cumsum(values)])
