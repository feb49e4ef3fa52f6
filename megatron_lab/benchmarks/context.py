"""Keys and values that travel among context ranks beside the products of attention: parts sleep, over an emulated slow link.

Ranks run `context_attention` forward and backward with real messages and collectives over `slow_link`. A part sleeps for its pairs
of tokens, in backward 2.5 times as long (five products beside two: Dao 2023, FlashAttention-2, section 4.1). The link has the
bandwidth at which one rank's keys and values take a given share of a step of the ring. Sleeping takes no core, as a network card
takes none.

The simulated best is the computation and what no order of these messages could hide: behind the ring's last step the sum that goes
home; beside a gather only the own part, and behind backward the whole reduce-scatter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.attention.documents import Documents
from megatron.attention.parts import RunPair
from megatron.config.parallel import ContextWay
from megatron.context_parallel import attention
from megatron.context_parallel.attention import Sharers, context_attention
from megatron.parallel.collectives import Pending
from megatron.parallel.context import Group, make_context
from megatron.parallel.cut import mirrored
from megatron.parallel.topology import Topology
from megatron.spec.layers import PLAIN
from megatron_lab.benchmarks.runner import all_in_turns, of_slowest_rank
from megatron_lab.benchmarks.slow_link import SlowLink
from megatron_lab.verification.local_ranks import run_ranks

BOUND = 1.15
"""How many times the simulated best a pass may take."""
WAYS: tuple[ContextWay, ...] = ("p2p", "all_gather")
_CPU = torch.device("cpu")
_TOKENS, _HEADS, _SIZE = 32, 2, 8
"""Tokens of a rank, key-value heads, head size."""
_BACKWARD = 2.5


@dataclass(frozen=True)
class Settings:
    """What is run."""

    ranks: int
    step_s: float = 0.1
    """Seconds of a rank's products with one rank's keys, forward."""
    share: float = 0.5
    """Time of one rank's keys and values on the link, as a share of that."""
    repeats: int = 5


@dataclass(frozen=True)
class Result:
    """Seconds of a pass of the slowest rank, in each turn, by way."""

    computation: dict[ContextWay, list[float]]
    """Without a link."""
    turns: dict[ContextWay, list[float]]
    """Each message waited for at once."""
    beside: dict[ContextWay, list[float]]

    def ratio(self, way: ContextWay, times: Sequence[float], best: float) -> float:
        """Of one kind against the best that follows from computation."""
        return statistics.median(one / (alone * best) for one, alone in zip(times, self.computation[way], strict=True))


def best(settings: Settings, way: ContextWay) -> float:
    """The simulated best as a multiple of computation, all of it in steps of the ring."""
    ranks, share = settings.ranks, settings.share
    whole = ranks * (1 + _BACKWARD)
    if way == "p2p":
        return (whole + share) / whole
    gather = (ranks - 1) * share
    return (whole + max(0.0, gather - 1) + max(0.0, gather - _BACKWARD) + gather) / whole


class _InTurns(SlowLink):
    """Whoever starts a message waits for it."""

    def start(
        self, name: str, real: Callable[..., Pending], tensor: torch.Tensor, group: Group, *args: Any, **kwargs: Any
    ) -> Pending:
        """See `SlowLink`."""
        return Pending(super().start(name, real, tensor, group, *args, **kwargs).wait())


def measure(settings: Settings) -> Result:
    """Passes of each kind in turn; the first turn is left out."""

    def live(rank: int) -> Result:
        groups = ("cp", "cp_ring", "cp_ring_grad")
        links = {"computation": SlowLink(groups), "turns": _InTurns(groups), "beside": SlowLink(groups)}
        links["computation"].connected = False
        for link in links.values():
            link.bandwidth = 4 * _TOKENS * _HEADS * 2 * _SIZE / (settings.share * settings.step_s)
        seconds: dict[str, dict[ContextWay, list[float]]] = {name: {} for name in links}

        def over(link: SlowLink, once: Callable[[], float]) -> Callable[[], float]:
            def run() -> float:
                with link.installed():
                    return once()

            return of_slowest_rank(run)

        with _sleeping_parts(settings):
            for way in WAYS:
                once = _pass(settings.ranks, rank, way)
                found = all_in_turns({name: over(link, once) for name, link in links.items()}, settings.repeats)
                for name, times in found.items():
                    seconds[name][way] = times
        return Result(**seconds)

    found: Result = run_ranks(settings.ranks, live, timeout=3600.0)[0]
    return found


def _pass(ranks: int, rank: int, way: ContextWay) -> Callable[[], float]:
    """A forward and a backward of one attention; gives a sum over results and gradients."""
    context = make_context(Topology(cp=ranks), rank, _CPU)
    bounds = np.array([0, ranks * _TOKENS], dtype=np.int32)
    documents = Documents(bounds, torch.from_numpy(bounds), 1, mirrored(ranks * _TOKENS, ranks))
    random = torch.Generator().manual_seed(rank)
    heads = [torch.randn(_TOKENS, 1, _HEADS, _SIZE, generator=random) for _ in range(3)]
    sharers = Sharers(way, context.context_group, context.context_rings)

    def once() -> float:
        q, k, v = (x.clone().requires_grad_() for x in heads)
        out = context_attention(sharers, q, k, v, documents, PLAIN)
        out.sum().backward()
        assert k.grad is not None
        return (out.sum() + k.grad.sum()).item()

    return once


@contextmanager
def _sleeping_parts(settings: Settings) -> Iterator[None]:
    """Parts of this process take the time of their pairs: a step of the ring has half as many as a rank's tokens squared, but for
    those before the own."""
    pairs_per_s = _TOKENS**2 / 2 / settings.step_s
    real = attention.attend_part, attention.differentiate_part

    def slowly(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
        def run(part: RunPair, *args: Any) -> Any:
            queries, keys = part.queries[1] - part.queries[0], part.keys[1] - part.keys[0]
            pairs = queries * keys / (2 if part.queries == part.keys else 1)
            end = time.perf_counter() + factor * pairs / pairs_per_s
            found = function(part, *args)
            time.sleep(max(0.0, end - time.perf_counter()))
            return found

        return run

    attention.attend_part, attention.differentiate_part = slowly(real[0], 1.0), slowly(real[1], _BACKWARD)
    try:
        yield
    finally:
        attention.attend_part, attention.differentiate_part = real


def misses(settings: Settings, result: Result) -> list[str]:
    """In words, what is not as it must be."""
    ratios = {way: result.ratio(way, result.beside[way], best(settings, way)) for way in WAYS}
    return [
        f"{way} takes {ratio:.2f} x the simulated best; at most {BOUND} is asked for"
        for way, ratio in ratios.items()
        if ratio > BOUND
    ]


def run(settings: Settings) -> bool:
    """Print a pass of each kind; returns whether the bound holds."""
    print(
        f"{settings.ranks} context ranks, attention forward and backward: a step of the ring has products of "
        f"{1e3 * settings.step_s:.0f} ms forward, and one rank's keys and values take "
        f"{1e3 * settings.share * settings.step_s:.0f} ms\n"
        f"milliseconds a pass, medians of {settings.repeats} (min to max), and as a multiple of computation"
    )
    result = measure(settings)
    for way in WAYS:
        kinds = {"computation": result.computation, "one after the other": result.turns, "beside products": result.beside}
        for words, times in kinds.items():
            spread = f"({1e3 * min(times[way]):.0f} to {1e3 * max(times[way]):.0f})"
            middle, ratio = 1e3 * statistics.median(times[way]), result.ratio(way, times[way], 1.0)
            print(f"{way:>11} {words:>20}{middle:>10.1f} {spread:<14}{ratio:>8.3f}")
        print(f"{way:>11} {'simulated best':>20}{'':>25}{best(settings, way):>8.3f}")
    missed = misses(settings, result)
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "the bound holds", flush=True)
    return not missed
