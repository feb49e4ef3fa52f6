"""Choose cases of few and small runs in which every pair of settings of a feature occurs: python -m tests.layouts.pairs [--help]

Without a flag the program counts the pairs that the written cases have, of each feature and in all. `--write` chooses all cases
again, greedily: each brings many new pairs for its cost, and no case is refused by the rules between the settings. `--improve`
replaces cases that no longer fit, adds cases for missing pairs, and searches for cheaper ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.layouts.case import CONSTRAINTS, DEFAULTS, KINDS, LOOKED_AT, LORA, QUICK, is_quick, num_layers, refusals, steps_of
from tests.layouts.features import FEATURES, Feature, Setting
from tests.support.covering import Case

WRITTEN = Path(__file__).parent.parent / "data" / "layout_cases.json"
Pair = frozenset[frozenset[tuple[str, Any]]]
"""Two settings of two axes of a feature."""


def written_cases() -> list[Case]:
    """Return the cases of the normal run."""
    return [{**DEFAULTS, **case} for case in json.loads(WRITTEN.read_text())]


def pair(one: Setting, other: Setting) -> Pair:
    """Two settings, whatever feature they are of."""
    return frozenset({frozenset(one.items()), frozenset(other.items())})


def pairs_of(feature: Feature) -> set[Pair]:
    """Pairs of settings of two axes that a valid and quick case of the feature's product has."""
    return {
        pair(one, other)
        for axis, another in itertools.combinations(feature.axes, 2)
        for one, other in itertools.product(feature.axes[axis], feature.axes[another])
        if any(map(is_quick, feature.cases(one, other)))
    }


def settings_in(case: Case) -> set[frozenset[tuple[str, Any]]]:
    """Settings of any feature that a case has."""
    return {setting for setting in _SETTINGS if all(case[axis] == value for axis, value in setting)}


_SETTINGS = {
    frozenset(setting.items()) for feature in FEATURES.values() for settings in feature.axes.values() for setting in settings
}
_IN_ORDER = sorted(_SETTINGS, key=lambda setting: repr(sorted(setting)))
"""The same in every process: a set's order is not."""


def pairs_in(cases: Iterable[Case]) -> set[Pair]:
    """Pairs of settings that cases have; of two settings of a feature or of any two."""
    return {frozenset(two) for case in cases for two in itertools.combinations(settings_in(case), 2)}


SECOND_STEPS = 2
"""Fewest cases with a second step for each setting, unless it has fewer cases in all."""


def written_steps() -> list[int]:
    """Return the number of steps of each case of the normal run.

    The cases that cost most make a single step, as long as each of their settings is in `SECOND_STEPS` cases that make another.
    """
    cases = written_cases()
    steps = [steps_of(case) for case in cases]
    left = Counter(setting for case in cases for setting in settings_in(case))
    for place in sorted(range(len(cases)), key=lambda place: cost(cases[place]), reverse=True):
        has = settings_in(cases[place])
        if steps[place] == 2 and all(left[setting] > SECOND_STEPS for setting in has):
            steps[place] = 1
            left.subtract(has)
    return steps


# ---- the choice


def cost(case: Case) -> float:
    """About the processor time of a run, in seconds."""
    ranks = case["tp"] * case["cp"] * case["pp"] * case["dp"]
    layers = (num_layers(case) + 1.5 * case["depths"]) / case["pp"]
    each = 0.017 + 0.009 * bool(case["experts"]) + 0.002 * (case["memory"] != "kept")
    work = (0.005 + each * steps_of(case) * case["microbatches"]) * layers
    sharded = 0.03 + 0.008 * layers if case["sharding"] == "optim_grads_params" else 0.0
    return ranks * (0.04 + work + sharded + (2.0 if case["compiled"] else 0.0))


_ALL = [*CONSTRAINTS, *QUICK]
PACKED = 1000
"""Missing pairs of which as many as possible are put into a case, before it is made whole."""
_SWITCHES = {frozenset({axis: value}.items()) for axis in ("experts", "lora") for value in (*KINDS, *LORA)}


class Chooser:
    """Makes cases that have many of the pairs that are still missing."""

    def __init__(self, required: set[Pair], seed: int) -> None:
        self.draw = random.Random(seed)
        self.settings = _IN_ORDER
        number = {setting: i for i, setting in enumerate(self.settings)}
        self.missing = {frozenset(number[setting] for setting in two) for two in required}
        self.partners: dict[int, set[int]] = {i: set() for i in range(len(self.settings))}
        for one, other in (tuple(two) for two in self.missing):
            self.partners[one].add(other)
            self.partners[other].add(one)
        self.with_axis: dict[str, list[int]] = {axis: [] for axis in DEFAULTS}
        for i, setting in enumerate(self.settings):
            for axis, _ in setting:
                self.with_axis[axis].append(i)
        self.values = {
            axis: [default, *sorted({dict(self.settings[i])[axis] for i in self.with_axis[axis]} - {default}, key=repr)]
            for axis, default in DEFAULTS.items()
        }
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, setting in enumerate(self.settings):
            groups.setdefault(tuple(sorted(axis for axis, _ in setting)), []).append(i)
        self.groups = [*groups.values()]
        self.checks: dict[str, list[int]] = {axis: [] for axis in DEFAULTS}
        for k, axes in enumerate(LOOKED_AT):
            for axis in axes:
                self.checks[axis].append(k)

    def fits(self, case: Case, new: Iterable[str]) -> bool:
        """Whether what is decided agrees, after these axes were."""
        for k in {k for axis in new for k in self.checks[axis]}:
            axes = LOOKED_AT[k]
            if case.keys() >= axes and not _ALL[k](*(case[axis] for axis in axes)):
                return False
        return True

    def may_be(self, case: Case, new: Iterable[str]) -> bool:
        """Whether what is decided agrees after these axes were, and each axis that depends on them still has a setting."""
        beside = {other for axis in new for k in self.checks[axis] for other in LOOKED_AT[k]} - case.keys()
        return self.fits(case, new) and all(
            any(self.fits({**case, axis: value}, [axis]) for value in self.values[axis]) for axis in beside
        )

    def has(self, case: Case, setting: int) -> bool:
        """Whether a case has a setting."""
        return all(axis in case and case[axis] == value for axis, value in self.settings[setting])

    def extended(self, case: Case, has: set[int], setting: int) -> tuple[Case, set[int], int] | None:
        """A case with one setting more, its settings, and the number of missing pairs that are new in it; None if it cannot be."""
        new = {axis: value for axis, value in self.settings[setting] if axis not in case}
        if any(axis in case and case[axis] != value for axis, value in self.settings[setting]):
            return None
        larger = {**case, **new}
        if not self.may_be(larger, new):
            return None
        added = {i for axis in new for i in self.with_axis[axis] if self.has(larger, i)} - has
        together = has | added
        gain = sum(len(self.partners[i] & together) for i in added) - sum(len(self.partners[i] & added) for i in added) // 2
        return larger, together, gain

    def candidate(self, first: Sequence[int], also: Sequence[tuple[int, ...]] = ()) -> tuple[Case, set[int]] | None:
        """A whole case that has these settings, as many of the other pairs as go with them, and greedily further settings."""
        case: Case = {}
        has: set[int] = set()
        for setting in first:
            if (step := self.extended(case, has, setting)) is None:
                return None
            case, has, _ = step
        for two in self.draw.sample(also, len(also)):
            both: tuple[Case, set[int], int] | None = (case, has, 0)
            for setting in two:
                both = both and self.extended(both[0], both[1], setting)
            if both:
                case, has, _ = both
        groups = self.groups[:]
        self.draw.shuffle(groups)
        groups.sort(key=lambda group: self.settings[group[0]] not in _SWITCHES)  # what others depend on comes first
        for group in groups:
            if self.settings[group[0]] in _SWITCHES and self.draw.random() < 0.5:
                ((axis, _),) = self.settings[group[0]]
                if axis not in case and self.may_be(off := {**case, axis: None}, [axis]):
                    case = off
            if all(axis in case for axis, _ in self.settings[group[0]]):
                continue
            best, most = None, -1.0
            for setting in group:
                if (step := self.extended(case, has, setting)) is not None:
                    weighed = step[2] + self.draw.random()
                    if weighed > most:
                        best, most = step, weighed
            if best is not None:
                case, has, _ = best
        for axis in DEFAULTS:
            if axis in case:
                continue
            larger = ({**case, axis: value} for value in self.values[axis])
            if (found := next((one for one in larger if self.may_be(one, [axis])), None)) is None:
                return None
            case = found
        return ({axis: case[axis] for axis in DEFAULTS}, has) if is_quick(case) else None

    def choose(self, tries: int) -> list[Case]:
        """Cases until no pair is missing."""
        chosen: list[Case] = []
        hopeless = 0
        while self.missing:
            order = sorted(tuple(sorted(two)) for two in self.missing)
            packs = len(order) < PACKED
            best, most = None, 0.0
            for k in range(tries if packs else tries // 3):
                found = self.candidate(self.draw.choice(order), order if packs and k % 4 else ())
                if found is None:
                    continue
                case, has = found
                gain = sum(len(self.partners[i] & has) for i in has) / 2
                if gain / cost(case) > most and not refusals(case):
                    best, most = found, gain / cost(case)
            if best is None:
                hopeless += 1
                if hopeless > 100:
                    raise RuntimeError(f"in no case: {[[dict(self.settings[i]) for i in two] for two in order]}")
                continue
            case, _ = best
            has = {i for i in range(len(self.settings)) if self.has(case, i)}
            for i in has:
                self.partners[i] -= has
            self.missing = {two for two in self.missing if not two <= has}
            chosen.append(case)
        return chosen


class Search:
    """Makes cases cheaper by small changes, and leaves cases out, without losing a required pair."""

    def __init__(self, cases: Sequence[Case], required: set[Pair], seed: int) -> None:
        self.draw = random.Random(seed)
        self.settings = _IN_ORDER
        number = {setting: i for i, setting in enumerate(self.settings)}
        self.required = {tuple(sorted(number[setting] for setting in two)) for two in required}
        self.cases = [*cases]
        self.values = {
            axis: sorted({default, *(dict(setting)[axis] for setting in self.settings if axis in dict(setting))}, key=repr)
            for axis, default in DEFAULTS.items()
        }
        singles = (frozenset({(axis, value)}) for axis, values in self.values.items() for value in values)
        self.moves = [dict(sorted(move)) for move in dict.fromkeys([*self.settings, *singles])]
        self.beside = {axis: sorted({o for axes in LOOKED_AT if axis in axes for o in axes} - {axis}) for axis in DEFAULTS}
        self._pairs: dict[tuple[Any, ...], frozenset[tuple[int, ...]]] = {}
        self._valid: dict[tuple[Any, ...], bool] = {}
        self.times = Counter(two for case in cases for two in self.pairs(case))

    def pairs(self, case: Case) -> frozenset[tuple[int, ...]]:
        """Return the required pairs that a case has, by the numbers of their settings."""
        key = tuple(case.values())
        if key not in self._pairs:
            has = [i for i, setting in enumerate(self.settings) if all(case[axis] == value for axis, value in setting)]
            self._pairs[key] = frozenset(two for two in itertools.combinations(has, 2) if two in self.required)
        return self._pairs[key]

    def changed(self, case: Case, move: Setting) -> Case | None:
        """Return a valid case that has a setting and, if that needs it, another value on one axis that depends on it."""
        new = {**case, **move}
        if not is_quick(new):
            beside = sorted({other for axis in move for other in self.beside[axis]} - {*move})
            near = ({**new, axis: value} for axis in self._shuffled(beside) for value in self._shuffled(self.values[axis]))
            new = next(filter(is_quick, near), {})
        key = tuple(new.values())
        if new and key not in self._valid:
            self._valid[key] = not refusals(new)
        return new if new and self._valid[key] else None

    def cheaper(self) -> None:
        """Change one case into another that costs no more and has each pair that only this case had."""
        place = self.draw.randrange(len(self.cases))
        case = self.cases[place]
        alone = {two for two in self.pairs(case) if self.times[two] == 1}
        for move in self.draw.sample(self.moves, 12):
            new = self.changed(case, move)
            if new is not None and new != case and cost(new) <= cost(case) and alone <= self.pairs(new):
                self._replace(place, new)
                return

    def left_out(self) -> None:
        """Leave out one case, if changes of other cases that cost less have the pairs that only this case had."""
        places = self.draw.sample(range(len(self.cases)), 4)
        place = min(places, key=lambda i: sum(self.times[two] == 1 for two in self.pairs(self.cases[i])) / cost(self.cases[i]))
        target = self.cases.pop(place)
        self.times.subtract(self.pairs(target))
        budget, before = cost(target), list[tuple[int, Case]]()
        for two in self.pairs(target):
            if self.times[two]:
                continue
            if (found := self._cheapest_with(two, budget)) is None:
                for other, case in reversed(before):
                    self._replace(other, case)
                self.cases.insert(place, target)
                self.times.update(self.pairs(target))
                return
            other, new = found
            budget -= cost(new) - cost(self.cases[other])
            before.append((other, self.cases[other]))
            self._replace(other, new)

    def _cheapest_with(self, two: tuple[int, ...], budget: float) -> tuple[int, Case] | None:
        """Return a case's place and a change of it that has a pair, loses none and costs less than a budget more."""
        move = {axis: value for i in two for axis, value in self.settings[i]}
        near = sorted(self.draw.sample(range(len(self.cases)), min(120, len(self.cases))), key=lambda i: self._apart(i, move))
        best = None
        for place in near[:40]:
            case = self.cases[place]
            new = self.changed(case, move)
            if new is None or (more := cost(new) - cost(case)) >= budget or two not in self.pairs(new):
                continue
            if all(self.times[other] > 1 or other in self.pairs(new) for other in self.pairs(case)):
                best, budget = (place, new), more
                if more <= 0:
                    break
        return best

    def _apart(self, place: int, move: Setting) -> int:
        return sum(self.cases[place][axis] != value for axis, value in move.items())

    def _replace(self, place: int, case: Case) -> None:
        self.times.subtract(self.pairs(self.cases[place]))
        self.cases[place] = case
        self.times.update(self.pairs(case))

    def _shuffled(self, some: Sequence[Any]) -> list[Any]:
        return self.draw.sample(some, len(some))


def improved(cases: Sequence[Case], required: set[Pair], seed: int, minutes: float) -> list[Case]:
    """Return cases of less cost that have the same required pairs, after a search of some minutes."""
    search = Search(cases, required, seed)
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        search.cheaper() if search.draw.random() < 0.75 else search.left_out()
    assert all(search.times[two] > 0 for two in search.required)
    return search.cases


def main() -> None:
    """Tell of the pairs, or choose cases and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="choose all cases again, and write them")
    parser.add_argument(
        "--improve", type=float, metavar="MINUTES", help="replace cases that do not fit, then search for cheaper cases so long"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the choice")
    parser.add_argument("--tries", type=int, default=30, help="candidates for each case")
    args = parser.parse_args()
    required = {name: pairs_of(feature) for name, feature in FEATURES.items()}
    whole = set().union(*required.values())
    if args.write:
        write(Chooser(whole, args.seed).choose(args.tries))
    if args.improve is not None:
        fitting = [case for case in written_cases() if is_quick(case) and not refusals(case)]
        cases = fitting + Chooser(whole - pairs_in(fitting), args.seed).choose(args.tries)
        write(improved(cases, whole, args.seed, args.improve))
    cases = written_cases()
    has = pairs_in(cases)
    for name, pairs in required.items():
        print(f"{name:12} {len(pairs):5} pairs, {len(pairs & has):5} in the cases")
    print(f"{'all':12} {len(whole):5} pairs, {len(whole & has):5} in {len(cases)} cases, about {sum(map(cost, cases)):.0f} s")


def write(cases: Iterable[Case]) -> None:
    """Keep the cases for the normal run."""
    rows = [{axis: value for axis, value in case.items() if value != DEFAULTS[axis]} for case in cases]
    WRITTEN.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
