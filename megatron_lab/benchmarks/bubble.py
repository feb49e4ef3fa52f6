"""The real bubble: the executor and its messages between real processes, with operations that sleep instead of computing.

A sleeping operation needs no core, so a machine of two cores can run eight stages. What a step takes beyond the simulated time is
what the executor, autograd and the messages cost.
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

from megatron.memory.recompute import recomputed
from megatron.parallel.accumulate import now_or_deferred
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Tensors, TensorSpec
from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.operations import Costs, Op, Schedule
from megatron.spec.schedules import SCHEDULES, make_schedule
from megatron_lab.benchmarks.runner import all_in_turns
from megatron_lab.verification.local_ranks import run_ranks

OFF_BOUND = 0.05
"""How far a measured step may be off the simulated one."""
SAVED_SIMULATED, SAVED_MEASURED = 0.25, 0.22
"""Where zb-v is to save that part of 1f1b's step on paper, it must save this part as measured."""

_AWAKE = 0.0002


@dataclass(frozen=True)
class Settings:
    """What is run."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    stages: int = 8
    microbatches: int = 16
    costs: Costs = field(default_factory=lambda: Costs(0.04, 0.04, 0.04))
    """Seconds of a whole stage; its chunks share them."""
    hidden: tuple[int, int, int] = (128, 1, 512)
    """[s, b, h] of the float32 tensor that travels."""
    overlap: bool = True
    repeats: int = 5

    def chunks_per_stage(self, name: str) -> int:
        """The number that a schedule must have, or two where it may have any."""
        return SCHEDULES[name].chunks_per_stage or 2

    def schedule(self, name: str) -> Schedule:
        """The schedule of this name. Where recompute takes time, all chunks have it."""
        chunks = self.chunks_per_stage(name)
        recomputed = range(self.stages * chunks) if self.costs.recompute else ()
        return make_schedule(name, self.stages, self.microbatches, chunks, recomputed=recomputed)

    def chunk_costs(self, name: str) -> Costs:
        """Costs of one chunk under the schedule of this name."""
        return self.costs.divided(self.chunks_per_stage(name))


@dataclass(frozen=True)
class Result:
    """Steps of one schedule, in seconds."""

    name: str
    simulated: float
    measured: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the measured steps."""
        return statistics.median(self.measured)

    @property
    def off(self) -> float:
        """Measured beyond simulated, as a part of the simulated."""
        return self.median / self.simulated - 1.0


class _Clock:
    """The executor's recorder: when the operation that now runs began."""

    began = 0.0

    def begin(self, op: Op) -> None:
        """Called by the executor."""
        self.began = time.perf_counter()

    def end(self, op: Op) -> None:
        """Called by the executor."""


class _Sleep(torch.autograd.Function):
    """A chunk: adds one and sleeps. Its backward sleeps for the input gradient; the weight gradient may be deferred.

    What autograd does before it comes to the sleep is a part of the operation, as it is of one that computes.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, costs: Costs, clock: _Clock, again: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.costs, ctx.clock = costs, clock
        ctx.save_for_backward(x)
        out = x + 1
        _sleep_until(clock.began + (costs.recompute if again else costs.forward))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        weight_grad, _ = ctx.costs.weight_grad, ctx.saved_tensors
        grad_in = grad.clone()
        _sleep_until(ctx.clock.began + ctx.costs.input_grad)
        now_or_deferred(lambda: _sleep_until(time.perf_counter() + weight_grad))
        return grad_in, None, None, None, None


def _sleep_until(end: float) -> None:
    """Sleep, and wait awake at the very end: the system may wake a process late, and that is not what is measured."""
    time.sleep(max(0.0, end - _AWAKE - time.perf_counter()))
    while time.perf_counter() < end:
        pass


def measure(settings: Settings) -> list[Result]:
    """Run every schedule; one step of each in turn."""
    simulated = {name: simulate(settings.schedule(name), settings.chunk_costs(name)).step_time for name in settings.schedules}
    timeout = 60.0 + 10.0 * (settings.repeats + 1) * sum(simulated.values())
    ranks = run_ranks(settings.stages, lambda rank: _stage(rank, settings, timeout), timeout=timeout)
    results = []
    for name in settings.schedules:
        # All stages read the same clock. A step begins with the first chunk, which lies on stage 0, and ends with the last stage.
        begins = [begin for begin, _ in ranks[0][name]]
        ends = [max(stage[name][step][1] for stage in ranks) for step in range(len(begins))]
        steps = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        results.append(Result(name, simulated[name], steps))
    return results


def _stage(rank: int, settings: Settings, timeout: float) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of every step of each schedule on one stage."""
    context = make_context(Topology(pp=settings.stages), rank, torch.device("cpu"), timeout_minutes=timeout / 60)
    executor = Executor(context, {"hidden": TensorSpec(settings.hidden, torch.float32)}, overlap=settings.overlap)
    executor.recorder = clock = _Clock()
    weight = torch.zeros((), requires_grad=True)

    def step_of(name: str) -> Callable[[], tuple[float, float]]:
        schedule, costs = settings.schedule(name), settings.chunk_costs(name)
        last = schedule.num_chunks - 1

        def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
            x = received["hidden"] if received else torch.full(settings.hidden, float(microbatch))

            def sleeps(x: torch.Tensor, *, again: bool) -> torch.Tensor:
                return _Sleep.apply(x, weight, costs, clock, again)

            out = recomputed(sleeps, x, ahead=True) if costs.recompute else sleeps(x, again=False)
            if chunk < last:
                return {"hidden": out}
            value = out.view(-1)[-1].item()
            assert value == microbatch + last + 1, f"microbatch {microbatch} is {value} after {last + 1} chunks"
            return {"loss": out.sum()}

        def step() -> tuple[float, float]:
            dist.barrier()
            begin = time.perf_counter()
            executor.run(schedule, forward)
            return begin, time.perf_counter()

        return step

    return all_in_turns({name: step_of(name) for name in settings.schedules}, settings.repeats)


def misses(results: Sequence[Result]) -> list[str]:
    """In words, what is not as it must be."""
    found = [
        f"{result.name} is {result.off:+.1%} off the simulator; at most {OFF_BOUND:.0%} is asked for"
        for result in results
        if abs(result.off) > OFF_BOUND
    ]
    named = {result.name: result for result in results}
    if {"1f1b", "zb-v"} <= named.keys():
        base, v = named["1f1b"], named["zb-v"]
        on_paper, measured = 1 - v.simulated / base.simulated, 1 - v.median / base.median
        if on_paper >= SAVED_SIMULATED and measured < SAVED_MEASURED:
            found.append(
                f"zb-v saves {measured:.1%} of 1f1b's step ({on_paper:.1%} on paper); at least {SAVED_MEASURED:.0%} is asked for"
            )
    return found


def report(results: Sequence[Result]) -> str:
    """A table, a schedule a line."""
    base = next((result.median for result in results if result.name == "1f1b"), None)
    lines = [f"{'schedule':12}{'simulated':>13}{'measured':>13}{'(min to max)':>22}{'difference':>13}{'against 1f1b':>15}"]
    for result in results:
        spread = f"({1e3 * min(result.measured):.1f} to {1e3 * max(result.measured):.1f})"
        against = "" if base is None else f"{result.median / base - 1:+.1%}"
        times = f"{1e3 * result.simulated:10.1f} ms{1e3 * result.median:10.1f} ms{spread:>22}"
        lines.append(f"{result.name:12}{times}{result.off:+13.1%}{against:>15}")
    return "\n".join(lines)


def run(settings: Settings) -> bool:
    """Print what the step of each schedule takes, beside the simulator; returns whether the bounds hold.

    They are asked of steps with overlap only: without, some schedules must wait for messages that the simulator lets travel.
    """
    costs = [f"{1e3 * cost:g}" for cost in (settings.costs.forward, settings.costs.input_grad, settings.costs.weight_grad)]
    again = f"; {1e3 * settings.costs.recompute:g} ms to run layers again ahead of it" if settings.costs.recompute else ""
    size = 4 * math.prod(settings.hidden) / 2**20
    print(
        f"{settings.stages} stages, {settings.microbatches} microbatches; a stage's forward, input gradient, weight gradient: "
        f"{', '.join(costs)} ms{again}, shared by its chunks\n"
        f"messages of {size:.3g} MiB, {'' if settings.overlap else 'not '}overlapped; "
        f"median of {settings.repeats} steps; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    results = measure(settings)
    print(report(results))
    if not settings.overlap:
        print("without overlap no bounds are asked for")
        return True
    missed = misses(results)
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "all bounds hold")
    return not missed
