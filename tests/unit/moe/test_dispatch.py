"""Which rows that come from other ranks are moved. (What ranks send: tests/proof/test_layouts_experts.py.)"""

from __future__ import annotations

import pytest
import torch

from megatron.moe import dispatch
from megatron.moe.dispatch import _Routes
from megatron.parallel.context import Group
from megatron.parallel.topology import Topology
from tests.support.lone_rank import lone_rank


def from_equal_ranks(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """What this rank receives where all ranks have the same tensor."""
    return tensor[group.rank].expand_as(tensor)


@pytest.mark.parametrize("experts", [2, 4])
def test_rows_are_moved_only_where_a_rank_has_several_experts(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a single expert are used as they arrive, without a copy. So it is in a plan."""
    monkeypatch.setattr(dispatch, "all_to_all", from_equal_ranks)
    group = lone_rank(Topology(dp=2, ep=2)).expert_group
    chosen = torch.tensor([[0], [1], [0], [experts - 1], [experts // 2]])
    way = _Routes.of(chosen, group, experts, 1)
    each = chosen[chosen < experts // 2].sort().values
    rows = torch.cat([each, each]).unsqueeze(-1)
    assert len(rows) == sum(way.receive_splits) == sum(way.rows_per_expert)
    assert torch.equal(way.sort_by_expert(rows), rows.sort(0).values)
    assert torch.equal(way.restore_arrival_order(way.sort_by_expert(rows)), rows)
    planned = _Routes.assumed(chosen, group, experts // 2, 1, len(rows), len(chosen))
    for one in (way, planned):
        assert (one.sort_by_expert(rows) is rows) == (experts == 2)
