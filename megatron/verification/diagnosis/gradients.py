"""Gradients of one step: which is the first in the order of backward that differs, and what kind of mistake gives just that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.verification.diagnosis.comparison import Compared, Comparison
from megatron.verification.diagnosis.contributions import Microbatch, explain, mixture_words
from megatron.verification.diagnosis.finding import Finding, Kind
from megatron.verification.diagnosis.join import GROUP_WORDS, Held, Joined, Replicas, cut
from megatron.verification.diagnosis.measure import constant_ratio, norm
from megatron.verification.diagnosis.places import listing
from megatron.verification.diagnosis.ratios import ratio_group, ratio_words
from megatron.verification.diagnosis.tolerance import TOLERANCE

LISTED = 6


@dataclass(frozen=True)
class _Cause:
    """What is wrong with one gradient."""

    text: str
    group: str = ""
    ranks: tuple[int, ...] = ()


def gradient_findings(runs: Comparison, index: int) -> Iterator[Finding]:
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
        yield Finding(Kind.GRADIENT, iteration, runs.place(first), text, worst, tuple(names), stages, cause.group, cause.ranks)


def _others(names: list[str], of: int) -> str:
    if len(names) == of and of > 1:
        return "; so are the gradients of all parameters"
    if len(names) == 1:
        return ""
    told = ", ".join(names[1:LISTED])
    return f"; likewise {told}" + (f" and {len(names) - LISTED} others" if len(names) > LISTED else "")


def _cause(runs: Comparison, index: int, compared: Compared, name: str) -> _Cause:
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


def _missing_sum(apart: list[Replicas], wanted: Tensor) -> _Cause | None:
    """Replicas along one axis hold parts whose sum is what each should hold."""
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


def _factor(runs: Comparison, index: int, joined: Joined, wanted: Tensor) -> _Cause | None:
    """All of it is the reference times one number."""
    ratio = constant_ratio(joined.tensor, wanted)
    if ratio is None or not all(_near(each.part.values, ratio * cut(wanted, each.part)) for each in joined.held):
        return None
    if ratio == 0:
        return _Cause("zero: nothing of the backward pass reaches it")
    facts = runs.facts(index)
    return _Cause(ratio_words(ratio, facts), ratio_group(ratio, facts))


def _microbatches(runs: Comparison, index: int, joined: Joined, apart: bool) -> _Cause | None:
    """It is made of the microbatches' contributions, but not of each of them once."""
    if index or joined.name not in runs.plain.contributions:
        return None
    contributions = runs.plain.contributions[joined.name]
    places = runs.plain.microbatches
    tokens = dict(zip(places, getattr(runs.plain, "microbatch_tokens", [1.0] * len(places)), strict=True))
    found: dict[str, list[Held]] = {}
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


def _flat_contributions(whole: Tensor, places: list[Microbatch], mine: list[Held]) -> Mapping[Microbatch, Tensor]:
    return {place: torch.cat([cut(whole[number], each.part).flatten() for each in mine]) for number, place in enumerate(places)}


def _left_over(runs: Comparison, index: int, compared: Compared, name: str) -> _Cause | None:
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


def _some_ranks(joined: Joined, wanted: Tensor, apart: list[Replicas]) -> _Cause | None:
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


def _plain_words(compared: Compared, name: str) -> str:
    return f"differs by no constant factor ({compared.measured[name].words()})"


def _near(found: Tensor, wanted: Tensor) -> bool:
    return norm(found - wanted) <= 1e3 * TOLERANCE * norm(wanted)
