"""Benchmark of tensor parallelism with and without `--tp-comm-overlap`, over an emulated slow link.

The ranks run a column-parallel and a row-parallel layer with sequence parallelism, forward and backward. Messages and collectives
are real and are delayed by `slow_link`. A matrix product sleeps in proportion to its FLOPs. The bandwidth of the link is set so
that an all-gather takes a given share of the time of the matrix product with which it overlaps. Sleeping uses no CPU core, just as
a network card uses none; and matrix products on a GPU use little of the host's cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron.parallel import overlap
from megatron.parallel.context import make_context
from megatron.parallel.matmul import matmul_into
from megatron.parallel.overlap import Overlap, RingOverlap
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.parallel.topology import Topology
from megatron.precision.gemms import DEFAULT_GEMMS, LinearGemms
from megatron.spec.weights import build_column_parallel_linear, build_row_parallel_linear
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lab.benchmarks.runner import make_slowest_rank_timer, run_in_turns
from megatron_lab.benchmarks.slow_link import SlowLink
from megatron_lab.verification.local_ranks import run_ranks

BOUND = 1.1
"""Maximum ratio of an overlapped pass to its computation, if an all-gather is shorter than its matrix product."""

_CPU = torch.device("cpu")
_ROWS, _HIDDEN, _WIDTH = 32, 64, 192
"""Rows (tokens) per rank, hidden size, and size between the two layers."""
_NUM_PRODUCTS = 6
"""Matrix products of a pass: two in forward, and two per forward product in backward."""


@dataclass(frozen=True)
class Settings:
    """Number of ranks and durations of the benchmark of tensor parallelism."""

    num_ranks: int
    product_s: float = 0.2
    """Seconds that each emulated matrix product takes."""
    share: float = 0.8
    """Time that the link needs for an all-gather, as a share of the time of a matrix product."""
    repeats: int = 5


@dataclass(frozen=True)
class LayerPassTimes:
    """Seconds of a forward and backward of a column-parallel and a row-parallel linear layer on the slowest rank, one value per
    repetition."""

    computation: list[float]
    """Seconds of each repetition if all collectives are skipped, so that only computation is left."""
    sequential: list[float]
    """Seconds without overlap: matrix products and collectives run one after the other."""
    overlapped: list[float]
    """Seconds with ring overlap: each collective is split into ring steps that overlap with partial matrix products."""
    sent_bytes: float
    """Bytes that a rank sends in one forward and backward. They are the same with and without overlap."""

    def compute_ratio(self, times: Sequence[float]) -> float:
        """Return the median over the repetitions of the times in `times` divided by the times without communication."""
        return statistics.median(time / computation for time, computation in zip(times, self.computation, strict=True))


def measure(settings: Settings) -> LayerPassTimes:
    """Time a forward and backward without communication, with sequential communication and with overlapped communication.

    Each repetition measures all three variants.
    """

    def run_rank(rank: int) -> LayerPassTimes:
        link = SlowLink(groups=("tp",))
        gather_bytes = 4 * _ROWS * _HIDDEN * (settings.num_ranks - 1)
        link.bandwidth = gather_bytes / (settings.share * settings.product_s)
        overlaps: dict[str, Overlap | None] = {"computation": None, "sequential": None, "overlapped": RingOverlap()}
        gemms = _SleepingGemms(settings)
        passes = {name: _build_pass(settings.num_ranks, rank, overlap_mode, gemms) for name, overlap_mode in overlaps.items()}
        outcomes: dict[str, tuple[float, float]] = {}

        def run_pass(name: str) -> None:
            link.is_connected, link.sent_bytes = name != "computation", 0.0
            outcomes[name] = passes[name](), link.sent_bytes

        with link.installed(), gemms.delay_ring_products():
            times = run_in_turns({name: make_slowest_rank_timer(partial(run_pass, name)) for name in overlaps}, settings.repeats)
        if outcomes["sequential"] != outcomes["overlapped"]:
            raise RuntimeError(
                "internal error of the benchmark: the pair (sum of output and input gradient, number of bytes sent) is "
                f"{outcomes['sequential']} without overlap, but {outcomes['overlapped']} with overlap of communication and "
                "computation; the pairs must be equal. Please report this"
            )
        return LayerPassTimes(**times, sent_bytes=outcomes["overlapped"][1])

    return run_ranks(settings.num_ranks, run_rank, timeout=3600.0)[0]


def _build_pass(num_ranks: int, rank: int, overlap_mode: Overlap | None, gemms: LinearGemms) -> Callable[[], float]:
    """Build a function that runs a column-parallel and a row-parallel layer forward and backward on this rank.

    The function returns the sum of the elements of the output and of the input gradient. Inputs and weights are ones, so the sum is
    exact and must be equal with and without overlap.

    Args:
        overlap_mode: overlap of communication with matrix products; None for no overlap.
        gemms: implementation of the matrix products of the layers.
    """
    context, table = make_context(Topology(tp=num_ranks), rank, _CPU), ParamTable()
    weight_specs = [
        *build_column_parallel_linear("up", _HIDDEN, _WIDTH, bias=False, std=1.0),
        *build_row_parallel_linear("down", _WIDTH, _HIDDEN, bias=False, std=1.0),
    ]
    scope = Scope(
        context,
        table,
        {weight.name: weight for weight in weight_specs},
        torch.float32,
        sequence_parallel=True,
        overlap=overlap_mode,
    )
    up, down = ColumnParallelLinear(scope.get_child("up")), RowParallelLinear(scope.get_child("down"))
    for layer in (up, down):
        layer.config = replace(layer.config, gemms=gemms)
    layers = torch.nn.Sequential(up, down)
    materialize(layers, table, _CPU)
    for entry in table:
        torch.nn.init.ones_(entry.param)
    x = torch.ones(_ROWS, 1, _HIDDEN)

    def run_pass() -> float:
        leaf = x.clone().requires_grad_()
        y = layers(leaf)
        y.sum().backward()
        assert leaf.grad is not None
        return (y.sum() + leaf.grad.sum()).item()

    return run_pass


class _SleepingGemms:
    """Matrix products of linear layers (`LinearGemms`) that sleep in proportion to their FLOPs."""

    def __init__(self, settings: Settings) -> None:
        flops = 2 * settings.num_ranks * _ROWS * _HIDDEN * (_WIDTH // settings.num_ranks)
        self._flops_per_s = flops / settings.product_s

    def compute_output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output x @ w^T + bias, where w is `weight`; x is [..., in], w is [out, in]."""
        return self._run_delayed(2 * x.numel() * len(weight), DEFAULT_GEMMS.compute_output, x, weight, bias)

    def compute_input_grad(self, grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input, dy @ w, where dy is `grad_output` [..., out] and w is `weight` [out, in]."""
        return self._run_delayed(2 * grad_output.numel() * weight.shape[1], DEFAULT_GEMMS.compute_input_grad, grad_output, weight)

    def compute_weight_grad(self, grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        """Write the weight gradient dy^T @ x to `into` [out, in], or add it to `into` if `add` is true.

        dy is `grad_output` [..., out], x is [..., in].
        """
        self._run_delayed(
            2 * grad_output.numel() * x.shape[1], partial(DEFAULT_GEMMS.compute_weight_grad, add=add), grad_output, x, into
        )

    @contextmanager
    def delay_ring_products(self) -> Iterator[None]:
        """Let the partial matrix products of ring overlap also sleep in proportion to their FLOPs, while the context is active."""

        def run_delayed_product(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, *args: Any) -> torch.Tensor:
            return self._run_delayed(2 * x.numel() * matrix.shape[1], matmul_into, out, x, matrix, *args)

        overlap.matmul_into = run_delayed_product  # type: ignore[assignment]
        try:
            yield
        finally:
            overlap.matmul_into = matmul_into

    def _run_delayed(self, flops: int, product: Callable[..., Any], *args: Any) -> Any:
        end = time.perf_counter() + flops / self._flops_per_s
        output = product(*args)
        time.sleep(max(0.0, end - time.perf_counter()))
        return output


def find_violations(result: LayerPassTimes) -> list[str]:
    """Return a message if a forward and backward with overlap takes more than `BOUND` times as long as without communication."""
    ratio = result.compute_ratio(result.overlapped)
    return [f"a pass with overlap takes {ratio:.2f} x computation; the limit is {BOUND}"] if ratio > BOUND else []


def run(settings: Settings) -> bool:
    """Print the times of a forward and backward of a column-parallel and a row-parallel linear layer.

    Returns:
        Whether the time with overlap is within `BOUND` times the computation. Always True if an all-gather takes at least as long
        as a matrix product.
    """
    print(
        f"{settings.num_ranks} tensor ranks, a column- and a row-parallel layer forward and backward: {_NUM_PRODUCTS} products of "
        f"{1e3 * settings.product_s:.0f} ms; a gather takes {1e3 * settings.share * settings.product_s:.0f} ms\n"
        f"milliseconds per pass (forward and backward), medians of {settings.repeats} (min to max)"
    )
    result = measure(settings)
    for label, times in (
        ("computation", result.computation),
        ("without overlap", result.sequential),
        ("with overlap", result.overlapped),
    ):
        range_text = f"({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"
        print(
            f"{label:>20}{1e3 * statistics.median(times):>10.1f} {range_text:<14}{result.compute_ratio(times):>8.3f} x computation"
        )
    print(f"a rank sends {result.sent_bytes / 1e3:.0f} kB per pass, with and without overlap")
    if settings.share >= 1.0:
        print("no limit applies: a gather takes at least as long as a product")
        return True
    violations = find_violations(result)
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "the bound holds", flush=True)
    return not violations
