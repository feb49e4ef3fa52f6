"""Tensors joined from the parts of all ranks: whether ranks that hold the same part agree, and how far it is from the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from megatron_lab.verification.observation import RankObservation, TensorPart
from megatron_lab.verification.wording import NEGLIGIBLE, ROUNDING, TOLERANCE, relative, relative_words, short

AXES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
"""The field's names for the ranks along an axis."""


@dataclass(frozen=True)
class HeldPart:
    """A part of a tensor, and the rank that holds it."""

    rank: int
    coordinates: Mapping[str, int]
    part: TensorPart


@dataclass(frozen=True)
class ReplicaSet:
    """Ranks that differ on one axis only and hold the same box of a tensor."""

    axis: str
    held: tuple[HeldPart, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(each.rank for each in self.held)

    def agree(self) -> bool:
        """Whether they hold the same bits."""
        return all(torch.equal(each.part.values, self.held[0].part.values) for each in self.held)

    def apart(self) -> float:
        """The largest difference from the first, as a share of its norm."""
        first = self.held[0].part.values
        return max(relative(norm(each.part.values - first), norm(first)) for each in self.held)

    def sum(self) -> Tensor:
        """The sum of what they hold."""
        return torch.stack([each.part.values for each in self.held]).sum(dim=0)


@dataclass(frozen=True)
class JoinedTensor:
    """One tensor of the model, as all ranks together hold it."""

    name: str
    held: tuple[HeldPart, ...]

    @cached_property
    def tensor(self) -> Tensor:
        """The whole tensor. If several ranks hold an element, the first counts; it is zero where none does (see `holes`)."""
        return self._filled[0]

    @property
    def holes(self) -> int:
        """Number of elements that no rank holds."""
        return self._filled[1]

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The global shapes that ranks report: one, if all is well."""
        return {each.part.shape for each in self.held}

    def versions(self) -> Iterator[Tensor]:
        """The whole tensor; then, for each holder whose part differs from it, the tensor with that part."""
        yield self.tensor
        for each in self.held:
            if each.part.shape == tuple(self.tensor.shape) and not torch.equal(each.part.cut(self.tensor), each.part.values):
                version = self.tensor.clone()
                version[each.part.box.index] = each.part.values
                yield version

    def ranks_apart(self) -> list[ReplicaSet]:
        """Sets of ranks that hold the same part, axis by axis, but do not agree on it."""
        found = []
        for axis in AXES:
            sets: dict[object, list[HeldPart]] = {}
            for each in self.held:
                others = tuple(sorted((a, at) for a, at in each.coordinates.items() if a != axis))
                sets.setdefault((others, each.part.box), []).append(each)
            found += [ReplicaSet(axis, tuple(same)) for same in sets.values()]
        return [replicas for replicas in found if not replicas.agree()]

    @cached_property
    def _filled(self) -> tuple[Tensor, int]:
        first = self.held[0].part
        shape = first.shape
        if tuple(first.values.shape) == shape and not any(first.offsets):  # the first holds it all
            return first.values.to(torch.float64, copy=True), 0
        tensor, missing = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)
        for each in self.held:
            if each.part.shape != shape:
                continue
            index = each.part.box.index
            tensor[index] = torch.where(missing[index], each.part.values, tensor[index])
            missing[index] = False
        return tensor, int(missing.sum())


def join(ranks: Sequence[RankObservation], parts: Sequence[Sequence[TensorPart]]) -> dict[str, JoinedTensor]:
    """Every tensor of which some rank holds a part, by name, from the parts of each rank."""
    found: dict[str, list[HeldPart]] = {}
    for rank, held in zip(ranks, parts, strict=True):
        for part in held:
            found.setdefault(part.name, []).append(HeldPart(rank.rank, rank.coordinates, part))
    return {name: JoinedTensor(name, tuple(held)) for name, held in found.items()}


@dataclass(frozen=True)
class Measured:
    """The difference of a tensor from its reference."""

    difference: float
    """Norm of the difference; infinite where the shapes are not the same."""
    size: float
    """Norm of the reference."""
    allowed: float
    """The largest difference that rounding can explain."""
    scale: float
    """The unit of `relative`: the reference's norm, a small share of the global norm where that is more, or the whole global norm
    where the reference is negligible."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ratio: float | None = None
    """The factor of the tensor over the reference, if nothing else differs."""
    rows: tuple[int, ...] = ()
    """Rows that differ (indices of the first dimension), if not all do."""

    @property
    def differs(self) -> bool:
        """Whether the difference is more than rounding."""
        return not self.difference <= self.allowed  # written so that NaN differs

    @property
    def relative(self) -> float:
        """The difference as a share of the scale: infinite if that is zero, or if anything is not finite."""
        return relative(self.difference, self.scale)

    @property
    def relative_allowed(self) -> float:
        """The share of the scale that rounding can explain."""
        return relative(self.allowed, self.scale)

    @property
    def excess(self) -> float:
        """The difference over what is allowed."""
        if self.allowed and not math.isnan(self.difference):
            return self.difference / self.allowed
        return math.inf if self.difference else 0.0

    def words(self) -> str:
        """The difference in words."""
        if self.shapes[0] != self.shapes[1]:
            return f"shape {list(self.shapes[0])}, reference {list(self.shapes[1])}"
        notes = [relative_words(self.difference, self.size)]
        notes += [] if self.ratio is None else [f"{short(self.ratio)}x the reference"]
        notes += [f"{rows_words(self.rows)} of {self.shapes[0][0]}"] if self.rows else []
        return "; ".join(notes)


def measure(
    actual: Tensor, reference: Tensor, *, global_norm: float = 0.0, tolerance: float = TOLERANCE, slack: float = 0.0
) -> Measured:
    """Compare a tensor with its reference.

    Args:
        global_norm: norm of all tensors of the kind together. Its rounding is allowed; what is negligible beside it is compared
            absolutely.
        tolerance: relative; with 0, rounding is not allowed either.
        slack: allowed in addition, absolute.
    """
    shapes = tuple(actual.shape), tuple(reference.shape)
    a, b = actual.detach().double().cpu(), reference.detach().double().cpu()
    size, negligible = norm(b), NEGLIGIBLE * global_norm
    scale = max(size, ROUNDING / tolerance * global_norm) if tolerance else size
    allowed, scale = (tolerance * scale, scale) if size >= negligible else (negligible, global_norm)
    allowed += slack
    if shapes[0] != shapes[1]:
        return Measured(math.inf, size, allowed, scale, shapes)
    found = Measured(norm(a - b), size, allowed, scale, shapes)
    if not found.differs:
        return found
    return Measured(found.difference, size, allowed, scale, shapes, constant_ratio(a, b), differing_rows(a, b, allowed))


def joint_norm(tensors: Iterable[Tensor]) -> float:
    """Norm of all elements together."""
    return math.hypot(*(norm(tensor) for tensor in tensors))


def norm(tensor: Tensor) -> float:
    """Square root of the sum of squares, summed in float64."""
    return tensor.detach().double().square().sum().sqrt().item()


_CONSTANT = 1e-6
"""A coefficient this near to a whole number counts as that number."""
_EXPLAINED = 1e-7
"""A tensor is a combination of others if at most this share of it is left."""

TermName = TypeVar("TermName")


def combination(found: Tensor, terms: Mapping[TermName, Tensor]) -> dict[TermName, float] | None:
    """The coefficients with which tensors add up to another, by least squares; without those that are zero.

    Returns:
        None where they do not add up to it, or do so in several ways.
    """
    present = {name: term.flatten() for name, term in terms.items() if term.any()}
    if not present or found.numel() <= len(present):  # as many unknowns as numbers explain anything
        return None
    matrix = torch.stack(list(present.values()), dim=1)
    if not (found.isfinite().all() and matrix.isfinite().all()):
        return None
    scale = matrix.norm(dim=0)
    solved = torch.linalg.lstsq(matrix / scale, found.reshape(-1, 1), driver="gelsd")
    if int(solved.rank) < len(present):
        return None
    left = matrix / scale @ solved.solution - found.reshape(-1, 1)
    if norm(left) > _EXPLAINED * norm(found):
        return None
    return dict(zip(present, (solved.solution.squeeze(1) / scale).tolist(), strict=True))


def is_near(value: float, number: float) -> bool:
    """Whether a coefficient counts as a number."""
    return abs(value - number) < _CONSTANT


def constant_ratio(a: Tensor, b: Tensor) -> float | None:
    """The factor of a over b, if there is one and it is not 1: the sign of a wrong scale, a missing sum, or one made twice."""
    found = combination(a, {"b": b})
    return None if found is None or is_near(found["b"], 1) else found["b"]


def differing_rows(a: Tensor, b: Tensor, allowed: float) -> tuple[int, ...]:
    """Which rows differ, if not all do: the sign of a wrong slice."""
    if a.dim() == 0 or len(a) < 2:
        return ()
    rows = (a - b).flatten(1).norm(dim=1) if a.dim() > 1 else (a - b).abs()
    bad = (~(rows <= allowed / math.sqrt(len(rows)))).nonzero().flatten().tolist()
    return tuple(bad) if len(bad) < len(rows) else ()


def rows_words(rows: tuple[int, ...]) -> str:
    """`rows 4 to 7`, or how many and from where."""
    if len(rows) > 1 and rows[-1] - rows[0] == len(rows) - 1:
        return f"rows {rows[0]} to {rows[-1]}"
    return f"{len(rows)} rows from {rows[0]} on"
