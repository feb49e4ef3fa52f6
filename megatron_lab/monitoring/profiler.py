"""Profiles of a run: a window of steps under torch's profiler (--profile), and the pipeline's timeline (--profile-pipeline)."""

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
from megatron.config.launcher import launched
from megatron.config.outputs import LoggingConfig
from megatron.config.pipeline_layout import LayerCosts
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.torch_private import dump_snapshot, record_memory_history
from megatron.pipeline_parallel.partition import Chunk
from megatron.pipeline_parallel.simulate import OpSpan, Timeline, simulate
from megatron.spec.operations import Op, OpKind
from megatron.training.failure import together
from megatron.training.features import Feature, RunParts
from megatron.training.step import TrainStep
from megatron.training.watch import Watcher
from megatron_lab.schedule_plots.of_run import RunPictures

logger = logging.getLogger(__name__)

_MEMORY_EVENTS = 1_000_000
"""Number of allocations and releases in the memory history; older ones are forgotten."""


Draw = Callable[[Sequence[tuple[str, Timeline]], Path], tuple[list[str], list[Path]]]
"""Draws timelines with their titles into files of this path, to which it adds suffixes. Returns lines of a table, and the files."""


class StepProfiler:
    """Records the steps from --profile-step-start up to, but not including, --profile-step-end.

        with StepProfiler(config, rank, device) as profiler:
            for iteration in ...:
                profiler.step(iteration)
                ...

    It writes into --profile-dir a Chrome trace (chrome://tracing, ui.perfetto.dev) `trace_rank0_step10-12.json` and, on CUDA,
    a memory snapshot `memory_rank0_step10-12.pickle` (pytorch.org/memory_viz), on other devices a table of the operations
    that allocate most, `memory_rank0_step10-12.txt`. Off, or on a rank that does not record, it does nothing.

    Args:
        config: Whether, when, on which ranks and where.
        rank: This rank.
        device: Where this rank computes.

    Raises:
        ValueError: The folder cannot be made.
    """

    def __init__(self, config: LoggingConfig, rank: int, device: torch.device) -> None:
        self._active = config.profile and rank in config.profile_ranks
        self._window = range(config.profile_step_start, config.profile_step_end)
        self._folder, self._rank, self._device = Path(config.profile_dir), rank, device
        self._profile: torch.profiler.profile | None = None
        self._first = self._last = 0
        if self._active:
            _make(self._folder)

    def step(self, iteration: int) -> None:
        """Called before step `iteration` begins (the first is 1)."""
        if self._profile is not None and iteration >= self._window.stop:
            self._finish()
        elif self._active and self._profile is None and iteration in self._window:
            self._first = iteration
            self._begin()
        self._last = iteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The run ended, or failed, inside the window: what was recorded is worth all the more.
        if self._profile is not None:
            self._finish()

    def _begin(self) -> None:
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


class _Measured(NamedTuple):
    """What one rank measured. Times are seconds of its host's clock."""

    host: str
    began: float
    """Time when it left the barrier before the step."""
    spans: list[OpSpan]
    deferred_bytes: int
    layers: dict[int, float]
    """Seconds of the forwards of its layers."""


_Moment = float | torch.cuda.Event
EMBEDDING = -1
"""Stands for the embedding among the numbers of layers."""


class SpanRecorder:
    """Records when operations compute; on CUDA by events, so that nothing waits for the device.

    Args:
        layers: by number in the model; the forwards of these are timed too.
    """

    def __init__(self, device: torch.device, layers: Mapping[int, nn.Module] = MappingProxyType({})) -> None:
        self._on_cuda = device.type == "cuda"
        self._moments: list[tuple[Op, _Moment, _Moment]] = []
        self._open: _Moment = 0.0
        self._in_forward = False
        self._layers: dict[int, list[_Moment]] = {number: [] for number in layers}
        self._hooks = [
            hook
            for number, layer in layers.items()
            for hook in (
                layer.register_forward_pre_hook(partial(self._passes, number)),
                layer.register_forward_hook(partial(self._passes, number)),
            )
        ]
        if self._on_cuda:
            torch.cuda.synchronize(device)
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
        self.began = time.perf_counter()

    def begin(self, op: Op) -> None:
        """Called when an operation begins to compute."""
        self._open = self._now()
        self._in_forward = op.kind is OpKind.FORWARD

    def end(self, op: Op) -> None:
        """Called when it has ended."""
        self._moments.append((op, self._open, self._now()))
        self._in_forward = False

    def close(self) -> None:
        """Time layers no more."""
        for hook in self._hooks:
            hook.remove()

    def layers(self) -> dict[int, float]:
        """Seconds of each layer in the forwards, all of them together."""
        return {
            number: sum(self._seconds(end) - self._seconds(start) for start, end in zip(moments[::2], moments[1::2], strict=True))
            for number, moments in self._layers.items()
        }

    def _passes(self, number: int, *_: object) -> None:
        if self._in_forward:  # a layer may run again in backward
            self._layers[number].append(self._now())

    def spans(self) -> list[OpSpan]:
        """The times of all operations, in seconds of this host's clock. Waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        return [OpSpan(op, self._seconds(start), self._seconds(end)) for op, start, end in self._moments]

    def _now(self) -> _Moment:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: _Moment) -> float:
        if isinstance(moment, float):
            return moment
        return self.began + self._zero.elapsed_time(moment) / 1000.0


class PipelineProfiler:
    """Compares the pipeline of one step as it really ran with the schedule.

    It measures step --profile-step-start, or the first after it where a run resumes later, on the pipeline that rank 0 belongs to.
    It is used as `StepProfiler` is.

    The first rank draws the measured timeline into --profile-dir, below a planned one. In the planned one each kind of operation
    takes its mean duration on each chunk, and messages take no time. So what the measured one takes beyond it is communication,
    waiting, and the spread of the durations. Off, or on ranks of other pipelines, it does nothing.

    Args:
        draw: draws the timelines; the first rank needs it.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, config: LoggingConfig, step: TrainStep, context: ParallelContext, draw: Draw | None) -> None:
        self._active = config.profile_pipeline and 0 in context.group("pp").ranks
        self._iteration, self._folder = config.profile_step_start, Path(config.profile_dir)
        self._step, self._context, self._draw = step, context, draw
        self._recorder: SpanRecorder | None = None
        if self._active and context.rank == 0:
            _make(self._folder)

    def step(self, iteration: int) -> None:
        """Called before step `iteration` begins (the first is 1)."""
        if not self._active:
            return
        if self._recorder is not None:
            self._finish()
        elif iteration >= self._iteration:
            self._iteration = iteration
            pipeline = self._context.group("pp")
            if pipeline.size > 1:
                dist.barrier(pipeline.process_group)
            self._recorder = self._step.executor.recorder = SpanRecorder(self._context.device, self._units())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._recorder is not None and error is None:  # after an error the other ranks may not come to the gathering
            self._finish()
        elif self._active and error is None and self._context.rank == 0:
            logger.warning("--profile-pipeline measured nothing: the run ended before iteration %d", self._iteration)

    def _units(self) -> dict[int, nn.Module]:
        """The layers of this rank by their numbers, and the embedding."""
        model = self._step.model
        units: dict[int, nn.Module] = {}
        for index, chunk in model.chunks.items():
            units |= zip(model.layer_table[index].layers, chunk.blocks, strict=False)
            units |= {} if chunk.embedding is None else {EMBEDDING: chunk.embedding}
        return units

    def _finish(self) -> None:
        assert self._recorder is not None
        recorder, self._recorder, self._active = self._recorder, None, False
        executor = self._step.executor
        executor.recorder = None
        recorder.close()
        spans = recorder.spans()
        mine = _Measured(socket.gethostname(), recorder.began, spans, executor.peak_deferred_bytes, recorder.layers())
        ranks = gather_objects(mine, self._context.group("pp"))
        if self._context.rank != 0:
            return
        if not all(rank.spans for rank in ranks):
            logger.warning("--profile-pipeline has nothing to show: iteration %d was left out", self._iteration)
            return
        self._write(ranks)

    def _write(self, ranks: list[_Measured]) -> None:
        count = 1 + max(span.op.microbatch for span in ranks[0].spans)
        schedule = self._step.schedule(count)
        measured = Timeline(schedule.name, _on_one_clock(ranks))
        planned = simulate(schedule, mean_costs(measured))
        titled = [
            (f"{schedule.name}, planned: mean durations, messages take no time", planned),
            (f"{schedule.name}, measured in iteration {self._iteration}", measured),
        ]
        assert self._draw is not None, "the first rank draws"
        lines, paths = self._draw(titled, self._folder / f"pipeline_step{self._iteration}")
        costs = layer_costs(self._step.model.layer_table, [span for rank in ranks for span in rank.spans], _united(ranks), count)
        paths.append(self._folder / f"layer_costs_step{self._iteration}.json")
        costs.write(paths[-1])
        if any(rank.deferred_bytes for rank in ranks):
            kept = ", ".join(f"{rank.deferred_bytes / 2**20:.1f}" for rank in ranks)
            lines.append(f"weight gradients put off keep at most (MiB, stage by stage): {kept}")
        for line in [*lines, f"the pipeline's timeline: {', '.join(map(str, paths))}"]:
            logger.info(line)


def layer_costs(
    table: Sequence[Chunk], spans: Sequence[OpSpan], forwards: Mapping[int, float], num_microbatches: int
) -> LayerCosts:
    """What each layer, the embedding and the loss take of a microbatch: of all that the operations of a chunk take, the share that
    they have of its forwards.

    Args:
        spans: the operations of all stages, in seconds.
        forwards: seconds of the forwards of each layer, and of the embedding.
    """
    found: dict[int, float] = {}
    loss = 0.0
    for chunk in table:
        whole = sum(span.end - span.start for span in spans if span.op.chunk == chunk.index)
        forward = sum(span.end - span.start for span in spans if span.op.chunk == chunk.index and span.op.kind is OpKind.FORWARD)
        parts = {number: forwards[number] for number in (*[EMBEDDING] * chunk.first, *chunk.layers)}
        # What no layer takes is the loss in the last chunk; elsewhere it is little, and belongs to all of them.
        all_of_it = max(forward, sum(parts.values())) if chunk.last else sum(parts.values())
        found |= {number: 1000 * whole * part / all_of_it / num_microbatches for number, part in parts.items()}
        if chunk.last:
            loss = 1000 * whole * (1 - sum(parts.values()) / all_of_it) / num_microbatches
    return LayerCosts(tuple(found[number] for number in range(table[-1].layers.stop)), found[EMBEDDING], loss)


def _united(ranks: Sequence[_Measured]) -> dict[int, float]:
    return {number: seconds for rank in ranks for number, seconds in rank.layers.items()}


def mean_costs(timeline: Timeline) -> Callable[[Op], float]:
    """Gives the mean duration of each kind of operation on each chunk."""
    found: dict[tuple[OpKind, int], list[float]] = {}
    for spans in timeline.spans:
        for span in spans:
            found.setdefault((span.op.kind, span.op.chunk), []).append(span.end - span.start)
    means = {key: statistics.fmean(durations) for key, durations in found.items()}
    return lambda op: means[op.kind, op.chunk]


def _on_one_clock(ranks: list[_Measured]) -> tuple[tuple[OpSpan, ...], ...]:
    """The operations of all stages in milliseconds since the barrier. The ranks of a host share its clock; its zero is when the
    first of them left the barrier."""
    zero: dict[str, float] = {}
    for rank in ranks:
        zero[rank.host] = min(rank.began, zero.get(rank.host, rank.began))
    return tuple(
        tuple(OpSpan(op, 1000.0 * (start - zero[rank.host]), 1000.0 * (end - zero[rank.host])) for op, start, end in rank.spans)
        for rank in ranks
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--profile-dir {folder} cannot be made ({error.strerror}).") from error


class _Profiling(Watcher):
    """Has a profiler look at the steps."""

    def __init__(self, profiler: StepProfiler | PipelineProfiler) -> None:
        self._profiler = profiler

    def around_steps(self) -> AbstractContextManager[object]:
        """Keep what was recorded, however the steps end."""
        return self._profiler

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Begin or end a profile before a step's data is read."""
        if name == "reading data" and iteration is not None:
            self._profiler.step(iteration)


class ProfileFeature(Feature):
    """--profile."""

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Profile the steps of the window."""
        context = run.context
        return [_Profiling(together(context, lambda: StepProfiler(run.config.logging, context.rank, context.device)))]


class PipelineProfileFeature(Feature):
    """--profile-pipeline."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._draw = RunPictures().draw if launched().rank == 0 else None

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Measure one step, and draw it."""
        return [_Profiling(together(run.context, lambda: PipelineProfiler(run.config.logging, run.step, run.context, self._draw)))]
