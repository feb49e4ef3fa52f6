"""Moments in 8 bits: the values of the codes, how far rounding goes, and what the state takes."""

from __future__ import annotations

import pytest
import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.eight_bits import EightBitAdamW, _build_code_values, _quantize, build_dynamic_codes
from megatron.parallel.params import ParamPartition, ParamRecord, Split
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron_lab.verification.reference.update_rules import quantize_moment
from tests.support.lone_rank import lone_rank

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_values_of_the_codes(signed: bool) -> None:
    """A byte each, ascending, zero and one among them; each decade has twice as many as the one below."""
    values = build_dynamic_codes(signed=signed)
    assert len(values) == len(set(values)) == 256 and list(values) == sorted(values)
    assert 0.0 in values and values[-1] == 1.0 and (min(values) < -0.99 if signed else min(values) == 0.0)
    decades = [sum(10.0 ** (k - 7) < value < 10.0 ** (k - 6) for value in values) for k in range(7)]
    assert decades == [2 ** (k + (not signed)) for k in range(7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_value_is_taken(dtype: torch.dtype, signed: bool) -> None:
    """As the reference rounds, which looks at every value; and what a code stands for has that code."""
    x = torch.randn(7, 1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 5
    x = x / x.abs().amax(-1, keepdim=True)
    x = x if signed else x.abs()
    table = _build_code_values(dtype, CPU, signed=signed)
    found = table[_quantize(x.to(dtype), signed=signed)]
    torch.testing.assert_close(found.double(), quantize_moment(x, 1000, signed=signed), rtol=1e-6, atol=1e-12)
    assert torch.equal(_quantize(table, signed=signed), torch.arange(256, dtype=torch.int32))


def test_the_state_takes_two_bytes_and_the_scales() -> None:
    rule, record = EightBitAdamW(OptimizerConfig(adam_8bit_block_size=256)), ParamRecord("w", (1024, 4096))
    sizes = [state.compute_num_bytes(record, {}, 1024 * 4096, torch.float32) for state in rule.states(record)]
    assert sum(size for size, _ in sizes) == 1024 * 4096 * (2 + 8 / 256) and not any(padding for _, padding in sizes)


@pytest.mark.parametrize(("splits", "cut_blocks"), [((), 1), ((Split(0, "tp"),), 2)])
def test_ranks_share_the_scale_of_each_cut_block_once(splits: tuple[Split, ...], cut_blocks: int) -> None:
    """Data ranks cut one block of each tensor rank's part. Where tensor ranks hold replicas, it is the same block."""
    record, topology = ParamRecord("w", (8, 8), splits), Topology(tp=2, dp=2)
    param = ParamPartition(record, torch.float32, (10,), GRADIENT_AXES, 2)
    rule = EightBitAdamW(OptimizerConfig(adam_8bit_block_size=4))
    ((statistic,),) = rule.statistics(param, lone_rank(topology))
    assert statistic.shape == (2, cut_blocks), "for both moments"
