"""The pipeline of one step as it really ran, beside what the schedule promises: `--profile-pipeline`."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from megatron.config.outputs import LoggingConfig
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.pictures.files import check_output, write_picture
from megatron.pipeline_parallel.pictures.panel import Panel
from megatron.pipeline_parallel.pictures.table import TimelineRow, draw_table
from megatron.pipeline_parallel.simulate import OpSpan, Timeline, simulate
from megatron.spec.operations import Op, OpKind
from megatron.training.step import TrainStep

logger = logging.getLogger(__name__)


class _Measured(NamedTuple):
    """What one rank measured. Times in seconds of its host's clock."""

    host: str
    began: float
    """When it left the barrier before the step."""
    spans: list[OpSpan]
    deferred_bytes: int


_Moment = float | torch.cuda.Event


class SpanRecorder:
    """Notes when operations compute; on CUDA by events, so that nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._moments: list[tuple[Op, _Moment, _Moment]] = []
        self._open: _Moment = 0.0
        if self._on_cuda:
            torch.cuda.synchronize(device)
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
        self.began = time.perf_counter()

    def begin(self, op: Op) -> None:
        """An operation begins to compute."""
        self._open = self._now()

    def end(self, op: Op) -> None:
        """It has ended."""
        self._moments.append((op, self._open, self._now()))

    def spans(self) -> list[OpSpan]:
        """All of them, in seconds of this host's clock. Waits for the device."""
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
    """Measures step --profile-step-start, or the first after it where a run resumes later, on the pipeline that rank 0 belongs to.

        with PipelineProfiler(config, step, context) as profiler:
            for iteration in ...:
                profiler.step(iteration)
                ...

    It writes the timeline into --profile-dir, under a planned one that takes the mean duration that each kind of operation had on
    each chunk, and messages that take no time: what the measured one needs beyond it is communication, waiting, and the spread of
    the durations. Off, or on ranks of other pipelines, it does nothing.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, config: LoggingConfig, step: TrainStep, context: ParallelContext) -> None:
        self._active = config.profile_pipeline and 0 in context.group("pp").ranks
        self._iteration, self._folder = config.profile_step_start, Path(config.profile_dir)
        self._step, self._context = step, context
        self._recorder: SpanRecorder | None = None
        self._suffixes: list[str] = []
        if self._active and context.rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--profile-dir {self._folder} cannot be made ({error.strerror}).") from error
            for suffix in (".txt", ".json", ".svg"):
                try:
                    check_output(self._folder / f"pipeline{suffix}")
                    self._suffixes.append(suffix)
                except ModuleNotFoundError as error:
                    logger.warning("--profile-pipeline writes no %s picture: %s", suffix, error)

    def step(self, iteration: int) -> None:
        """Say that `iteration` (the first is 1) is about to begin."""
        if not self._active:
            return
        if self._recorder is not None:
            self._finish()
        elif iteration >= self._iteration:
            self._iteration = iteration
            pipeline = self._context.group("pp")
            if pipeline.size > 1:
                dist.barrier(pipeline.process_group)
            self._recorder = self._step.executor.recorder = SpanRecorder(self._context.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._recorder is not None and error is None:  # after an error the other ranks may not come to the gathering
            self._finish()
        elif self._active and error is None and self._context.rank == 0:
            logger.warning("--profile-pipeline measured nothing: the run ended before iteration %d", self._iteration)

    def _finish(self) -> None:
        assert self._recorder is not None
        recorder, self._recorder, self._active = self._recorder, None, False
        executor = self._step.executor
        executor.recorder = None
        mine = _Measured(socket.gethostname(), recorder.began, recorder.spans(), executor.peak_deferred_bytes)
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
        panels = [
            Panel(f"{schedule.name}, planned: mean durations, messages take no time", planned),
            Panel(f"{schedule.name}, measured in iteration {self._iteration}", measured),
        ]
        paths = [self._folder / f"pipeline_step{self._iteration}{suffix}" for suffix in self._suffixes]
        for path in paths:
            write_picture(panels, path)
        lines = draw_table([TimelineRow(panel) for panel in panels]).splitlines()
        if any(rank.deferred_bytes for rank in ranks):
            kept = ", ".join(f"{rank.deferred_bytes / 2**20:.1f}" for rank in ranks)
            lines.append(f"weight gradients put off keep at most (MiB, stage by stage): {kept}")
        for line in [*lines, f"the pipeline's timeline: {', '.join(map(str, paths))}"]:
            logger.info(line)


def mean_costs(timeline: Timeline) -> Callable[[Op], float]:
    """The mean duration of each kind of operation on each chunk."""
    found: dict[tuple[OpKind, int], list[float]] = {}
    for spans in timeline.spans:
        for span in spans:
            found.setdefault((span.op.kind, span.op.chunk), []).append(span.end - span.start)
    means = {key: statistics.fmean(durations) for key, durations in found.items()}
    return lambda op: means[op.kind, op.chunk]


def _on_one_clock(ranks: list[_Measured]) -> tuple[tuple[OpSpan, ...], ...]:
    """Milliseconds since the barrier. The ranks of a host share its clock; its zero is when the first of them left the barrier."""
    zero: dict[str, float] = {}
    for rank in ranks:
        zero[rank.host] = min(rank.began, zero.get(rank.host, rank.began))
    return tuple(
        tuple(OpSpan(op, 1000.0 * (start - zero[rank.host]), 1000.0 * (end - zero[rank.host])) for op, start, end in rank.spans)
        for rank in ranks
    )
