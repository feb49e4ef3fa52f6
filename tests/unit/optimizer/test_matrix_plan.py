"""Who makes which matrix whole: each element comes once, each holder gets its own back, and ranks have about equal work."""

from __future__ import annotations

import pytest
import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer import matrix_plan
from megatron.optimizer.matrix_plan import Matrix, plan_matrices
from megatron.optimizer.muon import count_matrix_flops, newton_schulz
from megatron.parallel.params import ParamPartition, ParamRecord, Split
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron_lab.planner.rank_profiles import Links
from megatron_lab.planner.storages import StorageLedger
from tests.support.lone_rank import lone_rank


def params(topology: Topology, layers: int = 3) -> list[ParamPartition]:
    """Of each layer a gated weight, one split by columns that data ranks cut within rows, and one that every rank holds."""
    found = []
    for layer in range(layers):
        gated = ParamRecord(f"{layer}.gated", (2, 8 * topology.tp, 12), (Split(1, "tp"),))
        wide = ParamRecord(f"{layer}.wide", (10, 6 * topology.tp), (Split(1, "tp"),))
        cuts = tuple(60 * place // topology.dp for place in range(1, topology.dp))
        found.append(ParamPartition(gated, torch.float32))
        found.append(ParamPartition(wide, torch.float32, cuts, GRADIENT_AXES, topology.dp))
        found.append(ParamPartition(ParamRecord(f"{layer}.replicated", (7, 9)), torch.float32))
    return found


def work(matrix: Matrix) -> float:
    return float(matrix.numel)


@pytest.mark.parametrize("most", [1, 300, 2**24])
@pytest.mark.parametrize("topology", [Topology(), Topology(dp=3), Topology(tp=2, dp=2), Topology(tp=4, pp=2, dp=3)])
def test_each_element_comes_once_and_goes_back_to_all(monkeypatch: pytest.MonkeyPatch, topology: Topology, most: int) -> None:
    monkeypatch.setattr(matrix_plan, "MAX_ROUND_ELEMENTS", most)
    plan = plan_matrices(params(topology), lone_rank(topology), work)
    assert plan.num_ranks == topology.tp * topology.dp
    owned = [matrix for one in plan.rounds for matrices in one.owned for matrix in matrices]
    assert len(owned) == len({(matrix.record.name, matrix.index) for matrix in owned}) == 3 * (2 + 1 + 1)
    for matrix in owned:
        times = torch.zeros(matrix.shape)
        for holding in matrix.shards:
            for placed in holding.slices:
                times[placed.slice.index] += 1
            assert sum(placed.slice.numel for placed in holding.slices) == holding.numel
            expected = {"gated": topology.dp, "wide": 1, "replicated": plan.num_ranks}[matrix.record.name.split(".")[1]]
            assert len(holding.ranks) == expected
        assert torch.equal(times, torch.ones(matrix.shape))
    for one in plan.rounds:
        assert all(move.sender in move.shard.ranks for move in one.transfers)
        assert all(move.sender == move.owner for move in one.transfers if move.owner in move.shard.ranks), "not sent for nothing"
    assert plan.num_ranks > 1 or plan.count_sent_elements() == [0]


@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
def test_work_is_even(ranks: int) -> None:
    """Within a third of the best, and never further apart than one matrix (Graham 1969)."""
    topology = Topology(dp=ranks)
    plan = plan_matrices(params(topology, layers=20), lone_rank(topology), work)
    done = plan.compute_rank_costs(work)
    largest = max(work(matrix) for one in plan.rounds for matrices in one.owned for matrix in matrices)
    assert max(done) - min(done) <= largest and max(done) <= 4 / 3 * max(sum(done) / ranks, largest)


@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (8, 3), (5, 5)])
def test_work_is_that_of_the_products(rows: int, columns: int) -> None:
    """The FLOPs by which matrices are dealt are those that orthogonalising one takes."""
    config, side = OptimizerConfig(optimizer="muon"), min(rows, columns)
    x, other, a, b = (torch.ones(1, *shape) for shape in ((rows, columns), (rows, columns), (side, side), (side, side)))
    with StorageLedger() as ledger:
        newton_schulz(x, other, a, b, config.muon_num_ns_steps)
    assert count_matrix_flops(Matrix(ParamRecord("w", (rows, columns)), 0, ()), config) == ledger.take_span().work.flops


def test_what_leaves_a_node_is_the_share_of_the_others_there() -> None:
    """Of eight ranks of a stage on two nodes, four of seven others are on the other one."""
    assert Links(Topology(tp=2, dp=4), gpus_per_node=4).compute_inter_node_fractions(0).tolist() == [[4 / 7] * 2] * 4
    assert Links(Topology(tp=2, dp=4), gpus_per_node=8).compute_inter_node_fractions(0).max() == 0.0
    assert Links(Topology(pp=2), gpus_per_node=1).compute_inter_node_fractions(1).max() == 0.0
