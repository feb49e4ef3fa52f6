"""Rank arithmetic: the coordinates of each rank on the parallelism axes, and the members of each group. Pure arithmetic: no process
group is created.

Example with 8 ranks at TP=2, PP=2, DP=2 in the default order tp-cp-dp-pp (the tensor coordinate varies fastest)::

    rank = tp + 2 * (dp + 2 * pp)

    rank   0  1  2  3 | 4  5  6  7
    tp     0  1  0  1 | 0  1  0  1
    dp     0  0  1  1 | 0  0  1  1
    pp     0  0  0  0 | 1  1  1  1

    tensor groups    ("tp",)       [0,1] [2,3] [4,5] [6,7]     neighbors: most of the traffic uses the fastest links
    data groups      ("dp",)       [0,2] [1,3] [4,6] [5,7]
    pipeline groups  ("pp",)       [0,4] [1,5] [2,6] [3,7]
    model replicas   ("tp","pp")   [0,1,4,5] [2,3,6,7]

In the order ``tp-cp-pp-dp`` (``--use-tp-pp-dp-mapping``) rank = tp + 2 * (pp + 2 * dp), and the data groups are [0,4] [1,5] [2,6]
[3,7].

Expert layers use a second grid on the same ranks. The tp x cp x dp ranks of a stage, in this order, are factored again into etp x
ep x edp, where the expert-tensor coordinate varies fastest. At ETP=1, EP=2 the ranks above have the coordinates

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
"""Axes of the expert grid within a stage. Along etp, ranks hold shards of the same experts; along ep, different experts; along edp,
the same shards of the same experts. So edp is the gradient group of the experts."""
DATA_AXES = ("dp",)
"""Axes of the data group, whose ranks read different samples. (Ranks along cp read the same samples and share each sequence.)"""
GRADIENT_AXES = ("cp", "dp")
"""Axes of the gradient group, whose ranks hold the same parameters. The sum of their gradients is the gradient of the global
batch."""
STAGE_AXES = ("tp", *GRADIENT_AXES)
"""Axes of the ranks of a pipeline stage, which together hold all parameters of the stage."""


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallelism axes, and the order in which ranks are numbered.

    Raises:
        ValueError: a size is not positive, or ETP x EP does not divide the number of ranks of a pipeline stage.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    pp_before_dp: bool = False
    """Number ranks along the pipeline axis before the data axis (``--use-tp-pp-dp-mapping``)."""
    ep: int = 1
    """Number of ranks of a stage that hold different experts."""
    expert_tensor: int | None = None
    """Number of ranks that hold shards of the same experts; None for the tensor-parallel size."""

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep", "etp"):
            if getattr(self, axis) < 1:
                raise ValueError(
                    f"the size of the parallel axis {axis} is {getattr(self, axis)}, but must be at least 1: set it to 1 if you "
                    "do not "
                    "use this axis"
                )
        if self.stage_size % (self.etp * self.ep):
            raise ValueError(
                f"the {self.stage_size} ranks of a pipeline stage (TP x CP x DP) are not divisible by "
                f"ETP x EP = {self.etp} x {self.ep} = {self.etp * self.ep}. Change --expert-model-parallel-size (EP) or "
                "--expert-tensor-parallel-size (ETP)"
            )

    @property
    def etp(self) -> int:
        """Number of ranks that hold shards of the same experts: `expert_tensor`, or by default the tensor-parallel size."""
        return self.tp if self.expert_tensor is None else self.expert_tensor

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same shards of the same experts."""
        return self.stage_size // (self.etp * self.ep)

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
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
        """Build the topology of a world. The data-parallel size follows from the world size and the other sizes.

        Raises:
            ValueError: a size is not positive, TP x CP x PP does not divide the world size, or ETP x EP does not divide the number
                of ranks of a pipeline stage.
        """
        cls(tp=tp, cp=cp, pp=pp)  # rejects sizes that are not positive
        if world_size < 1 or world_size % (tp * cp * pp):
            raise ValueError(
                f"world size {world_size} is not divisible by TP x CP x PP = {tp} x {cp} x {pp} = {tp * cp * pp}. Change the "
                "number of ranks or one of these sizes"
            )
        return cls(tp, cp, world_size // (tp * cp * pp), pp, pp_before_dp, ep, expert_tensor)

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> Topology:
        """Build the topology from the settings. The data-parallel size follows from the world size and the other sizes.

        Raises:
            ValueError: TP x CP x PP does not divide the world size, or ETP x EP does not divide the number of ranks of a pipeline
                stage.
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
        """Format as "tensor 2 x pipeline 4 x data 8".

        The context-parallel size is included if it is not 1, the sizes of the expert axes if experts are split differently from the
        other layers.
        """
        context = f" x context {self.cp}" if self.cp > 1 else ""
        experts = (
            "" if (self.ep, self.etp) == (1, self.tp) else f" (experts: tensor {self.etp} x expert {self.ep} x data {self.edp})"
        )
        return f"tensor {self.tp}{context} x pipeline {self.pp} x data {self.dp}{experts}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def get_size(self, *axes: str) -> int:
        """Return the number of ranks in a group over the given axes: the product of the sizes of these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def get_coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on the axes tp, cp, dp and pp.

        Raises:
            ValueError: the rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside a world of {self.world_size} ranks: use a rank from 0 to {self.world_size - 1}"
            )
        remainder, tp = divmod(rank, self.tp)
        remainder, cp = divmod(remainder, self.cp)
        if self.pp_before_dp:
            dp, pp = divmod(remainder, self.pp)
        else:
            pp, dp = divmod(remainder, self.dp)
        return {"tp": tp, "cp": cp, "dp": dp, "pp": pp}

    def get_expert_coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on the expert axes (etp, ep and edp).

        Raises:
            ValueError: the rank is outside the world.
        """
        coordinates = self.get_coordinates(rank)
        remainder, etp = divmod(coordinates["tp"] + self.tp * (coordinates["cp"] + self.cp * coordinates["dp"]), self.etp)
        edp, ep = divmod(remainder, self.ep)
        return {"etp": etp, "ep": ep, "edp": edp}

    def all_coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on the axes tp, cp, dp and pp and on the expert axes (etp, ep and edp).

        Raises:
            ValueError: the rank is outside the world.
        """
        return {**self.get_coordinates(rank), **self.get_expert_coordinates(rank)}

    def find_rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the global rank at these coordinates."""
        outer = pp + self.pp * dp if self.pp_before_dp else dp + self.dp * pp
        return tp + self.tp * (cp + self.cp * outer)

    def find_expert_rank(self, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """Return the global rank at these coordinates of the expert grid."""
        remainder, tp = divmod(etp + self.etp * (ep + self.ep * edp), self.tp)
        dp, cp = divmod(remainder, self.cp)
        return self.find_rank(tp, cp, dp, pp)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks of the group of `rank` over the given axes, ascending, including `rank`. They have the same coordinates
        on all other axes.

        Args:
            axes: axes of a single grid: of AXES, or of the expert axes and pp.

        Raises:
            ValueError: an axis is unknown, the axes belong to different grids, or the rank is outside the world.
        """
        return self._get_ranks_along(axes, self.all_coordinates(rank))

    def get_groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups over the given axes as tuples of ranks, ordered by their first rank."""
        fixed_axes = [axis for axis in self._find_grid(axes)[0] if axis not in axes]
        fixed_coordinates = itertools.product(*(range(self.get_size(axis)) for axis in fixed_axes))
        return sorted(
            self._get_ranks_along(axes, dict(zip(fixed_axes, coordinates, strict=True))) for coordinates in fixed_coordinates
        )

    def get_expert_shard_size(self, shard_size: int) -> int:
        """Return the number of ranks over which hybrid FSDP shards each expert, if it shards other parameters over `shard_size`
        data-parallel ranks.

        The `shard_size` x TP ranks that share one copy of the other parameters may hold several copies of each expert. The experts
        are sharded over the ranks of these copies. If the ranks hold one copy or less, the result is 1.

        Args:
            shard_size: number of data-parallel ranks that share one copy of the other parameters. Together with their
                tensor-parallel ranks, they have consecutive ranks in a stage.

        Raises:
            ValueError: these ranks hold more than one copy of the experts, but not a whole number of copies.
        """
        num_ranks, ranks_per_copy = shard_size * self.tp, self.etp * self.ep
        if num_ranks > ranks_per_copy and num_ranks % ranks_per_copy:
            raise ValueError(
                f"FSDP shard size x TP = {shard_size} x {self.tp} = {num_ranks} is not divisible by "
                f"ETP x EP = {self.etp} x {self.ep} = {ranks_per_copy}. Change --fsdp-shard-size"
            )
        return max(num_ranks // ranks_per_copy, 1)

    def shard_and_replica_groups(
        self, shard_size: int, rank: int | None = None, axes: tuple[str, ...] = GRADIENT_AXES
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the shard groups and the replica groups of hybrid FSDP, as lists of ranks.

        Each gradient group is divided into shard groups of `shard_size` neighbors. A replica group contains the ranks at the same
        position of each shard group. Example: the data group [0, 2, 4, 6] at shard size 2 has the shard groups [0, 2] and [4, 6],
        and the replica groups [0, 4] and [2, 6].

        Args:
            rank: return only the shard group and the replica group of this rank; None for all groups.
            axes: axes of the groups to divide; by default those of the gradient group.

        Raises:
            ValueError: `shard_size` does not divide the size of the groups.
        """
        group_size = self.get_size(*axes)
        if shard_size < 1 or group_size % shard_size:
            raise ValueError(
                f"{group_size} data-parallel ranks cannot be divided into shard groups of {shard_size} ranks. Set "
                f"--fsdp-shard-size to a divisor of {group_size}"
            )
        if rank is None:
            groups = self.get_groups(*axes)
            starts, shard_ranks = range(0, group_size, shard_size), range(shard_size)
        else:
            groups = [self.group(rank, *axes)]
            shard_index, shard_rank = divmod(groups[0].index(rank), shard_size)
            starts, shard_ranks = (
                range(shard_index * shard_size, (shard_index + 1) * shard_size, shard_size),
                range(shard_rank, shard_rank + 1),
            )
        shard_groups = [ranks[start : start + shard_size] for ranks in groups for start in starts]
        return shard_groups, [ranks[shard_rank::shard_size] for ranks in groups for shard_rank in shard_ranks]

    def _get_ranks_along(self, axes: tuple[str, ...], fixed_coordinates: dict[str, int]) -> tuple[int, ...]:
        """Return the ranks that have the coordinates `fixed_coordinates` on all axes of the grid except `axes`."""
        grid_axes, rank_of = self._find_grid(axes)
        if set(axes) == set(AXES):
            return tuple(range(self.world_size))
        coordinates = itertools.product(
            *(range(self.get_size(axis)) if axis in axes else (fixed_coordinates[axis],) for axis in grid_axes)
        )
        return tuple(sorted(itertools.starmap(rank_of, coordinates)))

    def _find_grid(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[..., int]]:
        """Return the axes of the grid to which `axes` belong, and the function that maps coordinates in the grid to a global
        rank."""
        expert_grid_axes = (*EXPERT_AXES, "pp")
        if set(axes) <= set(AXES):
            return AXES, self.find_rank
        if set(axes) <= set(expert_grid_axes):
            return expert_grid_axes, self.find_expert_rank
        raise ValueError(f"axes {axes} are not in one rank grid: pass only axes of {AXES}, or only axes of {expert_grid_axes}")
