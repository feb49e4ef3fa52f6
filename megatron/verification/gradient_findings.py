"""Gradients of one step: which is the first in the order of backward that differs, and what kind of mistake gives just that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.verification.comparison import ComparedTensors, Comparison, FindingKind, ProofFinding
from megatron.verification.joined import GROUP_WORDS, HeldPart, JoinedTensor, ReplicaSet, constant_ratio, cut, norm
from megatron.verification.wording import TOLERANCE, listing, ratio_group, ratio_words

LISTED = 6


@dataclass(frozen=True)
class _Cause:
    """What is wrong with one gradient."""

    text: str
    group: str = ""
    ranks: tuple[int, ...] = ()


def gradient_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Of the step of this index. Parameters with the same cause are told together, the first in the order of backward first."""
    compared = runs.gradients(index)
    causes = {name: _cause(runs, index, compared, name) for name in compared.differing}
    together: dict[tuple[str, str], list[str]] = {}
    for name, cause in causes.items():
        together.setdefault((cause.text, cause.group), []).append(name)
    iteration = runs.plain.steps[index].iteration
    for names in together.values():
        first, cause = names[0], causes[names[0]]
        stages = tuple(sorted({stage for name in names for stage in runs.stages(name)}))
        worst = max(compared.measured[name].relative for name in names)
        text = cause.text + _others(names, len(compared.measured))
        yield ProofFinding(
            FindingKind.GRADIENT, iteration, runs.place(first), text, worst, tuple(names), stages, cause.group, cause.ranks
        )


def _others(names: list[str], of: int) -> str:
    if len(names) == of and of > 1:
        return "; so are the gradients of all parameters"
    if len(names) == 1:
        return ""
    told = ", ".join(names[1:LISTED])
    return f"; likewise {told}" + (f" and {len(names) - LISTED} others" if len(names) > LISTED else "")


def _cause(runs: Comparison, index: int, compared: ComparedTensors, name: str) -> _Cause:
    """The first explanation that fits."""
    joined, wanted = compared.joined[name], compared.reference[name]
    if joined.shapes != {tuple(wanted.shape)}:
        return _Cause(compared.measured[name].words())
    bad = tuple(each.rank for each in joined.held if not each.part.values.isfinite().all())
    if bad:
        return _Cause(f"not finite, on rank {listing(bad)}", ranks=bad)
    apart = [replicas for replicas in joined.replicas() if not replicas.agree()]
    return (
        _missing_sum(apart, wanted)
        or _factor(runs, index, joined, wanted)
        or _microbatches(runs, index, joined, bool(apart))
        or _left_over(runs, index, compared, name)
        or _some_ranks(joined, wanted, apart)
        or _Cause(_plain_words(compared, name))
    )


def _missing_sum(apart: list[ReplicaSet], wanted: Tensor) -> _Cause | None:
    """ReplicaSet along one axis hold parts whose sum is what each should hold."""
    for axis in ("tp", "pp", "dp"):
        along = [replicas for replicas in apart if replicas.axis == axis]
        if not along or not all(replicas.sum_is(wanted) for replicas in along):
            continue
        group, ranks = GROUP_WORDS[axis], along[0].ranks
        if axis == "pp":
            text = (
                "the tied embedding is not joined: the first and the last stage each keep the gradient of their own use of it, "
                "and their sum is right"
            )
        else:
            text = f"the sum over the {group} group is missing: each rank keeps its own part, and the sum of the parts is right"
        return _Cause(f"{text} (ranks {listing(ranks)}, for one)", group, ranks)
    return None


def _factor(runs: Comparison, index: int, joined: JoinedTensor, wanted: Tensor) -> _Cause | None:
    """All of it is the reference times one number."""
    ratio = constant_ratio(joined.tensor, wanted)
    if ratio is None or not all(_near(each.part.values, ratio * cut(wanted, each.part)) for each in joined.held):
        return None
    if ratio == 0:
        return _Cause("zero: nothing of the backward pass reaches it")
    facts = runs.facts(index)
    return _Cause(ratio_words(ratio, facts), ratio_group(ratio, facts))


def _microbatches(runs: Comparison, index: int, joined: JoinedTensor, apart: bool) -> _Cause | None:
    """It is made of the microbatches' contributions, but not of each of them once."""
    if index or joined.name not in runs.plain.contributions:
        return None
    contributions = runs.plain.contributions[joined.name]
    places = runs.plain.microbatches
    tokens = dict(zip(places, getattr(runs.plain, "microbatch_tokens", [1.0] * len(places)), strict=True))
    found: dict[str, list[HeldPart]] = {}
    reduces = False
    for rank in dict.fromkeys(each.rank for each in joined.held):
        mine = [each for each in joined.held if each.rank == rank]
        flat = torch.cat([each.part.values.flatten() for each in mine])
        if len(flat) <= len(places):
            continue  # too few numbers to tell the microbatches apart
        mixture = explain(flat, _flat_contributions(contributions, places, mine))
        if mixture is None:
            return None
        sliced = apart or len({each.box for each in joined.held if each.coordinates["tp"] == mine[0].coordinates["tp"]}) > len(mine)
        text = mixture_words(mixture, tokens, mine[0].coordinates["dp"] if sliced else None)
        if text is not None:
            found.setdefault(text, []).extend(mine)
            reduces = reduces or not mixture.overwritten
    if not found:
        return None
    several = len(found) > 1
    texts = [f"on rank {listing(each.rank for each in held)}: {text}" if several else text for text, held in found.items()]
    ranks = tuple(sorted({each.rank for held in found.values() for each in held}))
    return _Cause("; ".join(texts[:4]), GROUP_WORDS["dp"] if reduces and runs.sizes["dp"] > 1 else "", ranks)


def _flat_contributions(whole: Tensor, places: list[Microbatch], mine: list[HeldPart]) -> Mapping[Microbatch, Tensor]:
    return {place: torch.cat([cut(whole[number], each.part).flatten() for each in mine]) for number, place in enumerate(places)}


def _left_over(runs: Comparison, index: int, compared: ComparedTensors, name: str) -> _Cause | None:
    """What is too much is a part of the gradient of the step before."""
    if not index:
        return None
    more, before = compared.joined[name].tensor - compared.reference[name], runs.gradients(index - 1).joined[name].tensor
    ratio = constant_ratio(more, before)
    one = ratio is None and _near(more, before)
    if not one and not ratio:
        return None
    times = "" if one else f"{ratio:.6g} times "
    return _Cause(f"it still holds {times}the gradient of the step before: what a step has summed is not forgotten at the next")


def _some_ranks(joined: JoinedTensor, wanted: Tensor, apart: list[ReplicaSet]) -> _Cause | None:
    """Some ranks hold what is right."""
    wrong = [each for each in joined.held if not _near(each.part.values, cut(wanted, each.part))]
    if not wrong:  # by little, on all
        return None
    ranks = tuple(sorted({each.rank for each in wrong}))
    groups = " and ".join(GROUP_WORDS[axis] for axis in dict.fromkeys(replicas.axis for replicas in apart))
    differ = f"the {groups} ranks hold different values for the same elements" if apart else ""
    if len(ranks) == len({each.rank for each in joined.held}):
        return _Cause(differ, groups, apart[0].ranks) if apart else None
    text = f"wrong on rank {listing(ranks)} alone"
    for axis in ("tp", "dp", "pp"):
        bad, all_of = ({each.coordinates[axis] for each in held} for held in (wrong, joined.held))
        if bad != all_of:
            text += f" ({GROUP_WORDS[axis]} rank {listing(bad)})"
            break
    return _Cause(f"{text}; {differ}" if differ else text, groups, ranks)


def _plain_words(compared: ComparedTensors, name: str) -> str:
    return f"differs by no constant factor ({compared.measured[name].words()})"


def _near(found: Tensor, wanted: Tensor) -> bool:
    return norm(found - wanted) <= 1e3 * TOLERANCE * norm(wanted)


Microbatch = tuple[int, int]
"""Data rank, and place among its microbatches."""

_EXPLAINED = 1e-7
"""What may be left of a gradient, relative, when it is explained."""
_WHOLE = 1e-5
"""How near a coefficient is to a whole number that it is."""


@dataclass(frozen=True)
class Mixture:
    """Coefficients of the microbatches that gave anything; 1 each is right."""

    coefficients: dict[Microbatch, float]

    def with_coefficient(self, value: float) -> list[Microbatch]:
        """Those that are counted so often."""
        return [place for place, found in self.coefficients.items() if abs(found - value) < _WHOLE]

    @property
    def right(self) -> bool:
        """Whether each counts once."""
        return len(self.with_coefficient(1)) == len(self.coefficients)

    @property
    def whole(self) -> bool:
        """Whether each counts a whole number of times."""
        return all(abs(found - round(found)) < _WHOLE for found in self.coefficients.values())

    def last(self, data_rank: int) -> int:
        """The last microbatch of a data rank."""
        return max(number for rank, number in self.coefficients if rank == data_rank)

    @property
    def overwritten(self) -> bool:
        """Whether the last of several microbatches of each data rank counts once, and all others not at all."""
        lasts = [place for place in self.coefficients if place[1] == self.last(place[0])]
        others = [place for place in self.coefficients if place not in lasts]
        return bool(others) and self.with_coefficient(1) == lasts and self.with_coefficient(0) == others


def explain(found: Tensor, contributions: Mapping[Microbatch, Tensor]) -> Mixture | None:
    """The coefficients, by least squares; None where the contributions do not explain the gradient, or do so in several ways.

    Args:
        found: flat elements of a gradient.
        contributions: the same elements of each microbatch's part of the right gradient.
    """
    present = {place: part for place, part in contributions.items() if part.any()}
    if not present or len(found) <= len(present) or not found.isfinite().all():
        return None
    places, matrix = list(present), torch.stack(list(present.values()), dim=1)
    scale = matrix.norm(dim=0)
    solved = torch.linalg.lstsq(matrix / scale, found.unsqueeze(1), driver="gelsd")
    if int(solved.rank) < len(places):
        return None
    left = matrix / scale @ solved.solution - found.unsqueeze(1)
    if left.norm() > _EXPLAINED * max(float(found.norm()), float(matrix.sum(dim=1).norm())):
        return None
    return Mixture(dict(zip(places, (solved.solution.squeeze(1) / scale).tolist(), strict=True)))


def mixture_words(mixture: Mixture, tokens: Mapping[Microbatch, float], data_rank: int | None = None) -> str | None:
    """What is wrong with the coefficients; None where each microbatch counts once.

    Args:
        tokens: how many count in each microbatch.
        data_rank: of the rank that holds the gradient, if it is not the same on all data ranks.
    """
    if mixture.right:
        return None
    missing = mixture.with_coefficient(0)
    if len(missing) == len(mixture.coefficients):
        return "zero: no microbatch's gradient reaches it"
    others = [place for place in mixture.coefficients if data_rank is not None and place[0] != data_rank]
    if others and set(missing) == set(others):
        return "only the rank's own microbatches are in it: the sum over the data group is missing"
    if missing and mixture.whole:
        if mixture.overwritten:
            return "only the last microbatch is in it: each overwrites those before it"
        last = all(place[1] == mixture.last(place[0]) for place in missing)
        why = "reduced before the last gradient was in it" if last else "reduced too early, or never added"
        if len({rank for rank, _ in mixture.coefficients}) == 1:
            why = "never added"  # nothing is reduced over one data rank
        return f"{_names(missing)} {'is' if len(missing) == 1 else 'are'} missing: {why}"
    if mixture.whole:
        counted = [f"{_names([place])} counts {round(c)} times" for place, c in mixture.coefficients.items() if round(c) != 1]
        return f"{', '.join(counted[:4])}: written or reduced again"
    weights = [c * tokens[place] for place, c in mixture.coefficients.items()]
    if max(weights) - min(weights) < _WHOLE * max(weights):
        return "each microbatch weighs the same, however many tokens count in it: a mean of means"
    by_rank = [sum(tokens[p] for p in mixture.coefficients if p[0] == place[0]) * c for place, c in mixture.coefficients.items()]
    if max(by_rank) - min(by_rank) < _WHOLE * max(by_rank):
        return "each data rank weighs the same, however many tokens count on it: a mean of means"
    listed = [f"{_names([place])} by {c:.6g}" for place, c in mixture.coefficients.items() if abs(c - 1) >= _WHOLE]
    return f"microbatches are weighed wrongly: {', '.join(listed[:6])}{', ...' if len(listed) > 6 else ''}"


def _names(places: list[Microbatch]) -> str:
    """`microbatch 2 of data rank 1`, counted from 0."""
    texts = [f"microbatch {number} of data rank {rank}" for rank, number in places[:4]]
    return " and ".join(texts) + (" and others" if len(places) > 4 else "")
