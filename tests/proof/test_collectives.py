"""Collectives of tensor groups: order, sums, and backward as the adjoint of forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_reduce_forward,
    broadcast_object,
    gather_objects,
    reduce_scatter,
    reduce_scatter_forward,
    split_along_first_dim,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.context import SELF_GROUP, Group, make_context
from megatron.parallel.topology import Topology
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.lone_rank import CPU

ROWS = 6


def numbers(rank: int, rows: int = ROWS, key: int = 0) -> torch.Tensor:
    """A rank's own [rows, 2, 3]."""
    generator = torch.Generator().manual_seed(100 * key + rank)
    return torch.randn(rows, 2, 3, dtype=torch.float64, generator=generator)


# ---- a group of one


@pytest.mark.parametrize("operation", [all_reduce, all_gather, reduce_scatter, all_reduce_forward, reduce_scatter_forward])
def test_a_group_of_one_does_nothing(operation: Callable[[torch.Tensor, Group], torch.Tensor]) -> None:
    x = numbers(0).requires_grad_(operation in (all_reduce_forward, reduce_scatter_forward))
    before = x.detach().clone()
    y = operation(x, SELF_GROUP)
    assert y is x and torch.equal(y, before)


@pytest.mark.parametrize("start", [start_all_reduce, start_all_gather, start_reduce_scatter])
def test_nothing_is_started_in_a_group_of_one(start: Callable[[torch.Tensor, Group], Pending]) -> None:
    x = numbers(0)
    pending = start(x, SELF_GROUP)
    assert pending.wait() is x and pending.wait() is x, "waiting twice is allowed"


def test_the_own_part_of_a_group_of_one_is_all_of_it() -> None:
    x = numbers(0)
    assert split_along_first_dim(x, SELF_GROUP).data_ptr() == x.data_ptr() and torch.equal(split_along_first_dim(x, SELF_GROUP), x)


def test_objects_in_a_group_of_one() -> None:
    assert gather_objects({"a": 1}, SELF_GROUP) == [{"a": 1}]
    assert broadcast_object("text", SELF_GROUP) == "text"


def test_own_parts_are_views_in_the_order_of_ranks_and_must_divide() -> None:
    x = numbers(0)
    groups = [Group("tp", (3, 5, 8), index) for index in range(3)]
    assert torch.equal(torch.cat([split_along_first_dim(x, group) for group in groups]), x)
    split_along_first_dim(x, groups[1])[0] = 7.0
    assert (x[2] == 7.0).all(), "a view"
    with pytest.raises(AssertionError, match="does not divide by 3 ranks"):
        split_along_first_dim(numbers(0, rows=7), groups[0])


# ---- groups of two and three


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)


def in_group(rank: int, size: int) -> dict[str, Any]:
    group = make_context(Topology(tp=size), rank, CPU).group("tp")
    short = numbers(rank, ROWS // size)
    results: dict[str, Any] = {
        "sum": all_reduce(numbers(rank), group),
        "max": all_reduce(numbers(rank), group, dist.ReduceOp.MAX),
        "gather": all_gather(short, group),
        "gather strided": all_gather(strided(short), group),
        "scatter": reduce_scatter(numbers(rank), group),
        "scatter strided": reduce_scatter(strided(numbers(rank)), group),
        "part": split_along_first_dim(numbers(9), group),
        "objects": gather_objects(("rank", rank), group),
        "broadcast": broadcast_object(("from", rank), group),
        "half": all_reduce(torch.full((4,), rank + 1.0, dtype=torch.bfloat16), group),
    }
    pending = [start_all_reduce(numbers(rank), group), start_all_gather(short, group), start_reduce_scatter(numbers(rank), group)]
    results["started"] = [p.wait() for p in reversed(pending)][::-1]
    x = numbers(rank).requires_grad_()
    y = all_reduce_forward(x * 1.0, group)
    y.backward(numbers(9, key=1))  # what follows is the same on all ranks, and so is its gradient
    results["sum pair"] = (y.detach(), x.grad)
    x = numbers(rank).requires_grad_()
    y = reduce_scatter_forward(x * 1.0, group)
    y.backward(numbers(rank, ROWS // size, key=1))
    results["scatter pair"] = (y.detach(), x.grad)
    dist.barrier()
    return results


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, in_group, request.param, timeout=60.0)


def test_values_and_order(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    every = torch.stack([numbers(rank) for rank in range(size)])
    joined = torch.cat([numbers(rank, ROWS // size) for rank in range(size)])
    part = ROWS // size
    for rank, found in enumerate(ranks):
        own = slice(rank * part, (rank + 1) * part)
        torch.testing.assert_close(found["sum"], every.sum(0), rtol=1e-14, atol=1e-14)
        assert torch.equal(found["max"], every.amax(0))
        assert torch.equal(found["gather"], joined) and torch.equal(found["gather strided"], joined)
        torch.testing.assert_close(found["scatter"], every.sum(0)[own], rtol=1e-14, atol=1e-14)
        assert torch.equal(found["scatter strided"], found["scatter"])
        assert torch.equal(found["part"], numbers(9)[own])
        assert found["objects"] == [("rank", r) for r in range(size)]
        assert found["broadcast"] == ("from", 0)
        assert found["half"].tolist() == [size * (size + 1) / 2] * 4
        assert torch.equal(found["started"][0], found["sum"])
        assert torch.equal(found["started"][1], found["gather"])
        assert torch.equal(found["started"][2], found["scatter"])


def test_replicas_are_equal_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    assert all(torch.equal(found["sum"], ranks[0]["sum"]) for found in ranks)


def inner(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a * b).sum().item()


def test_gather_and_scatter_are_adjoint(ranks: list[dict[str, Any]]) -> None:
    """<gather x, y> = <x, scatter y>, summed over the ranks, for every x and y."""
    size = len(ranks)
    forward = sum(inner(found["gather"], numbers(rank)) for rank, found in enumerate(ranks))
    backward = sum(inner(numbers(rank, ROWS // size), found["scatter"]) for rank, found in enumerate(ranks))
    assert forward == pytest.approx(backward, rel=1e-12)


def test_the_sum_is_passed_back_as_the_adjoint(ranks: list[dict[str, Any]]) -> None:
    """The sum is one replicated tensor, so <sum of x, y> counts once, and <x, gradient> over the ranks."""
    forward = inner(ranks[0]["sum pair"][0], numbers(9, key=1))
    backward = sum(inner(numbers(rank), found["sum pair"][1]) for rank, found in enumerate(ranks))
    assert forward == pytest.approx(backward, rel=1e-12)
    assert all(torch.equal(found["sum pair"][0], found["sum"]) for found in ranks)


def test_the_scattered_sum_is_passed_back_as_the_adjoint(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    forward = sum(inner(found["scatter pair"][0], numbers(r, ROWS // size, key=1)) for r, found in enumerate(ranks))
    backward = sum(inner(numbers(rank), found["scatter pair"][1]) for rank, found in enumerate(ranks))
    assert forward == pytest.approx(backward, rel=1e-12)
    assert all(torch.equal(found["scatter pair"][0], found["scatter"]) for found in ranks)
