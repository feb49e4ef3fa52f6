"""A small subset of a large product of settings in which every pair of settings still occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

Case = dict[str, Any]


def product(cases_by_axis: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Every valid case of the full product, the last axis varying fastest."""
    return [_case(cases_by_axis, places) for places in _valid_places(cases_by_axis, valid).tolist()]


def covering(
    cases_by_axis: Mapping[str, Sequence[Any]], seed: int, valid: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Valid cases among which every pair of settings of two axes occurs that occurs in any valid case.

    Greedy: each case taken is one of those that bring most new pairs; the seed decides between equals. For k axes of at most n
    settings some n^2 x log(k) cases remain of n^k.

    Args:
        cases_by_axis: settings of each axis.
        seed: the same seed gives the same cases.
        valid: which cases make sense; the answer may depend on the case alone.
    """
    candidates = _valid_places(cases_by_axis, valid)
    order = [*range(len(candidates))]
    random.Random(seed).shuffle(order)
    candidates = candidates[order]
    pairs, missing = _pairs(candidates, [len(settings) for settings in cases_by_axis.values()])
    # Bounds from above on what each case brings, since that only shrinks: most cases need no second look.
    bounds = np.full(len(candidates), pairs.shape[1])
    chosen: list[Case] = []
    while missing.any():
        best = np.flatnonzero(bounds == bounds.max())
        exact = bounds[best[0]]
        bounds[best] = missing[pairs[best]].sum(1)
        best = best[bounds[best] == exact]
        if len(best):
            chosen.append(_case(cases_by_axis, candidates[best[0]].tolist()))
            missing[pairs[best[0]]] = False
    return chosen


def full_but(kept: Collection[Any], values: Iterable[Any], instead: str) -> list[Any]:
    """Return the values of a parametrisation, with a mark on those that only --full runs.

    Args:
        kept: values of the normal run, at least one.
        values: all values; a tuple has one for each parameter.
        instead: what proves the same for the other values in the normal run.
    """
    values = [*values]
    assert kept and all(value in values for value in kept), f"{kept} are to be some of {values}"
    rest = pytest.mark.full(instead)
    return [
        value if value in kept else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=rest) for value in values
    ]


class _Watched(Mapping[str, Any]):
    """A case that notes which of its settings are looked at."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.seen: set[str] = set()

    def __getitem__(self, axis: str) -> Any:
        self.seen.add(axis)
        return self._case[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._case)

    def __len__(self) -> int:
        return len(self._case)


def _case(cases_by_axis: Mapping[str, Sequence[Any]], places: Sequence[int]) -> Case:
    return {axis: settings[place] for (axis, settings), place in zip(cases_by_axis.items(), places, strict=True)}


def _valid_places(cases_by_axis: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool]) -> np.ndarray:
    """Places of the settings of each valid case: [valid cases, axes].

    Most answers depend on a few of the settings only, so `valid` is asked once for all cases that are alike in those it looks at.
    """
    lengths = [len(settings) for settings in cases_by_axis.values()]
    column = {axis: i for i, axis in enumerate(cases_by_axis)}
    makes_sense = np.zeros(lengths, bool)
    unknown = np.ones(lengths, bool)
    i = 0
    while (i := i + int(unknown.reshape(-1)[i:].argmax())) < unknown.size and unknown.reshape(-1)[i]:
        places = np.unravel_index(i, lengths)
        case: Any = _Watched(_case(cases_by_axis, [int(place) for place in places]))
        answer = valid(case)
        alike = tuple(places[column[axis]] if axis in case.seen else slice(None) for axis in cases_by_axis)
        makes_sense[alike] = answer
        unknown[alike] = False
    return np.argwhere(makes_sense)


def _pairs(cases: np.ndarray, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Settings two by two (of a single axis, the setting alone): a number for each pair [cases, pairs], and which numbers occur."""
    columns, count = [], 0
    for one, other in itertools.combinations(range(len(lengths)), 2) if len(lengths) > 1 else [(0, 0)]:
        columns.append(count + cases[:, one] * lengths[other] + cases[:, other])
        count += lengths[one] * lengths[other]
    pairs = np.stack(columns, 1)
    occurs = np.zeros(count, bool)
    occurs[pairs] = True
    return pairs, occurs
