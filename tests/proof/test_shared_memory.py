"""The tests' own process group does what gloo does, and tells what a library would let pass."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.collectives import _all_gather, _reduce_scatter
from megatron_lab.verification.local_ranks import RanksError, run_ranks
from tests.support.shared_memory import SHARED_MEMORY

SIZE = 3


def every_call(rank: int) -> list[Any]:
    """The results of all calls, on the world and on a part of it."""
    found: list[Any] = [dist.get_world_size()]
    pair = dist.new_group([0, 2])
    for group, ranks in ((dist.group.WORLD, [0, 1, 2]), (pair, [0, 2])):
        if rank not in ranks:
            continue
        size, last = len(ranks), ranks[-1]
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            mine = (torch.arange(2 * size) + 10 * rank).to(dtype)
            for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                reduced = mine.clone()
                dist.all_reduce(reduced, operation, group=group)
                found.append(reduced)
            gathered, part, other = mine.repeat(size), mine[:2].clone(), mine.clone()
            _all_gather(gathered, mine, group=group)
            _reduce_scatter(part, mine, group=group)
            dist.broadcast(other, last, group=group)
            listed = [torch.empty_like(mine) for _ in ranks]
            dist.all_gather(listed, mine, group=group)
            found += [gathered, part, other, *listed]
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        collected: list[Any] = [None] * size
        dist.gather_object(rank, collected if rank == ranks[0] else None, ranks[0], group=group)
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, [{"to": each} for each in ranks] if rank == ranks[0] else None, ranks[0], group=group)
        told = [rank]
        dist.broadcast_object_list(told, ranks[0], group=group)
        found += [objects, collected, scattered, told]
        neighbours = ranks[(ranks.index(rank) + 1) % size], ranks[ranks.index(rank) - 1]
        for step in range(3):
            received = torch.empty(4)
            arriving = dist.irecv(received, neighbours[1], group=group)
            leaving = dist.isend(torch.full((4,), 10.0 * rank + step), neighbours[0], group=group)
            assert arriving is not None and leaving is not None
            arriving.wait()
            leaving.wait()
            found.append(received)
        dist.barrier(group)
    return found


def test_every_call_gives_what_gloo_gives() -> None:
    ours, gloo = run_ranks(SIZE, every_call, backend=SHARED_MEMORY), run_ranks(SIZE, every_call)
    for rank in range(SIZE):
        torch.testing.assert_close(ours[rank], gloo[rank], rtol=0, atol=0)


def test_more_calls_than_there_are_slots() -> None:
    def on_rank(rank: int) -> None:
        for step in range(1100):
            tensor = torch.tensor([step + rank])
            dist.all_reduce(tensor)
            assert tensor.item() == 2 * step + 1

    run_ranks(2, on_rank, backend=SHARED_MEMORY)


def test_a_result_is_there_after_wait_and_not_before() -> None:
    def on_rank(rank: int) -> tuple[float, float]:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        before = tensor.item()
        work.wait()
        return before, tensor.item()

    assert run_ranks(2, on_rank, backend=SHARED_MEMORY) == [(1.0, 2.0)] * 2


def written_too_early(rank: int) -> None:
    tensor, part = torch.ones(4), torch.empty(2)
    work = _reduce_scatter(part, tensor, async_op=True)
    tensor[3] = 5
    work.wait()


def sent_and_written(rank: int) -> None:
    tensor = torch.ones(4)
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    assert work is not None
    if rank == 0:
        tensor.zero_()
    work.wait()


def different_calls(rank: int) -> None:
    dist.barrier() if rank else dist.all_reduce(torch.ones(1))


def different_sizes(rank: int) -> None:
    dist.all_reduce(torch.ones(1 + rank))


def one_is_missing(rank: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
    if rank:
        dist.barrier(group)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (written_too_early, "changed before the collective"),
        (sent_and_written, "changed before the collective"),
        (different_calls, "is all-reduce here and {'barrier'} elsewhere"),
        (different_sizes, "8 bytes came for 1 elements of 4 bytes"),
        (one_is_missing, "a peer never came to call 0"),
    ],
)
def test_what_is_wrong_is_told(function: Callable[[int], None], message: str) -> None:
    with pytest.raises(RanksError) as error:
        run_ranks(2, function, backend=SHARED_MEMORY)
    assert message in str(error.value)


def test_what_is_no_number_is_unchanged_too() -> None:
    def on_rank(rank: int) -> float:
        tensor = torch.tensor([torch.nan, 1.0], dtype=torch.bfloat16)
        work = dist.all_reduce(tensor.clone(), async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(tensor, 1)
        return tensor[1].item()

    assert run_ranks(2, on_rank, backend=SHARED_MEMORY) == [1.0, 1.0]


def test_no_file_is_left() -> None:
    def on_rank(rank: int) -> list[str]:
        dist.barrier()
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in maps if "/ranks-" in line and not line.endswith("(deleted)")]

    assert run_ranks(2, on_rank, backend=SHARED_MEMORY) == [[], []]
