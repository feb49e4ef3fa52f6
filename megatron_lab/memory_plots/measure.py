"""Measurement of a real training step on CPU ranks: the memory in use during its forwards and backwards, and the time of each
operation."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from megatron.config.config import Config
from megatron.model.build import build_model_from_config
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import connect
from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import Op
from megatron.training.inputs import open_data
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.startup import resolve_batch_size
from megatron.training.step import TrainStep
from megatron_lab.verification.local_ranks import run_ranks

_MEMORY_EVENT = "[memory]"
_LAST_LAYER_GRAD_EVENT = "gradient at the last layer"


@dataclass(frozen=True)
class MeasuredStep:
    """Measured memory of one rank during a step, until its gradients are complete.

    Times are milliseconds since the start of the first operation. Sizes are bytes in addition to the memory that the model's state
    and the step's inputs use at that start.
    """

    times: tuple[float, ...]
    allocated: tuple[int, ...]
    """Bytes in use from each of the times in `times` until the next of them."""
    spans: tuple[OpSpan, ...]
    last_layer_grad_ms: float | None
    """Milliseconds from the start of the first operation until backward reaches the last layer of the model for the first time;
    None if this rank does not have that layer."""
    host_bytes: int = 0
    """Bytes of the host buffers for offloaded tensors. `allocated` does not contain them, although on a CPU rank they are in
    the same memory."""

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in use at any time of the step."""
        return max(self.allocated, default=0)

    def compute_max_allocated(self, start: float, end: float) -> int:
        """Return the maximum number of bytes in use between two times.

        Args:
            start, end: times in milliseconds since the start of the first operation.
        """
        until_start = [size for time, size in zip(self.times, self.allocated, strict=True) if time <= start]
        in_range = [size for time, size in zip(self.times, self.allocated, strict=True) if start < time <= end]
        return max((*until_start[-1:], *in_range), default=0)

    def get_allocated_after(self, span: OpSpan) -> int:
        """Return the number of bytes in use at the end of an operation.

        Args:
            span: measured start and end of the operation.
        """
        return self.compute_max_allocated(span.end, span.end)


def measure_ranks(config: Config, world_size: int) -> list[MeasuredStep]:
    """Run the first step of a job on CPU processes of this machine. Return the measured memory of each rank.

    The function forks processes. So on a machine with CUDA, call it before the first backward of this process.

    Args:
        world_size: number of ranks of the job.

    Raises:
        RanksError: a rank failed.
    """
    steps: list[MeasuredStep] = run_ranks(world_size, lambda _: measure_step(*prepare_step(config)), init=False)
    return steps


def prepare_step(config: Config) -> tuple[TrainStep, Sequence[ModelInputs]]:
    """Return this rank's training step, ready to run, and the microbatches of the first step.

    The environment variables of the launcher say which rank of the job this process is.
    """
    context = connect(config.parallel)
    plan = BatchSizePlan(config.training, context.data_group.size, config.model.seq_length)
    config = resolve_batch_size(config, plan)
    data = open_data(config, context)
    model = build_model_from_config(config, context, data.vocab_size)
    step = TrainStep.of(config, model, context)
    step.prepare(plan.get_num_microbatches(0))
    batches = data.create_batches(Progress(), plan, context).iter_training_batches(0)
    batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    return step, batch


def measure_step(step: TrainStep, batch: Sequence[ModelInputs]) -> MeasuredStep:
    """Compute the gradients of a step under torch's profiler. Return the memory in use over time and the times of the
    operations."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs each of its stages
    recorder = _ProfileRecorder(step)
    # Offloaded tensors use no device memory. On a CPU the profiler would count their host buffers too, so NumPy allocates these.
    step.executor.host.allocate = lambda size: torch.from_numpy(np.empty(size, dtype=np.uint8))  # type: ignore[method-assign]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step.compute_gradients(batch)
    recorder.remove()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start_ns = min((event.start_ns() for event in events if event.name() in recorder.ops), default=0)

    def to_ms(ns: int) -> float:
        return (ns - start_ns) / 1e6

    memory_events = [event for event in events if event.name() == _MEMORY_EVENT]
    op_events = [event for event in events if event.name() in recorder.ops]
    last_layer_grad_ms = next((to_ms(event.start_ns()) for event in events if event.name() == _LAST_LAYER_GRAD_EVENT), None)
    return MeasuredStep(
        times=tuple(to_ms(event.start_ns()) for event in memory_events),
        allocated=tuple(itertools.accumulate(event.nbytes() for event in memory_events)),
        spans=tuple(
            OpSpan(recorder.ops[event.name()], to_ms(event.start_ns()), to_ms(event.start_ns() + event.duration_ns()))
            for event in op_events
        ),
        last_layer_grad_ms=last_layer_grad_ms,
        host_bytes=step.executor.host.num_bytes,
    )


class _ProfileRecorder:
    """Observer of the pipeline executor that marks the operations in torch's profile, so that memory use can be assigned to
    operations.

    Each operation becomes a range of the profile. The first gradient that reaches the output of the last layer becomes an event.
    """

    def __init__(self, step: TrainStep) -> None:
        self.ops: dict[str, Op] = {}
        self._executor, self._hooks = step.executor, []
        for chunk_index, chunk in step.model.chunks.items():
            if step.model.layer_table[chunk_index].is_last and len(chunk.layers):
                self._hooks.append(chunk.layers[-1].register_forward_hook(self._register_grad_hook))
        self._executor.recorder = self

    def remove(self) -> None:
        """Stop marking operations: remove this observer from the executor, and its hooks from the last layer."""
        self._executor.recorder = None
        for hook in self._hooks:
            hook.remove()

    def start(self, op: Op) -> None:
        """Begin a range of the profile that marks the time of `op`. The executor calls this method when an operation starts."""
        name = f"{op.type.value} of microbatch {op.microbatch} in chunk {op.chunk}"
        self.ops[name] = op
        self._current_range = torch.profiler.record_function(name)
        self._current_range.__enter__()

    def end(self, op: Op) -> None:
        """End the range of the profile that marks the time of `op`. The executor calls this method when an operation ends."""
        self._current_range.__exit__(None, None, None)

    def _register_grad_hook(self, layer: nn.Module, args: object, out: torch.Tensor) -> None:
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(self._mark_grad)

    def _mark_grad(self, grads: object) -> None:
        with torch.profiler.record_function(_LAST_LAYER_GRAD_EVENT):
            pass
