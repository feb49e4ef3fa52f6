"""Output of a run during training: log lines, validation lines, timers, the metrics file, the history file, and curves
(TensorBoard, Weights & Biases, MLflow, trackio). Only rank 0 prints and writes."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from megatron.config.imports import import_object
from megatron.config.outputs import LoggingConfig
from megatron.data.history import count_tokens
from megatron.metrics.log_line import (
    LineFile,
    LogLineValues,
    MetricSink,
    Printer,
    RunEnd,
    format_duration,
    format_megatron_line,
    format_short_line,
    format_short_validation_line,
    format_time,
    format_validation_lines,
)
from megatron.metrics.measures import Timers, format_times, get_peak_host_bytes, merge_rank_times
from megatron.model.build import Model
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.spec.counts import count_flops_per_step
from megatron.training.callbacks import METRICS
from megatron.training.failure import run_on_all_ranks
from megatron.training.progress import Progress
from megatron.training.step import StepResult

if TYPE_CHECKING:
    from megatron.metrics.history import HistoryFile
    from megatron.moe.balance import RouterMetrics
    from megatron.training.gradient_noise import NoiseEstimate

START_LOG_FILE = "start.log"
"""File in the run folder with the start-up log of each start of which a terminal has shown only a summary."""
_MIN_MEASURED_S, _MIN_REMAINING_S = 2.0, 60.0
"""Seconds of steps from which on the end of the run is estimated for the log; and minimum remaining seconds for this line."""


@dataclass
class _Interval:
    """Values of the steps since the last log line, from which the next log line is computed."""

    start_time: float
    """Start of the interval, by time.perf_counter(). A pause (evaluation, save) moves it forward by its duration, so that the
    pause does not count."""
    num_steps: int = 0
    num_samples: int = 0
    attention_samples: float = 0.0
    """Sum of `StepResult.attention_samples` over the steps: number of single-document samples that would need the same
    attention FLOPs."""
    num_skipped: int = 0
    num_spikes: int = 0
    num_nans: int = 0
    losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    noises: list[NoiseEstimate] = field(default_factory=list)
    mtp_losses: list[float] = field(default_factory=list)
    expert_balances: list[RouterMetrics] = field(default_factory=list)
    context_imbalances: list[float] = field(default_factory=list)
    """`StepResult.context_imbalance` of each step: attention FLOPs of the most loaded context-parallel rank, divided by the
    mean over the ranks."""
    max_logits: list[float] = field(default_factory=list)


class LiveDisplay(Protocol):
    """Status lines below the log on a terminal, which are updated in place at each step."""

    def step(self, progress: Progress, result: StepResult | None, line_values: Mapping[str, Any], time: float) -> None:
        """Update the status lines after a step.

        Args:
            line_values: values to show, by their names in `LogLineValues`, such as `learning_rate` and `tokens_per_s`.
            time: time.perf_counter() at the end of the step.
        """

    def show_activity(self, activity: str, progress: Progress) -> None:
        """Show in the status lines what the run does between steps, such as saving or evaluating."""


class ThroughputEstimator:
    """Estimator of the throughput and of the remaining time of the run, from the latest steps.

    The remaining time includes evaluations and saves. For this, the time of the remaining steps is multiplied by the ratio of total
    time to time in steps so far.

    Args:
        total_samples: samples of the complete run; 0 to estimate no remaining time.
    """

    def __init__(self, total_samples: int) -> None:
        self._total_samples = total_samples
        self._start_time: float | None = None
        self._first_step = (0.0, 0)
        self._step_seconds = 0.0
        self._recent_steps: deque[tuple[float, int]] = deque(maxlen=20)

    def step(self, now: float, seconds: float, samples: int) -> None:
        """Record the duration of a step. The first step creates connections and fills caches, so it only gives an upper bound.

        Args:
            now: time.perf_counter() at the end of the step.
            seconds: duration of the step.
            samples: samples of the step.
        """
        if self._start_time is None:
            self._start_time, self._first_step = now, (seconds, samples)
            return
        self._step_seconds += seconds
        self._recent_steps.append((seconds, samples))

    @property
    def measured_seconds(self) -> float:
        """Duration of all recorded steps without the first, in seconds."""
        return self._step_seconds

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second over the latest steps; None until the second step is recorded."""
        seconds = sum(step_seconds for step_seconds, _ in self._recent_steps)
        return sum(samples for _, samples in self._recent_steps) / seconds if seconds else None

    def estimate_remaining_seconds(self, now: float, consumed_samples: int) -> float | None:
        """Return the estimated seconds until the end of the run. After the first step this is an upper bound (`is_upper_bound`).
        Return None before the first step, at the end of the run, or if `total_samples` is 0.

        Args:
            now: current time.perf_counter().
            consumed_samples: samples of the run so far.
        """
        remaining_samples = self._total_samples - consumed_samples
        if self._start_time is None or not self._total_samples or remaining_samples <= 0:
            return None
        samples_per_s = self.samples_per_s
        if samples_per_s is None:
            seconds, samples = self._first_step
            return remaining_samples * seconds / samples if samples else None
        return remaining_samples / samples_per_s * max(1.0, (now - self._start_time) / self._step_seconds)

    @property
    def is_upper_bound(self) -> bool:
        """Whether the estimate of the remaining time is an upper bound, because only the first step is recorded."""
        return not self._recent_steps


class Reporter:
    """Output of a run: collects the results of steps, and at intervals writes log lines, the metrics file, the history file and
    curves (TensorBoard and other loggers).

    Args:
        total_iterations: number of steps of the complete run.
        total_samples: samples of the complete run, to estimate the remaining time; 0 for no estimate.
        is_output_rank: whether this rank prints and writes. The other ranks only take part in gathering the timers.
        quiet: print nothing, but write all files.
        peak_flops: FLOP/s of one device, or None if not known.
        resumed: append to the metrics file instead of starting a new file.
        counts_spikes: log the number of loss spikes, because steps are checked for spikes.
        open_curve_sinks: function that opens the outputs of curves, from the iteration at which the run starts and from the facts
            about this start. Called on this rank when the run starts; None for no curves.
        folder: folder for the history file of the run (`megatron/metrics/history.py`); None for no history.
    """

    def __init__(
        self,
        config: LoggingConfig,
        model: Model,
        context: ParallelContext,
        timers: Timers,
        total_iterations: int,
        *,
        total_samples: int = 0,
        is_output_rank: bool,
        quiet: bool = False,
        peak_flops: float | None = None,
        resumed: bool = False,
        counts_spikes: bool = False,
        open_curve_sinks: Callable[[int, Mapping[str, Any]], list[MetricSink]] | None = None,
        folder: str | None = None,
    ) -> None:
        self._counts_spikes, self._quiet = counts_spikes, quiet
        self._config, self._model, self._context, self._timers = config, model, context, timers
        self._total_iterations, self._is_output_rank, self._peak_flops = total_iterations, is_output_rank, peak_flops
        self._metrics_file: MetricSink | None = None
        self._curve_sinks: list[MetricSink] = []
        self._open_curve_sinks = open_curve_sinks
        if is_output_rank and config.metrics_file:
            self._metrics_file = import_object("megatron_lab.monitoring.loggers:MetricsFile")(config.metrics_file, append=resumed)
        self._sinks = [] if self._metrics_file is None else [self._metrics_file]
        self.end: RunEnd = "finished"
        """How the run ends, for the outputs of curves, if it ends without an error."""
        self._history: HistoryFile | None = None
        if is_output_rank and folder is not None:
            self._history = import_object("megatron.metrics.history:HistoryFile")(folder, model.config.seq_length)
        self._printer, self._throughput = Printer(), ThroughputEstimator(total_samples)
        self._folder, self._on_terminal = folder, is_output_rank and not quiet and self._printer.is_terminal
        on_terminal = self._on_terminal
        self._is_short = config.log_format == "short" or (config.log_format == "auto" and on_terminal)
        self._display: LiveDisplay | None = None
        if self._is_short and on_terminal:
            self._display = import_object("megatron_lab.monitoring.live_lines:LiveLines")(self._printer, total_iterations)
        self._is_first_step, self._has_logged_estimate = True, False
        self._last_step_end = time.perf_counter()
        self._interval = _Interval(self._last_step_end)

    @contextmanager
    def record_run(self, progress: Progress, run_facts: Mapping[str, Any]) -> Iterator[None]:
        """Open the outputs of curves, and write the history file of the run (`megatron/metrics/history.py`) while the block is
        active. All ranks call this together.

        At the end of the block all outputs are written and closed. If the block raises an error, only the end of the run is written
        to the history file and to the curves. The other files are not closed, because that could block.

        Args:
            progress: progress of the run at this start.
            run_facts: further keys of the line about this start in the history file, such as layout and device.

        Raises:
            SetupError: an output of curves cannot be opened.
        """
        if self._config.writes_curves:  # only now, when no other run can use the save folder
            open_sinks = self._open_curve_sinks
            open_on_rank = lambda: [] if open_sinks is None else open_sinks(progress.iteration, run_facts)  # noqa: E731
            with self.pause("opening loggers", progress):
                self._curve_sinks = run_on_all_ranks(self._context, open_on_rank)
            self._sinks = [*self._curve_sinks, *self._sinks]
        if self._history is not None:
            tokens = count_tokens(progress.phases, progress.consumed_samples, self._model.config.seq_length)
            self._history.write_start(progress.iteration, progress.consumed_samples, tokens, run_facts)
        try:
            yield
        except BaseException as error:
            self._printer.show_status([])
            self.record_event("end", progress, str(error).partition("\n")[0] or type(error).__name__)
            for sink in self._curve_sinks:
                sink.close("failed")
            raise
        self._printer.show_status([])
        for sink in self._sinks:
            sink.close(self.end)
        if self._history is not None:
            self._history.close()

    def step(
        self,
        progress: Progress,
        result: StepResult | None,
        learning_rate: float,
        batch_size: int,
        collect_log_values: Callable[[], dict[str, float]],
        collect_record_values: Callable[[], dict[str, Any]],
    ) -> dict[str, float] | None:
        """Record the result of a step, and log if a log line is due.

        Args:
            result: result of the step; None for an iteration that --iterations-to-skip skips.
            batch_size: number of sequences of the step.
            collect_log_values: function that returns additional values to log. It is called on every rank, and only if a log line
                is due.
            collect_record_values: function that returns additional values for the history file only.

        Returns:
            the logged values by their names in the metrics file; None if no log line is due.
        """
        interval = self._interval
        interval.num_steps += 1
        interval.num_samples += batch_size
        interval.attention_samples += _get_attention_samples(result, batch_size)
        interval.num_skipped += result is None or result.skipped
        if result is not None:
            interval.num_nans += math.isnan(result.loss)
            interval.num_spikes += result.spike is not None
            if not result.skipped:
                interval.losses.append(result.loss)
                interval.z_losses += [] if result.z_loss is None else [result.z_loss]
                interval.noises += [] if result.gradient_noise is None else [result.gradient_noise]
                interval.mtp_losses += [] if result.mtp_loss is None else [result.mtp_loss]
                interval.expert_balances += [] if result.expert_balance is None else [result.expert_balance]
                interval.context_imbalances += [] if result.context_imbalance is None else [result.context_imbalance]
                interval.max_logits += [] if result.max_attention_logit is None else [result.max_attention_logit]
        now = time.perf_counter()
        self._throughput.step(now, now - self._last_step_end, batch_size)
        if self._curve_sinks and progress.iteration % self._config.tensorboard_log_interval == 0 and result is not None:
            self._write_curves(progress, result, learning_rate, batch_size, now - self._last_step_end)
        if self._history is not None:
            has_update = result is not None and not result.skipped
            self._history.add_step(
                progress.iteration,
                progress.consumed_samples,
                batch_size,
                lm_loss=result.loss if result is not None else None,
                grad_norm=result.grad_norm if result is not None and has_update else None,
                learning_rate=learning_rate,
                seconds=now - self._last_step_end,
            )
        self._last_step_end = now
        self._log_estimate(progress, now)
        values = None
        if self._is_first_step or progress.iteration % self._config.log_interval == 0:
            values = self._log_interval(progress, result, learning_rate, batch_size, collect_log_values(), collect_record_values)
            self._is_first_step = False
            self._last_step_end = time.perf_counter()
            self._interval = _Interval(self._last_step_end)
        if self._display is not None:
            samples_per_s = self._throughput.samples_per_s
            tokens_per_s = None if samples_per_s is None else samples_per_s * self._model.config.seq_length
            line_values = self._build_line_values(progress, learning_rate, batch_size)
            self._display.step(progress, result, {**line_values, "tokens_per_s": tokens_per_s}, now)
        return values

    def log_evaluation(
        self, progress: Progress, losses: Mapping[str, tuple[float, float | None]], split: Literal["validation", "test"]
    ) -> dict[str, float]:
        """Log the losses of an evaluation. Returns the losses by their names in the metrics file.

        Args:
            losses: mean over the tokens, and the same of multi-token prediction (None without it), for each set by name. A single
                set may have the name "".
            split: split of the data that was evaluated.
        """
        values: dict[str, float] = {}
        for name, (loss, mtp_loss) in add_mean(losses).items():
            suffix = f"/{name}" if name else ""
            values |= {f"{split}_loss{suffix}": loss} | ({} if mtp_loss is None else {f"{split}_mtp_loss{suffix}": mtp_loss})
            num_averaged = 0 if name in losses else len(losses)
            if num_averaged != 1:
                format_lines = format_short_validation_line if self._is_short else format_validation_lines
                for line in format_lines(
                    progress.iteration, loss, split, mtp_loss=mtp_loss, set_name=name, num_averaged=num_averaged
                ):
                    self.log(line)
        self._write(self._sinks, progress, values)
        self._record("evaluation", progress, values)
        return values

    def log_measurements(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Write additional values, by name, to the metrics file, the curves and the history file. Nothing is printed."""
        self._write(self._sinks, progress, values)
        self._record("measured", progress, values)

    def log_text(self, progress: Progress, name: str, text: str) -> None:
        """Write a text to the curves' outputs that show texts. Nothing is printed.

        Args:
            name: name under which the texts of several iterations are shown together.
        """
        for sink in self._sinks:
            sink.log_text(progress.iteration, progress.consumed_samples, name, text)

    def record_samples(self, progress: Progress, samples: Sequence[Mapping[str, str]]) -> None:
        """Write generated texts to the history file of the run. Nothing is printed.

        Args:
            samples: `prompt` and `text` of each sample.
        """
        self._record("samples", progress, {"samples": samples})

    def rewind(self, iteration: int) -> None:
        """Let the curves continue at the iteration of an earlier checkpoint, to which the run has gone back."""
        for sink in self._sinks:
            sink.rewind(iteration)

    def record_event(self, event: str, progress: Progress, message: str, **values: Any) -> None:
        """Write an event to the history file of the run. Nothing is printed.

        Args:
            event: name of the event, such as "save" or "end".
            message: description of the event.
            values: additional keys of the event's line in the file.
        """
        self._record("event", progress, {"event": event, "words": message.strip(), **values})

    @contextmanager
    def pause(self, activity: str, progress: Progress) -> Iterator[None]:
        """Exclude the time in the `with` block from the duration of the steps in the log.

        Args:
            activity: what the run does in the block, such as "saving", for the status lines on a terminal.
        """
        start_time = time.perf_counter()
        if self._display is not None:
            self._display.show_activity(activity, progress)
        yield
        pause_seconds = time.perf_counter() - start_time
        self._interval.start_time += pause_seconds
        self._last_step_end += pause_seconds

    def log(self, line: str) -> None:
        """Print a line immediately, on rank 0. On a terminal, a line that is too long for it is wrapped between words."""
        if self._on_terminal:
            line = import_object("megatron_lab.terminal:wrap_text")(line, self._printer.width - 1)
        self._print(line)

    def log_start(self, summary: Sequence[str], details: Sequence[str], notices: Sequence[str]) -> None:
        """Log the description of the run when it starts, on rank 0.

        A file or a pipe gets all lines. A terminal gets them with --verbose. Without it, a terminal gets the summary, the notices
        and the warnings; the complete log is appended to `start.log` in the run folder.

        Args:
            summary: lines about the model, the layout and the data.
            details: further lines. Warnings start with "WARNING:".
            notices: lines that also a terminal shows, about outputs, flags and resuming.
        """
        if not self._is_short:  # its lines have times, in Megatron-LM's format without a zone
            notices = [*notices, f"started at {format_time(datetime.now())}; the times of log lines are in this zone"]
        lines = [*summary, *details, *notices]
        shown = lines
        if self._on_terminal and not self._config.verbose:
            shown = [*summary, *(line for line in details if line.startswith("WARNING:")), *notices]
        for line in shown:
            self.log(f"  {line}")
        if len(shown) == len(lines):
            return
        location = "--verbose"
        if self._folder is not None:
            path = os.path.join(self._folder, START_LOG_FILE)
            location = f"{path}, or {location}"
            file = LineFile("the start-up log", path, append=True)
            file.write("\n".join([f"started on {format_time(datetime.now())}", *(f"  {line}" for line in lines)]))
            file.close()
        self.log(f"  {len(lines) - len(shown)} more lines: {location}")

    def _log_estimate(self, progress: Progress, now: float) -> None:
        """Log once when the run is expected to end, in Megatron-LM's log format, whose lines do not contain it."""
        if self._is_short or self._has_logged_estimate or self._throughput.measured_seconds < _MIN_MEASURED_S:
            return
        self._has_logged_estimate = True
        remaining_s = self._throughput.estimate_remaining_seconds(now, progress.consumed_samples)
        if remaining_s is not None and remaining_s >= _MIN_REMAINING_S:
            end = datetime.now() + timedelta(seconds=remaining_s)
            self.log(f"  about {format_duration(remaining_s)} left, until {format_time(end, 'minutes')}")

    def _print(self, line: str) -> None:
        if self._is_output_rank and not self._quiet:
            self._printer.print_line(line)

    def _record(self, line_type: str, progress: Progress, values: Mapping[str, Any]) -> None:
        if self._history is not None:
            self._history.write_line(line_type, progress.iteration, progress.consumed_samples, values)

    @staticmethod
    def _write(sinks: Iterable[MetricSink], progress: Progress, values: Mapping[str, float]) -> None:
        for sink in sinks:
            sink.log_scalars(progress.iteration, progress.consumed_samples, values)

    def _compute_tflops(self, num_samples: int, attention_samples: float, seconds: float) -> float:
        """Return the throughput of a time span in TFLOP/s per device.

        Args:
            num_samples: number of samples that were trained on.
            attention_samples: number of single-document samples whose attention needs the same FLOPs.
            seconds: length of the time span.
        """
        flops = count_flops_per_step(self._model.config, self._model.vocab_size, num_samples, attention_samples)
        return flops / seconds / self._context.topology.world_size / 1e12

    def _log_interval(
        self,
        progress: Progress,
        result: StepResult | None,
        learning_rate: float,
        batch_size: int,
        extra_values: dict[str, float],
        collect_record_values: Callable[[], dict[str, Any]],
    ) -> dict[str, float]:
        """Print the log line of the steps since the previous one. Write its values to the metrics file, the curves and the history
        file, and return them by name."""
        interval = self._interval
        seconds = time.perf_counter() - interval.start_time
        elapsed_ms = 1000 * seconds / interval.num_steps
        tflops = self._compute_tflops(interval.num_samples, interval.attention_samples, seconds)
        loss, z_loss, mtp_loss = (
            _compute_mean(interval.losses),
            _compute_mean(interval.z_losses),
            _compute_mean(interval.mtp_losses),
        )
        expert_values = interval.expert_balances[0].log_values(interval.expert_balances) if interval.expert_balances else {}
        noise = import_object("megatron.training.gradient_noise:compute_noise_scale")(interval.noises) if interval.noises else None
        imbalance = _compute_mean(interval.context_imbalances)
        max_logit = max(interval.max_logits, default=None)
        tokens_per_s = interval.num_samples * self._model.config.seq_length / seconds
        mfu = None if self._peak_flops is None else tflops * 1e12 / self._peak_flops
        line = LogLineValues(
            **self._build_line_values(progress, learning_rate, batch_size),
            elapsed_ms=elapsed_ms,
            lm_loss=loss,
            tokens_per_s=tokens_per_s,
            mfu=mfu,
            z_loss=z_loss,
            mtp_loss=mtp_loss,
            load_balancing_loss=expert_values.get("load_balancing_loss"),
            moe_z_loss=expert_values.get("moe_z_loss"),
            busiest_expert=expert_values.get("busiest_expert"),
            dropped_share=expert_values.get("dropped_share"),
            loss_scale=result.loss_scale if result else 1.0,
            num_skipped=interval.num_skipped,
            num_nans=interval.num_nans,
            tflops_per_device=tflops if self._config.log_throughput else None,
            grad_norm=result.grad_norm if result and not result.skipped else None,
            num_zeros=result.num_zeros if result else None,
            params_norm=extra_values.get("params_norm"),
            gradient_noise=noise,
            context_imbalance=imbalance,
            max_attention_logit=max_logit,
            custom={name: extra_values[name] for name in METRICS if name in extra_values},
        )
        if self._is_short:
            self.log(format_short_line(line))
        else:
            self._print(format_megatron_line(line))  # unchanged on a terminal too, for programs that parse it
        values = {
            "learning_rate": learning_rate,
            "global_batch_size": batch_size,
            "skipped": interval.num_skipped,
            **({"spikes": interval.num_spikes} if self._counts_spikes else {}),
            "elapsed_ms": elapsed_ms,
            "tokens_per_s": tokens_per_s,
            "tflops_per_device": tflops,
            **extra_values,
            **expert_values,
        }
        optional_values = {
            "mfu": mfu,
            "lm_loss": loss,
            "z_loss": z_loss,
            "mtp_loss": mtp_loss,
            "gradient_noise": noise,
            "context_imbalance": imbalance,
            "max_attention_logit": max_logit,
        }
        values |= {name: value for name, value in optional_values.items() if value is not None}
        if result is not None:
            values |= {"loss_scale": result.loss_scale, "grad_norm": result.grad_norm}
        if result is not None and result.num_zeros is not None:
            values["num_zeros"] = result.num_zeros
        if self._metrics_file:
            self._write([self._metrics_file], progress, values)
        memory = self._measure_memory()
        self._write(self._curve_sinks, progress, {**extra_values, **memory})
        timers = self._log_times(progress) if self._config.timing_log_level > 0 else {}
        if self._history is not None:
            scalar_values = {name: value for name, value in values.items() if "/" not in name}
            record_values = {**memory, **collect_record_values(), **({"timers_ms": timers} if timers else {})}
            self._record("log", progress, {**scalar_values, **record_values})
        return values

    def _build_line_values(self, progress: Progress, learning_rate: float, batch_size: int) -> dict[str, Any]:
        """Return the values that every log line and the status lines contain, by their names in `LogLineValues`."""
        return {
            "time": datetime.now(),
            "iteration": progress.iteration,
            "train_iterations": self._total_iterations,
            "consumed_samples": progress.consumed_samples,
            "learning_rate": learning_rate,
            "global_batch_size": batch_size,
            "remaining_s": self._throughput.estimate_remaining_seconds(time.perf_counter(), progress.consumed_samples),
            "is_remaining_bound": self._throughput.is_upper_bound,
        }

    def _measure_memory(self) -> dict[str, int]:
        host, device = get_peak_host_bytes(), self._context.device
        return {"memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host, "host_bytes": host}

    def _write_curves(self, progress: Progress, result: StepResult, learning_rate: float, batch_size: int, seconds: float) -> None:
        values = {
            "learning_rate": learning_rate,
            "global_batch_size": batch_size,
            "loss_scale": result.loss_scale,
            **({"spikes": int(result.spike is not None)} if self._counts_spikes else {}),
            "elapsed_ms": 1000 * seconds,
            "tokens_per_s": batch_size * self._model.config.seq_length / seconds,
            "tflops_per_device": self._compute_tflops(batch_size, _get_attention_samples(result, batch_size), seconds),
        }
        if self._peak_flops is not None:
            values["mfu"] = values["tflops_per_device"] * 1e12 / self._peak_flops
        if not result.skipped:
            values |= {"lm_loss": result.loss, "grad_norm": result.grad_norm}
            values |= {} if result.z_loss is None else {"z_loss": result.z_loss}
            values |= {} if result.mtp_loss is None else {"mtp_loss": result.mtp_loss}
            values |= {} if result.expert_balance is None else result.expert_balance.log_values([result.expert_balance])
            values |= {} if result.max_attention_logit is None else {"max_attention_logit": result.max_attention_logit}
        if result.num_zeros is not None:
            values["num_zeros"] = result.num_zeros
        if self._config.log_memory_to_tensorboard and torch.cuda.is_initialized():
            values |= {
                "mem-allocated-bytes": torch.cuda.memory_allocated(),
                "mem-max-allocated-bytes": torch.cuda.max_memory_allocated(),
            }
        self._write(self._curve_sinks, progress, values)

    def _log_times(self, progress: Progress) -> dict[str, float]:
        """Log the timers of all ranks. Returns the milliseconds per step of the slowest rank, by timer name."""
        ms_of_ranks = gather_objects(self._timers.reset_elapsed_ms(), self._context.world)
        times = {name: [ms / self._interval.num_steps for ms in rank_ms] for name, rank_ms in merge_rank_times(ms_of_ranks).items()}
        if text := format_times(times, self._config.timing_log_option):
            self.log(text)
        if self._config.log_timers_to_tensorboard:
            self._write(self._curve_sinks, progress, {f"{name}-time": max(rank_ms) / 1000 for name, rank_ms in times.items()})
        return {name: max(rank_ms) for name, rank_ms in times.items()}


def add_mean(losses: Mapping[str, tuple[float, float | None]]) -> dict[str, tuple[float, float | None]]:
    """Return the losses of an evaluation by the name of the set, with the unweighted mean over the sets under the name "", unless
    this is the name of a set."""
    means = (None if None in column else sum(column) / len(column) for column in zip(*losses.values(), strict=True))
    return dict(losses) if "" in losses else {**losses, "": tuple(means)}  # type: ignore[dict-item]


def _compute_mean(values: Sequence[float]) -> float | None:
    """Return the mean of the values, or None if the list is empty."""
    return math.fsum(values) / len(values) if values else None


def _get_attention_samples(result: StepResult | None, batch_size: int) -> float:
    """Return the number of single-document samples whose attention needs as many FLOPs as that of a step.

    Args:
        result: result of the step; None for a skipped iteration.
        batch_size: number of sequences of the step. Returned if attention does not depend on the documents.
    """
    return batch_size if result is None or result.attention_samples is None else result.attention_samples
