"""Which ranks are slow: apart from the noise of their peers, and by the stage."""

from __future__ import annotations

from megatron_lab.flight.stragglers import find_slow_ranks


def test_a_rank_is_compared_with_those_of_its_stage() -> None:
    """Stages may differ; a rank stands out of the spread of its peers, and by a tenth."""
    stages = [0, 0, 0, 0, 1, 1, 1, 1]
    assert find_slow_ranks([1.0, 1.01, 1.31, 0.99, 3.0, 3.0, 3.0, 3.0], stages) == {2: 1.31}
    assert find_slow_ranks([1.0, 1.01, 1.05, 0.99, 3.0, 3.0, 3.0, 3.0], stages) == {}, "less than a tenth"
    assert find_slow_ranks([1.0, 1.3, 1.35, 0.8, 3.0, 3.0, 3.0, 3.0], stages) == {}, "within the spread"
    assert find_slow_ranks([1.0, 1.5], [0, 0]) == {1: 1.5} and find_slow_ranks([1.0, 9.0], [0, 1]) == {}
