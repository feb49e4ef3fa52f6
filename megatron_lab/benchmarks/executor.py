"""Benchmark of the time that the pipeline executor adds to the operations of a step.

All model chunks are on one stage, so nothing is sent, and the operations compute almost nothing. The benchmark alternates between
the executor and a plain loop that makes the same autograd calls. The difference in time is the overhead of the executor.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.parallel.accumulate import run_or_defer
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Tensors, TensorSpec
from megatron.pipeline_parallel.validate import validate
from megatron.spec.operations import OpType, Schedule
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.benchmarks.runner import make_timer, run_in_turns

BOUND_US = 150.0
"""Maximum microseconds per operation in the executor, including the autograd calls."""

_MICROBATCHES = 32
_CHUNKS = 4
"""Chunks on the stage, for a schedule that allows any number."""


class _TinyChunk(torch.autograd.Function):
    """Model chunk that computes almost nothing, so that a step takes only the time of the pipeline executor itself: one addition in
    forward, one in backward, and an empty weight gradient that can be deferred."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        run_or_defer(_do_nothing)
        return grad + 1, None


def _do_nothing() -> None:
    pass


def build_executor_step(schedule: Schedule) -> Callable[[], None]:
    """Build a function that runs one step of the schedule with the pipeline executor."""
    context = make_context(Topology(), 0, torch.device("cpu"))
    executor = Executor(context, {"hidden": TensorSpec((1,), torch.float32)})
    first_input, weight, last_chunk = torch.zeros(1), torch.zeros((), requires_grad=True), schedule.num_chunks - 1

    def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
        out = _TinyChunk.apply(received["hidden"] if received else first_input, weight)
        return {"hidden": out} if chunk < last_chunk else {"loss": out}

    return lambda: executor.run(schedule, forward)


def build_autograd_step(schedule: Schedule) -> Callable[[], None]:
    """Build a function that makes the autograd calls of one step in the order of the schedule, without the executor."""
    x, grad, weight = torch.zeros(1), torch.ones(1), torch.zeros((), requires_grad=True)

    def step() -> None:
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        for op in schedule.ops[0]:
            key = (op.chunk, op.microbatch)
            if op.type is OpType.FORWARD:
                outputs[key] = _TinyChunk.apply(x.detach().requires_grad_(), weight)
            elif op.type is OpType.WEIGHT_GRAD:
                _do_nothing()
            else:
                torch.autograd.backward(outputs.pop(key), grad)

    return step


def bench_operations(pairs: int) -> list[str]:
    """Print the microseconds per operation of each schedule, with the executor and with only the autograd calls.

    Args:
        pairs: number of repetitions; each measures a step with the executor and a step without it.

    Returns:
        A message for each schedule whose median time per operation with the executor is above `BOUND_US`.
    """
    print(
        f"{'one stage':12}{'chunks':>8}{'operations':>12}{'executor':>13}{'only autograd':>16}{'overhead':>13}{'(min to max)':>18}"
    )
    violations = []
    for name, spec in SCHEDULES.items():
        num_chunks = spec.chunks_per_stage or _CHUNKS
        schedule = build_schedule(name, 1, _MICROBATCHES, num_chunks)
        steps = {"executor": build_executor_step(schedule), "bare": build_autograd_step(schedule)}
        step_durations = run_in_turns({step_name: make_timer(step) for step_name, step in steps.items()}, pairs)
        op_times = {
            step_name: [1e6 * duration / len(schedule.ops[0]) for duration in durations]
            for step_name, durations in step_durations.items()
        }
        overheads = [
            executor_time - autograd_time
            for executor_time, autograd_time in zip(op_times["executor"], op_times["bare"], strict=True)
        ]
        executor_median, autograd_median = statistics.median(op_times["executor"]), statistics.median(op_times["bare"])
        text = (
            f"{name:12}{num_chunks:8}{len(schedule.ops[0]):12}{executor_median:10.1f} us{autograd_median:13.1f} us"
            f"{statistics.median(overheads):10.1f} us"
        )
        print(text + f"({min(overheads):.1f} to {max(overheads):.1f})".rjust(18))
        if executor_median > BOUND_US:
            violations.append(f"{name} takes {executor_median:.0f} us per operation; the limit is {BOUND_US:.0f} us")
    return violations


def bench_start(sizes: Sequence[tuple[int, int]]) -> None:
    """Print the time to build and to validate each schedule.

    The first step under a schedule needs this time before its first operation.

    Args:
        sizes: (number of stages, number of microbatches) of the schedules.
    """
    print(f"{'at start':12}{'size':>10}{'operations':>12}{'build':>13}{'validate':>13}")
    for num_stages, num_microbatches in sizes:
        for name, spec in SCHEDULES.items():
            gc.collect()  # so that garbage of earlier code does not count
            schedule, build_s = _time_call(lambda: build_schedule(name, num_stages, num_microbatches, spec.chunks_per_stage or 2))  # noqa: B023
            _, validate_s = _time_call(lambda: validate(schedule))  # noqa: B023
            size, num_ops = f"{num_stages} x {num_microbatches}", sum(map(len, schedule.ops))
            print(f"{name:12}{size:>10}{num_ops:12,}{1e3 * build_s:10.1f} ms{1e3 * validate_s:10.1f} ms")


def _time_call(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def run(pairs: int, sizes: Sequence[tuple[int, int]]) -> bool:
    """Print the executor's time per operation, and the time to build and validate schedules.

    Args:
        pairs: number of repetitions; each measures a step with the executor and a step without it.
        sizes: (number of stages, number of microbatches) of the schedules to build and validate.

    Returns:
        Whether the time per operation of every schedule is within `BOUND_US`.
    """
    violations = bench_operations(pairs)
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "all bounds hold", flush=True)
    bench_start(sizes)
    return not violations
