"""Global tensors from the parts of all ranks, and whether the ranks that hold the same part agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.verification.diagnosis.measure import norm
from megatron.verification.diagnosis.tolerance import TOLERANCE, relative
from megatron.verification.observing.observation import Part, RankObservation

GROUP_WORDS = {"tp": "tensor", "dp": "data", "pp": "pipeline", "cp": "context"}
"""What the ranks along an axis are called together."""


@dataclass(frozen=True)
class Held:
    """A part and who holds it."""

    rank: int
    coordinates: Mapping[str, int]
    part: Part

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes."""
        return self.part.offsets, tuple(self.part.values.shape)


@dataclass(frozen=True)
class Replicas:
    """Ranks that differ on one axis only and hold the same box of a tensor."""

    axis: str
    held: tuple[Held, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(each.rank for each in self.held)

    def agree(self) -> bool:
        """Whether they hold the same bits."""
        return all(torch.equal(each.part.values, self.held[0].part.values) for each in self.held)

    def apart(self) -> float:
        """The largest difference from the first, in parts of its norm."""
        first = self.held[0].part.values
        return max(relative(norm(each.part.values - first), norm(first)) for each in self.held)

    def sum_is(self, reference: Tensor) -> bool:
        """Whether all of them together are what each should hold."""
        total = torch.stack([each.part.values for each in self.held]).sum(dim=0)
        wanted = cut(reference, self.held[0].part)
        return norm(total - wanted) <= 1e3 * TOLERANCE * norm(wanted)


@dataclass(frozen=True)
class Joined:
    """One tensor of the model, as all ranks together hold it."""

    name: str
    held: tuple[Held, ...]

    @cached_property
    def tensor(self) -> Tensor:
        """The whole: where several ranks hold an element, the first of them counts; zero where none does (see `holes`)."""
        return self._filled[0]

    @property
    def holes(self) -> int:
        """Elements that no rank holds."""
        return self._filled[1]

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """What the ranks take the whole tensor's shape for: one, if all is well."""
        return {each.part.shape for each in self.held}

    def versions(self) -> Iterator[Tensor]:
        """The whole tensor; and again for each holder whose part is not what the whole says, with its part."""
        yield self.tensor
        for each in self.held:
            if each.part.shape == tuple(self.tensor.shape) and not torch.equal(cut(self.tensor, each.part), each.part.values):
                version = self.tensor.clone()
                version[where(each.part)] = each.part.values
                yield version

    def replicas(self, axes: Sequence[str] = ("tp", "dp", "pp")) -> Iterator[Replicas]:
        """Ranks that hold the same, axis by axis."""
        for axis in axes:
            sets: dict[object, list[Held]] = {}
            for each in self.held:
                others = tuple(sorted((a, at) for a, at in each.coordinates.items() if a != axis))
                sets.setdefault((others, each.box), []).append(each)
            yield from (Replicas(axis, tuple(same)) for same in sets.values() if len(same) > 1)

    @cached_property
    def _filled(self) -> tuple[Tensor, int]:
        shape = self.held[0].part.shape
        tensor, missing = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)
        for each in self.held:
            if each.part.shape != shape:
                continue
            index = where(each.part)
            fresh = missing[index]
            tensor[index] = torch.where(fresh, each.part.values, tensor[index])
            missing[index] = False
        return tensor, int(missing.sum())


def join(ranks: Sequence[RankObservation], parts_of: Callable[[RankObservation], Sequence[Part]]) -> dict[str, Joined]:
    """Every tensor of which some rank holds a part."""
    found: dict[str, list[Held]] = {}
    for rank in ranks:
        for part in parts_of(rank):
            found.setdefault(part.name, []).append(Held(rank.rank, rank.coordinates, part))
    return {name: Joined(name, tuple(held)) for name, held in found.items()}


def where(part: Part) -> tuple[slice, ...]:
    """The box as an index of the whole tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.values.shape, strict=True))


def cut(whole: Tensor, part: Part) -> Tensor:
    """The box of a part, out of a whole tensor."""
    return whole[where(part)]
