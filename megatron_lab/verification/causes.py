"""What a wrong tensor or number looks like: where it differs, and the mistake that makes such a difference.

A mistake shows in coefficients. A tensor that is its reference times a number was summed too often or divided wrongly; a gradient
is a sum of what each microbatch gives, an update one of the right update and the weights before. The first such explanation counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_lab.verification.comparison import ComparedTensors, Comparison, FindingKind, ProofFinding
from megatron_lab.verification.joined import AXES, HeldPart, JoinedTensor, Measured, combination, constant_ratio, is_near, norm
from megatron_lab.verification.observation import PlainRun
from megatron_lab.verification.wording import TOLERANCE, Factor, factor_words, listing, relative

LISTED = 5
"""The most further names in a finding."""
_SUM_ROOM = 1e3 * TOLERANCE
"""Relative difference at which a sum counts as right: it has the rounding of a few more operations."""


@dataclass(frozen=True)
class Cause:
    """What a wrong tensor looks like. Tensors with the same cause share a finding."""

    text: str
    """Empty if no explanation fits."""
    notes: tuple[str, ...] = ()
    """Where it differs, if not everywhere."""
    group: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that differs from its reference."""

    joined: JoinedTensor
    wanted: Tensor
    measured: Measured

    @cached_property
    def parts(self) -> tuple[HeldPart, ...]:
        """The parts that differ, each by itself; all, if only the whole does."""
        held = self.joined.held
        allowed = self.measured.allowed / math.sqrt(len(held))
        return tuple(each for each in held if not norm(each.part.values - each.part.cut(self.wanted)) <= allowed) or held

    @cached_property
    def values(self) -> Tensor:
        """The elements of these parts, flat."""
        return torch.cat([each.part.values.flatten() for each in self.parts])

    @property
    def excess(self) -> Tensor:
        """What these have more than the reference."""
        return self.values - self.same_of(self.wanted)

    def same_of(self, whole: Tensor) -> Tensor:
        """The same elements of another tensor."""
        return torch.cat([each.part.cut(whole).flatten() for each in self.parts])


Explanation = Callable[[WrongTensor], tuple[str, str]]
"""An explanation that only tensors of one kind can have, and the group that it is about; empty where it does not fit."""


def cause_of(wrong: WrongTensor, factors: Sequence[Factor], explain: Explanation) -> Cause:
    """The cause of a difference."""
    if wrong.joined.shapes != {tuple(wrong.wanted.shape)}:
        return Cause(wrong.measured.words())
    bad = tuple(sorted({each.rank for each in wrong.parts if not each.part.values.isfinite().all()}))
    if bad:
        return Cause(f"not finite, on rank {listing(bad)}", ranks=bad)
    if missing := _missing_sum(wrong):
        return missing
    ratio = constant_ratio(wrong.values, wrong.same_of(wrong.wanted))
    text, group = explain(wrong) if ratio is None else factor_words(ratio, factors)
    notes, everywhere = [], wrong.joined.held
    for axis, name in AXES.items():
        ranks, all_ranks = ({each.coordinates[axis] for each in held} for held in (wrong.parts, everywhere))
        if ranks != all_ranks:
            notes.append(f"only on {name} rank {listing(ranks)}")
    if apart := list(dict.fromkeys(AXES[replicas.axis] for replicas in wrong.joined.ranks_apart())):
        notes.append(f"the {' and '.join(apart)} ranks hold different values")
        group = group or apart[0]
    some, every = ({each.rank for each in held} for held in (wrong.parts, everywhere))
    return Cause(text, tuple(notes), group, tuple(sorted(some)) if some != every else ())


_MISSING = "the sum over the {} group is missing: each rank keeps its own part, and the sum of the parts is right"
_MISSING_OVER = {axis: _MISSING.format(name) for axis, name in AXES.items()}
_MISSING_OVER["pp"] = (
    "the tied embedding is not joined: the first and the last stage each keep the gradient of their own use of it, and their sum "
    "is right"
)


def _missing_sum(wrong: WrongTensor) -> Cause | None:
    """A sum is missing: replicas along one axis hold parts whose sum is what each should hold."""
    apart = wrong.joined.ranks_apart()
    for axis, text in _MISSING_OVER.items():
        along = [replicas for replicas in apart if replicas.axis == axis]
        if not along:
            continue
        bias = ""
        for replicas in along:
            wanted = replicas.held[0].part.cut(wrong.wanted)
            left, allowed = replicas.sum() - wanted, _SUM_ROOM * norm(wanted)
            if not norm(left) <= allowed:
                bias = ", but for a bias that each of them adds"
                if left.dim() < 3 or not norm(left - left[:1, :1]) <= allowed:
                    break
        else:
            ranks = along[0].ranks
            return Cause(f"{text}{bias} (ranks {listing(ranks)}, for one)", group=AXES[axis], ranks=ranks)
    return None


def not_explained(wrong: WrongTensor) -> tuple[str, str]:
    """The explanation of tensors of which nothing more is known."""
    return "", ""


def microbatches_in(plain: PlainRun) -> Explanation:
    """A gradient of the first step has not each microbatch's contribution once."""
    tokens = dict(zip(plain.microbatches, plain.microbatch_tokens, strict=True))

    def explain(wrong: WrongTensor) -> tuple[str, str]:
        each = zip(plain.microbatches, plain.contributions[wrong.joined.name], strict=True)
        counts = combination(wrong.values, {place: wrong.same_of(part) for place, part in each})
        if counts is None:
            return "", ""
        text = mixture_words(counts, tokens)
        return text, AXES["dp"] if len({rank for rank, _ in counts}) > 1 and "overwrites" not in text else ""

    return explain


def mixture_words(counts: Mapping[tuple[int, int], float], tokens: Mapping[tuple[int, int], float]) -> str:
    """How often each microbatch is in a gradient, where that is not once, and what it looks like.

    Args:
        counts: by (data rank, microbatch).
        tokens: how many tokens of each count.
    """
    wrong = {place: value for place, value in counts.items() if not is_near(value, 1)}
    if not wrong:
        return ""
    missing = [place for place, value in wrong.items() if is_near(value, 0)]
    last = dict(sorted(counts))
    early = [place for place in counts if place[1] != last[place[0]]]
    of_rank = {rank: math.fsum(tokens[place] for place in counts if place[0] == rank) for rank in last}
    for each, many in (("microbatch", tokens), ("data rank", {place: of_rank[place[0]] for place in counts})):
        weights = [many[place] * value for place, value in counts.items()]
        if max(weights) - min(weights) < 1e-6 * max(weights):
            return f"each {each} weighs the same, however many tokens count in it: a mean of means"
    if missing and set(missing) == set(wrong) == set(early):
        return "only the last microbatch is in it: each overwrites those before it"
    if len(missing) < len(wrong):
        why = "written or reduced again" if all(is_near(value, round(value)) for value in wrong.values()) else "weighed wrongly"
    elif len(last) == 1:
        why = "never added"  # nothing is reduced over one data rank
    else:
        why = "reduced too early, or never added" if set(missing) & set(early) else "reduced before the last gradient was in it"
    listed = [
        f"microbatch {number} of data rank {rank} {'is missing' if (rank, number) in missing else f'counts {value:.6g} times'}"
        for (rank, number), value in list(wrong.items())[:4]
    ]
    return f"{', '.join(listed)}{' and others' if len(wrong) > 4 else ''}: {why}"


def left_over(before: Mapping[str, JoinedTensor]) -> Explanation:
    """A gradient still has that of the step before in it."""

    def explain(wrong: WrongTensor) -> tuple[str, str]:
        found = combination(wrong.excess, {"before": wrong.same_of(before[wrong.joined.name].tensor)})
        if found is None:
            return "", ""
        times = "" if is_near(found["before"], 1) else f"{found['before']:.6g} times "
        return f"it still holds {times}the gradient of the step before: what a step has summed is not forgotten at the next", ""

    return explain


def wrong_update(before: Mapping[str, Tensor]) -> Explanation:
    """Weights have moved from those before the step by too much, by too little, or with another decay."""

    def explain(wrong: WrongTensor) -> tuple[str, str]:
        start = wrong.same_of(before[wrong.joined.name])
        if torch.equal(wrong.values, start):
            return "the weights are as before: no update reached them", ""
        found = combination(wrong.excess, {"update": wrong.same_of(wrong.wanted) - start, "weights": start})
        if found is None:
            return "differs by no constant factor: clipping, moments or the update rule", ""
        if not is_near(found["update"], 0):
            return f"the change is {factor_words(1 + found['update'])[0]}", ""  # sums over groups are right: the gradient is
        return f"it is too far by {found['weights']:.6g} times the weights before: weight decay acts otherwise than it should", ""

    return explain


# ---- findings


def tensor_findings(
    runs: Comparison,
    index: int | None,
    kind: FindingKind,
    compared: ComparedTensors,
    lead: str = "",
    *,
    names: Sequence[str] | None = None,
    factors: Sequence[Factor] = (),
    explain: Explanation = not_explained,
) -> Iterator[ProofFinding]:
    """One finding for each cause of the tensors that differ.

    Args:
        lead: words before the cause.
        names: the tensors in the order of cause; by default all that differ, in that of the forward.
    """
    together: dict[Cause, list[str]] = {}
    for name in compared.differing if names is None else names:
        wrong = WrongTensor(compared.joined[name], compared.reference[name], compared.measured[name])
        together.setdefault(cause_of(wrong, factors, explain), []).append(name)
    for cause, same in together.items():
        text = cause.text or f"differs by no constant factor ({compared.measured[same[0]].words()})"
        others = likewise(same)
        if kind is FindingKind.GRADIENT and len(same) == len(compared.measured) > 1:
            others = "so are the gradients of all parameters"
        worst = max(compared.measured[name].relative for name in same)
        text = sentence(lead, text, *cause.notes, others)
        yield runs.finding(index, kind, same, text, worst, group=cause.group, ranks=cause.ranks)


def number_findings(
    runs: Comparison,
    index: int | None,
    kind: FindingKind,
    where: str | Sequence[str],
    what: str,
    found: float,
    wanted: float,
    why: str = "",
    *,
    divides: bool = False,
) -> Iterator[ProofFinding]:
    """A finding if two numbers differ by more than rounding.

    Args:
        why: words on what it can be.
        divides: the loss and every gradient are divided by it.
    """
    if abs(found - wanted) <= TOLERANCE * abs(wanted):
        return
    text = f"{what} is {found:.12g}, the reference's {wanted:.12g}"
    if math.isfinite(found) and found and wanted:
        factor, _ = factor_words(wanted / found if divides else found / wanted, runs.factors(index or 0))
        text += f": {'the loss and every gradient are ' * divides}{factor}"
    yield runs.finding(index, kind, where, sentence(text, why), relative(found - wanted, wanted))


def likewise(names: Sequence[str]) -> str:
    """The names after the first in words."""
    more = len(names) - 1 - LISTED
    return f"likewise {', '.join(names[1 : 1 + LISTED])}{f' and {more} others' if more > 0 else ''}" if names[1:] else ""


def sentence(*parts: str) -> str:
    """The parts that say something."""
    return "; ".join(filter(None, parts))
