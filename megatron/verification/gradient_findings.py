"""Gradients of one step: the first that differs, in the order of backward, and the kind of mistake that makes this difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.verification.comparison import ComparedTensors, Comparison, FindingKind, ProofFinding
from megatron.verification.joined import GROUP_WORDS, HeldPart, JoinedTensor, ReplicaSet, constant_ratio, cut, near
from megatron.verification.wording import listing, ratio_group, ratio_words

LISTED = 6
_EXPLAINED = 1e-7
"""A gradient is explained if at most this share of it is left."""
_WHOLE = 1e-5
"""A coefficient this near to a whole number counts as that number."""

MicrobatchPlace = tuple[int, int]
"""(data rank, index among its microbatches)."""


@dataclass(frozen=True)
class GradientCause:
    """The cause of one wrong gradient."""

    text: str
    group: str = ""
    ranks: tuple[int, ...] = ()


def gradient_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Differences in the step of this index. Parameters with the same cause share a finding, in the order of backward."""
    compared = runs.gradients(index)
    together: dict[tuple[str, str], list[str]] = {}
    causes = {name: _cause(runs, index, compared, name) for name in compared.differing}
    for name, cause in causes.items():
        together.setdefault((cause.text, cause.group), []).append(name)
    for names in together.values():
        cause = causes[names[0]]
        text = cause.text + likewise(names, LISTED)
        if len(names) == len(compared.measured) > 1:
            text = f"{cause.text}; so are the gradients of all parameters"
        worst = max(compared.measured[name].relative for name in names)
        yield runs.finding(FindingKind.GRADIENT, index, names, text, worst, group=cause.group, ranks=cause.ranks)


def likewise(names: Sequence[str], most: int) -> str:
    """The names after the first, at most this many, in words."""
    told = ", ".join(names[1:most])
    return (f"; likewise {told}" if told else "") + (f" and {len(names) - most} others" if len(names) > most else "")


def _cause(runs: Comparison, index: int, compared: ComparedTensors, name: str) -> GradientCause:
    """The first explanation that fits."""
    joined, wanted = compared.joined[name], compared.reference[name]
    if joined.shapes != {tuple(wanted.shape)}:
        return GradientCause(compared.measured[name].words())
    bad = tuple(each.rank for each in joined.held if not each.part.values.isfinite().all())
    if bad:
        return GradientCause(f"not finite, on rank {listing(bad)}", ranks=bad)
    apart = joined.ranks_apart()
    return (
        _missing_sum(apart, wanted)
        or _factor(runs, index, joined, wanted)
        or _microbatches(runs, index, joined)
        or _left_over(runs, index, compared, name)
        or _some_ranks(joined, wanted, apart)
        or GradientCause(f"differs by no constant factor ({compared.measured[name].words()})")
    )


def _missing_sum(apart: list[ReplicaSet], wanted: Tensor) -> GradientCause | None:
    """A sum is missing: replicas along one axis hold parts whose sum is what each should hold."""
    for axis, group in GROUP_WORDS.items():
        along = [replicas for replicas in apart if replicas.axis == axis]
        if not along or not all(near(replicas.sum(), cut(wanted, replicas.held[0].part)) for replicas in along):
            continue
        text = f"the sum over the {group} group is missing: each rank keeps its own part, and the sum of the parts is right"
        if axis == "pp":
            text = (
                "the tied embedding is not joined: the first and the last stage each keep the gradient of their own use of it, "
                "and their sum is right"
            )
        return GradientCause(f"{text} (ranks {listing(along[0].ranks)}, for one)", group, along[0].ranks)
    return None


def _factor(runs: Comparison, index: int, joined: JoinedTensor, wanted: Tensor) -> GradientCause | None:
    """The whole gradient is the reference times one number."""
    ratio = constant_ratio(joined.tensor, wanted)
    if ratio is None or not all(each.near(ratio * wanted) for each in joined.held):
        return None
    if ratio == 0:
        return GradientCause("zero: nothing of the backward pass reaches it")
    facts = runs.facts(index)
    return GradientCause(ratio_words(ratio, facts), ratio_group(ratio, facts))


def _microbatches(runs: Comparison, index: int, joined: JoinedTensor) -> GradientCause | None:
    """The gradient is made of the microbatches' contributions, but does not have each of them once."""
    if index or joined.name not in runs.plain.contributions:
        return None
    contributions, places = runs.plain.contributions[joined.name], runs.plain.microbatches
    tokens = dict(zip(places, runs.plain.microbatch_tokens, strict=True))
    found: dict[str, list[HeldPart]] = {}
    for rank in dict.fromkeys(each.rank for each in joined.held):
        mine = [each for each in joined.held if each.rank == rank]
        flat = torch.cat([each.part.values.flatten() for each in mine])
        if len(flat) <= len(places):
            continue  # too few numbers to tell the microbatches apart
        parts = [torch.cat([cut(whole, each.part).flatten() for each in mine]) for whole in contributions]
        coefficients = explain(flat, dict(zip(places, parts, strict=True)))
        if coefficients is None:
            return None
        if text := mixture_words(coefficients, tokens):
            found.setdefault(text, []).extend(mine)
    if not found:
        return None
    texts = [f"on rank {listing(each.rank for each in held)}: {text}" for text, held in found.items()]
    text = "; ".join(texts[:4]) if len(found) > 1 else next(iter(found))
    ranks = tuple(sorted({each.rank for held in found.values() for each in held}))
    reduces = runs.sizes["dp"] > 1 and any("overwrites" not in text for text in found)
    return GradientCause(text, GROUP_WORDS["dp"] if reduces else "", ranks)


def explain(found: Tensor, contributions: Mapping[MicrobatchPlace, Tensor]) -> dict[MicrobatchPlace, float] | None:
    """How often each microbatch that gives anything counts in a gradient, by least squares; 1 is right.

    Args:
        found: flat elements of a gradient.
        contributions: the same elements of each microbatch's part of the right gradient.

    Returns:
        None where the contributions do not explain the gradient, or do so in several ways.
    """
    present = {place: part for place, part in contributions.items() if part.any()}
    if not present or len(found) <= len(present) or not found.isfinite().all():
        return None
    matrix = torch.stack(list(present.values()), dim=1)
    scale = matrix.norm(dim=0)
    solved = torch.linalg.lstsq(matrix / scale, found.unsqueeze(1), driver="gelsd")
    if int(solved.rank) < len(present):
        return None
    left = matrix / scale @ solved.solution - found.unsqueeze(1)
    if left.norm() > _EXPLAINED * max(float(found.norm()), float(matrix.sum(dim=1).norm())):
        return None
    return dict(zip(present, (solved.solution.squeeze(1) / scale).tolist(), strict=True))


def mixture_words(coefficients: Mapping[MicrobatchPlace, float], tokens: Mapping[MicrobatchPlace, float]) -> str:
    """What is wrong with the coefficients in words; empty if each microbatch counts once.

    Args:
        tokens: how many tokens of each microbatch count.
    """
    wrong = {place: value for place, value in coefficients.items() if abs(value - 1) >= _WHOLE}
    if not wrong:
        return ""
    missing = [place for place, value in wrong.items() if abs(value) < _WHOLE]
    lasts = {rank: max(number for of, number in coefficients if of == rank) for rank, _ in coefficients}
    if any(abs(value - round(value)) >= _WHOLE for value in wrong.values()):
        of_rank = {rank: sum(tokens[place] for place in coefficients if place[0] == rank) for rank in lasts}
        for each, many in (("microbatch", tokens), ("data rank", {place: of_rank[place[0]] for place in coefficients})):
            weights = [many[place] * value for place, value in coefficients.items()]
            if max(weights) - min(weights) < _WHOLE * max(weights):
                return f"each {each} weighs the same, however many tokens count in it: a mean of means"
        listed = [f"{_names([place])} by {value:.6g}" for place, value in wrong.items()]
        return f"microbatches are weighed wrongly: {', '.join(listed[:LISTED])}{', ...' if len(listed) > LISTED else ''}"
    if not missing:
        counted = [f"{_names([place])} counts {round(value)} times" for place, value in wrong.items()]
        return f"{', '.join(counted[:4])}: written or reduced again"
    if missing == list(wrong) == [(rank, number) for rank, number in coefficients if number != lasts[rank]]:
        return "only the last microbatch is in it: each overwrites those before it"
    why = "never added"  # nothing is reduced over one data rank
    if len(lasts) > 1:
        last = all(number == lasts[rank] for rank, number in missing)
        why = "reduced before the last gradient was in it" if last else "reduced too early, or never added"
    return f"{_names(missing)} {'is' if len(missing) == 1 else 'are'} missing: {why}"


def _names(places: list[MicrobatchPlace]) -> str:
    """`microbatch 2 of data rank 1`, counted from 0."""
    texts = [f"microbatch {number} of data rank {rank}" for rank, number in places[:4]]
    return " and ".join(texts) + (" and others" if len(places) > 4 else "")


def _left_over(runs: Comparison, index: int, compared: ComparedTensors, name: str) -> GradientCause | None:
    """The excess is a multiple of the gradient of the step before."""
    if not index:
        return None
    more, before = compared.joined[name].tensor - compared.reference[name], runs.gradients(index - 1).joined[name].tensor
    ratio = 1.0 if near(more, before) else constant_ratio(more, before)
    if not ratio:
        return None
    times = "" if ratio == 1.0 else f"{ratio:.6g} times "
    return GradientCause(
        f"it still holds {times}the gradient of the step before: what a step has summed is not forgotten at the next"
    )


def _some_ranks(joined: JoinedTensor, wanted: Tensor, apart: list[ReplicaSet]) -> GradientCause | None:
    """Some ranks hold the right gradient."""
    wrong = [each for each in joined.held if not each.near(wanted)]
    ranks = tuple(sorted({each.rank for each in wrong}))
    groups = " and ".join(dict.fromkeys(replicas.group for replicas in apart))
    differ = f"the {groups} ranks hold different values for the same elements" if apart else ""
    if not wrong or len(ranks) == len({each.rank for each in joined.held}):  # a small difference, or one on all ranks
        return GradientCause(differ, groups, apart[0].ranks) if wrong and apart else None
    text = f"wrong on rank {listing(ranks)} alone"
    for axis in ("tp", "dp", "pp"):
        bad, all_of = ({each.coordinates[axis] for each in held} for held in (wrong, joined.held))
        if bad != all_of:
            text += f" ({GROUP_WORDS[axis]} rank {listing(bad)})"
            break
    return GradientCause(f"{text}; {differ}" if differ else text, groups, ranks)
