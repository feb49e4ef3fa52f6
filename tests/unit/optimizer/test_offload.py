"""Mains and moments in host memory: the same updates, bit for bit, and copies that nothing overtakes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer import placement, rules
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.optimizer.placement import HostTransfer, select_offloaded
from megatron.parallel.collectives import Pending
from megatron.parallel.params import ParamRecord, Shard, ShardGroup
from megatron.parallel.tensor_slice import FlatRange
from tests.support import lazy_streams
from tests.support.held import state_held_by
from tests.support.lone_rank import lone_rank

SIZES = [[300, 64, 7], [1], [129, 500], [64, 64]]
"""Elements of the shards of each group."""
ADAM = OptimizerConfig(optimizer="adam")
SGD = OptimizerConfig(optimizer="sgd", sgd_momentum=0.9)
PLAIN_SGD = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0)
BOTH = replace(SGD, optimizer="both")  # type: ignore[arg-type]
"""Adam for what decays, SGD for the others: both in each group."""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are many."""
    monkeypatch.setattr(placement, "_BATCH_ELEMENTS", 128)


@pytest.fixture(autouse=True)
def two_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(config: OptimizerConfig) -> rules.RuleSelector:
        adam, sgd = rules.AdamW(config), rules.SGD(config)
        return lambda record: adam if record.has_weight_decay else sgd

    monkeypatch.setitem(rules.RULES, "both", both)


@pytest.fixture(params=["in place", "staged", "late"])
def staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On the device that is the host, no copies but of weights; as on another device; and with copies as late as they may be."""
    if request.param == "late":
        monkeypatch.setattr(torch, "get_device_module", lambda device: lazy_streams)
    return request.param != "in place"


def offloading(config: OptimizerConfig, fraction: float) -> OptimizerConfig:
    return replace(config, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)


def values(size: int, key: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(key)).to(dtype)


class Coming(Pending):
    """A gradient that is there once somebody has waited for it. On a side stream the wait is put into the stream too."""

    def __init__(self, shards: Sequence[Shard], step: int) -> None:
        self.shards, self.step = shards, step
        self.waited_beside = False

    def wait(self) -> torch.Tensor:
        stream = lazy_streams.current_stream()
        if stream is not lazy_streams.MAIN:
            self.waited_beside = True
            stream.issued.append(self.arrive)
        else:
            self.arrive()
        return torch.empty(0)

    def arrive(self) -> None:
        for shard in self.shards:
            key = 1000 * self.step + int(shard.record.name)
            shard.grad.copy_(values(shard.grad.numel(), key, shard.grad.dtype))


class Run:
    """An optimizer and what happens around it. What is published is written down."""

    def __init__(self, config: OptimizerConfig, dtype: torch.dtype, *, staged: bool | None = None, tells: bool = True) -> None:
        """
        Args:
            tells: say when groups are reduced.
        """
        self.tells, self.staged = tells, staged
        self.groups: list[ShardGroup] = []
        self.published: list[torch.Tensor] = []
        wide, number = torch.promote_types(dtype, torch.float32), itertools.count(1)
        for sizes in SIZES:
            shards = []
            for size in sizes:
                name = str(next(number))
                weights = values(size, int(name), dtype)
                record = ParamRecord(name, (size,), param_type="matrix" if int(name) % 2 == 0 else "vector")
                shards.append(Shard(record, FlatRange(0, size), weights, torch.zeros(size, dtype=wide), range(size)))
            self.groups.append(ShardGroup(shards))
            self.groups[-1].gather_params = lambda shards=shards: self.published.extend(s.weights.clone() for s in shards)  # type: ignore[misc]
        self.optimizer = ShardedOptimizer(self.groups, config, lone_rank(), uses_staging=staged)
        self.steps_done = 0

    def step(self, *, skipped: bool = False) -> None:
        self.steps_done += 1
        for group in reversed(self.groups):  # as backward completes them
            coming = Coming(group.shards, self.steps_done)
            if self.tells and group.on_reduced:
                group.notify_reduced(coming)
                assert coming.waited_beside or torch.get_device_module("cpu") is not lazy_streams
            coming.wait()
        if not skipped:
            self.optimizer.step(0.01 * self.steps_done, 0.1, 1.0 / 3.0 if self.steps_done % 2 else 1.0)
        for shard in self.optimizer.shards:
            shard.grad.fill_(torch.nan)  # the next backward

    def state(self) -> list[torch.Tensor]:
        return [t for s in self.optimizer.shards for t in (s.weights, s.main_param, *s.moments.values())]


def assert_equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


SKIPPED = (1, 3)


@functools.cache
def not_offloading(config: OptimizerConfig, dtype: torch.dtype) -> Run:
    """After five steps."""
    plain = Run(config, dtype)
    assert all((s.main_param is not s.weights) == (dtype == torch.bfloat16) for s in plain.optimizer.shards)
    for step in range(1, 6):
        plain.step(skipped=step in SKIPPED)
    return plain


@pytest.mark.parametrize(
    ("config", "dtype", "fraction", "tells"),
    [
        pytest.param(
            *case,
            marks=() if case[2:] == (0.5, True) or case[:2] == (BOTH, torch.bfloat16) else pytest.mark.full("the other cases"),
        )
        for case in itertools.product((ADAM, SGD, PLAIN_SGD, BOTH), DTYPES, (0.0, 0.5, 1.0), (True, False))
    ],
)
def test_offloading_changes_no_bit(config: OptimizerConfig, dtype: torch.dtype, fraction: float, tells: bool, staged: bool) -> None:
    plain = not_offloading(config, dtype)
    run = Run(offloading(config, fraction), dtype, staged=staged, tells=tells)
    for step in range(1, 6):
        run.step(skipped=step in SKIPPED)
    assert_equal(run.state(), plain.state())
    assert_equal(run.published, plain.published)
    assert run.optimizer.num_steps == 3 and len(run.published) == 3 * len(run.optimizer.shards)
    assert not torch.equal(run.state()[0], Run(config, dtype).state()[0])


@pytest.mark.parametrize(
    "config", [BOTH, *(pytest.param(one, marks=pytest.mark.full("both rules")) for one in (ADAM, SGD, PLAIN_SGD))]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_goes_to_and_from_an_optimizer_that_offloads(config: OptimizerConfig, dtype: torch.dtype, staged: bool) -> None:
    """As by a checkpoint: main parameters, moments, and the number of updates."""
    for before, after in ((config, offloading(config, 0.5)), (offloading(config, 0.5), config)):
        through, resumed = Run(before, dtype, staged=staged), Run(after, dtype, staged=staged)
        for _ in range(3):
            through.step()
        for old, new in zip(through.optimizer.shards, resumed.optimizer.shards, strict=True):
            new.main_param.copy_(old.main_param)
            for name, moment in old.moments.items():
                new.moments[name].copy_(moment)
        resumed.optimizer.num_steps = through.optimizer.num_steps
        resumed.optimizer.copy_main_to_model_params()
        resumed.steps_done = 3
        assert_equal(resumed.published, [shard.weights for shard in through.optimizer.shards])
        for _ in range(2):
            through.step()
            resumed.step()
        assert_equal(resumed.state(), through.state())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_offloaded_lies_apart_from_the_weights(dtype: torch.dtype, staged: bool) -> None:
    """Also where dtypes agree, unless the device is the host; and its memory is counted as the host's."""
    optimizer = Run(offloading(ADAM, 0.5), dtype, staged=staged).optimizer
    numel = sum(itertools.chain(*SIZES))
    names = select_offloaded({s.record.name: s.main_param.numel() for s in optimizer.shards}, 0.5)
    taken = {index for index, s in enumerate(optimizer.shards) if s.record.name in names}
    apart = [s.main_param.untyped_storage().data_ptr() != s.weights.untyped_storage().data_ptr() for s in optimizer.shards]
    assert apart == [dtype == torch.bfloat16 or (staged and index in taken) for index in range(len(apart))]
    assert sum(optimizer.shards[index].main_param.numel() for index in taken) / numel == pytest.approx(0.5, abs=1e-3)
    device, host = state_held_by(optimizer, offloading(ADAM, 0.5))
    padded = {
        where: sum(-(-s.main_param.numel() // 64) * 64 for i, s in enumerate(optimizer.shards) if (i in taken) == where)
        for where in (True, False)
    }
    width = optimizer.shards[0].main_param.itemsize

    assert sum(host.main_params) == (padded[True] * width if dtype == torch.bfloat16 or staged else 0)
    assert sum(host.moments) == 2 * padded[True] * width
    assert sum(device.main_params) == (padded[False] * width if dtype == torch.bfloat16 else 0)
    assert sum(device.moments) == 2 * padded[False] * width and not device.buffers
    staging = padded[True] * width + 2 * 128 * dtype.itemsize
    assert sum(host.buffers) == (staging if staged else 0)


def test_each_rule_of_a_group_waits_for_its_own_gradients() -> None:
    run = Run(offloading(BOTH, 1.0), torch.float32, staged=True)
    assert [len(group.on_reduced) for group in run.groups] == [len({int(s.record.name) % 2 for s in g.shards}) for g in run.groups]


def test_copies_go_on_beside_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins to copy gradients without waiting for them, and waits for weights only when both buffers are full."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: lazy_streams)
    link = HostTransfer(torch.device("cpu"))
    grads, arrived = torch.ones(3), torch.zeros(3)
    wait = link.copy_grads_to_host(Pending(grads), [grads], [arrived])
    assert not arrived.any()
    wait()
    assert arrived.all()
    main_params, weights = (
        [torch.full((2,), float(i)) for i in range(1, 5)],
        [torch.zeros(2, dtype=torch.bfloat16) for _ in range(4)],
    )
    link.reserve(4)
    there = []
    for main, weight in zip(main_params, weights, strict=True):
        link.copy_to_device([main], [weight])
        main.zero_()
        there.append([w.tolist() == [i, i] for i, w in enumerate(weights, start=1)])
    assert there == [[False] * 4, [False] * 4, [True, False, False, False], [True, True, False, False]]
    link.wait_for_copies()
    assert [w.tolist() for w in weights] == [[i, i] for i in range(1, 5)]


# ---- which shards


@pytest.mark.parametrize("sizes", [[], [5], [1, 1, 1, 1], [100, 1], [100, 60, 50, 40, 3, 3, 2, 1], [7, 7, 7], [0, 4, 0]])
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.25, 0.5, 0.6, 0.99, 1.0])
def test_whole_shards_come_near_to_the_fraction(sizes: list[int], fraction: float) -> None:
    named = {str(index): size for index, size in enumerate(sizes)}
    chosen = select_offloaded(named, fraction)
    assert chosen <= set(named) and chosen == select_offloaded(dict(reversed(named.items())), fraction), "in any order"
    taken, wanted = sum(named[name] for name in chosen), fraction * sum(sizes)
    assert abs(taken - wanted) <= max(sizes, default=0) / 2
    if fraction in (0.0, 1.0):
        assert taken == wanted
    assert all(named[name] for name in chosen), "an empty shard has nothing to move"
    for name, size in named.items():  # no single change comes nearer
        other = taken + (-size if name in chosen else size)
        assert abs(taken - wanted) <= abs(other - wanted) + 1e-9


def test_a_model_of_equal_blocks_comes_within_a_percent() -> None:
    """Embedding and twelve blocks of a GPT with a hidden size of 768."""
    block = [4 * 768 * 768, 4 * 768 * 768, 3 * 768 * 768, 768 * 768, 4 * 768, 768, 768, 768]
    sizes = [50304 * 768, 1024 * 768, *(block * 12)]
    named = {str(index): size for index, size in enumerate(sizes)}
    for fraction in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9):
        taken = sum(named[name] for name in select_offloaded(named, fraction))
        assert taken / sum(sizes) == pytest.approx(fraction, abs=0.01)
