"""Benchmark of context parallelism: keys and values travel over an emulated slow link while attention computes.

The ranks run `context_attention` forward and backward, with real messages and collectives over the emulated link (`slow_link`).
They compute attention for one range of queries and one range of keys at a time. A sleep after each of these computations extends it
to a set duration: proportional to the number of (query, key) pairs in the two ranges, and 2.5 times as long in backward (five
matrix products instead of two: Dao 2023, FlashAttention-2, section 4.1). The bandwidth of the link is set so that sending the keys
and values of one rank takes a given share of the time of a ring step. Sleeping uses no CPU core, just as a network card uses none.

The benchmark compares the measured times with the best possible time: the computation plus the communication that no order of these
messages can hide. With ring attention (p2p), only one message cannot be hidden: it returns the sum of the gradients to the rank of
the keys after the last ring step. With the all-gather, only attention to the rank's own keys overlaps with the gather, and the
reduce-scatter after backward cannot be hidden at all.
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
from megatron.attention.range_pairs import RangePair
from megatron.config.parallel import CpCommType
from megatron.context_parallel import attention
from megatron.context_parallel.attention import ContextRanks, context_attention
from megatron.parallel.collectives import Pending
from megatron.parallel.context import Group, make_context
from megatron.parallel.sequence_split import split_zigzag
from megatron.parallel.topology import Topology
from megatron.spec.layers import DEFAULT_SCORES
from megatron_lab.benchmarks.runner import make_slowest_rank_timer, run_in_turns
from megatron_lab.benchmarks.slow_link import SlowLink
from megatron_lab.verification.local_ranks import run_ranks

BOUND = 1.15
"""Maximum ratio of a measured pass to the simulated best time."""
COMM_TYPES: tuple[CpCommType, ...] = ("p2p", "all_gather")
_CPU = torch.device("cpu")
_TOKENS, _HEADS, _SIZE = 32, 2, 8
"""Tokens per rank, key-value heads, and head size."""
_BACKWARD = 2.5


@dataclass(frozen=True)
class Settings:
    """Number of ranks and durations of the benchmark of context parallelism."""

    num_ranks: int
    step_s: float = 0.1
    """Seconds of a ring step in forward: attention of the queries of one rank to the keys of one rank."""
    share: float = 0.5
    """Time that the link needs to send the keys and values of one rank, as a fraction of `step_s`, the time of the attention in one
    step of the ring."""
    repeats: int = 5


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a forward and backward of attention on the slowest rank, one value per repetition, by communication type."""

    computation: dict[CpCommType, list[float]]
    """Seconds without communication."""
    sequential: dict[CpCommType, list[float]]
    """Seconds without overlap: a rank waits for each message as soon as the message starts."""
    overlapped: dict[CpCommType, list[float]]
    """Seconds with communication that overlaps with computation."""

    def compute_ratio(self, comm_type: CpCommType, times: Sequence[float], best_ratio: float) -> float:
        """Return the median over the repetitions of the times in `times` divided by the simulated best time.

        Args:
            comm_type: context-parallel communication type of the passes.
            times: seconds of passes (forward and backward of attention), one value per repetition.
            best_ratio: simulated best time as a multiple of the computation (`simulate_best_ratio`).
        """
        return statistics.median(
            time / (computation * best_ratio) for time, computation in zip(times, self.computation[comm_type], strict=True)
        )


def simulate_best_ratio(settings: Settings, comm_type: CpCommType) -> float:
    """Return the shortest possible time of a forward and backward of attention, as a multiple of its time without communication.

    The function calculates in units of the time of a ring step in forward.

    Args:
        comm_type: context-parallel communication type (--cp-comm-type), such as p2p.
    """
    ranks, share = settings.num_ranks, settings.share
    computation = ranks * (1 + _BACKWARD)
    if comm_type == "p2p":
        return (computation + share) / computation
    gather = (ranks - 1) * share
    return (computation + max(0.0, gather - 1) + max(0.0, gather - _BACKWARD) + gather) / computation


class _BlockingLink(SlowLink):
    """Emulated slow link without overlap: a rank waits for each collective as soon as it has started the collective."""

    def start(
        self, name: str, collective: Callable[..., Pending], tensor: torch.Tensor, group: Group, *args: Any, **kwargs: Any
    ) -> Pending:
        """Start a collective and wait until it is complete.

        The arguments are those of `SlowLink.start`.
        """
        return Pending(super().start(name, collective, tensor, group, *args, **kwargs).wait())


def measure(settings: Settings) -> PassTimes:
    """Time a forward and backward of attention without communication, with blocking communication and with overlapped
    communication.

    Each repetition measures all three variants.
    """

    def run_rank(rank: int) -> PassTimes:
        groups = ("cp", "cp_ring", "cp_ring_grad")
        links = {"computation": SlowLink(groups), "sequential": _BlockingLink(groups), "overlapped": SlowLink(groups)}
        links["computation"].is_connected = False
        for link in links.values():
            link.bandwidth = 4 * _TOKENS * _HEADS * 2 * _SIZE / (settings.share * settings.step_s)
        times_by_link: dict[str, dict[CpCommType, list[float]]] = {name: {} for name in links}

        def make_timer(link: SlowLink, run_pass: Callable[[], float]) -> Callable[[], float]:
            def run() -> float:
                with link.installed():
                    return run_pass()

            return make_slowest_rank_timer(run)

        with _delay_attention(settings):
            for comm_type in COMM_TYPES:
                run_pass = _build_pass(settings.num_ranks, rank, comm_type)
                turn_times = run_in_turns({name: make_timer(link, run_pass) for name, link in links.items()}, settings.repeats)
                for name, times in turn_times.items():
                    times_by_link[name][comm_type] = times
        return PassTimes(**times_by_link)

    result: PassTimes = run_ranks(settings.num_ranks, run_rank, timeout=3600.0)[0]
    return result


def _build_pass(num_ranks: int, rank: int, comm_type: CpCommType) -> Callable[[], float]:
    """Build a function that runs attention forward and backward on this rank.

    The function returns the sum of the elements of the output and of the gradient of the keys.
    """
    context = make_context(Topology(cp=num_ranks), rank, _CPU)
    bounds = np.array([0, num_ranks * _TOKENS], dtype=np.int32)
    documents = Documents(bounds, torch.from_numpy(bounds), 1, split_zigzag(num_ranks * _TOKENS, num_ranks))
    random = torch.Generator().manual_seed(rank)
    qkv = [torch.randn(_TOKENS, 1, _HEADS, _SIZE, generator=random) for _ in range(3)]
    context_ranks = ContextRanks(comm_type, context.context_group, context.context_rings)

    def run_pass() -> float:
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        out = context_attention(context_ranks, q, k, v, documents, DEFAULT_SCORES)
        out.sum().backward()
        assert k.grad is not None
        return (out.sum() + k.grad.sum()).item()

    return run_pass


@contextmanager
def _delay_attention(settings: Settings) -> Iterator[None]:
    """Make attention sleep in this process, while the context is active, in proportion to its number of (query, key) pairs.

    Attention is computed for one range of queries and one range of keys at a time. Let t be the number of tokens of a rank. Under
    the zigzag split, every ring step has t^2 / 2 (query, key) pairs and takes `step_s` in forward. If the queries and the keys of a
    range are the same tokens, only half of the pairs count, because of the causal mask.
    """
    pairs_per_s = _TOKENS**2 / 2 / settings.step_s
    originals = attention.attend_pair, attention.attend_pair_backward

    def add_delay(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
        def run(pair: RangePair, *args: Any) -> Any:
            num_queries, num_keys = pair.query_range[1] - pair.query_range[0], pair.key_range[1] - pair.key_range[0]
            num_pairs = num_queries * num_keys / (2 if pair.query_range == pair.key_range else 1)
            end = time.perf_counter() + factor * num_pairs / pairs_per_s
            result = function(pair, *args)
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return run

    attention.attend_pair, attention.attend_pair_backward = add_delay(originals[0], 1.0), add_delay(originals[1], _BACKWARD)
    try:
        yield
    finally:
        attention.attend_pair, attention.attend_pair_backward = originals


def find_violations(settings: Settings, result: PassTimes) -> list[str]:
    """Return a message for each communication type with which attention takes more than `BOUND` times the simulated best time,
    although communication overlaps."""
    ratios = {
        comm_type: result.compute_ratio(comm_type, result.overlapped[comm_type], simulate_best_ratio(settings, comm_type))
        for comm_type in COMM_TYPES
    }
    return [
        f"{comm_type} takes {ratio:.2f} x the simulated best time; the limit is {BOUND}"
        for comm_type, ratio in ratios.items()
        if ratio > BOUND
    ]


def run(settings: Settings) -> bool:
    """Print the times of a forward and backward of attention with each communication type.

    Returns:
        Whether attention is fast enough with every communication type (see `find_violations`).
    """
    print(
        f"{settings.num_ranks} context ranks, attention forward and backward: the products of a ring step take "
        f"{1e3 * settings.step_s:.0f} ms in forward, and sending the keys and values of a rank takes "
        f"{1e3 * settings.share * settings.step_s:.0f} ms\n"
        f"milliseconds per pass (forward and backward), medians of {settings.repeats} (min to max), "
        "and as a multiple of computation"
    )
    result = measure(settings)
    for comm_type in COMM_TYPES:
        times_by_label = {
            "computation": result.computation,
            "without overlap": result.sequential,
            "with overlap": result.overlapped,
        }
        for label, times in times_by_label.items():
            range_text = f"({1e3 * min(times[comm_type]):.0f} to {1e3 * max(times[comm_type]):.0f})"
            median_ms, ratio = 1e3 * statistics.median(times[comm_type]), result.compute_ratio(comm_type, times[comm_type], 1.0)
            print(f"{comm_type:>11} {label:>20}{median_ms:>10.1f} {range_text:<14}{ratio:>8.3f}")
        print(f"{comm_type:>11} {'simulated best':>20}{'':>25}{simulate_best_ratio(settings, comm_type):>8.3f}")
    violations = find_violations(settings, result)
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "the bound holds", flush=True)
    return not violations
