"""Saved tensors that are moved to host memory and back, beside computation: layers sleep, and a slow link is emulated.

A layer sleeps for its forward and for its backward, and saves one tensor. The link to the host takes as long for it as a given
share of the layer's forward, each way by itself. A step with the schedule's copies is compared with the same step without any, and
with one in which computation waits for each copy. Sleeping takes no core, as a copy by a GPU's own engine takes none.
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

from megatron.memory.host import HostMemory
from megatron.memory.offload import chosen_layer
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Tensors, TensorSpec
from megatron.spec.operations import Schedule
from megatron.spec.schedules import gpipe, one_f_one_b
from megatron_lab.benchmarks.runner import all_in_turns, timed

BOUND = 1.05
"""How many times the step without copies a step may take in which each copy is shorter than a layer's forward."""

_CPU = torch.device("cpu")
_SHAPE = (64, 1, 512)
_LAYERS, _MICROBATCHES = 6, 4


@dataclass(frozen=True)
class Settings:
    """What is run."""

    forward_s: float = 0.02
    """Seconds of a layer's forward; its backward takes twice as long."""
    share: float = 0.8
    """Time of a layer's copy, as a share of its forward."""
    repeats: int = 5


@dataclass(frozen=True)
class Result:
    """Seconds a step under one schedule, in each turn."""

    name: str
    without: list[float]
    beside: list[float]
    """With copies beside computation."""
    waiting: list[float]
    """With computation that waits for each copy."""

    @property
    def ratio(self) -> float:
        """The step with copies against that without."""
        return statistics.median(beside / without for beside, without in zip(self.beside, self.without, strict=True))


class _Lane:
    """One way of the link, or the stream that computes."""

    def __init__(self, *_: object) -> None:
        self.free_at = 0.0

    def wait_stream(self, other: _Lane) -> None:
        """Copies begin no sooner than now: what they read is computed."""
        self.free_at = max(self.free_at, time.perf_counter())

    def record_event(self) -> float:
        """When all of its copies are through."""
        return self.free_at

    def wait_event(self, at: float) -> None:
        """The stream that computes sleeps until then; a lane goes on then."""
        if self is SlowHost.computing:
            _sleep_until(at)
        else:
            self.free_at = max(self.free_at, at)


class SlowHost(HostMemory):
    """Host memory behind a link of a given bandwidth each way.

    Args:
        bandwidth: bytes a second.
        beside: whether copies run beside computation, which otherwise waits for each.
    """

    computing = _Lane()

    def __init__(self, bandwidth: float, *, beside: bool) -> None:
        super().__init__(_CPU)
        self._bandwidth, self._beside, self._lane = bandwidth, beside, self.computing
        self.streams = SimpleNamespace(Stream=_Lane, current_stream=lambda device: self._lane, stream=self._on)

    @contextmanager
    def _on(self, lane: _Lane) -> Iterator[None]:
        self._lane = lane
        yield
        self._lane = self.computing

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """See `HostMemory`."""
        to.copy_(source)
        self._lane.free_at = max(self._lane.free_at, time.perf_counter()) + len(source) / self._bandwidth
        if not self._beside:
            _sleep_until(self._lane.free_at)


class _Sleep(torch.autograd.Function):
    """A layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:  # type: ignore[override]
        began = time.perf_counter()
        out = x + 1
        ctx.save_for_backward(out)
        ctx.seconds = seconds
        _sleep_until(began + seconds)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        _sleep_until(time.perf_counter() + 2 * ctx.seconds)
        return grad * saved, None


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


def measure(settings: Settings) -> list[Result]:
    """One step of each kind in turn, for each schedule; the first turn is left out."""
    bandwidth = torch.empty(_SHAPE).nbytes / (settings.share * settings.forward_s)
    hosts: dict[str, HostMemory | None] = {
        "without": None,
        "beside": SlowHost(bandwidth, beside=True),
        "waiting": SlowHost(bandwidth, beside=False),
    }
    results = []
    for schedule in (one_f_one_b(1, _MICROBATCHES), gpipe(1, _MICROBATCHES)):
        steps = {name: _stepper(schedule, host, settings) for name, host in hosts.items()}
        seconds = all_in_turns({name: timed(step) for name, step in steps.items()}, settings.repeats)
        results.append(Result(schedule.name, **seconds))
    return results


def _stepper(schedule: Schedule, host: HostMemory | None, settings: Settings) -> Callable[[], None]:
    executor = Executor(make_context(Topology(), 0, _CPU), {"hidden": TensorSpec(_SHAPE, torch.float32)}, host=host)

    def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
        x = torch.zeros(_SHAPE, requires_grad=True)
        for number in range(_LAYERS):
            layer = None if host is None else chosen_layer(x, last=number == _LAYERS - 1)
            x = (
                _Sleep.apply(x, settings.forward_s)
                if layer is None
                else layer.run(lambda x: _Sleep.apply(x, settings.forward_s), x)
            )
        return {"loss": x.sum()}

    return lambda: executor.run(schedule, forward)


def misses(results: list[Result]) -> list[str]:
    """In words, what is not as it must be."""
    return [
        f"{one.name}: a step takes {one.ratio:.2f} x the one without copies; at most {BOUND} is asked for"
        for one in results
        if one.ratio > BOUND
    ]


def run(settings: Settings) -> bool:
    """Print the steps under each schedule; returns whether the bound holds."""
    print(
        f"{_LAYERS} layers of {1e3 * settings.forward_s:.0f} ms forward and {2e3 * settings.forward_s:.0f} ms backward, "
        f"{_MICROBATCHES} microbatches; a layer's saved tensor takes {1e3 * settings.share * settings.forward_s:.0f} ms each way\n"
        f"{'schedule':>10}{'no copies':>14}{'beside':>12}{'ratio':>8}{'waiting':>12}   ms a step, medians of {settings.repeats}"
    )
    results = measure(settings)
    for one in results:
        without, beside, waiting = (1e3 * statistics.median(seconds) for seconds in (one.without, one.beside, one.waiting))
        print(f"{one.name:>10}{without:>14.1f}{beside:>12.1f}{one.ratio:>8.3f}{waiting:>12.1f}")
    if settings.share >= 1.0:
        print(f"a ratio of at most {BOUND} is asked for where copies are shorter than forwards")
        return True
    missed = misses(results)
    print("\n".join(f"MISSED: {miss}" for miss in missed) if missed else "the bound holds", flush=True)
    return not missed
