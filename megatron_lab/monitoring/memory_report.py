"""Report of the memory of each rank by purpose, measured between two steps and compared with the planner's prediction
(--log-memory).

The model's state is measured tensor by tensor, by the size of the storages. The remaining memory at the peak consists of
activations and of temporary tensors within a step. On CUDA the peak is known from torch's allocator. On the CPU only the memory of
the process is known, from which the memory before the model was built is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.config.config import Config
from megatron.metrics.measures import get_peak_host_bytes
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult, TrainStep
from megatron_lab.monitoring.rehearsal import PlanProcess, build_full_plan
from megatron_lab.planner.plan import Plan, RankMemory
from megatron_lab.planner.state_layout import Bytes, StateMemory
from megatron_lab.planner.units import format_bytes
from megatron_lab.terminal import format_table

ACTIVATIONS_ROW = "activations and temporary tensors"
"""Name of the row for the device memory at the peak that is not state of the model."""
_METRIC_NAMES = {ACTIVATIONS_ROW: "activations-and-the-rest"}
"""Metric names of rows whose text was changed later. All other metric names are the text of the row with hyphens."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Measured memory of one rank, in bytes. Peaks are the largest values since the start of the process."""

    state: StateMemory
    """Memory of the model's state (parameters, gradients, optimizer states) by purpose, including padding."""
    peak: int
    """Peak memory. On CUDA: device memory allocated by torch's allocator. On the CPU: memory of the process minus `baseline`."""
    reserved: int
    """Peak of the device memory that torch's CUDA allocator reserved; 0 on the CPU."""
    device_used: int
    """Device memory that all processes on the device use at present; 0 on the CPU."""
    host_peak: int
    """Peak host memory of the process."""
    offloaded: int
    """Host memory of the buffers for activations that are offloaded between forward and backward."""
    baseline: int
    """Host memory before the model was built: Python and its libraries."""

    @property
    def activations(self) -> int:
        """Bytes of activations and temporary tensors at the peak: the peak minus the model's state."""
        state_bytes = self.state.total.device if self.reserved else self.state.total.total + self.offloaded
        return max(0, self.peak - state_bytes)


def measure_memory(step: TrainStep, baseline: int) -> MeasuredMemory:
    """Measure the memory of this rank between two steps, without waiting for the device.

    Args:
        baseline: bytes of host memory before the model was built.
    """
    device, state, offloaded = step.context.device, measure_state(step), step.executor.host.num_bytes
    if device.type != "cuda":
        return MeasuredMemory(state, max(0, get_peak_host_bytes() - baseline), 0, 0, get_peak_host_bytes(), offloaded, baseline)
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    peak, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return MeasuredMemory(state, peak, reserved, total - free, get_peak_host_bytes(), offloaded, baseline)


def measure_state(step: TrainStep) -> StateMemory:
    """Return the bytes of the model's state (parameters, gradients, optimizer states) on this rank, by purpose.

    Bytes are those of the tensors' storages. A storage that serves several purposes is counted once, for the first of them.
    """
    counted: set[int] = set()

    def count_bytes(tensors: Iterable[torch.Tensor], *, on_host: bool = False) -> Bytes:
        device = host = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in counted or not storage.nbytes():
                continue
            counted.add(storage.data_ptr())
            if on_host or storage.device.type != step.context.device.type:
                host += storage.nbytes()
            else:
                device += storage.nbytes()
        return Bytes(device, host)

    providers = [provider.get_persistent_tensors() for provider in step.providers]
    offloaded_shards = step.optimizer.offloaded_shards
    offloaded_ids = {id(shard) for shard in offloaded_shards}
    device_shards = [shard for shard in step.optimizer.shards if id(shard) not in offloaded_ids]
    parameters = sum((count_bytes(entry.parameters, on_host=entry.on_host) for entry in providers), Bytes())
    gradients = sum((count_bytes(entry.gradients, on_host=entry.on_host) for entry in providers), Bytes())
    main_params = count_bytes(shard.main_param for shard in device_shards) + count_bytes(
        (shard.main_param for shard in offloaded_shards), on_host=True
    )
    moments = count_bytes(moment for shard in device_shards for moment in shard.moments.values())
    moments += count_bytes((moment for shard in offloaded_shards for moment in shard.moments.values()), on_host=True)
    averages = count_bytes(shard.average for shard in device_shards if shard.average is not None)
    averages += count_bytes((shard.average for shard in offloaded_shards if shard.average is not None), on_host=True)
    buffers = count_bytes(tensor for entry in providers for tensor in entry.buffers) + count_bytes(
        step.optimizer.staging_buffers, on_host=True
    )
    buffers += count_bytes(step.optimizer.buffers)
    return StateMemory(parameters, gradients, main_params, moments, averages, buffers)


@dataclass
class MemoryAccount:
    """Data for the memory report of a rank: the training step whose memory is measured, and the memory that the planner predicts.

    The fields are set while the run starts. `baseline` is the host memory in bytes before the model is built.
    """

    baseline: int = field(default_factory=get_peak_host_bytes)
    step: TrainStep | None = None
    plan: Plan | None = None
    planned: RankMemory | None = None
    """Memory that the planner predicts for this rank; None without a plan."""

    def set_plan(self, plan: Plan | str, context: ParallelContext) -> list[str]:
        """Store the memory plan of the job, and the part of it that belongs to this rank. Return lines for the start-up log.

        Args:
            plan: plan of the job or, if planning failed, the reason as text.
        """
        if isinstance(plan, str):
            return [f"memory is reported without a plan: {plan}"]
        coordinates = context.coordinates
        self.plan = plan
        self.planned = plan.profile_at(
            coordinates["pp"], coordinates["tp"], coordinates["cp"] + context.topology.cp * coordinates["dp"]
        ).memory
        max_bytes = max(profile.memory.total.device for profile in plan.profiles)
        buffers = [buffer for profile in plan.profiles for buffer in profile.allowances if buffer.communicators]
        largest_buffer = max(buffers, key=lambda buffer: buffer.bytes, default=None)
        advice = [f"advice: {line}" for line in plan.advice if line.startswith("the fullest rank")]
        buffer_lines = [] if largest_buffer is None else [f"planned: a rank has {largest_buffer}, allocated at their first use"]
        return [f"planned: the fullest rank takes {format_bytes(max_bytes)} of its device", *buffer_lines, *advice]

    def build_rows(self) -> list[tuple[str, int, int | None]]:
        """Return the rows of the memory report: (name, measured bytes, predicted bytes) for each purpose, on the device and in host
        memory.

        Predicted bytes are None without a plan.
        """
        assert self.step is not None
        measured, planned = measure_memory(self.step, self.baseline), self.planned
        rows: list[tuple[str, int, int | None]] = []
        for name, state_bytes in measured.state.by_purpose.items():
            planned_bytes = None if planned is None else planned.by_purpose[name]
            rows.append((name.replace("_", " "), state_bytes.device, None if planned_bytes is None else planned_bytes.device))
            if state_bytes.host or (planned_bytes is not None and planned_bytes.host):
                rows.append(
                    (
                        f"{name.replace('_', ' ')} on the host",
                        state_bytes.host,
                        None if planned_bytes is None else planned_bytes.host,
                    )
                )
        rows.append((ACTIVATIONS_ROW, measured.activations, None if planned is None else planned.activations.device))
        planned_offloaded = None if planned is None else planned.activations.host
        if measured.offloaded or planned_offloaded:
            rows.append(("activations on the host", measured.offloaded, planned_offloaded))
        if measured.reserved:
            planned_peak = None if planned is None else planned.total.device - planned.cuda.device
            rows.append(("allocated at the peak", measured.peak, planned_peak))
            rows.append(("reserved at the peak", measured.reserved, None))
            rows.append(("used of the device", measured.device_used, None if planned is None else planned.total.device))
        rows.append(("Python and libraries", measured.baseline, None))
        rows.append(("the process at its peak", measured.host_peak, None))
        return rows


def gather_report(account: MemoryAccount, context: ParallelContext, time_text: str) -> tuple[list[str], dict[str, float]]:
    """Gather the memory of all ranks, and format a table with the minimum and maximum over the ranks. All ranks must call the
    function.

    Args:
        time_text: time of the measurement for the heading, such as "after iteration 1".

    Returns:
        The lines of the table, and the maximum over the ranks of the measured bytes, by metric name.
    """
    ranks = [{row[0]: row[1:] for row in rows} for rows in gather_objects(account.build_rows(), context.world)]
    names = list(dict.fromkeys(name for rows in ranks for name in rows))
    table_rows, maxima = [], {}
    for name in names:
        measured = [rows[name][0] if name in rows else 0 for rows in ranks]
        planned = [rows[name][1] for rows in ranks if name in rows]
        if any(measured) or any(planned):
            maxima[f"memory/{_METRIC_NAMES.get(name) or name.replace(' ', '-')}"] = float(max(measured))
            table_rows.append(
                [f"  {name}", _format_range(measured), _format_range([value for value in planned if value is not None])]
            )
    rank_text = f"a rank, minimum and maximum over {context.world.size} ranks" if context.world.size > 1 else "this process"
    return [
        f"  {line}" for line in format_table([[f"memory {time_text}, of {rank_text}", "measured", "planned"], *table_rows])
    ], maxima


def _format_range(values: Sequence[int]) -> str:
    if not values:
        return "-"
    low, high = format_bytes(min(values)), format_bytes(max(values))
    return high if low == high else f"{low} - {high}"


class MemoryCallback(Callback):
    """Callback that logs the memory of all ranks after the first step and in every N-th iteration (--log-memory N)."""

    def __init__(self, account: MemoryAccount, context: ParallelContext, interval: int, reporter: Reporter) -> None:
        self._account, self._context, self._interval, self._reporter = account, context, interval, reporter
        self._is_first = True

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Log the memory report if one is due after this step."""
        if self._is_first or progress.iteration % self._interval == 0:
            lines, maxima = gather_report(self._account, self._context, f"after iteration {progress.iteration}")
            for line in lines:
                self._reporter.log(line)
            self._reporter.log_measurements(progress, maxima)
        self._is_first = False


class MemoryFeature(Feature):
    """Feature of --log-memory: reports of each rank's memory by purpose.

    While the run starts, the planner predicts the memory of the job. The reports compare the measured memory with this prediction.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.account = MemoryAccount()
        self._plan_process = PlanProcess(build_full_plan)

    def on_forks_done(self) -> None:
        """Send the settings to the child process that plans the job."""
        self._plan_process.send_config(self.config)

    def get_startup_lines(self, run: RunComponents) -> list[str]:
        """Receive the memory plan from the child process. Return log lines about the rank with the largest predicted memory."""
        return self.account.set_plan(self._plan_process.receive_plan(run.context), run.context)

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that logs the memory of the ranks."""
        interval = run.config.logging.memory_interval
        assert interval is not None
        self.account.step = run.step
        return [MemoryCallback(self.account, run.context, interval, run.reporter)]
