"""Comparison of the predicted step time and memory with the first measured steps (--plan-report), by component of a step.

Timers can separate three components without making the host wait for the device: the operations of the schedule (including the
communication of tensor ranks within them), waits between operations, and the end of the step. These components are compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config.config import Config
from megatron.config.launcher import read_process_info
from megatron.config.parsed_flags import DryRun, get_current_job
from megatron.config.regular_file import check_output
from megatron.model.inputs import ModelInputs
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron.training.step import StepResult, TrainStep
from megatron_lab.monitoring.memory_report import MemoryAccount, measure_memory
from megatron_lab.monitoring.profiler import SpanRecorder
from megatron_lab.monitoring.rehearsal import PlanProcess
from megatron_lab.planner.cluster import Cluster, load_cluster, load_shipped_cluster
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.step_time import StepTime, predict_from_work
from megatron_lab.planner.step_work import StepWork
from megatron_lab.planner.units import format_bytes

FIRST_MEASURED_STEP, LAST_MEASURED_STEP = 3, 10
"""First and last measured step of a start, counted from 1. Earlier steps create connections, compile, and fill caches."""
_MIN_DIFFERENCE = 0.1
"""Smallest difference of a component that is reported, as a fraction of the step time."""
IDLE_PARTS = ("messages", "pipeline idle")
"""Components of `StepTime.breakdown` between operations."""
STEP_END_PARTS = ("gradients", "parameters", "optimizer", "numbers", "other")
"""Components of `StepTime.breakdown` at the end of the step."""


def group_by_timer(parts: Mapping[str, float]) -> dict[str, float]:
    """Group the predicted times of a step's activities into the three components that timers can measure. Return their sums.

    Args:
        parts: seconds by the name of the activity (`StepTime.breakdown`).

    Returns:
        Seconds of "operations", "waiting between operations" and "end of the step".
    """
    idle, step_end = (sum(parts.get(name, 0.0) for name in names) for names in (IDLE_PARTS, STEP_END_PARTS))
    return {"operations": sum(parts.values()) - idle - step_end, "waiting between operations": idle, "end of the step": step_end}


@dataclass(frozen=True)
class PredictedStep:
    """Duration and memory that the planner predicts for one step. It is stored in the report as JSON."""

    cluster: str
    seconds: float
    """Predicted duration of a step in seconds."""
    low: float
    high: float
    """Upper bound of the duration in seconds; `low` is the lower bound. 90 % of measured steps are expected between them."""
    parts: Mapping[str, float]
    """Predicted seconds of each activity of a step, such as messages or optimizer (`StepTime.breakdown`)."""
    device_bytes: int
    """Predicted device memory in bytes of the rank that needs most."""

    @classmethod
    def of(cls, cluster: Cluster, step: StepTime) -> PredictedStep:
        """Build the prediction from the planner's step time for a cluster."""
        return cls(cluster.name, step.seconds, step.low, step.high, dict(step.breakdown), step.device_bytes)


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured durations and memory of the first steps. They are stored in the report as JSON."""

    steps: Sequence[float]
    """Seconds of each step on its slowest rank."""
    parts: Mapping[str, float]
    """Seconds of "operations", "waiting between operations" and "end of the step", on the rank whose operations take longest."""
    device_bytes: int
    """Memory in bytes of the rank that uses most. On CUDA: memory in use on its device. On the CPU: memory of the process without
    that of Python and its libraries."""

    @property
    def seconds(self) -> float:
        """Median duration of a step, in seconds."""
        return statistics.median(self.steps)


class StepPrediction:
    """Prediction of the job's step time and memory, which the first rank computes in a child process (`PlanProcess`).

    Create it before process groups exist and before CUDA is used. Then call `start`, and later `receive`.

    Raises:
        ValueError: the cluster of --plan-cluster is unknown, or the report cannot be written.
    """

    def __init__(self, config: Config) -> None:
        logging = config.logging
        assert logging.plan_report is not None
        if read_process_info().rank == 0:
            check_output("--plan-report", logging.plan_report)
        self.path, self._config = Path(logging.plan_report), config
        self._cluster = None if logging.plan_cluster is None else load_cluster(logging.plan_cluster)
        self._plan_process = PlanProcess(_predict_work)
        self.predicted: PredictedStep | str = "there is no plan"

    def start(self, config: Config) -> None:
        """Let the child process compute the prediction for these settings."""
        self._plan_process.send_config(config)

    def receive(self, context: ParallelContext) -> list[str]:
        """Wait for the child process, and predict the step time. Return lines for the start-up log. All ranks must call the
        method."""
        plan = self._plan_process.receive_plan(context)
        try:
            if isinstance(plan, str):
                raise ValueError(plan)
            device = get_device_name(context.device)
            cluster = self._cluster or load_shipped_cluster(device)
            if cluster is None:
                raise ValueError(
                    f"no cluster file is shipped for {device}. Write one with tools/check_cluster.py --measure, "
                    "and set --plan-cluster to it"
                )
            work, config, vocab_size = plan
            self.predicted = prediction = PredictedStep.of(
                cluster, predict_from_work(work, config, get_current_job(), vocab_size, cluster)
            )
        except ValueError as error:
            self.predicted = str(error)
            return [f"step times are not predicted: {error}"]
        range_text = f"{1e3 * prediction.low:,.0f} to {1e3 * prediction.high:,.0f}"
        return [f"predicted: {1e3 * prediction.seconds:,.0f} ms per step (90 % range {range_text}), for {prediction.cluster}"]


def _predict_work(config: Config, job: DryRun, vocab_size: int) -> tuple[StepWork, Config, int]:
    return Planner(config, job, vocab_size, shortened=True).compute_step_work(), config, vocab_size


def get_device_name(device: torch.device) -> str:
    """Return the name of a device, as used in cluster files."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class PlanReport(Callback):
    """Callback that measures the first steps, compares them with the prediction, and writes the report of --plan-report.

    Args:
        plan: prediction of the step time and memory.
        account: bytes of host memory before the model was built, for the measured memory.
        log: function that writes a log line on the first rank.
    """

    def __init__(self, plan: StepPrediction, step: TrainStep, account: MemoryAccount, log: Callable[[str], None]) -> None:
        self._plan, self._step, self._account, self._log = plan, step, account, log
        self._num_steps = 0
        self._start_time = 0.0
        self._recorder: SpanRecorder | None = None
        self._steps: list[tuple[float, SpanRecorder]] = []
        self._is_done = isinstance(plan.predicted, str)

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Start to measure this step if it is one of the steps to measure.

        Steps that another profiler records are not measured.
        """
        self._num_steps += 1
        self._recorder = None
        if not self._is_done and self._num_steps >= FIRST_MEASURED_STEP and self._step.executor.recorder is None:
            self._recorder = self._step.executor.recorder = SpanRecorder(self._step.context.device)
            self._start_time = time.perf_counter()

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Store the duration of this step if it was measured. After the last step to measure, write the report.

        The device has finished the step, because the host has read its loss.
        """
        if self._recorder is not None:
            self._steps.append((time.perf_counter() - self._start_time, self._recorder))
            self._step.executor.recorder = None
        if self._num_steps >= LAST_MEASURED_STEP:
            self._report()

    def close(self) -> None:
        """At the end of the run, report the measured steps, if the run was too short for all of them."""
        self._report()

    def _report(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        predicted = self._plan.predicted
        assert isinstance(predicted, PredictedStep)
        if not self._steps:
            self._log(
                f"  --plan-report has nothing to compare: the run ended before step {FIRST_MEASURED_STEP}, "
                "the first step that is measured"
            )
            return
        measured = self._gather_measurements()
        lines = format_comparison(predicted, measured)
        for line in lines:
            self._log(f"  {line}")
        if self._step.context.rank == 0:
            write_report(self._plan.path, predicted, measured, self._describe_run())

    def _gather_measurements(self) -> MeasuredSteps:
        """Gather the measured steps of all ranks. The times of the components come from the rank whose operations take longest."""
        local_steps = [(step_s, *_measure_ops(recorder)) for step_s, recorder in self._steps]
        memory = measure_memory(self._step, self._account.baseline)
        ranks = gather_objects((local_steps, memory.device_used or memory.peak), self._step.context.world)
        busiest = max(
            (rank_steps for rank_steps, _ in ranks), key=lambda rank_steps: statistics.median(busy_s for _, busy_s, _ in rank_steps)
        )
        step_s, busy_s, span_s = (statistics.median(column) for column in zip(*busiest, strict=True))
        parts = {"operations": busy_s, "waiting between operations": span_s - busy_s, "end of the step": max(0.0, step_s - span_s)}
        steps = [max(rank_steps[i][0] for rank_steps, _ in ranks) for i in range(len(local_steps))]
        return MeasuredSteps(steps, parts, max(num_bytes for _, num_bytes in ranks))

    def _describe_run(self) -> dict[str, Any]:
        context = self._step.context
        ranks = {axis: context.topology.get_size(axis) for axis in ("tp", "cp", "pp", "dp")}
        return {"device": get_device_name(context.device), "torch": torch.__version__, "ranks": ranks}


def _measure_ops(recorder: SpanRecorder) -> tuple[float, float]:
    """Return two times of a recorded step in seconds: the total time of all its operations, and the time from the start of the step
    to the end of its last operation."""
    op_spans = recorder.get_op_spans()
    return sum(span.end - span.start for span in op_spans), max(span.end for span in op_spans) - recorder.start_time


def format_comparison(predicted: PredictedStep, measured: MeasuredSteps) -> list[str]:
    """Format predicted and measured step time, memory and component times as log lines.

    If the largest difference of a component exceeds 10 % of the step time, a last line names this component.
    """
    relative_difference = measured.seconds / predicted.seconds - 1
    position = "within" if predicted.low <= measured.seconds <= predicted.high else "outside of"
    lines = [
        f"plan: a step takes {1e3 * measured.seconds:,.0f} ms, predicted {1e3 * predicted.seconds:,.0f} "
        f"({relative_difference:+.0%}, {position} "
        f"{1e3 * predicted.low:,.0f} to {1e3 * predicted.high:,.0f})",
        f"plan: memory {format_bytes(measured.device_bytes)}, predicted {format_bytes(predicted.device_bytes)} "
        f"({measured.device_bytes / max(1, predicted.device_bytes) - 1:+.0%})",
    ]
    predicted_parts = group_by_timer(predicted.parts)
    for name, part_s in measured.parts.items():
        lines.append(f"plan: {name} {1e3 * part_s:,.1f} ms, predicted {1e3 * predicted_parts[name]:,.1f}")
    name = max(predicted_parts, key=lambda candidate: abs(measured.parts[candidate] - predicted_parts[candidate]))
    difference = measured.parts[name] - predicted_parts[name]
    if abs(difference) > _MIN_DIFFERENCE * measured.seconds:
        lines.append(
            f"plan: largest difference in {name}: {1e3 * abs(difference):,.1f} ms "
            f"{'more' if difference > 0 else 'less'} than predicted"
        )
    return lines


def write_report(path: Path, predicted: PredictedStep, measured: MeasuredSteps, run_info: Mapping[str, Any]) -> None:
    """Write the predicted and the measured values to the file of --plan-report, as JSON.

    Args:
        run_info: further entries of the JSON object: device, torch version and number of ranks along each axis.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {**run_info, "foretold": asdict(predicted), "measured": {**asdict(measured), "seconds": measured.seconds}}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


class PlanFeature(Feature):
    """Feature of --plan-report: comparison of the predicted step time and memory with the first measured steps."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._account, self._plan = MemoryAccount(), StepPrediction(config)

    def on_forks_done(self) -> None:
        """Send the settings to the child process that predicts the step time."""
        self._plan.start(self.config)

    def get_startup_lines(self, run: RunComponents) -> list[str]:
        """Receive the prediction from the child process. Return a log line with the predicted step time."""
        return self._plan.receive(run.context)

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that measures the first steps and compares them with the prediction."""
        return [PlanReport(self._plan, run.step, self._account, run.reporter.log)]
