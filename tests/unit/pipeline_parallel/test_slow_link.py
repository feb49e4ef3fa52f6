"""The instruments of the overlap bench: the slow link, the clock of a model's units, and the step with perfect overlap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.data_parallel import bucket
from megatron.parallel import collectives
from megatron.parallel.collectives import Pending
from megatron.parallel.context import Group
from megatron.spec.operations import Op, OpType
from megatron_lab.benchmarks import slow_link, unit_times
from megatron_lab.benchmarks.overlap_bound import BucketTimes, simulate_shortest_step
from megatron_lab.benchmarks.slow_link import SlowLink
from megatron_lab.benchmarks.unit_times import UnitClock, UnitTimes

DATA = Group("cp-dp", (0, 1, 2, 3), 0)


class Clock:
    """Stands for `time`: passes only when told, or in a sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (slow_link, unit_times):
        monkeypatch.setattr(module, "time", found)
    return found


def real(tensor: torch.Tensor, group: Group, *args: Any, **kwargs: Any) -> Pending:
    """A collective that is through at once."""
    return Pending(tensor + 1)


# ---- the link


@pytest.mark.parametrize(
    ("name", "seconds"),
    # 4 ranks, 16 elements of 4 bytes a rank, 8 bytes a second: a ring sends 3/4 of what is reduced, three times what is gathered.
    [("start_all_reduce", 2 * 48 / 8), ("start_reduce_scatter", 48 / 8), ("start_all_gather", 3 * 64 / 8)],
)
def test_a_collective_takes_bytes_over_bandwidth(name: str, seconds: float, clock: Clock) -> None:
    link = SlowLink()
    link.bandwidth = 8.0
    pending = link.start(name, real, torch.zeros(16), DATA)
    assert clock.now == 100.0, "starting takes no time"
    assert pending.wait().tolist() == [1.0] * 16
    assert clock.now == 100.0 + seconds and link.sent_bytes == 8 * seconds
    pending.wait()
    assert clock.now == 100.0 + seconds, "it is through"


def test_collectives_follow_each_other_while_the_rank_computes(clock: Clock) -> None:
    link = SlowLink()
    link.bandwidth = 48.0  # a second each
    first, second = (link.start("start_reduce_scatter", real, torch.zeros(16), DATA) for _ in range(2))
    clock.now += 1.5
    first.wait()
    assert clock.now == 101.5
    second.wait()
    assert clock.now == 102.0
    clock.now = 110.0
    link.start("start_reduce_scatter", real, torch.zeros(16), DATA).wait()
    assert clock.now == 111.0, "an idle link starts at once"


def test_only_collectives_of_the_data_ranks_are_slowed(clock: Clock) -> None:
    link = SlowLink()
    link.bandwidth = 1.0
    for group in (Group("tp-cp-dp-pp", (0, 1), 0), Group("tp", (0, 1), 0), Group("cp-dp", (0,), 0)):
        link.start("start_all_reduce", real, torch.zeros(16), group).wait()
    assert clock.now == 100.0 and link.sent_bytes == 0.0


def test_without_a_connection_nothing_is_sent_but_counted(clock: Clock) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Pending:
        raise AssertionError("sent")

    link, out = SlowLink(), torch.empty(4)
    link.is_connected = False
    given = torch.zeros(8)
    assert link.start("start_all_reduce", refuse, given, DATA).wait() is given
    assert link.start("start_reduce_scatter", refuse, given, DATA, out=out).wait() is out
    assert link.start("start_all_gather", refuse, given, DATA).wait().shape == (32,)
    assert link.start("start_reduce_scatter", refuse, given, DATA).wait().shape == (2,)
    assert link.sent_bytes == 48 + 24 + 96 + 24 and clock.now == 100.0


def test_the_link_is_there_for_a_while_in_every_module() -> None:
    names = ("start_all_reduce", "start_reduce_scatter", "start_all_gather")
    before = {name: getattr(collectives, name) for name in names}
    link = SlowLink()
    link.is_connected = False  # so no process group is needed
    with link.installed():
        collectives.all_reduce(torch.zeros(16), DATA)
        assert link.sent_bytes == 96.0, "plain collectives go over the link too"
        for name in names:
            assert getattr(bucket, name) is getattr(collectives, name) is not before[name]
    for name in names:
        assert getattr(bucket, name) is getattr(collectives, name) is before[name]


# ---- the clock of the units


def test_unit_times_are_the_fastest_of_each_unit(clock: Clock) -> None:
    pace: list[float] = []

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, times: UnitTimes) -> torch.Tensor:  # type: ignore[override]
            ctx.times = times
            clock.now += pace[-1] * times.forward
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            clock.now += pace[-1] * ctx.times.backward
            return grad, None

    class Unit(nn.Module):
        def __init__(self, times: UnitTimes) -> None:
            super().__init__()
            self.times = times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slow.apply(x, self.times)

    wanted = [UnitTimes(1.0, 2.0), UnitTimes(4.0, 8.0), UnitTimes(16.0, 32.0)]
    units = [Unit(times) for times in wanted]
    train: Any = SimpleNamespace(
        model=SimpleNamespace(chunks={0: SimpleNamespace(get_units=lambda: units)}), executor=SimpleNamespace(recorder=None)
    )
    found = UnitClock(train)
    assert train.executor.recorder is found
    for microbatch, slower in enumerate((2.0, 1.0, 3.0)):
        pace.append(slower)
        forward, backward = (Op(kind, 0, microbatch) for kind in (OpType.FORWARD, OpType.BACKWARD))
        clock.now += 64.0
        found.start(forward)
        x = torch.zeros((), requires_grad=True)
        for unit in units:
            x = unit(x)
        found.end(forward)
        clock.now += 64.0
        found.start(backward)
        x.backward()  # type: ignore[no-untyped-call]
        found.end(backward)
    assert found.compute_times() == wanted


# ---- perfect overlap

UNITS = [UnitTimes(0.0, 0.0), UnitTimes(1.0, 2.0), UnitTimes(1.0, 2.0)]


@pytest.mark.parametrize(
    ("reduce", "gather", "microbatches", "every", "step"),
    # Computation of a microbatch takes 6 seconds, the update 0.6.
    [
        (0.0, 0.0, 1, False, 6.6),
        (0.0, 0.0, 3, True, 18.6),
        (1.0, 0.0, 1, False, 8.6),  # the first bucket hides behind backward; the others are complete at its end
        (2.5, 0.0, 1, False, 12.1),  # the link does not rest from 4.6 on
        (3.0, 0.0, 2, False, 19.6),  # from 10.6 on: the backward of the last microbatch
        (3.0, 0.0, 2, True, 22.6),  # from 4.6 on, 18 seconds
        (0.0, 1.0, 1, False, 8.2),  # from 0.2 on, when a third is updated; the last of three arrives as its block can begin, at 3.2
        (0.0, 0.1, 1, False, 6.6),  # hidden behind the update and the forward
        (0.5, 0.5, 1, False, 8.2),
    ],
)
def test_perfect_overlap(reduce: float, gather: float, microbatches: int, every: bool, step: float) -> None:
    buckets = [BucketTimes(unit, reduce, gather) for unit in (2, 1, 0)]
    assert simulate_shortest_step(UNITS, 0.6, buckets, microbatches, every_microbatch=every) == pytest.approx(step)
