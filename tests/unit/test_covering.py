"""The covering subset: every possible pair occurs, few cases, the same for the same seed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock, call

import pytest

from megatron.config.parallel import ShardingStrategy
from megatron.spec.schedules import SCHEDULES
from tests import conftest
from tests.layouts.case import is_quick, refusals
from tests.layouts.features import FEATURES
from tests.layouts.pairs import (
    SECOND_STEPS,
    Chooser,
    Search,
    cost,
    pairs_in,
    pairs_of,
    settings_in,
    written_cases,
    written_steps,
)
from tests.support.covering import Case, covering, full_but, product

AXES: dict[str, list[Any]] = {
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4, 8],
    "dp": [1, 2, 4, 8],
    "sequence": [False, True],
    "tied": [False, True],
}


def fits(case: dict[str, Any]) -> bool:
    return case["tp"] * case["pp"] * case["dp"] in (1, 2, 4, 8) and not (case["sequence"] and case["tp"] == 1)


def pairs(cases: list[dict[str, Any]]) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def test_every_valid_pair_occurs_in_few_valid_cases() -> None:
    full = product(AXES, fits)
    chosen = covering(AXES, 1, fits)
    assert all(fits(case) and list(case) == list(AXES) for case in chosen)
    assert pairs(chosen) == pairs(full)
    assert len(full) == 60 and len(chosen) <= 24


@pytest.mark.parametrize("valid", [fits, lambda case: 8 not in case.values(), lambda case: {**case}["pp"] < 4])
def test_product_has_every_valid_case(valid: Callable[[Case], bool]) -> None:
    """Whichever settings decide, the same ones for all cases or not."""
    every = [dict(zip(AXES, settings, strict=True)) for settings in itertools.product(*AXES.values())]
    assert product(AXES, valid) == [case for case in every if valid(case)]


def test_large_product_needs_few_cases() -> None:
    axes = {name: [0, 1, 2] for name in "abcdefg"}
    chosen = covering(axes, 3)
    assert len(pairs(chosen)) == 21 * 9 and len(chosen) <= 20  # of 2,187; 9 is the least possible


def test_seed_decides() -> None:
    assert covering(AXES, 5, fits) == covering(AXES, 5, fits)
    assert covering(AXES, 5, fits) != covering(AXES, 6, fits)


def test_one_axis_takes_every_setting() -> None:
    assert sorted(case["tp"] for case in covering({"tp": [1, 2, 4]}, 0)) == [1, 2, 4]


def test_the_pages_say_how_many_layouts_are_compared() -> None:
    """And which splits: context ranks are not in all."""
    cases, sizes = written_cases(), ("tp", "pp", "dp", "cp")
    splits = {split for split in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(split) <= 8}
    compared = {tuple(case[size] for size in sizes) for case in cases} & splits
    plain, all_plain = ({split for split in some if split[3] == 1} for some in (compared, splits))
    counts = (
        f"all {len(plain)} splits without context parallelism, and {len(compared - plain)} of the {len(splits - all_plain)} splits"
    )
    readme, trust = (" ".join((Path(__file__).parents[2] / page).read_text().split()) for page in ("README.md", "docs/trust.md"))
    assert counts in trust and plain == all_plain
    assert all(f"about {round(len(cases), -2)} combinations of layouts and models" in page for page in (readme, trust))
    for axis, settings in {"schedule": SCHEDULES, "sharding": get_args(ShardingStrategy)}.items():
        assert {case[axis] for case in cases} == {*settings}


def test_every_pair_of_settings_of_a_feature_is_in_a_case_of_the_normal_run() -> None:
    """`python -m tests.layouts.pairs --improve 10` adds and replaces cases where axes change."""
    cases = written_cases()
    assert [case for case in cases if not is_quick(case)] == []
    assert {message for case in cases for message in refusals(case)} == set()
    found = pairs_in(cases)
    missing = {name: pairs_of(feature) - found for name, feature in FEATURES.items()}
    assert not any(missing.values()), missing


def test_a_value_that_is_not_kept_has_the_mark_of_full() -> None:
    first, second, third = full_but([("a", 2)], [("a", 1), ("a", 2), ("b", 1)], "the other value")
    assert second == ("a", 2)
    assert [(param.values, *(mark.name for mark in param.marks)) for param in (first, third)] == [
        (("a", 1), "full"),
        (("b", 1), "full"),
    ]
    with pytest.raises(AssertionError, match="are to be some of"):
        full_but(["c"], ["a", "b"], "a value that is gone")


@pytest.mark.parametrize("full", [False, True])
def test_marked_tests_run_with_full_alone(full: bool) -> None:
    items: list[Any] = [Mock(path=name) for name in ("plain", "marked")]
    items[0].get_closest_marker.return_value = None
    left_out: list[Any] = []
    config = SimpleNamespace(
        getoption={"--full": full, "--piece": None}.__getitem__,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    conftest.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert items[0].get_closest_marker.call_args_list in ([call("full")], [])
    assert [one.path for one in items] == ["plain", *(["marked"] if full else [])]
    assert [one.path for one in left_out] == ([] if full else ["marked"])


def test_each_setting_trains_for_a_second_step_in_some_cases() -> None:
    cases = [*zip(written_cases(), written_steps(), strict=True)]
    every, longer = (Counter(s for case, steps in cases if steps > least for s in settings_in(case)) for least in (0, 1))
    assert all(longer[setting] >= min(SECOND_STEPS, count) for setting, count in every.items())
    assert 1 in written_steps()


def test_the_search_makes_cases_cheaper_and_loses_no_pair() -> None:
    required = pairs_of(FEATURES["packing"])
    cases = Chooser(required, seed=2).choose(tries=3)
    search = Search(cases, required, seed=2)
    for _ in range(60):
        search.cheaper()
        search.left_out()
    assert pairs_in(search.cases) >= required and all(map(is_quick, search.cases))
    assert not any(map(refusals, search.cases))
    assert sum(map(cost, search.cases)) < 0.95 * sum(map(cost, cases)) and len(search.cases) <= len(cases)
