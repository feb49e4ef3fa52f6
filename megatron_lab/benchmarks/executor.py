"""What the executor itself costs: all chunks on one stage, so that nothing is sent, and operations that compute next to nothing.

The same autograd calls are made in a plain loop too, in turn with the executor; the difference is its own.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.parallel.accumulate import now_or_deferred
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Tensors, TensorSpec
from megatron.pipeline_parallel.validate import validate
from megatron.spec.operations import OpKind, Schedule
from megatron.spec.schedules import SCHEDULES, make_schedule
from megatron_lab.benchmarks.runner import all_in_turns, timed

BOUND_US = 150.0
"""Microseconds an operation may take in the executor, autograd's own calls included."""

_MICROBATCHES = 32
_CHUNKS = 4
"""On the stage, where a schedule takes any number."""


class _Tiny(torch.autograd.Function):
    """A chunk that does nothing: one operation forward, one backward, a weight gradient that may be deferred."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        now_or_deferred(_nothing)
        return grad + 1, None


def _nothing() -> None:
    pass


def by_executor(schedule: Schedule) -> Callable[[], None]:
    """A step by the executor."""
    context = make_context(Topology(), 0, torch.device("cpu"))
    executor = Executor(context, {"hidden": TensorSpec((1,), torch.float32)})
    start, weight, last = torch.zeros(1), torch.zeros((), requires_grad=True), schedule.num_chunks - 1

    def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
        out = _Tiny.apply(received["hidden"] if received else start, weight)
        return {"hidden": out} if chunk < last else {"loss": out}

    return lambda: executor.run(schedule, forward)


def by_hand(schedule: Schedule) -> Callable[[], None]:
    """The autograd calls of the same operations in the same order, and nothing else."""
    x, grad, weight = torch.zeros(1), torch.ones(1), torch.zeros((), requires_grad=True)

    def step() -> None:
        alive: dict[tuple[int, int], torch.Tensor] = {}
        for op in schedule.ops[0]:
            key = (op.chunk, op.microbatch)
            if op.kind is OpKind.FORWARD:
                alive[key] = _Tiny.apply(x.detach().requires_grad_(), weight)
            elif op.kind is OpKind.WEIGHT_GRAD:
                _nothing()
            else:
                torch.autograd.backward(alive.pop(key), grad)

    return step


def bench_operations(pairs: int) -> list[str]:
    """Print microseconds an operation; returns what is over the bound."""
    print(
        f"{'one stage':12}{'chunks':>8}{'operations':>12}{'executor':>13}{'bare autograd':>16}{'its own':>13}{'(min to max)':>18}"
    )
    missed = []
    for name, spec in SCHEDULES.items():
        chunks = spec.chunks_per_stage or _CHUNKS
        schedule = make_schedule(name, 1, _MICROBATCHES, chunks)
        steps = {"executor": by_executor(schedule), "bare": by_hand(schedule)}
        turns = all_in_turns({which: timed(step) for which, step in steps.items()}, pairs)
        times = {which: [1e6 * took / len(schedule.ops[0]) for took in seconds] for which, seconds in turns.items()}
        own = [ours - bare for ours, bare in zip(times["executor"], times["bare"], strict=True)]
        total, bare = statistics.median(times["executor"]), statistics.median(times["bare"])
        line = f"{name:12}{chunks:8}{len(schedule.ops[0]):12}{total:10.1f} us{bare:13.1f} us{statistics.median(own):10.1f} us"
        print(line + f"({min(own):.1f} to {max(own):.1f})".rjust(18))
        if total > BOUND_US:
            missed.append(f"{name} takes {total:.0f} us an operation; at most {BOUND_US:.0f} is asked for")
    return missed


def bench_start(sizes: Sequence[tuple[int, int]]) -> None:
    """Print what the first step with a schedule costs before its first operation.

    Args:
        sizes: (stages, microbatches) of the schedules.
    """
    print(f"{'at start':12}{'size':>10}{'operations':>12}{'make':>13}{'prove':>13}")
    for stages, microbatches in sizes:
        for name, spec in SCHEDULES.items():
            gc.collect()  # garbage of others is not its cost
            schedule, make = _timed(lambda: make_schedule(name, stages, microbatches, spec.chunks_per_stage or 2))  # noqa: B023
            _, prove = _timed(lambda: validate(schedule))  # noqa: B023
            size, count = f"{stages} x {microbatches}", sum(map(len, schedule.ops))
            print(f"{name:12}{size:>10}{count:12,}{1e3 * make:10.1f} ms{1e3 * prove:10.1f} ms")


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = function()
    return result, time.perf_counter() - began


def run(pairs: int, sizes: Sequence[tuple[int, int]]) -> bool:
    """Print both; returns whether the bound holds."""
    missed = bench_operations(pairs)
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "all bounds hold", flush=True)
    bench_start(sizes)
    return not missed
