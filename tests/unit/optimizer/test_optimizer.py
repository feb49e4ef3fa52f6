"""The optimizer over shards against torch's own, and sums over gradients that every layout must agree on."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer import placement
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.optimizer.statistics import compute_squared_norms, count_zeros
from megatron.parallel.params import ParamPartition, ParamRecord, Shard, ShardGroup
from megatron.parallel.tensor_slice import FlatRange
from tests.support.held import state_held_by
from tests.support.lone_rank import CPU, lone_rank

SHAPES = {"matrix": (7, 5), "bias": (11,), "norm": (3,)}
DECAYING = {"matrix"}


def values(*shape: int, key: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(key)).to(dtype)


def shards(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Shard]:
    """One a name, whole; 16-bit weights have a float32 gradient."""
    wide = torch.promote_types(dtype, torch.float32)
    made = []
    for key, (name, shape) in enumerate(SHAPES.items()):
        weights = (values(*shape, key=key, dtype=torch.float64) * scale).to(dtype).view(-1)
        size = weights.numel()
        record = ParamRecord(name, shape, param_type="matrix" if name in DECAYING else "vector")
        made.append(Shard(record, FlatRange(0, size), weights, torch.zeros(size, dtype=wide), range(size)))
    return made


def make(made: Sequence[Shard], config: OptimizerConfig) -> ShardedOptimizer:
    """In two groups, but for a single shard."""
    cut = max(len(made) - 1, 1)
    groups = [ShardGroup(list(part)) for part in (made[:cut], made[cut:]) if part]
    return ShardedOptimizer(groups, config, lone_rank())


def set_grads(made: Sequence[Shard], step: int) -> None:
    for key, shard in enumerate(made):
        shard.grad.copy_(values(shard.grad.numel(), key=100 * step + key + 10, dtype=shard.grad.dtype))


def plain(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """torch's optimizer, not fused, on copies; decay on the first tensor only."""
    params = [shard.weights.to(shard.grad.dtype, copy=True).requires_grad_() for shard in shards(dtype)]
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]
    if kind == "adam":
        return params, torch.optim.AdamW(groups, lr=0.0, foreach=False, **{"betas": (0.9, 0.95), "eps": 1e-8, **changes})
    return params, torch.optim.SGD(groups, lr=0.0, foreach=False, **changes)


def plain_step(
    params: list[torch.Tensor], optimizer: torch.optim.Optimizer, made: Sequence[Shard], factor: float, lr: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    for param, shard in zip(params, made, strict=True):
        param.grad = shard.grad * factor
    optimizer.step()


ADAM = OptimizerConfig(optimizer="adam", adam_beta2=0.95)
SGD = OptimizerConfig(optimizer="sgd", sgd_momentum=0.9)
PLAIN_SGD = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0)


# ---- the update rules


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("config", "changes"), [(ADAM, {}), (SGD, {"momentum": 0.9}), (PLAIN_SGD, {})], ids=["adam", "sgd", "plain sgd"]
)
@pytest.mark.parametrize("factor", [1.0, 0.37, 1.0 / 65536])
def test_updates_equal_those_of_torch_on_scaled_gradients(
    config: OptimizerConfig, changes: dict[str, Any], factor: float, dtype: torch.dtype
) -> None:
    """The factor, of unscaling and clipping, acts before momentum and moments; the learning rate changes every step."""
    made = shards(dtype)
    optimizer = make(made, config)
    assert all(shard.main_param is shard.weights for shard in made), "the parameters are their own main parameters"
    params, expected = plain(config.optimizer, dtype, **changes)
    for step in range(4):
        set_grads(made, step)
        now = factor if step != 2 else 1.0  # a step without scaling between others
        plain_step(params, expected, made, now, lr=0.01 * (step + 1))
        optimizer.step(0.01 * (step + 1), 0.1, now)
        tolerance = 2e-6 if dtype == torch.float32 else 1e-13
        for shard, param in zip(made, params, strict=True):
            torch.testing.assert_close(shard.weights, param.detach(), rtol=tolerance, atol=tolerance)
            assert shard.main_param is shard.weights
    assert optimizer.num_steps == 4


def test_weight_decay_acts_on_records_that_decay_only() -> None:
    for config in (ADAM, PLAIN_SGD):
        made = shards()
        before = [shard.weights.clone() for shard in made]
        make(made, config).step(0.5, 0.1, 1.0)  # the gradients are zero
        for shard, old in zip(made, before, strict=True):
            torch.testing.assert_close(shard.main_param, old * 0.95 if shard.record.name in DECAYING else old, rtol=1e-6, atol=0.0)


def test_weight_decay_follows_its_schedule() -> None:
    made = shards()
    optimizer, old = make(made, ADAM), made[0].weights.clone()
    for decay in (0.0, 0.2):
        optimizer.step(0.5, decay, 1.0)
    torch.testing.assert_close(made[0].main_param, old * 0.9, rtol=1e-6, atol=0.0)


def test_lamb_leaves_a_matrix_without_gradient_and_decay_as_it_is() -> None:
    """The update has length 0, by which the length of the matrix must not be divided."""
    shard = shards()[0]
    old = shard.weights.clone()
    group = ShardGroup([shard], params=[ParamPartition(shard.record, torch.float32)])
    ShardedOptimizer([group], OptimizerConfig(optimizer="lamb"), lone_rank()).step(0.5, 0.0, 1.0)
    assert torch.equal(shard.weights, old)


@pytest.mark.parametrize("names", [["matrix"], ["bias", "norm"]])
def test_all_shards_may_be_of_one_kind(names: list[str]) -> None:
    made = [shard for shard in shards() if shard.record.name in names]
    set_grads(made, 0)
    old = [shard.weights.clone() for shard in made]
    make(made, ADAM).step(0.1, 0.1, 0.5)
    assert all(not torch.equal(shard.main_param, before) for shard, before in zip(made, old, strict=True))


# ---- 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_parameters_are_updated_in_float32_and_published_rounded(dtype: torch.dtype) -> None:
    made = shards(dtype)
    optimizer = make(made, ADAM)
    assert all(shard.main_param is not shard.weights for shard in made)
    params, expected = plain("adam", dtype)
    pointers = [shard.weights.data_ptr() for shard in made]
    for step in range(3):
        set_grads(made, step)
        plain_step(params, expected, made, 0.5, lr=0.01)
        optimizer.step(0.01, 0.1, 0.5)
        for shard, param in zip(made, params, strict=True):
            assert shard.main_param.dtype == torch.float32 and shard.weights.dtype == dtype
            torch.testing.assert_close(shard.main_param, param.detach(), rtol=2e-6, atol=2e-6)
            assert torch.equal(shard.weights, shard.main_param.to(dtype))
    assert [shard.weights.data_ptr() for shard in made] == pointers


def test_updates_too_small_for_16_bits_add_up() -> None:
    """A hundred steps of 1e-4 from 1: in bfloat16, whose neighbours of 1 are 0.004 away, nothing would ever move."""
    weights = torch.ones(4, dtype=torch.bfloat16)
    shard = Shard(ParamRecord("w", (4,)), FlatRange(0, 4), weights, torch.ones(4), range(4))
    optimizer = make([shard], PLAIN_SGD)
    optimizer.step(1e-4, 0.0, 1.0)
    assert weights.tolist() == [1.0] * 4
    for _ in range(99):
        optimizer.step(1e-4, 0.0, 1.0)
    torch.testing.assert_close(shard.main_param, torch.full((4,), 0.99), rtol=1e-5, atol=0.0)
    assert weights.tolist() == torch.full((4,), 0.99).bfloat16().tolist()


def test_copies_of_a_group_lie_in_one_buffer() -> None:
    made = shards(torch.bfloat16)
    optimizer = ShardedOptimizer([ShardGroup(made)], ADAM, lone_rank())
    device, host = state_held_by(optimizer, ADAM)
    assert device.main_params == [4 * 3 * 64], "each padded to 64 elements"
    assert device.moments == [4 * 3 * 64] * 2 and not device.buffers
    assert len({shard.main_param.untyped_storage().data_ptr() for shard in made}) == 1
    assert not (host.main_params or host.moments or host.buffers)
    made = shards()
    device, _ = state_held_by(ShardedOptimizer([ShardGroup(made)], ADAM, lone_rank()), ADAM)
    assert not device.main_params, "the weights are the main parameters"


# ---- groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_is_published_once_its_weights_are_new(dtype: torch.dtype) -> None:
    """And before the next group is updated, so that the two overlap."""
    made = shards(dtype)
    old = [shard.weights.clone() for shard in made]
    seen: list[list[bool]] = []
    groups = [ShardGroup([shard], gather_params=lambda: seen.append(changed())) for shard in made]

    def changed() -> list[bool]:
        return [not torch.equal(shard.weights, before) for shard, before in zip(made, old, strict=True)]

    optimizer = ShardedOptimizer(groups, ADAM, lone_rank())
    set_grads(made, 0)
    assert seen == [], "making it publishes nothing"
    optimizer.step(0.1, 0.1, 1.0)
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


def test_publish_carries_loaded_main_parameters_to_all_weights() -> None:
    made = shards(torch.bfloat16)
    published: list[str] = []
    groups = [ShardGroup([shard], gather_params=partial(published.append, shard.record.name)) for shard in made]
    optimizer = ShardedOptimizer(groups, ADAM, lone_rank())
    for shard in made:
        shard.main_param.fill_(2.5)
    optimizer.copy_main_to_model_params()
    assert published == list(SHAPES) and all((shard.weights == 2.5).all() for shard in made)
    assert optimizer.num_steps == 0


def test_a_group_may_be_empty_and_so_may_a_shard() -> None:
    """A rank whose slice of a bucket is padding; a dimension that has fewer indices than there are ranks."""
    empty = Shard(ParamRecord("none", (0, 5)), FlatRange(0, 0), torch.zeros(0), torch.zeros(0), range(0))
    published: list[int] = []
    made = shards()
    groups = [ShardGroup([], lambda: published.append(0)), ShardGroup([empty]), ShardGroup([empty, *made])]
    optimizer = ShardedOptimizer(groups, ADAM, lone_rank())
    set_grads(made, 0)
    optimizer.step(0.1, 0.0, 0.5)
    assert published == [0] and made[2].moments["exp_avg"].any()


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize(("dtype", "counts"), [(torch.bfloat16, (48, 24, 2)), (torch.float32, (2, 2, 2))])
def test_updating_in_batches_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, config: OptimizerConfig, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    """On a processor a large shard is updated and rounded part by part; where nothing is rounded, as a whole."""
    results = []
    for limit, count in zip((64, 128, 2**20), counts, strict=True):
        monkeypatch.setattr(placement, "_BATCH_ELEMENTS", limit)
        size = 1000
        wide = torch.promote_types(dtype, torch.float32)
        made = [
            Shard(
                ParamRecord(str(key), (size,)),
                FlatRange(0, size),
                values(size, key=key, dtype=dtype),
                torch.zeros(size, dtype=wide),
                range(0),
            )
            for key in range(3)
        ]
        optimizer = make(made, config)
        assert sum(len(part._batches) for parts in optimizer._placements for part in parts) == count
        for step in range(3):
            set_grads(made, step)
            optimizer.step(0.01, 0.1, 0.3)
        results.append([tensor for s in made for tensor in (s.weights, s.main_param, *s.moments.values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("sizes", [[], [0], [64], [1], [100, 64, 1, 1, 300, 0, 7], [1000]])
@pytest.mark.parametrize("limit", [64, 128, math.inf])
def test_batches_cover_everything_in_order(sizes: list[int], limit: float) -> None:
    made = placement.split_into_batches(sizes, limit)
    assert [(b.param_index, i) for batch in made for b in batch for i in range(b.start, b.stop)] == [
        (index, i) for index, size in enumerate(sizes) for i in range(size)
    ]
    assert all(batch for batch in made)
    assert all(block.start % 64 == 0 and block.start < block.stop for batch in made for block in batch)
    if limit == math.inf:
        assert len(made) <= 1
    else:
        assert all(sum(block.stop - block.start for block in batch) <= limit for batch in made)


# ---- state


def test_state_is_there_before_the_first_step() -> None:
    for config, names in ((ADAM, {"exp_avg", "exp_avg_sq"}), (SGD, {"momentum_buffer"}), (PLAIN_SGD, set())):
        made = shards(torch.bfloat16)
        optimizer = make(made, config)
        before = {s.record.name: s.moments for s in made}
        for shard in made:
            moments = before[shard.record.name]
            assert moments.keys() == names
            assert all(m.shape == shard.main_param.shape and m.dtype == torch.float32 and not m.any() for m in moments.values())
        set_grads(made, 0)
        optimizer.step(0.1, 0.0, 1.0)
        for shard in made:
            for name, moment in shard.moments.items():
                assert moment is before[shard.record.name][name] and moment.any(), "updated where it lies"


# ---- apex


def test_apex_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    for kind in ("adam", "sgd"):
        with pytest.raises(ValueError, match="--use-apex is set, but NVIDIA apex is not installed"):
            make(shards(), OptimizerConfig(optimizer=kind, use_apex=True))  # type: ignore[arg-type]


class FakeFusedAdam(torch.optim.Optimizer):
    """As apex's: plain gradients with no factor, and one count of steps for a group, not one for each tensor."""

    def __init__(self, params: Any, *, adam_w_mode: bool, lr: float) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                first, second = self.state[param]["exp_avg"], self.state[param]["exp_avg_sq"]
                first.lerp_(param.grad, 1 - beta1)
                second.lerp_(param.grad.square(), 1 - beta2)
                root = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * first / (1 - beta1 ** group["step"]) / root)


class FakeFusedSGD(torch.optim.SGD):
    """Takes apex's arguments."""

    def __init__(self, params: Any, *, lr: float, momentum: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum, foreach=False)


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """As if it were installed. Lists the optimizers of it that are made."""
    made: list[object] = []

    def noting(kind: type) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            made.append(kind(*args, **options))
            return made[-1]

        return make

    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam, optimizers.FusedSGD = noting(FakeFusedAdam), noting(FakeFusedSGD)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    return made


APEX = OptimizerConfig(use_apex=True, adam_beta2=0.95)


@pytest.mark.parametrize(
    ("config", "changes"), [(APEX, {}), (replace(APEX, optimizer="sgd"), {"momentum": 0.9})], ids=["adam", "sgd"]
)
def test_apex_is_used_where_it_is_there_and_asked_for(apex: list[object], config: OptimizerConfig, changes: dict[str, Any]) -> None:
    made = shards()
    optimizer = make(made, config)
    assert len(apex) == sum(len(part._batches) for parts in optimizer._placements for part in parts)
    params, expected = plain(config.optimizer, **changes)
    for step in range(3):
        set_grads(made, step)
        plain_step(params, expected, made, 0.37, lr=0.01)
        optimizer.step(0.01, 0.1, 0.37)
        for shard, param in zip(made, params, strict=True):
            torch.testing.assert_close(shard.main_param, param.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("config", [ADAM, SGD, APEX], ids=["adam", "sgd", "apex"])
def test_another_optimizer_goes_on_from_moments_and_the_number_of_updates(apex: list[object], config: OptimizerConfig) -> None:
    """Without that number Adam's bias correction would start again."""

    def train(optimizer: ShardedOptimizer, made: Sequence[Shard], steps: range) -> None:
        for step in steps:
            set_grads(made, step)
            optimizer.step(0.01, 0.1, 0.5)

    first = shards()
    through = make(first, config)
    train(through, first, range(3))
    second = shards()
    resumed = make(second, config)
    for old, new in zip(first, second, strict=True):
        new.main_param.copy_(old.main_param)
        for name, moment in old.moments.items():
            new.moments[name].copy_(moment)
    resumed.num_steps = through.num_steps
    train(through, first, range(3, 6))
    train(resumed, second, range(3, 6))
    assert resumed.num_steps == through.num_steps == 6
    assert all(torch.equal(a.main_param, b.main_param) for a, b in zip(first, second, strict=True))


# ---- sums over gradients


@pytest.mark.parametrize("numel", [1, 7, 4095, 4096, 4097, 8192, 4_800_000])
def test_sums_of_squares_are_exact_to_float32(numel: int) -> None:
    """One float32 reduction over 4.8 million elements came out 1e-3 low."""
    tensor = values(numel, key=numel)
    exact = tensor.double().square().sum().item()
    found = compute_squared_norms([tensor, tensor.double()], CPU)
    assert found.dtype == torch.float64
    assert found[0].item() == pytest.approx(exact, rel=1e-6)
    assert found[1].item() == pytest.approx(exact, rel=1e-13)


def test_equal_numbers_are_the_worst_case() -> None:
    """All roundings of a row go one way."""
    tensor = torch.full((5_000_000,), 0.1)
    assert compute_squared_norms([tensor], CPU)[0].item() == pytest.approx(tensor[:1].double().square().item() * 5e6, rel=1e-5)


def test_sums_have_a_place_for_each_tensor_of_any_shape() -> None:
    tensors = [torch.full((2, 3), 2.0), torch.tensor(3.0), torch.zeros(0), torch.full((5000, 2), 1.0).t()]
    assert compute_squared_norms(tensors, CPU).tolist() == pytest.approx([24.0, 9.0, 0.0, 10_000.0], rel=1e-6)
    assert compute_squared_norms([], CPU).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 5, 63, 64, 1000, 4095, 4096, 4097, 8192, 20_000, 300_001])
def test_sums_depend_on_the_elements_only(numel: int, dtype: torch.dtype) -> None:
    """Not on where in memory they begin, and not on what they are a part of: so sharding does not change the norm."""
    tensor = values(numel, key=numel, dtype=dtype)
    alone = compute_squared_norms([tensor], CPU)
    for before in (*range(17), 31, 64):
        larger = torch.full((before + numel + 100,), 7.0, dtype=dtype)
        part = larger[before : before + numel].copy_(tensor)
        assert torch.equal(compute_squared_norms([part], CPU), alone)


@pytest.mark.parametrize("numel", [10, 10_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows(numel: int, bad: float) -> None:
    for place in (0, numel // 2, numel - 1):
        tensor = torch.zeros(numel)
        tensor[place] = bad
        assert not torch.isfinite(compute_squared_norms([tensor, torch.ones(3)], CPU)).tolist()[0]
        assert compute_squared_norms([tensor, torch.ones(3)], CPU)[1].item() == pytest.approx(3.0)


def test_large_finite_gradients_do_not_overflow_as_sums() -> None:
    """Gradients of 1e4 times a loss scale of 2^16, by the million."""
    assert compute_squared_norms([torch.full((1_000_000,), 1e4 * 2**16)], CPU)[0].item() == pytest.approx(
        1e6 * (1e4 * 2**16) ** 2, rel=1e-5
    )


def test_zeros_are_counted() -> None:
    tensor = values(5000)
    tensor[::5] = 0.0
    tensor[1], tensor[2] = -0.0, float("nan")
    assert count_zeros([tensor, torch.zeros(3), torch.ones(2, 2)], CPU).item() == 1000 + 1 + 3
    assert count_zeros([], CPU).item() == 0.0
