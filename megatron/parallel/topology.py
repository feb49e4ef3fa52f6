"""Rank arithmetic: which rank sits where in two grids, and who shares a group with whom. Pure; no process is started.

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

Experts have a grid of their own on the same ranks: the tp x cp x dp ranks of a stage, in this order, are etp x ep x edp, the
expert-tensor coordinate fastest. At ETP=1, EP=2 the ranks above have

    rank   0  1  2  3 | 4  5  6  7
    ep     0  1  0  1 | 0  1  0  1
    edp    0  0  1  1 | 0  0  1  1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron.config.parallel import ParallelConfig

AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp")
"""Axes of the experts' grid within a stage: ranks along etp hold parts of the same experts, along ep other experts, along edp the
same ones. The last is the experts' gradient group."""
DATA_AXES = ("dp",)
"""The data group: its ranks read different samples. The ranks along cp read the same ones, and share each sequence."""
GRADIENT_AXES = ("cp", "dp")
"""The gradient group: its ranks hold the same parameters, and the sum of their gradients is that of the whole batch."""
STAGE_AXES = ("tp", *GRADIENT_AXES)
"""The ranks of a stage: together they hold its matrices."""


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes and the order in which ranks are numbered.

    Raises:
        ValueError: a size is not positive.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    pp_before_dp: bool = False
    """Number the pipeline axis before the data axis (``--use-tp-pp-dp-mapping``)."""
    ep: int = 1
    """Ranks of a stage that hold different experts."""
    expert_tensor: int | None = None
    """Ranks of a stage that hold parts of the same expert; by default tp."""

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep", "etp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"the size of axis {axis} must be at least 1, not {getattr(self, axis)}")
        if self.stage_size % (self.etp * self.ep):
            raise ValueError(f"the {self.stage_size} ranks of a stage do not divide by ETP x EP = {self.etp} x {self.ep}")

    @property
    def etp(self) -> int:
        """Ranks that hold parts of the same expert."""
        return self.tp if self.expert_tensor is None else self.expert_tensor

    @property
    def edp(self) -> int:
        """Ranks that hold the same parts of the same experts."""
        return self.stage_size // (self.etp * self.ep)

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @classmethod
    def from_world(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        pp_before_dp: bool = False,
        ep: int = 1,
        expert_tensor: int | None = None,
    ) -> Topology:
        """The topology whose data size fills the world.

        Raises:
            ValueError: a size is not positive, tp x cp x pp does not divide the world size, or etp x ep that of a stage.
        """
        cls(tp=tp, cp=cp, pp=pp)  # refuses sizes that are not positive
        if world_size < 1 or world_size % (tp * cp * pp):
            raise ValueError(f"world size {world_size} does not divide by TP x CP x PP = {tp} x {cp} x {pp} = {tp * cp * pp}")
        return cls(tp, cp, world_size // (tp * cp * pp), pp, pp_before_dp, ep, expert_tensor)

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> Topology:
        """The topology that the settings ask for.

        Raises:
            ValueError: as in `from_world`.
        """
        return cls.from_world(
            world_size,
            tp=parallel.tensor_model_parallel_size,
            cp=parallel.context_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            pp_before_dp=parallel.use_tp_pp_dp_mapping,
            ep=parallel.expert_model_parallel_size,
            expert_tensor=parallel.expert_tensor_parallel_size,
        )

    def __str__(self) -> str:
        """As "tensor 2 x pipeline 4 x data 8", with the context size where there is one."""
        context = f" x context {self.cp}" if self.cp > 1 else ""
        experts = (
            "" if (self.ep, self.etp) == (1, self.tp) else f" (experts: tensor {self.etp} x expert {self.ep} x data {self.edp})"
        )
        return f"tensor {self.tp}{context} x pipeline {self.pp} x data {self.dp}{experts}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def size(self, *axes: str) -> int:
        """Number of ranks in a group over these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on every axis.

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
        return {"tp": tp, "cp": cp, "dp": dp, "pp": pp}

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on the experts' axes.

        Raises:
            ValueError: the rank is outside the world.
        """
        at = self.coordinates(rank)
        rest, etp = divmod(at["tp"] + self.tp * (at["cp"] + self.cp * at["dp"]), self.etp)
        edp, ep = divmod(rest, self.ep)
        return {"etp": etp, "ep": ep, "edp": edp}

    def places(self, rank: int) -> dict[str, int]:
        """Place of a rank on every axis of both grids.

        Raises:
            ValueError: the rank is outside the world.
        """
        return {**self.coordinates(rank), **self.expert_coordinates(rank)}

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Rank at these coordinates."""
        outer = pp + self.pp * dp if self.pp_before_dp else dp + self.dp * pp
        return tp + self.tp * (cp + self.cp * outer)

    def expert_rank(self, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """Rank at these coordinates of the experts' grid."""
        rest, tp = divmod(etp + self.etp * (ep + self.ep * edp), self.tp)
        dp, cp = divmod(rest, self.cp)
        return self.rank(tp, cp, dp, pp)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks, ascending, that differ from `rank` at most along these axes, which are of one of the two grids.

        Raises:
            ValueError: there is no such axis, or no such rank.
        """
        return self._members(axes, self.places(rank))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Every group over these axes, each once, ordered by its first rank."""
        others = [axis for axis in self._grid(axes)[0] if axis not in axes]
        places = itertools.product(*(range(self.size(axis)) for axis in others))
        return sorted(self._members(axes, dict(zip(others, place, strict=True))) for place in places)

    def expert_shard_size(self, shard_size: int) -> int:
        """How many copies of an expert the ranks have that share one copy of the rest of the model.

        Args:
            shard_size: data ranks that share it; with their tensor ranks they are neighbours in a stage.

        Raises:
            ValueError: these ranks do not have as many copies of each expert.
        """
        ranks, a_copy = shard_size * self.tp, self.etp * self.ep
        if ranks > a_copy and ranks % a_copy:
            raise ValueError(f"{shard_size} x {self.tp} ranks do not divide by ETP x EP = {self.etp} x {self.ep}")
        return max(ranks // a_copy, 1)

    def hybrid_groups(
        self, shard_size: int, rank: int | None = None, axes: tuple[str, ...] = GRADIENT_AXES
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Each gradient group, cut into parts of `shard_size` neighbours; and the groups across, of one rank from each part.

        Example: of the data ranks [0, 2, 4, 6], parts of two are [0, 2] [4, 6], and [0, 4] [2, 6] lie across.

        Args:
            rank: give only the part and the group across that this rank belongs to.
            axes: of the groups, by default those of the data ranks.

        Raises:
            ValueError: the parts would not be equal.
        """
        size = self.size(*axes)
        if shard_size < 1 or size % shard_size:
            raise ValueError(f"{size} data ranks do not divide into parts of {shard_size}")
        if rank is None:
            data = self.groups(*axes)
            starts, places = range(0, size, shard_size), range(shard_size)
        else:
            data = [self.group(rank, *axes)]
            at, place = divmod(data[0].index(rank), shard_size)
            starts, places = range(at * shard_size, (at + 1) * shard_size, shard_size), range(place, place + 1)
        parts = [ranks[start : start + shard_size] for ranks in data for start in starts]
        return parts, [ranks[place::shard_size] for ranks in data for place in places]

    def _members(self, axes: tuple[str, ...], at: dict[str, int]) -> tuple[int, ...]:
        """Ranks that have these coordinates on the other axes."""
        grid, rank = self._grid(axes)
        if set(axes) == set(AXES):
            return tuple(range(self.world_size))
        places = itertools.product(*(range(self.size(axis)) if axis in axes else (at[axis],) for axis in grid))
        return tuple(sorted(itertools.starmap(rank, places)))

    def _grid(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[..., int]]:
        """The grid that has these axes, and what gives the rank of a place in it."""
        of_experts = (*EXPERT_AXES, "pp")
        if set(axes) <= set(AXES):
            return AXES, self.rank
        if set(axes) <= set(of_experts):
            return of_experts, self.expert_rank
        raise ValueError(f"the axes are {AXES} or {of_experts}, and not {axes}")
