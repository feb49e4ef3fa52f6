"""Communication of tensor ranks beside products, with `--tp-comm-overlap` and without: products sleep, over an emulated slow link.

Ranks run a column- and a row-parallel layer under sequence parallelism, forward and backward, with real messages and collectives
over `slow_link`. A product sleeps for its FLOPs. The link has the bandwidth at which a gather takes a given share of the product
beside it. Sleeping takes no core, as a network card takes none, and a GPU's products take few of a host's.
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
from megatron.parallel.overlap import Overlap, Pieces
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.parallel.products import product_into
from megatron.parallel.topology import Topology
from megatron.precision.products import PLAIN, Products
from megatron.spec.weights import column, row
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lab.benchmarks.runner import all_in_turns, of_slowest_rank
from megatron_lab.benchmarks.slow_link import SlowLink
from megatron_lab.verification.local_ranks import run_ranks

BOUND = 1.1
"""How many times the computation a pass in pieces may take, where a gather is shorter than its product."""

_CPU = torch.device("cpu")
_ROWS, _HIDDEN, _WIDTH = 32, 64, 192
"""Rows of a rank, hidden size, width between the two layers."""
_PRODUCTS = 6
"""Of a pass: two forward, and two for each of these backward."""


@dataclass(frozen=True)
class Settings:
    """What is run."""

    ranks: int
    product_s: float = 0.2
    """Seconds of each product."""
    share: float = 0.8
    """Time of a gather, as a share of a product."""
    repeats: int = 5


@dataclass(frozen=True)
class Result:
    """Seconds of a pass of the slowest rank, in each turn."""

    computation: list[float]
    """Without a link."""
    turns: list[float]
    """Product and collective one after the other."""
    pieces: list[float]
    sent: float
    """Bytes that a rank sends in a pass, either way."""

    def ratio(self, times: Sequence[float]) -> float:
        """Of one kind against computation."""
        return statistics.median(one / alone for one, alone in zip(times, self.computation, strict=True))


def measure(settings: Settings) -> Result:
    """Passes of each kind in turn; the first turn is left out."""

    def live(rank: int) -> Result:
        link = SlowLink(groups=("tp",))
        gathered = 4 * _ROWS * _HIDDEN * (settings.ranks - 1)
        link.bandwidth = gathered / (settings.share * settings.product_s)
        kinds: dict[str, Overlap | None] = {"computation": None, "turns": None, "pieces": Pieces()}
        products = _Sleeping(settings)
        passes = {name: _pass(settings.ranks, rank, way, products) for name, way in kinds.items()}
        told: dict[str, tuple[float, float]] = {}

        def run(name: str) -> None:
            link.connected, link.sent = name != "computation", 0.0
            told[name] = passes[name](), link.sent

        with link.installed(), products.of_pieces():
            seconds = all_in_turns({name: of_slowest_rank(partial(run, name)) for name in kinds}, settings.repeats)
        if told["turns"] != told["pieces"]:
            raise RuntimeError(f"(sum, bytes sent) are {told['turns']} one after the other, and {told['pieces']} in pieces")
        return Result(**seconds, sent=told["pieces"][1])

    return run_ranks(settings.ranks, live, timeout=3600.0)[0]


def _pass(ranks: int, rank: int, way: Overlap | None, products: Products) -> Callable[[], float]:
    """A forward and a backward of ones, whose sums are exact; gives a sum over results and gradients."""
    context, table = make_context(Topology(tp=ranks), rank, _CPU), ParamTable()
    both = [*column("up", _HIDDEN, _WIDTH, bias=False, std=1.0), *row("down", _WIDTH, _HIDDEN, bias=False, std=1.0)]
    scope = Scope(context, table, {weight.name: weight for weight in both}, torch.float32, sequence_parallel=True, overlap=way)
    up, down = ColumnParallelLinear(scope.child("up")), RowParallelLinear(scope.child("down"))
    for layer in (up, down):
        layer.form = replace(layer.form, products=products)
    layers = torch.nn.Sequential(up, down)
    materialize(layers, table, _CPU)
    for entry in table:
        torch.nn.init.ones_(entry.param)
    x = torch.ones(_ROWS, 1, _HIDDEN)

    def run() -> float:
        given = x.clone().requires_grad_()
        y = layers(given)
        y.sum().backward()
        assert given.grad is not None
        return (y.sum() + given.grad.sum()).item()

    return run


class _Sleeping:
    """Products of this process take the time of their FLOPs."""

    def __init__(self, settings: Settings) -> None:
        whole = 2 * settings.ranks * _ROWS * _HIDDEN * (_WIDTH // settings.ranks)
        self._flops_per_s = whole / settings.product_s

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Products`."""
        return self._slowly(2 * x.numel() * len(weight), PLAIN.output, x, weight, bias)

    def input_gradient(self, grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Products`."""
        return self._slowly(2 * grad_output.numel() * weight.shape[1], PLAIN.input_gradient, grad_output, weight)

    def weight_gradient(self, grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        """See `Products`."""
        self._slowly(2 * grad_output.numel() * x.shape[1], partial(PLAIN.weight_gradient, add=add), grad_output, x, into)

    @contextmanager
    def of_pieces(self) -> Iterator[None]:
        """So do those of pieces, meanwhile."""

        def slowly(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, *rest: Any) -> torch.Tensor:
            return self._slowly(2 * x.numel() * matrix.shape[1], product_into, out, x, matrix, *rest)

        overlap.product_into = slowly  # type: ignore[assignment]
        try:
            yield
        finally:
            overlap.product_into = product_into

    def _slowly(self, flops: int, product: Callable[..., Any], *args: Any) -> Any:
        end = time.perf_counter() + flops / self._flops_per_s
        found = product(*args)
        time.sleep(max(0.0, end - time.perf_counter()))
        return found


def misses(result: Result) -> list[str]:
    """In words, what is not as it must be."""
    ratio = result.ratio(result.pieces)
    return [f"a pass in pieces takes {ratio:.2f} x computation; at most {BOUND} is asked for"] if ratio > BOUND else []


def run(settings: Settings) -> bool:
    """Print a pass of each kind; returns whether the bound holds."""
    print(
        f"{settings.ranks} tensor ranks, a column- and a row-parallel layer forward and backward: {_PRODUCTS} products of "
        f"{1e3 * settings.product_s:.0f} ms; a gather takes {1e3 * settings.share * settings.product_s:.0f} ms\n"
        f"milliseconds a pass, medians of {settings.repeats} (min to max)"
    )
    result = measure(settings)
    for words, times in (
        ("computation", result.computation),
        ("one after the other", result.turns),
        ("in pieces", result.pieces),
    ):
        spread = f"({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"
        print(f"{words:>20}{1e3 * statistics.median(times):>10.1f} {spread:<14}{result.ratio(times):>8.3f} x computation")
    print(f"a rank sends {result.sent / 1e3:.0f} kB either way")
    if settings.share >= 1.0:
        print(f"a ratio of at most {BOUND} is asked for where gathers are shorter than products")
        return True
    missed = misses(result)
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "the bound holds", flush=True)
    return not missed
