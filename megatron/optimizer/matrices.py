"""How the flat elements that a rank updates lie in the whole parameter, for rules that sum over rows, columns or all of it.

A piece is cut into parts: tail of a row, whole rows, head of a row (of a parameter with several matrices more of them). A part is a
box of the global tensor, so its elements have the box's shape, and what belongs to it of a sum over rows is found by the box too.
Padding is in no part. A unit is one matrix of a parameter, [R, C], or one vector where it holds vectors: what is summed as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.optimizer.rule import Target
from megatron.parallel.boxes import FlatPiece, PlacedBox
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.state_shape import COLUMNS
from megatron.spec.weights import score_row

Index = tuple[slice, ...]


def unit_dims(record: ParamRecord) -> int:
    """The number of dimensions of a unit, the last ones."""
    return 1 if record.kind == "vector" else 2


def units_of(record: ParamRecord) -> tuple[int, ...]:
    """Shape in which the units of a parameter lie: the leading dimensions."""
    return record.shape[: -unit_dims(record)]


def unit_numel(record: ParamRecord) -> int:
    """Elements of a unit."""
    return math.prod(record.shape[-unit_dims(record) :])


@dataclass(frozen=True)
class Part:
    """Some elements of a target that are a box of the global tensor."""

    placed: PlacedBox

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor like the target's, as a view in the shape of the box."""
        start = self.placed.start
        return flat[start : start + self.placed.box.numel].view(self.placed.box.sizes)

    @property
    def rows(self) -> Index:
        """Their rows, as an index into numbers of all rows."""
        return self.placed.box.index[:-1]

    @property
    def columns(self) -> Index:
        """Their columns, as an index into numbers of all columns."""
        return (*self.placed.box.index[:-2], self.placed.box.index[-1])

    @property
    def begins_rows(self) -> bool:
        """Whether they hold the first elements of their rows."""
        return self.placed.box.offsets[-1] == 0

    def units(self, dims: int) -> Index:
        """Their units, as an index into numbers of all units."""
        return self.placed.box.index[:-dims]


def parts_of(target: Target, context: ParallelContext) -> list[Part]:
    """All elements of a target, without padding."""
    return [Part(placed) for placed in target.record.boxes(target.piece, context)]


def counted_parts(target: Target, context: ParallelContext) -> list[Part]:
    """The elements whose shares of sums this rank gives: together the ranks' parts are the parameter, once."""
    start, counted = target.piece.start, target.counted
    boxes = target.record.boxes(FlatPiece(start + counted.start, start + counted.stop), context)
    return [Part(PlacedBox(placed.box, counted.start + placed.start)) for placed in boxes]


def rows_kept(target: Target, name: str, part: Part, context: ParallelContext) -> torch.Tensor:
    """What a target keeps of the rows of a part, as a view: [..., R]. A row is in one part of a target at the most."""
    length = target.record.local_shape(context.axis_sizes)[-1]
    first = (target.piece.start + part.placed.start) // length - target.piece.start // length
    sizes = part.placed.box.sizes[:-1]
    return target.moments[name][first : first + math.prod(sizes)].view(sizes)


def columns_kept(target: Target, name: str, context: ParallelContext) -> list[tuple[torch.Tensor, Index]]:
    """What a target keeps of columns, as views, each with its index into numbers of all columns."""
    boxes = target.record.state_boxes(COLUMNS, target.piece, context)
    flat = target.moments[name]
    return [(flat[one.start : one.start + one.box.numel].view(one.box.sizes), one.box.index) for one in boxes]


def squares(view: torch.Tensor, dims: int) -> torch.Tensor:
    """Sums of squares over the last dimensions: first over rows, then wider, see `norms.py`."""
    rows = torch.linalg.vector_norm(view, dim=-1).double().square_()
    return (rows.sum(-1) if dims == 2 else rows).to(view.dtype)


def add_squares(into: torch.Tensor, tensor: torch.Tensor, parts: Sequence[Part], dims: int) -> None:
    """Add the squares of parts to sums of units."""
    for part in parts:
        into[part.units(dims)].add_(squares(part.of(tensor), dims).to(into.device))


# ---- QK-clip: after an update, the query and key weights of heads whose scores grew too large are scaled down (MuonClip; Kimi K2,
# arXiv 2507.20534, section 2.1).
#
# With S the largest score of a head in the step (`megatron.attention.largest`) and gamma = min(1, threshold / S), its queries are
# multiplied by gamma^alpha and its keys by gamma^(1 - alpha): the same inputs would then have given the threshold. Query heads
# that share a key head share its gamma, the smallest of theirs, as in Megatron-LM. In latent attention the rotated channels of
# queries take all of gamma, since the rotated key belongs to all heads.


class QKClip:
    """Scales the main parameters before they are averaged and published, so that all that is made of them agrees.

    Args:
        largest: the largest scores of the step over the whole batch, [layers, query heads]; filled anew in each step.
    """

    def __init__(self, largest: torch.Tensor, threshold: float, alpha: float, context: ParallelContext) -> None:
        self._largest, self._threshold, self._context = largest, threshold, context
        self._exponents = {"query": alpha, "key": 1.0 - alpha, "both": 1.0}
        self._gammas: dict[torch.device, torch.Tensor] = {}

    def begin(self) -> None:
        """Take the scores of a step. Offloaded parameters get the factors in host memory."""
        gammas = torch.where(self._largest > self._threshold, self._threshold / self._largest, 1.0)
        self._gammas = {gammas.device: gammas}

    def clipper(self, targets: Sequence[Target]) -> Callable[[], None]:
        """A function that scales the targets, just updated."""
        parts = [
            (part.of(target.main), target.record, part.placed.box.index[0])
            for target in targets
            if target.record.scores is not None
            for part in parts_of(target, self._context)
        ]

        def clip() -> None:
            for view, record, rows in parts:
                factors = self._factors(record, view.device)[rows].to(view.dtype)
                view.mul_(factors.view(-1, *[1] * (view.dim() - 1)))

        return clip

    def _factors(self, record: ParamRecord, device: torch.device) -> torch.Tensor:
        """The factor of each row of a parameter."""
        if device not in self._gammas:
            self._gammas[device] = next(iter(self._gammas.values())).to(device)
        scores = record.scores
        assert scores is not None
        gammas = self._gammas[device][score_row(record.name)].view(-1, scores.queries).amin(-1, keepdim=True)  # [units, 1]
        runs = [
            gammas.pow(self._exponents[side]).expand(-1, rows)
            if side in self._exponents
            else torch.ones_like(gammas).expand(-1, rows)
            for rows, side in scores.runs
        ]
        return torch.cat(runs, 1).flatten()
