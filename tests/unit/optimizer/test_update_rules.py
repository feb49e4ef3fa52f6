"""Every update rule that sees each element by itself does the same to slices as to whole parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from megatron.config.training import OptimizerConfig
from megatron.data_parallel.bucket_plan import plan_buckets
from megatron.optimizer import placement
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.optimizer.rule import AdamW, Target, Update, Updater, UpdateRule, build_param_groups, wrap_torch_optimizer
from megatron.optimizer.rules import RULES, SGD, RuleSelector, use_for_all
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, Shard, ShardGroup, Split
from megatron.parallel.topology import Topology
from tests.support.lone_rank import lone_rank

RECORDS = [
    ParamRecord("embedding", (46, 12), (Split(0, "tp", padded_size=48),)),
    ParamRecord("norm", (24,), param_type="vector"),
    ParamRecord("square", (16, 16)),
    ParamRecord("gated", (2, 10, 8), (Split(1, "tp"),)),
    ParamRecord("tall", (33, 12), (Split(1, "tp"),)),
    ParamRecord("wide", (4, 96), (Split(0, "tp"),)),
    ParamRecord("bias", (6,), param_type="vector"),
]
STEPS = 4


# ---- rules beside those of --optimizer


class MomentumRule(UpdateRule):
    """By a torch optimizer, as those of apex are."""

    moments = ("momentum_buffer",)

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        return wrap_torch_optimizer(targets, torch.optim.SGD(build_param_groups(targets), lr=0.0, momentum=0.9))


class GreedyRule(UpdateRule):
    """Divides a gradient by its norm, though it may see any part of it."""

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        def step(update: Update) -> None:
            for target in targets:
                target.main.sub_(target.grad / target.grad.norm().clamp(min=1e-300), alpha=update.rate(target.group))

        return step


def mixed(config: OptimizerConfig) -> RuleSelector:
    """A rule for each kind of parameter: two of them share buckets."""
    matrix, table, vector = MomentumRule(), SGD(config), AdamW(config)
    return lambda record: table if record.name == "embedding" else vector if record.param_type == "vector" else matrix


ACROSS_RANKS = ("adafactor", "lamb", "adam8bit", "muon")
"""Rules that put together what all ranks have, which are not there here: tests/proof/test_layouts.py is about
them."""
ALL = {name: rule for name, rule in RULES.items() if name not in ACROSS_RANKS} | {
    "momentum": lambda config: use_for_all(MomentumRule()),
    "mixed": mixed,
}


# ---- the proof


def values(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash_of(name) + step)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[:4], "big") * 100


def entries(context: ParallelContext) -> list[ParamEntry]:
    module = nn.Module()
    for record in RECORDS:
        shape = record.get_local_shape(context.axis_sizes)
        setattr(module, record.name, nn.Parameter(torch.empty(shape, dtype=torch.float64, device="meta")))
    return [ParamEntry(record, [(module, record.name)]) for record in RECORDS]


def train(
    rule: str, topology: Topology, tensor_rank: int, config: OptimizerConfig, bucket_size: int | None
) -> dict[str, torch.Tensor]:
    """Weights and moments after some updates, by name, put together from what the data ranks of one tensor rank hold."""
    found: dict[str, torch.Tensor] = {}
    for data_rank in range(topology.dp):
        context = lone_rank(topology, data_rank * topology.tp + tensor_rank)
        groups = []
        for plan in plan_buckets(entries(context), context, bucket_size=bucket_size):
            shards = []
            for placed, piece in plan.get_params_in_slice(context.group(*plan.axes).rank):
                record = placed.entry.record
                weights = values(record.name, placed.entry.param.shape, 0).view(-1)[piece.start : piece.stop].clone()
                shards.append(Shard(record, piece, weights, torch.zeros_like(weights), range(0)))
            groups.append(ShardGroup(shards))
        optimizer = ShardedOptimizer(groups, config, context, uses_staging=True)
        for step in range(1, STEPS + 1):
            for shard in optimizer.shards:
                grad = values(shard.record.name, shard.record.get_local_shape(context.axis_sizes), step)
                shard.grad.copy_(grad.view(-1)[shard.flat_range.start : shard.flat_range.stop])  # type: ignore[union-attr]
            optimizer.step(0.01 * step, 0.1, 0.7)
        for shard in optimizer.shards:
            for kind, tensor in {"weights": shard.weights, **shard.moments}.items():
                name, numel = f"{kind}.{shard.record.name}", math.prod(shard.record.get_local_shape(context.axis_sizes))
                whole = found.setdefault(name, torch.full((numel,), math.nan, dtype=torch.float64))
                part = whole[shard.flat_range.start : shard.flat_range.stop]  # type: ignore[union-attr]
                assert part.isnan().all(), "held twice"
                part.copy_(tensor)
    return found


def prove(rule: str, *, tp: int = 1, dp: int, offload: float = 0.0, bucket_size: int | None = None) -> None:
    """The update of slices on `dp` ranks equals that of whole parameters on one.

    Raises:
        AssertionError: it does not.
    """
    config = OptimizerConfig(optimizer=rule, optimizer_cpu_offload=offload > 0.0, optimizer_offload_fraction=offload)  # type: ignore[arg-type]
    for tensor_rank in range(tp):
        whole = train(rule, Topology(tp=tp), tensor_rank, OptimizerConfig(optimizer=rule), None)  # type: ignore[arg-type]
        sliced = train(rule, Topology(tp=tp, dp=dp), tensor_rank, config, bucket_size)
        assert sliced.keys() == whole.keys()
        for name in whole:
            torch.testing.assert_close(sliced[name], whole[name], rtol=1e-12, atol=1e-14, msg=f"{name} differs")
            assert not torch.equal(whole[name], values(name.partition(".")[2], whole[name].shape, 0)), "nothing was updated"


@pytest.fixture(autouse=True)
def test_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rule in ALL.items():
        monkeypatch.setitem(RULES, name, rule)


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("bucket_size", [None, 300])
@pytest.mark.parametrize("rule", ALL)
def test_update_of_slices_equals_that_of_whole_parameters(rule: str, tp: int, dp: int, bucket_size: int | None) -> None:
    prove(rule, tp=tp, dp=dp, bucket_size=bucket_size)


@pytest.mark.parametrize("rule", ALL)
def test_offloaded_slices_are_no_other(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """And in host memory those of rules that see elements are cut once more."""
    monkeypatch.setattr(placement, "_BATCH_ELEMENTS", 64)
    prove(rule, dp=3, offload=0.5)


def test_the_proof_is_about_something() -> None:
    """Each rank has some; parameters lie on several ranks."""
    context = lone_rank(Topology(dp=3))
    plans = plan_buckets(entries(context), context, bucket_size=None)
    holders = [{placed.entry.record.name for plan in plans for placed, _ in plan.get_params_in_slice(index)} for index in range(3)]
    assert all(holders) and any(sum(record.name in held for held in holders) > 1 for record in RECORDS)


def test_the_proof_fails_for_a_rule_that_asks_for_less_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "greedy", lambda config: use_for_all(GreedyRule()))
    with pytest.raises(AssertionError, match="differs"):
        prove("greedy", dp=3)


# ---- what a rule is given


def test_each_parameter_has_the_moments_of_its_rule() -> None:
    """Under a rule for each kind of parameter, on every number of ranks."""
    for dp in (1, 3):
        found = train("mixed", Topology(dp=dp), 0, OptimizerConfig(optimizer="mixed"), None)  # type: ignore[arg-type]
        kinds = {record.name: {key.partition(".")[0] for key in found if key.endswith(f".{record.name}")} for record in RECORDS}
        assert kinds.pop("embedding") == {"weights", "momentum_buffer"}
        assert kinds.pop("norm") == kinds.pop("bias") == {"weights", "exp_avg", "exp_avg_sq"}
        assert all(names == {"weights", "momentum_buffer"} for names in kinds.values()), kinds
