"""Full tensors, assembled from the slices that the ranks recorded. The module checks that replicas agree, and measures how far a
tensor is from its reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from megatron_lab.verification.difference_text import (
    NEGLIGIBLE,
    ROUNDING,
    TOLERANCE,
    compute_relative,
    format_factor,
    format_relative_difference,
)
from megatron_lab.verification.observation import LocalTensor, RankObservation

AXIS_NAMES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
"""Names of the axes in findings and reports."""


@dataclass(frozen=True)
class RankTensor:
    """Slice of a tensor that one rank recorded, with the rank and its coordinates on the axes (tp, cp, dp, pp)."""

    rank: int
    coordinates: Mapping[str, int]
    local: LocalTensor


@dataclass(frozen=True)
class ReplicaSet:
    """Replicas of one slice of a tensor, held by ranks that differ only in their coordinate along one axis."""

    axis: str
    replicas: tuple[RankTensor, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the replicas."""
        return tuple(replica.rank for replica in self.replicas)

    def are_equal(self) -> bool:
        """Check whether all replicas are equal bit by bit."""
        return all(torch.equal(replica.local.values, self.replicas[0].local.values) for replica in self.replicas)

    def compute_max_difference(self) -> float:
        """Return the largest relative difference between a replica and the first replica: the norm of the difference divided by the
        norm of the first replica."""
        first = self.replicas[0].local.values
        return max(compute_relative(compute_norm(replica.local.values - first), compute_norm(first)) for replica in self.replicas)

    def sum(self) -> Tensor:
        """Return the sum of the replicas. If it equals the reference, the replicas are summands that were not reduced."""
        return torch.stack([replica.local.values for replica in self.replicas]).sum(dim=0)


@dataclass(frozen=True)
class GatheredTensor:
    """Tensor of the model, as the collection of the slices that all ranks recorded."""

    name: str
    rank_tensors: tuple[RankTensor, ...]

    @cached_property
    def tensor(self) -> Tensor:
        """Full tensor in float64. An element that several ranks hold is taken from the first of them. Elements that no rank holds
        are zero; `num_missing` counts them."""
        return self._tensor_and_num_missing[0]

    @property
    def num_missing(self) -> int:
        """Number of elements of the full tensor that no rank holds."""
        return self._tensor_and_num_missing[1]

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Shapes of the full tensor according to the ranks. If there is more than one, the ranks disagree, which is an error."""
        return {rank_tensor.local.shape for rank_tensor in self.rank_tensors}

    def iter_versions(self) -> Iterator[Tensor]:
        """Yield the full tensor. Then, for each rank whose slice differs from it, yield a copy of the full tensor with the values
        of that rank."""
        yield self.tensor
        for rank_tensor in self.rank_tensors:
            if rank_tensor.local.shape == tuple(self.tensor.shape) and not torch.equal(
                rank_tensor.local.select(self.tensor), rank_tensor.local.values
            ):
                version = self.tensor.clone()
                version[rank_tensor.local.tensor_slice.index] = rank_tensor.local.values
                yield version

    def find_differing_replicas(self) -> list[ReplicaSet]:
        """Find the replicas with different values. The axes are searched in the order tp, cp, dp, pp."""
        replica_sets = []
        for axis in AXIS_NAMES:
            replicas_by_slice: dict[object, list[RankTensor]] = {}
            for rank_tensor in self.rank_tensors:
                other_coordinates = tuple(sorted((a, coordinate) for a, coordinate in rank_tensor.coordinates.items() if a != axis))
                replicas_by_slice.setdefault((other_coordinates, rank_tensor.local.tensor_slice), []).append(rank_tensor)
            replica_sets += [ReplicaSet(axis, tuple(equal_slices)) for equal_slices in replicas_by_slice.values()]
        return [replica_set for replica_set in replica_sets if not replica_set.are_equal()]

    @cached_property
    def _tensor_and_num_missing(self) -> tuple[Tensor, int]:
        first = self.rank_tensors[0].local
        shape = first.shape
        if tuple(first.values.shape) == shape and not any(first.offsets):  # the first rank holds the full tensor
            return first.values.to(torch.float64, copy=True), 0
        tensor, is_missing = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)
        for rank_tensor in self.rank_tensors:
            if rank_tensor.local.shape != shape:
                continue
            index = rank_tensor.local.tensor_slice.index
            tensor[index] = torch.where(is_missing[index], rank_tensor.local.values, tensor[index])
            is_missing[index] = False
        return tensor, int(is_missing.sum())


def gather_tensors(ranks: Sequence[RankObservation], local_tensors: Sequence[Sequence[LocalTensor]]) -> dict[str, GatheredTensor]:
    """Collect the local tensors of all ranks by name. Return a `GatheredTensor` for each name.

    Args:
        ranks: records of the ranks.
        local_tensors: for each rank, in the order of `ranks`, its local tensors.
    """
    rank_tensors: dict[str, list[RankTensor]] = {}
    for rank, rank_locals in zip(ranks, local_tensors, strict=True):
        for local in rank_locals:
            rank_tensors.setdefault(local.name, []).append(RankTensor(rank.rank, rank.coordinates, local))
    return {name: GatheredTensor(name, tuple(tensors)) for name, tensors in rank_tensors.items()}


@dataclass(frozen=True)
class TensorDifference:
    """Size of the difference between a tensor and its reference, compared with the size that rounding can explain."""

    distance: float
    """Norm of (tensor - reference); infinite if the shapes differ."""
    reference_norm: float
    """Norm of the reference tensor."""
    allowed: float
    """Largest `distance` that rounding can explain."""
    scale: float
    """Norm by which `distance` is divided to give `relative`: the norm of the reference tensor, but at least a small share of
    the global norm (the joint norm of all tensors of this type). If the norm of the reference is negligible, the global norm
    itself."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ratio: float | None = None
    """Constant factor between the tensor and its reference; None if the tensor is not a multiple of its reference."""
    rows: tuple[int, ...] = ()
    """Indices along the first dimension at which the tensor differs; empty if it differs at all indices."""

    @property
    def differs(self) -> bool:
        """Whether the distance is larger than rounding can explain."""
        return not self.distance <= self.allowed  # True for NaN

    @property
    def relative(self) -> float:
        """`distance` divided by `scale`. Infinite if the distance is not finite, or if only the scale is zero."""
        return compute_relative(self.distance, self.scale)

    @property
    def relative_allowed(self) -> float:
        """`allowed` divided by `scale`: the largest relative difference that rounding can explain."""
        return compute_relative(self.allowed, self.scale)

    @property
    def excess(self) -> float:
        """`distance` divided by `allowed`: above 1, the tensor differs by more than rounding."""
        if self.allowed and not math.isnan(self.distance):
            return self.distance / self.allowed
        return math.inf if self.distance else 0.0

    def describe(self) -> str:
        """Describe the difference as text: its relative size, a constant factor if there is one, and the rows that differ."""
        if self.shapes[0] != self.shapes[1]:
            return f"shape {list(self.shapes[0])}, reference {list(self.shapes[1])}"
        clauses = [format_relative_difference(self.distance, self.reference_norm)]
        clauses += [] if self.ratio is None else [f"{format_factor(self.ratio)}x the reference"]
        clauses += [f"{format_rows(self.rows)} of {self.shapes[0][0]}"] if self.rows else []
        return "; ".join(clauses)


def measure_difference(
    actual: Tensor, reference: Tensor, *, global_norm: float = 0.0, tolerance: float = TOLERANCE, slack: float = 0.0
) -> TensorDifference:
    """Measure how far a tensor is from its reference.

    Args:
        global_norm: joint norm of all tensors of the same type, such as all gradients. Rounding errors of values of this size are
            allowed. If the reference is negligible relative to this norm, the difference is measured relative to this norm.
        tolerance: allowed relative difference; with 0, even rounding errors are not allowed.
        slack: absolute difference (norm) that is allowed in addition.
    """
    shapes = tuple(actual.shape), tuple(reference.shape)
    a, b = actual.detach().double().cpu(), reference.detach().double().cpu()
    reference_norm, negligible = compute_norm(b), NEGLIGIBLE * global_norm
    scale = max(reference_norm, ROUNDING / tolerance * global_norm) if tolerance else reference_norm
    allowed, scale = (tolerance * scale, scale) if reference_norm >= negligible else (negligible, global_norm)
    allowed += slack
    if shapes[0] != shapes[1]:
        return TensorDifference(math.inf, reference_norm, allowed, scale, shapes)
    difference = TensorDifference(compute_norm(a - b), reference_norm, allowed, scale, shapes)
    if not difference.differs:
        return difference
    return TensorDifference(
        difference.distance, reference_norm, allowed, scale, shapes, find_constant_ratio(a, b), find_differing_rows(a, b, allowed)
    )


def compute_joint_norm(tensors: Iterable[Tensor]) -> float:
    """Compute the norm of all tensors together, as if they were concatenated."""
    return math.hypot(*(compute_norm(tensor) for tensor in tensors))


def compute_norm(tensor: Tensor) -> float:
    """Compute the square root of the sum of squared elements in float64."""
    return tensor.detach().double().square().sum().sqrt().item()


_COEFFICIENT_TOLERANCE = 1e-6
"""Largest difference of a coefficient from a target value to count as equal."""
_MAX_RESIDUAL = 1e-7
"""A tensor counts as a linear combination of others if the norm of the residual is at most this share of its norm."""

TermName = TypeVar("TermName")


def solve_combination(tensor: Tensor, terms: Mapping[TermName, Tensor]) -> dict[TermName, float] | None:
    """Write a tensor as a linear combination of other tensors: find the coefficient of each of them by least squares.

    Terms that are zero everywhere get no coefficient.

    Args:
        tensor: tensor to write as a combination.
        terms: tensors of the combination, by name.

    Returns:
        The coefficients by name, or None if no combination equals the tensor or the coefficients are not unique.
    """
    present = {name: term.flatten() for name, term in terms.items() if term.any()}
    if not present or tensor.numel() <= len(present):  # with as many unknowns as elements, any tensor has a solution
        return None
    matrix = torch.stack(list(present.values()), dim=1)
    if not (tensor.isfinite().all() and matrix.isfinite().all()):
        return None
    scale = matrix.norm(dim=0)
    solution = torch.linalg.lstsq(matrix / scale, tensor.reshape(-1, 1), driver="gelsd")
    if int(solution.rank) < len(present):
        return None
    residual = matrix / scale @ solution.solution - tensor.reshape(-1, 1)
    if compute_norm(residual) > _MAX_RESIDUAL * compute_norm(tensor):
        return None
    return dict(zip(present, (solution.solution.squeeze(1) / scale).tolist(), strict=True))


def is_near(value: float, target: float) -> bool:
    """Check whether a coefficient of a linear combination equals `target` up to rounding."""
    return abs(value - target) < _COEFFICIENT_TOLERANCE


def find_constant_ratio(a: Tensor, b: Tensor) -> float | None:
    """Return the factor c with `a` = c * `b`, or None if there is no such factor or it is 1.

    A constant factor indicates a wrong scale, a missing sum or a sum that is computed twice.
    """
    coefficients = solve_combination(a, {"b": b})
    return None if coefficients is None or is_near(coefficients["b"], 1) else coefficients["b"]


def find_differing_rows(a: Tensor, b: Tensor, allowed: float) -> tuple[int, ...]:
    """Return the indices along the first dimension at which two tensors differ.

    The tuple is empty if all rows differ: only a difference in some of the rows indicates that a wrong slice was used.

    Args:
        allowed: norm of the difference that rounding can explain. A row differs if it exceeds an equal share of this norm, which is
            `allowed` divided by the square root of the number of rows.
    """
    if a.dim() == 0 or len(a) < 2:
        return ()
    row_distances = (a - b).flatten(1).norm(dim=1) if a.dim() > 1 else (a - b).abs()
    differing = (~(row_distances <= allowed / math.sqrt(len(row_distances)))).nonzero().flatten().tolist()
    return tuple(differing) if len(differing) < len(row_distances) else ()


def format_rows(rows: tuple[int, ...]) -> str:
    """Format row indices as text: `rows 4 to 7` for consecutive rows, otherwise the number of rows and the first index."""
    if len(rows) > 1 and rows[-1] - rows[0] == len(rows) - 1:
        return f"rows {rows[0]} to {rows[-1]}"
    return f"{len(rows)} rows from {rows[0]} on"
