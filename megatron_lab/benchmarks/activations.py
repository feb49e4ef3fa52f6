"""Benchmark of activation offloading: saved tensors move to host memory and back while the layers compute.

Layers sleep instead of computing, and the link to the host is emulated. A layer sleeps in its forward and in its backward, and
saves one tensor. A copy of that tensor over the link takes a given share of the layer's forward time. The two directions of the
link are independent. The benchmark compares three variants of a step: copies that overlap with computation, no copies, and copies
that computation waits for. Sleeping uses no CPU core, just as a copy by the copy engine of a GPU uses none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megatron.memory.host_buffers import HostBufferPool
from megatron.memory.offload import create_offloader
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Tensors, TensorSpec
from megatron.spec.operations import Schedule
from megatron.spec.schedules import build_1f1b, build_gpipe
from megatron_lab.benchmarks.runner import make_timer, run_in_turns

BOUND = 1.05
"""Maximum ratio of the step with copies to the step without, if each copy is shorter than a layer's forward."""

_CPU = torch.device("cpu")
_SHAPE = (64, 1, 512)
_LAYERS, _MICROBATCHES = 6, 4


@dataclass(frozen=True)
class Settings:
    """Durations and number of repetitions of the benchmark of activation offloading."""

    forward_s: float = 0.02
    """Seconds of a layer's forward. Its backward takes twice as long."""
    share: float = 0.8
    """Time that the copy of a layer's saved tensor takes on the host link, as a share of the layer's forward time."""
    repeats: int = 5


@dataclass(frozen=True)
class ScheduleTimes:
    """Step times under one pipeline schedule in three variants: without copies, with overlapped copies, and with blocking copies.

    Each list has the seconds of a step, one value per repetition of the measurement.
    """

    name: str
    without_copies: list[float]
    overlapped: list[float]
    """Seconds of steps whose copies run concurrently with computation."""
    blocking: list[float]
    """Seconds of steps whose computation waits for each copy."""

    @property
    def ratio(self) -> float:
        """Median over the repetitions of the step time with overlapped copies of activations, divided by the step time without
        copies."""
        return statistics.median(
            overlapped / baseline for overlapped, baseline in zip(self.overlapped, self.without_copies, strict=True)
        )


class _EmulatedStream:
    """Emulation of a CUDA stream: the compute stream, or the stream that copies tensors in one direction over the host link."""

    def __init__(self, *_: object) -> None:
        self.free_at = 0.0

    def wait_stream(self, stream: _EmulatedStream) -> None:
        """Let the next copy of this stream start no earlier than now, because it copies a tensor that the other stream computes.

        The tensor is complete by now, because the layers run (sleep) on the host.
        """
        self.free_at = max(self.free_at, time.perf_counter())

    def record_event(self) -> float:
        """Return the time at which all copies of this stream are complete."""
        return self.free_at

    def wait_event(self, event_time: float) -> None:
        """Make this stream wait until `event_time`, a time that `record_event` of a stream has returned.

        The compute stream sleeps until that time. A copy stream does not sleep: it starts its next copy no earlier than that time.
        """
        if self is SlowHostBufferPool.compute_stream:
            _sleep_until(event_time)
        else:
            self.free_at = max(self.free_at, event_time)


class SlowHostBufferPool(HostBufferPool):
    """Pool of host buffers for offloaded tensors, behind an emulated host link with a given bandwidth in each direction.

    Args:
        bandwidth: bytes per second.
        overlapped: run copies concurrently with computation. If False, computation waits for each copy.
    """

    compute_stream = _EmulatedStream()

    def __init__(self, bandwidth: float, *, overlapped: bool) -> None:
        super().__init__(_CPU)
        self._bandwidth, self._overlapped, self._current_stream = bandwidth, overlapped, self.compute_stream
        self.device_module = SimpleNamespace(
            Stream=_EmulatedStream, current_stream=lambda device: self._current_stream, stream=self._use_stream
        )

    @contextmanager
    def _use_stream(self, stream: _EmulatedStream) -> Iterator[None]:
        self._current_stream = stream
        yield
        self._current_stream = self.compute_stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target` at once, and mark the current stream as busy for the time that the copy takes on the emulated
        link."""
        target.copy_(source)
        self._current_stream.free_at = max(self._current_stream.free_at, time.perf_counter()) + len(source) / self._bandwidth
        if not self._overlapped:
            _sleep_until(self._current_stream.free_at)


class _SleepLayer(torch.autograd.Function):
    """Layer that sleeps in its forward, sleeps twice as long in its backward, and saves one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float) -> torch.Tensor:  # type: ignore[override]
        start = time.perf_counter()
        out = x + 1
        ctx.save_for_backward(out)
        ctx.forward_s = forward_s
        _sleep_until(start + forward_s)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        _sleep_until(time.perf_counter() + 2 * ctx.forward_s)
        return grad * saved, None


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


def measure(settings: Settings) -> list[ScheduleTimes]:
    """Time training steps without copies, with overlapped copies and with blocking copies, under the 1F1B and the GPipe schedule.

    Each repetition runs all three variants.
    """
    bandwidth = torch.empty(_SHAPE).nbytes / (settings.share * settings.forward_s)
    pools: dict[str, HostBufferPool | None] = {
        "without_copies": None,
        "overlapped": SlowHostBufferPool(bandwidth, overlapped=True),
        "blocking": SlowHostBufferPool(bandwidth, overlapped=False),
    }
    results = []
    for schedule in (build_1f1b(1, _MICROBATCHES), build_gpipe(1, _MICROBATCHES)):
        steps = {name: _build_step(schedule, pool, settings) for name, pool in pools.items()}
        times = run_in_turns({name: make_timer(step) for name, step in steps.items()}, settings.repeats)
        results.append(ScheduleTimes(schedule.name, **times))
    return results


def _build_step(schedule: Schedule, pool: HostBufferPool | None, settings: Settings) -> Callable[[], None]:
    executor = Executor(make_context(Topology(), 0, _CPU), {"hidden": TensorSpec(_SHAPE, torch.float32)}, host=pool)

    def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
        x = torch.zeros(_SHAPE, requires_grad=True)
        for layer_index in range(_LAYERS):
            offloader = None if pool is None else create_offloader(x, is_last=layer_index == _LAYERS - 1)
            x = (
                _SleepLayer.apply(x, settings.forward_s)
                if offloader is None
                else offloader.run(lambda x: _SleepLayer.apply(x, settings.forward_s), x)
            )
        return {"loss": x.sum()}

    return lambda: executor.run(schedule, forward)


def find_violations(results: list[ScheduleTimes]) -> list[str]:
    """Return a message for each schedule under which a step with overlapped copies takes more than `BOUND` times as long as a step
    without copies."""
    return [
        f"{result.name}: a step with copies takes {result.ratio:.2f} x as long as without; the limit is {BOUND}"
        for result in results
        if result.ratio > BOUND
    ]


def run(settings: Settings) -> bool:
    """Print the step times under each schedule.

    Returns:
        Whether the step with overlapped copies takes at most `BOUND` times as long as the step without copies, under each schedule.
        Always True if a copy takes at least as long as a layer's forward.
    """
    print(
        f"{_LAYERS} layers of {1e3 * settings.forward_s:.0f} ms forward and {2e3 * settings.forward_s:.0f} ms backward, "
        f"{_MICROBATCHES} microbatches; a copy of a layer's saved tensor takes {1e3 * settings.share * settings.forward_s:.0f} ms\n"
        f"{'schedule':>10}{'no copies':>14}{'overlapped':>12}{'ratio':>8}{'blocking':>12}   "
        f"ms per step, medians of {settings.repeats}"
    )
    results = measure(settings)
    for result in results:
        without_copies, overlapped, blocking = (
            1e3 * statistics.median(times) for times in (result.without_copies, result.overlapped, result.blocking)
        )
        print(f"{result.name:>10}{without_copies:>14.1f}{overlapped:>12.1f}{result.ratio:>8.3f}{blocking:>12.1f}")
    if settings.share >= 1.0:
        print("no limit applies: a copy takes at least as long as a forward")
        return True
    violations = find_violations(results)
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "the bound holds", flush=True)
    return not violations
