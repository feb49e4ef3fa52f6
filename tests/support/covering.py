"""A small subset of a large product of settings in which every pair of settings still occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

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
    if len(cases_by_axis) == 1 or not candidates:
        return candidates
    numbers = [{setting: place for place, setting in enumerate(settings)} for settings in cases_by_axis.values()]
    columns = [
        np.array([known[setting] for setting in column], dtype=np.int32)
        for known, column in zip(numbers, zip(*(case.values() for case in candidates), strict=True), strict=True)
    ]
    # For each two axes the number of the pair in each candidate, and which pairs no case taken has.
    pairs = [one * len(known) + other for (_, one), (known, other) in itertools.combinations(zip(numbers, columns, strict=True), 2)]
    missing = [np.zeros(found.max() + 1, dtype=bool) for found in pairs]
    for lacking, found in zip(missing, pairs, strict=True):
        lacking[found] = True
    chosen: list[Case] = []
    while any(lacking.any() for lacking in missing):
        new = np.zeros(len(candidates), dtype=np.int32)
        for lacking, found in zip(missing, pairs, strict=True):
            if lacking.any():
                new += lacking[found]
        best = int(new.argmax())
        chosen.append(candidates[best])
        for lacking, found in zip(missing, pairs, strict=True):
            lacking[found[best]] = False
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
