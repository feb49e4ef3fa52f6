"""A small subset of a large product of settings in which every pair of settings still occurs."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(cases_by_axis: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Every valid case of the full product, the last axis varying fastest."""
    cases = (dict(zip(cases_by_axis, settings, strict=True)) for settings in itertools.product(*cases_by_axis.values()))
    return [case for case in cases if valid(case)]


def covering(
    cases_by_axis: Mapping[str, Sequence[Any]], seed: int, valid: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Valid cases among which every pair of settings of two axes occurs that occurs in any valid case.

    Greedy: each case taken is one of those that bring most new pairs; the seed decides between equals. For k axes of at most n
    settings some n^2 x log(k) cases remain of n^k.

    Args:
        cases_by_axis: settings (hashable) of each axis.
        seed: the same seed gives the same cases.
        valid: which cases make sense.
    """
    candidates = product(cases_by_axis, valid)
    random.Random(seed).shuffle(candidates)
    numbers = {axis: {setting: place for place, setting in enumerate(settings)} for axis, settings in cases_by_axis.items()}
    first = dict(zip(numbers, itertools.accumulate((len(known) for known in numbers.values()), initial=0), strict=False))
    pairs = [_pairs([first[axis] + numbers[axis][setting] for axis, setting in case.items()]) for case in candidates]
    missing = set().union(*pairs)
    # Bounds from above on what each case brings, since that only shrinks: most cases need no second look.
    bounds = [(-len(found), i) for i, found in enumerate(pairs)]
    heapq.heapify(bounds)
    chosen: list[Case] = []
    while missing:
        bound, i = heapq.heappop(bounds)
        new = len(pairs[i] & missing)
        if new < -bound:
            heapq.heappush(bounds, (-new, i))
        else:
            chosen.append(candidates[i])
            missing -= pairs[i]
    return chosen


def every_setting_once(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of a few of these cases, in their order, such that each setting of any case is in one of them. Greedy."""
    left = {name: {(setting, repr(value)) for setting, value in case.items()} for name, case in cases.items()}
    missing, chosen = set().union(*left.values()), set()
    while missing:
        best = max(left, key=lambda name: len(left[name] & missing))
        missing -= left.pop(best)
        chosen.add(best)
    return [name for name in cases if name in chosen]


def _pairs(settings: Sequence[int]) -> set[int]:
    """Settings, by number, two by two, a number for each pair; of a single axis, the setting alone."""
    if len(settings) < 2:
        return set(settings)
    return {one << 16 | other for one, other in itertools.combinations(settings, 2)}
