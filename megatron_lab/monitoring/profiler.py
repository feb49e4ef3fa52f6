"""Profiles of a run: a range of steps with torch's profiler (--profile), and the timeline of the pipeline (--profile-pipeline)."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from megatron.config.config import Config
from megatron.config.launcher import read_process_info
from megatron.config.outputs import LoggingConfig
from megatron.config.pipeline_layout import LayerCosts
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.torch_private import dump_snapshot, record_memory_history
from megatron.pipeline_parallel.partition import Chunk
from megatron.pipeline_parallel.simulate import OpSpan, Timeline, simulate
from megatron.spec.operations import Op, OpType
from megatron.training.callbacks import Callback
from megatron.training.failure import run_on_all_ranks
from megatron.training.features import Feature, RunComponents
from megatron.training.step import TrainStep
from megatron_lab.schedule_plots.run_pictures import RunPictures

logger = logging.getLogger(__name__)

_MEMORY_EVENTS = 1_000_000
"""Number of allocations and releases in the memory history. Older ones are dropped."""


DrawFunction = Callable[[Sequence[tuple[str, Timeline]], Path], tuple[list[str], list[Path]]]
"""Function that draws timelines with their titles into files. It appends suffixes to the given path. Returns lines of a table, and
the paths of the files."""


class StepProfiler:
    """Profiler of the steps from --profile-step-start up to, but not including, --profile-step-end (--profile).

        with StepProfiler(config, rank, device) as profiler:
            for iteration in ...:
                profiler.step(iteration)
                ...

    It writes a Chrome trace such as `trace_rank0_step10-12.json` (for chrome://tracing, ui.perfetto.dev) into --profile-dir. On
    CUDA it also writes a memory snapshot `memory_rank0_step10-12.pickle` (for pytorch.org/memory_viz), on other devices a table of
    the operations that allocate most, `memory_rank0_step10-12.txt`. It does nothing if profiling is disabled, or on a rank that is
    not profiled.

    Args:
        config: enables the profiler, and selects its steps, ranks and folder.
        rank: rank of this process.
        device: device of this rank.

    Raises:
        ValueError: the folder cannot be created.
    """

    def __init__(self, config: LoggingConfig, rank: int, device: torch.device) -> None:
        self._active = config.profile and rank in config.profile_ranks
        self._window = range(config.profile_step_start, config.profile_step_end)
        self._folder, self._rank, self._device = Path(config.profile_dir), rank, device
        self._profile: torch.profiler.profile | None = None
        self._first = self._last = 0
        if self._active:
            _create_folder(self._folder)

    def step(self, iteration: int) -> None:
        """Start or stop recording if `iteration` is the first step of the range, or the first step after it.

        Call this method before each step starts. The first iteration is 1.
        """
        if self._profile is not None and iteration >= self._window.stop:
            self._finish()
        elif self._active and self._profile is None and iteration in self._window:
            self._first = iteration
            self._start()
        self._last = iteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The run ended or failed inside the window: keep the recorded steps.
        if self._profile is not None:
            self._finish()

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
        self._profile.start()

    def _finish(self) -> None:
        assert self._profile is not None
        profile, self._profile = self._profile, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profile.stop()
        window = f"rank{self._rank}_step{self._first}-{self._last + 1}"
        trace, memory = self._folder / f"trace_{window}.json", self._folder / f"memory_{window}.txt"
        profile.export_chrome_trace(str(trace))
        if self._device.type == "cuda":
            memory = memory.with_suffix(".pickle")
            dump_snapshot(str(memory))
            record_memory_history(enabled=None)
        else:
            memory.write_text(profile.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=50), encoding="utf-8")
        logger.info("profile of steps %d to %d: %s and %s", self._first, self._last, trace, memory)


class _StageProfile(NamedTuple):
    """Measured operations of one pipeline stage in the profiled step. Times are in seconds, by the clock of the stage's host."""

    host: str
    start_time: float
    """Time at which the stage's rank left the barrier before the step. The earliest of these times on a host is the zero of the
    host's times in the timeline."""
    op_spans: list[OpSpan]
    deferred_bytes: int
    layers: dict[int, float]
    """Total seconds of each layer's forward passes in the step, by layer index."""


_Timestamp = float | torch.cuda.Event
EMBEDDING = -1
"""Key of the embedding in mappings that are keyed by layer index."""


class SpanRecorder:
    """Observer of the pipeline executor that records the start and end of the operations of a step.

    On CUDA it records events, so that the host does not wait for the device.

    Args:
        layers: layers by index in the model. The times of their forward passes are recorded too.
    """

    def __init__(self, device: torch.device, layers: Mapping[int, nn.Module] = MappingProxyType({})) -> None:
        self._on_cuda = device.type == "cuda"
        self._op_times: list[tuple[Op, _Timestamp, _Timestamp]] = []
        self._op_start: _Timestamp = 0.0
        self._in_forward = False
        self._layer_timestamps: dict[int, list[_Timestamp]] = {layer_index: [] for layer_index in layers}
        self._hooks = [
            hook
            for layer_index, layer in layers.items()
            for hook in (
                layer.register_forward_pre_hook(partial(self._on_layer_call, layer_index)),
                layer.register_forward_hook(partial(self._on_layer_call, layer_index)),
            )
        ]
        if self._on_cuda:
            torch.cuda.synchronize(device)
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._start_event.record()
        self.start_time = time.perf_counter()

    def start(self, op: Op) -> None:
        """Record the start of an operation. The executor calls this method."""
        self._op_start = self._read_clock()
        self._in_forward = op.type is OpType.FORWARD

    def end(self, op: Op) -> None:
        """Record the end of an operation. The executor calls this method."""
        self._op_times.append((op, self._op_start, self._read_clock()))
        self._in_forward = False

    def close(self) -> None:
        """Remove the hooks that time the layers."""
        for hook in self._hooks:
            hook.remove()

    def get_layer_times(self) -> dict[int, float]:
        """Return the total seconds of each layer's forward passes, by layer index. Recomputation is not included."""
        return {
            layer_index: sum(
                self._to_seconds(end) - self._to_seconds(start)
                for start, end in zip(timestamps[::2], timestamps[1::2], strict=True)
            )
            for layer_index, timestamps in self._layer_timestamps.items()
        }

    def _on_layer_call(self, layer_index: int, *_: object) -> None:
        if self._in_forward:  # skip layers that are recomputed in backward
            self._layer_timestamps[layer_index].append(self._read_clock())

    def get_op_spans(self) -> list[OpSpan]:
        """Wait for the device. Return the start and end of all recorded operations, in seconds by the clock of this host."""
        if self._on_cuda:
            torch.cuda.synchronize()
        return [OpSpan(op, self._to_seconds(start), self._to_seconds(end)) for op, start, end in self._op_times]

    def _read_clock(self) -> _Timestamp:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _to_seconds(self, timestamp: _Timestamp) -> float:
        if isinstance(timestamp, float):
            return timestamp
        return self.start_time + self._start_event.elapsed_time(timestamp) / 1000.0


class PipelineProfiler:
    """Profiler that compares the measured timeline of one pipeline step with the schedule (--profile-pipeline).

    It measures step --profile-step-start, or the first step after it if a run resumes later, on the pipeline of rank 0. Use it as a
    context manager, and call `step` before each step.

    The first rank draws the measured timeline into --profile-dir, below a simulated timeline. In the simulation each type of
    operation takes its mean measured duration on each chunk, and messages take no time. So the additional time of the measured
    timeline is communication, waiting, and the variation of the durations. The profiler does nothing if it is disabled, or on ranks
    of other pipelines.

    Args:
        draw: function that draws the timelines; needed on the first rank.

    Raises:
        ValueError: the folder cannot be created.
    """

    def __init__(self, config: LoggingConfig, step: TrainStep, context: ParallelContext, draw: DrawFunction | None) -> None:
        self._active = config.profile_pipeline and 0 in context.group("pp").ranks
        self._iteration, self._folder = config.profile_step_start, Path(config.profile_dir)
        self._step, self._context, self._draw = step, context, draw
        self._recorder: SpanRecorder | None = None
        if self._active and context.rank == 0:
            _create_folder(self._folder)

    def step(self, iteration: int) -> None:
        """Start recording if `iteration` is the step to measure. Stop recording if the previous step was measured.

        Call this method before each step starts. The first iteration is 1.
        """
        if not self._active:
            return
        if self._recorder is not None:
            self._finish()
        elif iteration >= self._iteration:
            self._iteration = iteration
            pipeline = self._context.group("pp")
            if pipeline.size > 1:
                dist.barrier(pipeline.process_group)
            self._recorder = self._step.executor.recorder = SpanRecorder(self._context.device, self._get_timed_modules())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None and error is None:  # after an error the other ranks may not call gather_objects
            self._finish()
        elif self._active and error is None and self._context.rank == 0:
            logger.warning("--profile-pipeline measured nothing: the run ended before iteration %d", self._iteration)

    def _get_timed_modules(self) -> dict[int, nn.Module]:
        """Return the modules of this rank whose forward passes are timed: its layers by layer index, and the embedding by the key
        `EMBEDDING`."""
        model = self._step.model
        modules: dict[int, nn.Module] = {}
        for index, chunk in model.chunks.items():
            modules |= zip(model.layer_table[index].layers, chunk.blocks, strict=False)
            modules |= {} if chunk.embedding is None else {EMBEDDING: chunk.embedding}
        return modules

    def _finish(self) -> None:
        assert self._recorder is not None
        recorder, self._recorder, self._active = self._recorder, None, False
        executor = self._step.executor
        executor.recorder = None
        recorder.close()
        op_spans = recorder.get_op_spans()
        profile = _StageProfile(
            socket.gethostname(), recorder.start_time, op_spans, executor.peak_deferred_bytes, recorder.get_layer_times()
        )
        profiles = gather_objects(profile, self._context.group("pp"))
        if self._context.rank != 0:
            return
        if not all(stage_profile.op_spans for stage_profile in profiles):
            logger.warning("--profile-pipeline measured nothing: iteration %d was skipped", self._iteration)
            return
        self._write(profiles)

    def _write(self, profiles: list[_StageProfile]) -> None:
        num_microbatches = 1 + max(span.op.microbatch for span in profiles[0].op_spans)
        schedule = self._step.get_schedule(num_microbatches)
        measured = Timeline(schedule.name, _align_clocks(profiles))
        planned = simulate(schedule, compute_mean_costs(measured))
        titled_timelines = [
            (f"{schedule.name}, simulated: mean measured durations, messages take no time", planned),
            (f"{schedule.name}, measured in iteration {self._iteration}", measured),
        ]
        assert self._draw is not None, "the first rank draws"
        lines, paths = self._draw(titled_timelines, self._folder / f"pipeline_step{self._iteration}")
        layer_costs = compute_layer_costs(
            self._step.model.layer_table,
            [span for profile in profiles for span in profile.op_spans],
            _merge_layer_times(profiles),
            num_microbatches,
        )
        paths.append(self._folder / f"layer_costs_step{self._iteration}.json")
        layer_costs.write(paths[-1])
        if any(profile.deferred_bytes for profile in profiles):
            deferred_text = ", ".join(f"{profile.deferred_bytes / 2**20:.1f}" for profile in profiles)
            lines.append(f"peak memory for deferred weight gradients (MiB, by stage): {deferred_text}")
        for line in [*lines, f"the pipeline's timeline: {', '.join(map(str, paths))}"]:
            logger.info(line)


def compute_layer_costs(
    layer_table: Sequence[Chunk], spans: Sequence[OpSpan], forwards: Mapping[int, float], num_microbatches: int
) -> LayerCosts:
    """Compute the time per microbatch of each layer, the embedding and the loss, in milliseconds.

    The total time of a chunk's operations is divided among the modules of the chunk, in proportion to their forward times.

    Args:
        layer_table: the layers of each model chunk.
        spans: operations of all stages in one step, in seconds.
        forwards: total seconds of the forward passes of each layer and of the embedding, by layer index or `EMBEDDING`.
    """
    costs: dict[int, float] = {}
    loss_ms = 0.0
    for chunk in layer_table:
        chunk_s = sum(span.end - span.start for span in spans if span.op.chunk == chunk.index)
        forward_s = sum(span.end - span.start for span in spans if span.op.chunk == chunk.index and span.op.type is OpType.FORWARD)
        layer_s = {layer_index: forwards[layer_index] for layer_index in (*[EMBEDDING] * chunk.is_first, *chunk.layers)}
        # In the last chunk, the time outside of the layers is the loss. In other chunks it is small and divided among the layers.
        total_s = max(forward_s, sum(layer_s.values())) if chunk.is_last else sum(layer_s.values())
        costs |= {layer_index: 1000 * chunk_s * seconds / total_s / num_microbatches for layer_index, seconds in layer_s.items()}
        if chunk.is_last:
            loss_ms = 1000 * chunk_s * (1 - sum(layer_s.values()) / total_s) / num_microbatches
    return LayerCosts(tuple(costs[layer_index] for layer_index in range(layer_table[-1].layers.stop)), costs[EMBEDDING], loss_ms)


def _merge_layer_times(profiles: Sequence[_StageProfile]) -> dict[int, float]:
    return {layer_index: seconds for profile in profiles for layer_index, seconds in profile.layers.items()}


def compute_mean_costs(timeline: Timeline) -> Callable[[Op], float]:
    """Return a function that maps an operation to the mean measured duration of all operations of the same type on the same
    chunk."""
    durations_by_op: dict[tuple[OpType, int], list[float]] = {}
    for spans in timeline.spans:
        for span in spans:
            durations_by_op.setdefault((span.op.type, span.op.chunk), []).append(span.end - span.start)
    means = {key: statistics.fmean(durations) for key, durations in durations_by_op.items()}
    return lambda op: means[op.type, op.chunk]


def _align_clocks(profiles: list[_StageProfile]) -> tuple[tuple[OpSpan, ...], ...]:
    """Convert the times of all stages to milliseconds since the barrier before the step, so that stages on different hosts can be
    compared.

    The ranks of a host share its clock. The zero point of a host is the time at which its first rank left the barrier.
    """
    start_times: dict[str, float] = {}
    for profile in profiles:
        start_times[profile.host] = min(profile.start_time, start_times.get(profile.host, profile.start_time))
    return tuple(
        tuple(
            OpSpan(op, 1000.0 * (start - start_times[profile.host]), 1000.0 * (end - start_times[profile.host]))
            for op, start, end in profile.op_spans
        )
        for profile in profiles
    )


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--profile-dir {folder} cannot be created ({error.strerror}). Choose another folder.") from error


class _ProfilerCallback(Callback):
    """Callback that calls the `step` method of a `StepProfiler` or `PipelineProfiler` before each step."""

    def __init__(self, profiler: StepProfiler | PipelineProfiler) -> None:
        self._profiler = profiler

    def around_steps(self) -> AbstractContextManager[object]:
        """Return the profiler as the context of the steps, so that it also writes its results if the steps end with an error."""
        return self._profiler

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Start or stop the profile, if this is the first or last step to profile. This happens before the data of the step is
        read."""
        if name == "reading data" and iteration is not None:
            self._profiler.step(iteration)


class ProfileFeature(Feature):
    """Feature of --profile: records a range of steps with torch's profiler."""

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that profiles the selected steps."""
        context = run.context
        return [
            _ProfilerCallback(run_on_all_ranks(context, lambda: StepProfiler(run.config.logging, context.rank, context.device)))
        ]


class PipelineProfileFeature(Feature):
    """Feature of --profile-pipeline: draws the timeline of the pipeline in one step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._draw = RunPictures().draw if read_process_info().rank == 0 else None

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that measures one step and draws its timeline."""
        return [
            _ProfilerCallback(
                run_on_all_ranks(run.context, lambda: PipelineProfiler(run.config.logging, run.step, run.context, self._draw))
            )
        ]
