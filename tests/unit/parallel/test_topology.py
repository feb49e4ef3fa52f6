"""Rank arithmetic against the published formulas, and laws that hold in every world."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.topology import DENSE_AXES, EXPERT_AXES, GRADIENT_AXES, Topology

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any small world of either order, with an expert grid that fits."""
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    return Topology(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, pp_before_dp=draw(st.booleans()))


AXES_OF_ONE_GRID = st.one_of(*(st.lists(st.sampled_from(grid), unique=True).map(tuple) for grid in (DENSE_AXES, EXPERT_AXES)))


@given(topologies())
def test_ranks_follow_the_formula(t: Topology) -> None:
    """rank = tp + TP (cp + CP (dp + DP pp)), and with the pipeline before the data tp + TP (cp + CP (pp + PP dp))."""
    for rank in range(t.world_size):
        c = t.coordinates(rank)
        outer = c["pp"] + t.pp * c["dp"] if t.pp_before_dp else c["dp"] + t.dp * c["pp"]
        assert rank == c["tp"] + t.tp * (c["cp"] + t.cp * outer)
        assert all(0 <= c[axis] < t.size(axis) for axis in (*DENSE_AXES, *EXPERT_AXES))


@given(topologies())
def test_rank_is_the_inverse_of_coordinates(t: Topology) -> None:
    for rank in range(t.world_size):
        coordinates = t.coordinates(rank)
        assert t.rank(**{axis: coordinates[axis] for axis in DENSE_AXES}) == rank
    assert t.rank() == 0 and t.rank(pp=t.pp - 1) == t.group(0, "pp")[-1]


@given(topologies())
def test_experts_divide_the_ranks_of_each_stage_anew(t: Topology) -> None:
    """In a stage's ascending ranks, the k-th lies at k = etp + ETP (ep + EP edp); expert sizes do not change the world."""
    assert t.edp * t.ep * t.etp == t.tp * t.cp * t.dp
    for stage in range(t.pp):
        ranks = [rank for rank in range(t.world_size) if t.coordinates(rank)["pp"] == stage]
        assert len(ranks) == t.tp * t.cp * t.dp
        for k, rank in enumerate(ranks):
            c = t.coordinates(rank)
            assert k == c["etp"] + t.etp * (c["ep"] + t.ep * c["edp"])


@given(topologies(), AXES_OF_ONE_GRID)
def test_groups_partition_the_world(t: Topology, axes: tuple[str, ...]) -> None:
    groups = t.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(t.world_size))
    assert all(len(group) == t.size(*axes) and list(group) == sorted(group) for group in groups)
    assert groups == sorted(groups)


@given(topologies(), AXES_OF_ONE_GRID)
def test_a_group_holds_the_ranks_that_differ_in_its_axes_only(t: Topology, axes: tuple[str, ...]) -> None:
    grid = EXPERT_AXES if set(axes) & (set(EXPERT_AXES) - {"pp"}) else DENSE_AXES
    others = [axis for axis in grid if axis not in axes]
    where = [t.coordinates(rank) for rank in range(t.world_size)]
    for rank in range(t.world_size):
        expected = [r for r in range(t.world_size) if all(where[r][axis] == where[rank][axis] for axis in others)]
        assert list(t.group(rank, *axes)) == expected
        assert t.group(rank, *axes) == t.group(rank, *reversed(axes))


def test_worked_example() -> None:
    """The one of the module's docstring."""
    t = Topology(tp=2, pp=2, dp=2)
    table = {axis: [t.coordinates(rank)[axis] for rank in range(8)] for axis in ("tp", "dp", "pp")}
    assert table == {"tp": [0, 1, 0, 1, 0, 1, 0, 1], "dp": [0, 0, 1, 1, 0, 0, 1, 1], "pp": [0, 0, 0, 0, 1, 1, 1, 1]}
    assert t.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert t.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert t.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert t.groups("tp", "pp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    other = Topology(tp=2, pp=2, dp=2, pp_before_dp=True)
    assert other.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert other.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert other.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert other.coordinates(1) | {"etp": 0} == other.coordinates(1)
    assert [other.coordinates(3)[axis] for axis in DENSE_AXES] == [1, 0, 0, 1]


def test_experts_by_hand() -> None:
    """8 ranks, TP=2, DP=2, PP=2; experts over EP=4: each stage's four ranks hold different experts."""
    t = Topology(tp=2, dp=2, pp=2, ep=4)
    assert t.edp == 1
    assert t.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert t.groups("edp") == [(rank,) for rank in range(8)]
    t = Topology(tp=2, dp=2, pp=2, ep=2, pp_before_dp=True)
    assert t.groups("ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert t.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("pp_before_dp", [False, True])
def test_3072_ranks(pp_before_dp: bool) -> None:
    t = Topology.from_world(3072, tp=8, pp=16, pp_before_dp=pp_before_dp)
    assert (t.dp, t.world_size, t.size("tp", "pp"), t.size()) == (24, 3072, 128, 1)
    for axes, count in {("tp",): 384, ("dp",): 128, ("pp",): 192, ("tp", "pp"): 24, GRADIENT_AXES: 128}.items():
        groups = t.groups(*axes)
        assert len(groups) == count
        assert sorted(itertools.chain(*groups)) == list(range(3072))
        for group in groups[::7]:
            assert t.group(group[-1], *axes) == group
    stride = 8 if pp_before_dp else 192
    assert t.group(1234, "pp") == tuple(t.rank(**{**dense(t, 1234), "pp": stage}) for stage in range(16))
    assert t.group(1234, "pp")[1] - t.group(1234, "pp")[0] == stride


def dense(t: Topology, rank: int) -> dict[str, int]:
    """Coordinates on the dense grid."""
    return {axis: t.coordinates(rank)[axis] for axis in DENSE_AXES}


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "etp", "ep"])
def test_sizes_must_be_positive(axis: str) -> None:
    with pytest.raises(ValueError, match=f"axis {axis} must be at least 1, not 0"):
        Topology(**{axis: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_sizes_must_be_positive_in_a_given_world(axis: str) -> None:
    with pytest.raises(ValueError, match=f"axis {axis} must be at least 1, not 0"):
        Topology.from_world(8, **{axis: 0})  # type: ignore[arg-type]


def test_experts_must_fit_on_a_stage() -> None:
    with pytest.raises(ValueError, match=r"2 x 4.*tp x cp x dp = 12"):
        Topology(tp=4, dp=3, pp=8, etp=2, ep=4)


@pytest.mark.parametrize("world_size", [0, 12, 17])
def test_the_world_must_divide(world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"world size {world_size} .* 2 x 1 x 4 = 8"):
        Topology.from_world(world_size, tp=2, pp=4)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_must_lie_in_the_world(rank: int) -> None:
    t = Topology(tp=2, pp=2, dp=2)
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 8"):
        t.coordinates(rank)
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 8"):
        t.group(rank, "tp")


@pytest.mark.parametrize("axes", [("tp", "ep"), ("dp", "edp"), ("mp",)])
def test_axes_must_lie_on_one_grid(axes: tuple[str, ...]) -> None:
    t = Topology(tp=2, dp=2)
    with pytest.raises(ValueError, match="do not lie on one grid"):
        t.group(0, *axes)
    with pytest.raises(ValueError, match="do not lie on one grid"):
        t.groups(*axes)
