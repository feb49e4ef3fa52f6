"""Muon makes its matrices in rounds: at every size of a round a run trains as one plain process does.

Other layouts with Muon are in `test_layouts.py`.
"""

from __future__ import annotations

import pytest

from megatron.optimizer import matrix_plan
from tests.layouts.case import DEFAULTS, recipe_of, reference_of
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, run_layout
from tests.support.warm import run_forked_ranks


@pytest.mark.parametrize("most", [1, pytest.param(1000, marks=pytest.mark.full("1, and test_matrix_plan.py"))])
def test_many_rounds_are_no_other(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Rounds of one matrix a rank, and of some: while one is computed others travel, in buffers that are used again."""
    monkeypatch.setattr(matrix_plan, "MAX_ROUND_ELEMENTS", most)
    monkeypatch.setattr("tests.support.layout.run_warm_ranks", run_forked_ranks)  # ranks that are forked now know the size
    recipe = recipe_of({**DEFAULTS, "style": "llama, norms of heads", "rule": "muon, three, even steps", "microbatches": 4})
    expected = reference_of(recipe)
    for layout in (Layout(), Layout(tp=2, dp=2, sharding="optim"), Layout(dp=2, micro_batch_size=1, sharding="optim_grads_params")):
        assert_equal_runs(run_layout(recipe, layout), expected)
