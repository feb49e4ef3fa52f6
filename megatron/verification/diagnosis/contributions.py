"""Which microbatches a gradient is made of: the coefficients with which their contributions add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
