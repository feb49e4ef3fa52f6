"""Rank arithmetic: which rank sits where in the grid, and who shares a group with whom. Pure; no process is started.

Worked example, 8 ranks at TP=2, PP=2, DP=2, default order tp-cp-dp-pp (the tensor coordinate varies fastest)::

    rank = tp + 2 * (dp + 2 * pp)

    rank   0  1  2  3 | 4  5  6  7
    tp     0  1  0  1 | 0  1  0  1
    dp     0  0  1  1 | 0  0  1  1
    pp     0  0  0  0 | 1  1  1  1

    tensor groups    ("tp",)       [0,1] [2,3] [4,5] [6,7]     neighbours: the most traffic on the fastest links
    data groups      ("dp",)       [0,2] [1,3] [4,6] [5,7]
    pipeline groups  ("pp",)       [0,4] [1,5] [2,6] [3,7]
    model replicas   ("tp","pp")   [0,1,4,5] [2,3,6,7]

With ``tp-cp-pp-dp`` (``--use-tp-pp-dp-mapping``) rank = tp + 2 * (pp + 2 * dp): the data groups become [0,4] [1,5] [2,6] [3,7].

A second grid (etp, ep, edp, pp) lies on the same ranks for experts: it divides each pipeline stage's tp x cp x dp ranks anew, so
the expert sizes do not multiply the world size.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

DENSE_AXES = ("tp", "cp", "dp", "pp")
DATA_AXES = ("dp",)
"""The data group: its ranks read different samples. The ranks along cp read the same ones, and share each sequence."""
GRADIENT_AXES = ("cp", "dp")
"""The gradient group: its ranks hold the same parameters, and the sum of their gradients is that of the whole batch."""
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes and the order in which ranks are numbered.

    Raises:
        ValueError: a size is not positive, or the expert grid does not fit on the dense one.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1
    pp_before_dp: bool = False
    """Number the pipeline axis before the data axis (``--use-tp-pp-dp-mapping``)."""

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep"):
            if getattr(self, axis) < 1:
                raise ValueError(f"the size of axis {axis} must be at least 1, not {getattr(self, axis)}")
        if (self.tp * self.cp * self.dp) % (self.etp * self.ep):
            raise ValueError(
                f"expert tensor x expert size ({self.etp} x {self.ep}) must divide the ranks of a stage, "
                f"tp x cp x dp = {self.tp * self.cp * self.dp}"
            )

    @classmethod
    def from_world(cls, world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, pp_before_dp: bool = False) -> Topology:
        """The topology whose data size fills the world.

        Raises:
            ValueError: a size is not positive, or tp x cp x pp does not divide the world size.
        """
        cls(tp=tp, cp=cp, pp=pp)  # refuses sizes that are not positive
        if world_size < 1 or world_size % (tp * cp * pp):
            raise ValueError(f"world size {world_size} does not divide by TP x CP x PP = {tp} x {cp} x {pp} = {tp * cp * pp}")
        return cls(tp=tp, cp=cp, dp=world_size // (tp * cp * pp), pp=pp, pp_before_dp=pp_before_dp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Data size of the expert grid."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def size(self, *axes: str) -> int:
        """Number of ranks in a group over these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on every axis of both grids.

        Raises:
            ValueError: the rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        if self.pp_before_dp:
            dp, pp = divmod(rest, self.pp)
        else:
            pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(self._place(tp, cp, dp), self.etp)
        edp, ep = divmod(rest, self.ep)
        return {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "etp": etp, "ep": ep, "edp": edp}

    def rank(self, **coordinates: int) -> int:
        """Rank at dense coordinates; those left out are 0."""
        at = {axis: coordinates.pop(axis, 0) for axis in DENSE_AXES}
        assert not coordinates, f"not dense axes: {coordinates}"
        return self._rank(self._place(at["tp"], at["cp"], at["dp"]), at["pp"])

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks, ascending, that differ from `rank` at most along these axes of one grid.

        Raises:
            ValueError: the axes lie on different grids.
        """
        mine = self.coordinates(rank)
        return self._members(axes, {axis: mine[axis] for axis in self._grid(axes) if axis not in axes})

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Every group over these axes, each once, ordered by its first rank."""
        others = [axis for axis in self._grid(axes) if axis not in axes]
        places = itertools.product(*(range(getattr(self, axis)) for axis in others))
        return sorted(self._members(axes, dict(zip(others, place, strict=True))) for place in places)

    def hybrid_groups(self, shard_size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Each gradient group, cut into parts of `shard_size` neighbours; and the groups across, of one rank from each part.

        Example: of the data ranks [0, 2, 4, 6], parts of two are [0, 2] [4, 6], and [0, 4] [2, 6] lie across.

        Raises:
            ValueError: the parts would not be equal.
        """
        self._check_parts(shard_size)
        data = self.groups(*GRADIENT_AXES)
        parts = [ranks[start : start + shard_size] for ranks in data for start in range(0, len(ranks), shard_size)]
        return parts, [ranks[place::shard_size] for ranks in data for place in range(shard_size)]

    def hybrid_group(self, rank: int, shard_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of `hybrid_groups`, the part and the group across that a rank belongs to.

        Raises:
            ValueError: the parts would not be equal.
        """
        self._check_parts(shard_size)
        data = self.group(rank, *GRADIENT_AXES)
        place = data.index(rank)
        start = place // shard_size * shard_size
        return data[start : start + shard_size], data[place % shard_size :: shard_size]

    def _check_parts(self, shard_size: int) -> None:
        data = self.size(*GRADIENT_AXES)
        if shard_size < 1 or data % shard_size:
            raise ValueError(f"{data} data ranks do not divide into parts of {shard_size}")

    def _members(self, axes: tuple[str, ...], fixed: dict[str, int]) -> tuple[int, ...]:
        """Ranks that have these coordinates on the other axes of the grid."""
        if not fixed:
            return tuple(range(self.world_size))
        stride, base, free = 1, 0, []
        for axis in self._grid(axes)[:3]:  # pp, the last, is apart
            size = getattr(self, axis)
            if axis in axes:
                free.append(range(0, stride * size, stride))
            else:
                base += stride * fixed[axis]
            stride *= size
        stages = range(self.pp) if "pp" in axes else (fixed["pp"],)
        return tuple(sorted(self._rank(base + sum(place), pp) for place in itertools.product(*free) for pp in stages))

    def _place(self, tp: int, cp: int, dp: int) -> int:
        """Place in the stage: number among the stage's ranks in ascending order. Both grids count it, each along its own axes."""
        return tp + self.tp * (cp + self.cp * dp)

    def _rank(self, place: int, pp: int) -> int:
        if not self.pp_before_dp:
            return place + self.tp * self.cp * self.dp * pp
        dp, inner = divmod(place, self.tp * self.cp)
        return inner + self.tp * self.cp * (pp + self.pp * dp)

    def _grid(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        for grid in (DENSE_AXES, EXPERT_AXES):
            if all(axis in grid for axis in axes):
                return grid
        raise ValueError(f"axes {axes} do not lie on one grid: {DENSE_AXES} or {EXPERT_AXES}")
