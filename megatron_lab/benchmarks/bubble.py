"""Benchmark of the pipeline bubble: the executor sends real messages between processes, and operations sleep instead of computing.

A sleeping operation needs no CPU core, so a machine with two cores can run eight stages. The difference between the measured and
the simulated step time is the time that the executor, autograd and the messages take.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.memory.recompute import run_with_recompute
from megatron.parallel.accumulate import run_or_defer
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Tensors, TensorSpec
from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.operations import Op, OpCosts, Schedule
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.benchmarks.runner import run_in_turns
from megatron_lab.verification.local_ranks import run_ranks

MAX_RELATIVE_ERROR = 0.05
"""Maximum relative difference between the measured and the simulated step."""
MIN_SIMULATED_SAVING, MIN_MEASURED_SAVING = 0.25, 0.22
"""If zb-v saves at least the first share of 1f1b's step in simulation, it must save at least the second share when measured."""

_BUSY_WAIT_S = 0.0002


@dataclass(frozen=True)
class Settings:
    """Schedules, sizes and durations of operations for the benchmark of the pipeline bubble."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    stages: int = 8
    microbatches: int = 16
    costs: OpCosts = field(default_factory=lambda: OpCosts(0.04, 0.04, 0.04))
    """Seconds of the forward, input gradient and weight gradient of a full pipeline stage. Each of the stage's model chunks takes
    an equal share."""
    hidden_shape: tuple[int, int, int] = (128, 1, 512)
    """Shape of the float32 tensor that stages send: [s, b, h] (sequence, microbatch size, hidden size)."""
    overlap: bool = True
    repeats: int = 5

    def get_chunks_per_stage(self, name: str) -> int:
        """Return the number of model chunks per stage that a schedule requires, or 2 if the schedule allows any number."""
        return SCHEDULES[name].chunks_per_stage or 2

    def get_schedule(self, name: str) -> Schedule:
        """Build the schedule with this name.

        If `costs` gives a duration for recomputation, all model chunks are recomputed in backward.
        """
        chunks = self.get_chunks_per_stage(name)
        recompute_chunks = range(self.stages * chunks) if self.costs.recompute else ()
        return build_schedule(name, self.stages, self.microbatches, chunks, recomputed_chunks=recompute_chunks)

    def compute_costs_per_chunk(self, name: str) -> OpCosts:
        """Return the seconds of each type of operation on one model chunk, under the schedule with this name."""
        return self.costs.divide_by_chunks(self.get_chunks_per_stage(name))


@dataclass(frozen=True)
class ScheduleResult:
    """Seconds of a step under one schedule: the time that the simulator predicts, and one measured time per repetition."""

    name: str
    simulated_time: float
    step_times: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the measured step times, in seconds."""
        return statistics.median(self.step_times)

    @property
    def relative_error(self) -> float:
        """Median measured step time divided by the simulated step time, minus 1."""
        return self.median / self.simulated_time - 1.0


class _OpClock:
    """Observer of the pipeline executor that remembers the time at which the current operation started. The benchmark replaces the
    computation of an operation by a sleep that ends a fixed time after this start."""

    op_start = 0.0

    def start(self, op: Op) -> None:
        """Store the current time. The executor calls this method when an operation starts."""
        self.op_start = time.perf_counter()

    def end(self, op: Op) -> None:
        """Do nothing. The executor calls this method when an operation ends, but only the start times are needed."""


class _SleepChunk(torch.autograd.Function):
    """Model chunk that adds 1 to its input and sleeps.

    The backward sleeps for the time of the input gradient. It also sleeps for the time of the weight gradient, at once or, if the
    schedule defers weight gradients, later. A sleep ends at a fixed time after the start of the operation. The time that autograd
    needs before the sleep is therefore part of the operation's duration, as in an operation that computes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, costs: OpCosts, clock: _OpClock, is_recompute: bool
    ) -> torch.Tensor:  # type: ignore[override]
        ctx.costs, ctx.clock = costs, clock
        ctx.save_for_backward(x)
        out = x + 1
        _sleep_until(clock.op_start + (costs.recompute if is_recompute else costs.forward))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        weight_grad, _ = ctx.costs.weight_grad, ctx.saved_tensors
        input_grad = grad.clone()
        _sleep_until(ctx.clock.op_start + ctx.costs.input_grad)
        run_or_defer(lambda: _sleep_until(time.perf_counter() + weight_grad))
        return input_grad, None, None, None, None


def _sleep_until(end: float) -> None:
    """Sleep until the time `end`. The last 0.2 ms are a busy wait, because the operating system may wake a process late."""
    time.sleep(max(0.0, end - _BUSY_WAIT_S - time.perf_counter()))
    while time.perf_counter() < end:
        pass


def measure(settings: Settings) -> list[ScheduleResult]:
    """Measure the step time of every schedule, with one process per pipeline stage.

    Each repetition runs one step of every schedule.
    """
    simulated_times = {
        name: simulate(settings.get_schedule(name), settings.compute_costs_per_chunk(name)).step_time for name in settings.schedules
    }
    timeout = 60.0 + 10.0 * (settings.repeats + 1) * sum(simulated_times.values())
    stage_times = run_ranks(settings.stages, lambda rank: _run_stage(rank, settings, timeout), timeout=timeout)
    results = []
    for name in settings.schedules:
        # All stages read the same clock. A step starts with the first chunk, on stage 0, and ends when the last stage has finished.
        starts = [start for start, _ in stage_times[0][name]]
        ends = [max(stage[name][step][1] for stage in stage_times) for step in range(len(starts))]
        steps = tuple(end - start for start, end in zip(starts, ends, strict=True))
        results.append(ScheduleResult(name, simulated_times[name], steps))
    return results


def _run_stage(rank: int, settings: Settings, timeout: float) -> dict[str, list[tuple[float, float]]]:
    """Run the steps of all schedules on one pipeline stage.

    Args:
        rank: index of the stage.
        timeout: seconds after which a process that waits for messages gives up.

    Returns:
        (start time, end time) of each step in seconds, by the name of the schedule.
    """
    context = make_context(Topology(pp=settings.stages), rank, torch.device("cpu"), timeout_minutes=timeout / 60)
    executor = Executor(context, {"hidden": TensorSpec(settings.hidden_shape, torch.float32)}, overlap=settings.overlap)
    executor.recorder = clock = _OpClock()
    weight = torch.zeros((), requires_grad=True)

    def build_step(name: str) -> Callable[[], tuple[float, float]]:
        schedule, costs = settings.get_schedule(name), settings.compute_costs_per_chunk(name)
        last_chunk = schedule.num_chunks - 1

        def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
            x = received["hidden"] if received else torch.full(settings.hidden_shape, float(microbatch))

            def sleep_layers(x: torch.Tensor, *, is_recompute: bool) -> torch.Tensor:
                return _SleepChunk.apply(x, weight, costs, clock, is_recompute)

            out = (
                run_with_recompute(sleep_layers, x, is_recomputed_ahead=True)
                if costs.recompute
                else sleep_layers(x, is_recompute=False)
            )
            if chunk < last_chunk:
                return {"hidden": out}
            value = out.view(-1)[-1].item()
            assert value == microbatch + last_chunk + 1, f"microbatch {microbatch} is {value} after {last_chunk + 1} chunks"
            return {"loss": out.sum()}

        def step() -> tuple[float, float]:
            dist.barrier()
            start = time.perf_counter()
            executor.run(schedule, forward)
            return start, time.perf_counter()

        return step

    return run_in_turns({name: build_step(name) for name in settings.schedules}, settings.repeats)


def find_violations(results: Sequence[ScheduleResult]) -> list[str]:
    """Return a message for each schedule whose median step time differs from the simulation by more than `MAX_RELATIVE_ERROR`.

    A further message says if zb-v saves less of the step time of 1f1b than `MIN_MEASURED_SAVING`, although the simulated saving is
    at least `MIN_SIMULATED_SAVING`.
    """
    violations = [
        f"{result.name} takes {abs(result.relative_error):.1%} {'more' if result.relative_error > 0 else 'less'} time "
        f"than simulated; the limit is {MAX_RELATIVE_ERROR:.0%}"
        for result in results
        if abs(result.relative_error) > MAX_RELATIVE_ERROR
    ]
    by_name = {result.name: result for result in results}
    if {"1f1b", "zb-v"} <= by_name.keys():
        baseline, zb_v = by_name["1f1b"], by_name["zb-v"]
        simulated_saving, measured_saving = 1 - zb_v.simulated_time / baseline.simulated_time, 1 - zb_v.median / baseline.median
        if simulated_saving >= MIN_SIMULATED_SAVING and measured_saving < MIN_MEASURED_SAVING:
            violations.append(
                f"zb-v saves {measured_saving:.1%} of 1f1b's step time ({simulated_saving:.1%} in the simulation); "
                f"the minimum is {MIN_MEASURED_SAVING:.0%}"
            )
    return violations


def format_table(results: Sequence[ScheduleResult]) -> str:
    """Format simulated and measured step times as a table with one line per schedule."""
    baseline = next((result.median for result in results if result.name == "1f1b"), None)
    rows = [f"{'schedule':12}{'simulated':>13}{'measured':>13}{'(min to max)':>22}{'difference':>13}{'vs. 1f1b':>15}"]
    for result in results:
        range_text = f"({1e3 * min(result.step_times):.1f} to {1e3 * max(result.step_times):.1f})"
        difference = "" if baseline is None else f"{result.median / baseline - 1:+.1%}"
        times = f"{1e3 * result.simulated_time:10.1f} ms{1e3 * result.median:10.1f} ms{range_text:>22}"
        rows.append(f"{result.name:12}{times}{result.relative_error:+13.1%}{difference:>15}")
    return "\n".join(rows)


def run(settings: Settings) -> bool:
    """Print the measured and the simulated step time of each schedule. Return whether `find_violations` finds nothing.

    The result is always True if messages are configured not to overlap with computation: some schedules then wait for messages,
    while the simulator assumes that messages overlap.
    """
    cost_texts = [f"{1e3 * cost:g}" for cost in (settings.costs.forward, settings.costs.input_grad, settings.costs.weight_grad)]
    recompute_text = (
        f"; {1e3 * settings.costs.recompute:g} ms to recompute layers before backward" if settings.costs.recompute else ""
    )
    message_mib = 4 * math.prod(settings.hidden_shape) / 2**20
    print(
        f"{settings.stages} stages, {settings.microbatches} microbatches; a stage's forward, input gradient, weight gradient: "
        f"{', '.join(cost_texts)} ms{recompute_text}, divided among its chunks\n"
        f"messages of {message_mib:.3g} MiB, {'' if settings.overlap else 'not '}overlapped; "
        f"median of {settings.repeats} steps; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    results = measure(settings)
    print(format_table(results))
    if not settings.overlap:
        print("no limits apply without overlap")
        return True
    violations = find_violations(results)
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "all bounds hold")
    return not violations
