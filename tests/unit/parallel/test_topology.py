"""Rank arithmetic against the published formulas, and laws that hold in every world."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.topology import AXES, GRADIENT_AXES, Topology

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any small world of either order."""
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    return Topology(tp=tp, cp=cp, dp=dp, pp=pp, pp_before_dp=draw(st.booleans()))


SOME_AXES = st.lists(st.sampled_from(AXES), unique=True).map(tuple)


@given(topologies())
def test_ranks_follow_the_formula(t: Topology) -> None:
    """rank = tp + TP (cp + CP (dp + DP pp)), and with the pipeline before the data tp + TP (cp + CP (pp + PP dp))."""
    for rank in range(t.world_size):
        c = t.get_coordinates(rank)
        outer = c["pp"] + t.pp * c["dp"] if t.pp_before_dp else c["dp"] + t.dp * c["pp"]
        assert rank == c["tp"] + t.tp * (c["cp"] + t.cp * outer)
        assert all(0 <= c[axis] < t.get_size(axis) for axis in AXES)


@given(topologies())
def test_rank_is_the_inverse_of_coordinates(t: Topology) -> None:
    for rank in range(t.world_size):
        coordinates = t.get_coordinates(rank)
        assert t.find_rank(**{axis: coordinates[axis] for axis in AXES}) == rank
    assert t.find_rank() == 0 and t.find_rank(pp=t.pp - 1) == t.group(0, "pp")[-1]


@given(topologies(), SOME_AXES)
def test_groups_partition_the_world(t: Topology, axes: tuple[str, ...]) -> None:
    groups = t.get_groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(t.world_size))
    assert all(len(group) == t.get_size(*axes) and list(group) == sorted(group) for group in groups)
    assert groups == sorted(groups)


@given(topologies(), SOME_AXES)
def test_a_group_holds_the_ranks_that_differ_in_its_axes_only(t: Topology, axes: tuple[str, ...]) -> None:
    others = [axis for axis in AXES if axis not in axes]
    where = [t.get_coordinates(rank) for rank in range(t.world_size)]
    for rank in range(t.world_size):
        expected = [r for r in range(t.world_size) if all(where[r][axis] == where[rank][axis] for axis in others)]
        assert list(t.group(rank, *axes)) == expected
        assert t.group(rank, *axes) == t.group(rank, *reversed(axes))


def test_worked_example() -> None:
    """The one of the module's docstring."""
    t = Topology(tp=2, pp=2, dp=2)
    table = {axis: [t.get_coordinates(rank)[axis] for rank in range(8)] for axis in ("tp", "dp", "pp")}
    assert table == {"tp": [0, 1, 0, 1, 0, 1, 0, 1], "dp": [0, 0, 1, 1, 0, 0, 1, 1], "pp": [0, 0, 0, 0, 1, 1, 1, 1]}
    assert t.get_groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert t.get_groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert t.get_groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert t.get_groups("tp", "pp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    other = Topology(tp=2, pp=2, dp=2, pp_before_dp=True)
    assert other.get_groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert other.get_groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert other.get_groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [other.get_coordinates(3)[axis] for axis in AXES] == [1, 0, 0, 1]


@pytest.mark.parametrize("pp_before_dp", [False, True])
def test_3072_ranks(pp_before_dp: bool) -> None:
    t = Topology.from_world(3072, tp=8, pp=16, pp_before_dp=pp_before_dp)
    assert (t.dp, t.world_size, t.get_size("tp", "pp"), t.get_size()) == (24, 3072, 128, 1)
    for axes, count in {("tp",): 384, ("dp",): 128, ("pp",): 192, ("tp", "pp"): 24, GRADIENT_AXES: 128}.items():
        groups = t.get_groups(*axes)
        assert len(groups) == count
        assert sorted(itertools.chain(*groups)) == list(range(3072))
        for group in groups[::7]:
            assert t.group(group[-1], *axes) == group
    stride = 8 if pp_before_dp else 192
    assert t.group(1234, "pp") == tuple(t.find_rank(**{**dense(t, 1234), "pp": stage}) for stage in range(16))
    assert t.group(1234, "pp")[1] - t.group(1234, "pp")[0] == stride


def dense(t: Topology, rank: int) -> dict[str, int]:
    """Coordinates on every axis."""
    return {axis: t.get_coordinates(rank)[axis] for axis in AXES}


@pytest.mark.parametrize("axis", AXES)
def test_sizes_must_be_positive(axis: str) -> None:
    with pytest.raises(ValueError, match=f"axis {axis} is 0, but must be at least 1"):
        Topology(**{axis: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_sizes_must_be_positive_in_a_given_world(axis: str) -> None:
    with pytest.raises(ValueError, match=f"axis {axis} is 0, but must be at least 1"):
        Topology.from_world(8, **{axis: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [0, 12, 17])
def test_the_world_must_divide(world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"world size {world_size} .* 2 x 1 x 4 = 8"):
        Topology.from_world(world_size, tp=2, pp=4)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_must_lie_in_the_world(rank: int) -> None:
    t = Topology(tp=2, pp=2, dp=2)
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 8"):
        t.get_coordinates(rank)
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 8"):
        t.group(rank, "tp")


@pytest.mark.parametrize("axes", [("tp", "ep"), ("mp",)])
def test_other_axes_are_refused(axes: tuple[str, ...]) -> None:
    t = Topology(tp=2, dp=2)
    with pytest.raises(ValueError, match="are not in one rank grid"):
        t.group(0, *axes)
    with pytest.raises(ValueError, match="are not in one rank grid"):
        t.get_groups(*axes)


def test_experts_have_a_grid_of_their_own() -> None:
    """On the ranks of each stage, in their order: tensor ranks of an expert side by side, then other experts, then copies."""
    grid = Topology(tp=2, cp=1, dp=4, pp=2, ep=2, expert_tensor=1)
    assert (grid.etp, grid.ep, grid.edp) == (1, 2, 4)
    assert [grid.get_expert_coordinates(rank)["ep"] for rank in range(8)] == [0, 1] * 4
    assert grid.get_groups("etp", "ep") == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert grid.get_groups("edp") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    for rank in range(grid.world_size):
        places = grid.all_coordinates(rank)
        assert grid.find_expert_rank(places["etp"], places["ep"], places["edp"], places["pp"]) == rank
    plain = Topology(tp=2, dp=2)
    assert plain.get_groups("edp") == plain.get_groups("cp", "dp") and plain.get_groups("etp", "ep") == plain.get_groups("tp")
    assert str(plain) == "tensor 2 x pipeline 1 x data 2"
    assert str(grid) == "tensor 2 x pipeline 2 x data 4 (experts: tensor 1 x expert 2 x data 4)"
    with pytest.raises(
        ValueError, match="the 4 ranks of a pipeline stage \\(TP x CP x DP\\) are not divisible by ETP x EP = 2 x 4"
    ):
        Topology(tp=2, dp=2, ep=4)
    with pytest.raises(ValueError, match="are not in one rank grid"):
        grid.get_groups("tp", "ep")
