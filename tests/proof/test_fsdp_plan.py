"""Which parameters are fully sharded, in which units and pieces, and from which values they start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.data_parallel.fsdp_plan import compute_owned_range, is_fully_sharded, order_for_backward, plan_units
from megatron.parallel.context import ParallelContext
from megatron.parallel.tensor_slice import FlatRange
from megatron.parallel.topology import Topology
from megatron_lab.verification.reference.shape import ReferenceShape
from tests.support.fsdp_world import TIED, UNTIED, build, in_world, shard
from tests.support.lone_rank import lone_rank
from tests.support.reference_runs import gpt2_like


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tied_parameters_and_partial_sums_over_tensor_ranks_stay_outside(sequence_parallel: bool) -> None:
    context = lone_rank(Topology(tp=2, dp=2))
    params = build(context, TIED, sequence_parallel=sequence_parallel).params
    outside = {entry.record.name for entry in params if not is_fully_sharded(entry, context)}
    partial_sums = {entry.record.name for entry in params if "tp" in entry.record.partial_axes}
    assert outside == {"embedding.word.weight"} | partial_sums and bool(partial_sums) == sequence_parallel


def test_tied_parameters_stay_outside_on_either_end() -> None:
    for rank in (0, 2):
        context = lone_rank(Topology(pp=2, dp=2), rank)
        outside = [entry.record.name for entry in build(context, TIED).params if not is_fully_sharded(entry, context)]
        assert outside == ["embedding.word.weight"]


def test_with_nobody_to_share_with_nothing_is_sharded() -> None:
    context = lone_rank(Topology(tp=4))
    assert not any(is_fully_sharded(entry, context) for entry in build(context).params)


@pytest.mark.parametrize("shape", [UNTIED, TIED], ids=["untied", "tied"])
def test_units_are_embedding_blocks_and_output_with_the_norm_before_it(shape: ReferenceShape) -> None:
    context = lone_rank(Topology(dp=2))
    model = build(context, shape)
    chunk = model.chunks[0]
    entries = [entry for entry in model.params if is_fully_sharded(entry, context)]
    units = plan_units(chunk.get_units(), entries)
    last = (chunk.final_norm, chunk.output) if shape is UNTIED else (chunk.final_norm,)
    assert [unit.modules for unit in units] == [(chunk.embedding,), *((block,) for block in chunk.layers), last]
    assert [entry for unit in units for entry in unit.entries] == entries, "each parameter once, in the order of the forward"


def test_depths_lie_inside_of_what_they_use() -> None:
    context = lone_rank(Topology(dp=2))
    model = build(context, replace(UNTIED, mtp_depths=2))
    chunk = model.chunks[0]
    assert chunk.mtp is not None
    entries = [entry for entry in model.params if is_fully_sharded(entry, context)]
    *_, last, end, first_depth, second_depth = units = plan_units(chunk.get_units(), entries)
    assert [unit.modules for unit in units[-3:]] == [(chunk.mtp,), *((depth,) for depth in chunk.mtp.depths)]
    assert [entry.record.name for entry in end.entries] == ["final_norm.weight", "output.weight"]
    assert {entry.record.name.split(".")[1] for entry in second_depth.entries} == {"1"}
    assert sorted(e.record.name for unit in units for e in unit.entries) == sorted(e.record.name for e in entries)
    assert [unit.num_nested for unit in units] == [0] * (len(units) - 3) + [2, 0, 0]
    order = order_for_backward(units, [unit.num_nested for unit in units])
    assert order[:4] == [end, second_depth, first_depth, last]


@pytest.mark.parametrize(("rows", "expected"), [(8, [(0, 2), (2, 4), (4, 6), (6, 8)]), (5, [(0, 2), (2, 4), (4, 5), (5, 5)])])
def test_pieces_are_those_of_torch_chunk(rows: int, expected: list[tuple[int, int]]) -> None:
    for rank, (start, stop) in enumerate(expected):
        context = lone_rank(Topology(dp=4), rank)
        entry = build(context, gpt2_like(seq=rows)).params["embedding.position.weight"]
        row = entry.param.shape[1]
        assert compute_owned_range(entry, context.get_fsdp_shard_group()) == FlatRange(start * row, stop * row)


# ---- initial values


def starts(context: ParallelContext) -> list[tuple[str, bool, bool, torch.dtype]]:
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        whole = build(context, dtype=dtype, materialized=True)
        drawn, kept = build(context, dtype=dtype), build(context, dtype=dtype, materialized=True)
        for entry in kept.params:
            entry.param.detach().add_(1)
        for a, b in zip(
            (s for g in shard(drawn, context).groups for s in g.shards),
            (s for g in shard(kept, context).groups for s in g.shards),
            strict=True,
        ):
            part = whole.params[a.record.name].param.detach().view(-1)[a.flat_range.start : a.flat_range.stop]
            same, moved = torch.equal(a.weights, part.to(a.weights.dtype)), torch.equal(b.weights, (part + 1).to(b.weights.dtype))
            found.append((a.record.name, same, moved, a.weights.dtype))
    return found


def test_initial_values_are_those_of_the_whole_model_in_its_dtype() -> None:
    for found in in_world(Topology(tp=2, dp=2), starts):
        assert all(same and moved for _, same, moved, _ in found), found
        assert {dtype for *_, dtype in found} == {torch.float32, torch.float64}
