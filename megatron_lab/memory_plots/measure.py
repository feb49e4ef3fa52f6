"""What the allocator of a CPU rank gives out during the forwards and backwards of one real step, operation by operation."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from megatron.config.config import Config
from megatron.model.build import model_of
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import connect
from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import Op
from megatron.training.inputs import open_data
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.startup import with_batch_size
from megatron.training.step import TrainStep
from megatron_lab.verification.local_ranks import run_ranks

_MEMORY_EVENT = "[memory]"
_IN_LAYERS = "gradient at the last layer"


@dataclass(frozen=True)
class Measured:
    """One rank's step up to its complete gradients. Times are milliseconds from its begin, sizes bytes beside all that was there
    before: the model's state and the step's inputs."""

    times: tuple[float, ...]
    allocated: tuple[int, ...]
    """What is held from each of these times on."""
    spans: tuple[OpSpan, ...]
    in_layers: float | None
    """When a gradient first comes to the last layer of the model, where this rank has it."""
    host: int = 0
    """Bytes of buffers for what is moved to host memory. On a CPU they lie beside all else; they are not in `allocated`."""

    @property
    def peak(self) -> int:
        """The most at once."""
        return max(self.allocated, default=0)

    def most(self, begin: float, end: float) -> int:
        """The most at once between two times."""
        before = [size for time, size in zip(self.times, self.allocated, strict=True) if time <= begin]
        within = [size for time, size in zip(self.times, self.allocated, strict=True) if begin < time <= end]
        return max((*before[-1:], *within), default=0)

    def after(self, span: OpSpan) -> int:
        """What is held when an operation has ended."""
        return self.most(span.end, span.end)


def measure(config: Config, world_size: int) -> list[Measured]:
    """The first step of all ranks, on local processes. Call it before this process has run a backward on a machine
    with CUDA.

    Raises:
        RanksError: a rank failed.
    """
    found: list[Measured] = run_ranks(world_size, lambda _: measured_step(*prepare(config)), init=False)
    return found


def prepare(config: Config) -> tuple[TrainStep, Sequence[ModelInputs]]:
    """A rank of the job that the environment describes, ready for its first step, and that step's microbatches."""
    context = connect(config.parallel)
    plan = BatchSizePlan(config.training, context.data_group.size, config.model.seq_length)
    config = with_batch_size(config, plan)
    data = open_data(config, context)
    model = model_of(config, context, data.vocab_size)
    step = TrainStep.of(config, model, context)
    step.prepare(plan.num_microbatches(0))
    batches = data.at(Progress(), plan, context).training(0)
    batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    return step, batch


def measured_step(step: TrainStep, batch: Sequence[ModelInputs]) -> Measured:
    """The gradients of a step, watched."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of each of its stages otherwise
    marks = _Marks(step)
    # What is moved to host memory is not on the device: here the allocator would see both.
    step.executor.host.allocate = lambda size: torch.from_numpy(np.empty(size, dtype=np.uint8))  # type: ignore[method-assign]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step.gradients(batch)
    marks.remove()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = min((event.start_ns() for event in events if event.name() in marks.ops), default=0)

    def ms(ns: int) -> float:
        return (ns - begin) / 1e6

    memory = [event for event in events if event.name() == _MEMORY_EVENT]
    spans = [event for event in events if event.name() in marks.ops]
    in_layers = next((ms(event.start_ns()) for event in events if event.name() == _IN_LAYERS), None)
    return Measured(
        times=tuple(ms(event.start_ns()) for event in memory),
        allocated=tuple(itertools.accumulate(event.nbytes() for event in memory)),
        spans=tuple(OpSpan(marks.ops[one.name()], ms(one.start_ns()), ms(one.start_ns() + one.duration_ns())) for one in spans),
        in_layers=in_layers,
        host=step.executor.host.num_bytes,
    )


class _Marks:
    """Names in the profile: a range for each operation, and a moment where a gradient comes to the last layer. The executor's
    recorder."""

    def __init__(self, step: TrainStep) -> None:
        self.ops: dict[str, Op] = {}
        self._executor, self._hooks = step.executor, []
        for number, chunk in step.model.chunks.items():
            if step.model.layer_table[number].last and len(chunk.layers):
                self._hooks.append(chunk.layers[-1].register_forward_hook(self._leaves))
        self._executor.recorder = self

    def remove(self) -> None:
        """Mark nothing any more."""
        self._executor.recorder = None
        for hook in self._hooks:
            hook.remove()

    def begin(self, op: Op) -> None:
        """Called by the executor."""
        name = f"{op.kind.value} of microbatch {op.microbatch} in chunk {op.chunk}"
        self.ops[name] = op
        self._open = torch.profiler.record_function(name)
        self._open.__enter__()

    def end(self, op: Op) -> None:
        """Called by the executor."""
        self._open.__exit__(None, None, None)

    def _leaves(self, layer: nn.Module, args: object, out: torch.Tensor) -> None:
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(self._enters)

    def _enters(self, grads: object) -> None:
        with torch.profiler.record_function(_IN_LAYERS):
            pass
