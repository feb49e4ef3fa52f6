"""Layers to chunks by cost: against every split there is, on small cases."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.pipeline_parallel.balance import balance
from megatron.spec.operations import assign_chunks_round_robin, assign_chunks_v_shape

SMALL_PLACES = [
    assign_chunks_round_robin(1),
    assign_chunks_round_robin(2),
    assign_chunks_round_robin(3),
    assign_chunks_round_robin(5),
    assign_chunks_round_robin(1, 3),
    assign_chunks_round_robin(2, 2),
    assign_chunks_round_robin(3, 2),
    assign_chunks_round_robin(2, 3),
    assign_chunks_v_shape(1),
    assign_chunks_v_shape(2),
    assign_chunks_v_shape(3),
]


@dataclass(frozen=True)
class Case:
    """A small problem in whole numbers."""

    op_costs: list[int]
    places: tuple[int, ...]
    embedding: int
    loss: int
    low: list[int]
    high: list[int]

    def solve(self) -> list[int]:
        return balance(
            self.op_costs,
            self.places,
            embedding_cost=self.embedding,
            loss_cost=self.loss,
            min_layers=self.low,
            max_layers=self.high,
        )

    def chunk_loads(self, counts: list[int]) -> list[int]:
        return add_up(self.op_costs, counts, self.embedding, self.loss)

    def stage_loads(self, counts: list[int]) -> list[int]:
        return by_stage(self.places, self.chunk_loads(counts))

    def quality(self, counts: list[int]) -> tuple[int, ...]:
        """Dearest stage, sum of squares of stages, dearest chunk, sum of squares of chunks."""
        stages, chunks = self.stage_loads(counts), self.chunk_loads(counts)
        return max(stages), sum(x * x for x in stages), max(chunks), sum(x * x for x in chunks)

    def splits(self) -> Iterator[list[int]]:
        """All that keep within bounds."""
        for bounds in itertools.combinations_with_replacement(range(len(self.op_costs) + 1), len(self.places) - 1):
            counts = [stop - start for start, stop in zip((0, *bounds), (*bounds, len(self.op_costs)), strict=True)]
            inside = all(low <= n <= high for low, n, high in zip(self.low, counts, self.high, strict=True))
            if inside:
                yield counts


def add_up(layers: Sequence[Any], counts: Sequence[int], first: Any, last: Any) -> list[Any]:
    """Sums over the chunks, with what comes on top at the ends."""
    rest = iter(layers)
    sums = [sum(itertools.islice(rest, count)) for count in counts]
    sums[0] += first
    sums[-1] += last
    return sums


def by_stage(places: Sequence[int], sums: Sequence[Any]) -> list[Any]:
    return [sum(value for place, value in zip(places, sums, strict=True) if place == stage) for stage in range(max(places) + 1)]


@st.composite
def cases(draw: st.DrawFn, *, equal: bool, places: list[tuple[int, ...]] = SMALL_PLACES) -> Case:
    """Problems that the bounds alone allow."""
    place = draw(st.sampled_from(places))
    low = [draw(st.integers(0, 1)) for _ in place]
    num_layers = draw(st.integers(max(1, sum(low)), 9))
    high = [draw(st.just(num_layers) | st.integers(low[i], 4)) for i in range(len(place))]
    assume(sum(high) >= num_layers)

    if equal:
        costs = [draw(st.integers(1, 4))] * num_layers
    else:
        costs = draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers))
    return Case(
        costs,
        place,
        draw(st.integers(0, 6)),
        draw(st.integers(0, 20)),
        low,
        high,
    )


@given(cases(equal=True))
def test_equal_layers_are_split_as_well_as_can_be(case: Case) -> None:
    assert case.quality(case.solve()) == min(map(case.quality, case.splits()))


@given(cases(equal=False, places=[assign_chunks_round_robin(stages) for stages in range(1, 6)]))
def test_one_chunk_a_stage_is_split_as_well_as_can_be(case: Case) -> None:
    assert case.quality(case.solve()) == min(map(case.quality, case.splits()))


@given(cases(equal=False))
def test_unequal_layers_on_several_chunks_come_near(case: Case) -> None:
    """What is promised: within bounds, and the dearest stage at most as many times the best as it has chunks."""
    found = case.solve()
    splits = list(case.splits())
    assert found in splits
    best = min(map(case.quality, splits))
    assert best <= case.quality(found)
    assert max(case.stage_loads(found)) <= best[0] * len(case.places) // (max(case.places) + 1)


@given(cases(equal=False))
def test_no_exchange_of_a_layer_helps(case: Case) -> None:
    """Local optimum, found by trying each exchange alone."""
    found = case.solve()
    for taker, giver in itertools.permutations(range(len(found)), 2):
        other = list(found)
        other[taker] += 1
        other[giver] -= 1
        if all(low <= n <= high for low, n, high in zip(case.low, other, case.high, strict=True)):
            assert case.quality(other) >= case.quality(found)


@pytest.mark.parametrize(
    ("costs", "places", "loss", "counts"),
    [
        ([6, 5, 9, 3], assign_chunks_round_robin(3), 0, [2, 1, 1]),  # 11, 9, 3; the sum of squares is less for 6, 5, 12
        ([9, 6, 6, 1, 8, 8], assign_chunks_round_robin(3), 0, [2, 3, 1]),  # 15, 15, 8; the sum of squares is less for 9, 13, 16
        ([4, 3, 7, 6, 4, 8, 7, 8, 1], assign_chunks_round_robin(2, 3), 3, [3, 1, 1, 1, 1, 2]),
        ([1, 1, 4, 5], assign_chunks_v_shape(2), 12, [1, 1, 1, 1]),
    ],
)
def test_the_dearest_stage_counts_first(costs: list[int], places: tuple[int, ...], loss: int, counts: list[int]) -> None:
    assert balance(costs, places, loss_cost=loss) == counts


def test_several_chunks_of_unequal_layers_are_mostly_split_as_well_as_can_be() -> None:
    """Over a fixed sample: what the dearest stage costs, as a multiple of the least possible."""
    numbers = random.Random(0)
    ratios = []
    for _ in range(60):
        place = numbers.choice(
            [
                assign_chunks_round_robin(2, 2),
                assign_chunks_v_shape(2),
                assign_chunks_v_shape(3),
                assign_chunks_round_robin(3, 2),
                assign_chunks_round_robin(2, 3),
            ]
        )
        costs = [numbers.randint(1, 9) for _ in range(9)]
        case = Case(costs, place, 0, numbers.randint(0, 20), [1] * len(place), [9] * len(place))
        ratios.append(max(case.stage_loads(case.solve())) / min(map(case.quality, case.splits()))[0])
    assert sum(ratio == 1 for ratio in ratios) > 0.85 * len(ratios)
    assert sum(ratios) < 1.01 * len(ratios)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(min_layers=[3, 3]),
            "4 layers cannot be split into 2 model chunks, which together hold at least 6 and at most 8 layers",
        ),
        (
            dict(max_layers=[1, 2]),
            "4 layers cannot be split into 2 model chunks, which together hold at least 2 and at most 3 layers",
        ),
        (dict(loss_cost=-1), "the costs of layers, embedding and loss must be finite and at least 0"),
        (dict(embedding_cost=math.nan), "the costs of layers, embedding and loss must be finite and at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance([1] * 4, assign_chunks_round_robin(2), **change)
