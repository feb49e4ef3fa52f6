"""Products along with the collective beside them, in pieces and by torch's fused operations, against one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from megatron.parallel import collectives, overlap
from megatron.parallel.collectives import all_gather, gather_objects, reduce_scatter
from megatron.parallel.context import Group, make_context
from megatron.parallel.matmul import linear
from megatron.parallel.overlap import Overlap, RingOverlap, SymmetricMemoryOverlap, choose_overlap
from megatron.parallel.topology import Topology
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.lone_rank import CPU
from tests.support.warm import run_warm_ranks

ROWS, BATCH, IN, OUT = 3, 2, 4, 10  # of the rows of a rank, pieces that are not of one size
EXACT = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""How far two orders of a sum may lie apart, by dtype."""


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def compared(way: Overlap, group: Group, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of every result; what is gathered must have the same bits."""

    def values(*shape: int, key: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(key)).to(dtype)

    x = values(ROWS, BATCH, IN, key=group.rank)
    weight, bias = values(OUT, IN, key=10 + group.rank), values(OUT, key=20 + group.rank)
    dy = values(ROWS, BATCH, OUT, key=30 + group.rank)
    partial = values(group.size * ROWS, BATCH, IN, key=40 + group.rank)
    found = {}
    for what, given, matrix, added, keeps in (
        ("y", x, weight.t(), bias, False),
        ("y of a strided input", x.transpose(0, 1).contiguous().transpose(0, 1), weight.t(), None, False),
        ("dx", dy, weight, None, True),
    ):
        before = given.clone()
        whole, product = way.all_gather_matmul(given, matrix, added, group, returns_input=keeps)
        expected = all_gather(given, group)
        assert (whole is not None) == keeps and (whole is None or torch.equal(whole, expected)), "the gathered input, bit for bit"
        assert torch.equal(given, before)
        found[what] = error(product, linear(expected, matrix.t(), added))
        assert product.is_contiguous() and not product._is_view(), "who gets it may write over it"
    for what, given in (("part", partial), ("part of a strided input", partial.transpose(0, 1).contiguous().transpose(0, 1))):
        part = way.matmul_reduce_scatter(given, weight.t(), group)
        assert part.is_contiguous() and not part._is_view()
        found[what] = error(part, reduce_scatter(linear(given, weight), group))
        assert torch.equal(part, way.matmul_reduce_scatter(given, weight.t(), group)), "the same in every run"
    return found


def pieces_on_ranks(rank: int, size: int) -> dict[torch.dtype, dict[str, float]]:
    group = make_context(Topology(tp=size), rank, CPU).group("tp")
    return {dtype: compared(RingOverlap(), group, dtype) for dtype in EXACT}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_equal_one_after_the_other(size: int) -> None:
    for found in run_warm_ranks(size, pieces_on_ranks, size):
        for dtype, errors in found.items():
            assert max(errors.values()) < EXACT[dtype] * size, (dtype, errors)


def fused_on_ranks(rank: int) -> tuple[dict[str, float], list[str], dict[str, float]]:
    """torch has these operations for CUDA; on the CPU, the definition that it gives of them takes their place."""
    group = make_context(Topology(tp=3), rank, CPU).group("tp")
    trials = [overlap._try_symmetric_memory(group, CPU)]
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    added = [0.0]

    def scattered(*args: Any) -> torch.Tensor:
        return symmetric_memory._fused_matmul_reduce_scatter_fallback(*args) + added[0]

    library.impl("fused_matmul_reduce_scatter", scattered, "CPU")
    trials.append(overlap._try_symmetric_memory(group, CPU))
    errors = compared(SymmetricMemoryOverlap(), group, torch.float64)
    added[0] = 0.0 if rank else 1.0
    trials.append(next(filter(None, gather_objects(overlap._try_symmetric_memory(group, CPU), group))))
    collectives._runs_p2p_in_order = lambda device: True
    return errors, trials, compared(RingOverlap(), group, torch.float64)


def test_the_calls_for_cuda_equal_one_after_the_other() -> None:
    """Fused operations, what is sent and received as one operation, and the trial that finds missing and wrong ones."""
    found: list[Any] = run_ranks(3, fused_on_ranks)
    for errors, (missing, right, wrong), in_one in found:
        assert max(*errors.values(), *in_one.values()) < EXACT[torch.float64] * 3, (errors, in_one)
        assert "symm_mem::fused_all_gather_matmul" in missing and (right, wrong) == ("", "a test of it gave wrong results")


def test_symmetric_memory_is_chosen_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By facts of two ranks' GPUs, through a stand-in for torch's CUDA."""
    facts: dict[str, Any] = {}

    def gathered(value: Any, group: Group) -> list[Any]:
        return [value, facts["other"]] if isinstance(value, tuple) else [value, ""]

    monkeypatch.setattr(overlap, "gather_objects", gathered)
    monkeypatch.setattr(overlap, "_try_symmetric_memory", lambda group, device: facts["trial"])
    monkeypatch.setattr(overlap.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def properties(device: torch.device | int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"gpu{device if isinstance(device, int) else device.index}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: facts["reach"])
    group = Group("tp", (0, 1), 0)

    def chosen(other: tuple[str, str], *, reach: bool = True, trial: str = "") -> Overlap:
        facts.update(other=other, reach=reach, trial=trial)
        return choose_overlap(group, torch.device("cuda", 0))

    assert chosen(("here", "gpu1")) == SymmetricMemoryOverlap()
    assert chosen(("there", "gpu1")) == RingOverlap("the tensor ranks are on several nodes")
    assert chosen(("here", "gpu0")) == RingOverlap("tensor ranks share a GPU")
    assert chosen(("here", "gpu1"), reach=False) == RingOverlap("the GPUs cannot read each other's memory")
    assert chosen(("here", "gpu9"), reach=False) == SymmetricMemoryOverlap(), "a GPU that this rank does not see: the trial tells"
    assert chosen(("here", "gpu1"), trial="a test of it gave wrong results") == RingOverlap("a test of it gave wrong results")
    assert choose_overlap(group, CPU) == RingOverlap("symmetric memory needs CUDA, and the device is cpu")
