"""What a run reports while it trains: the log line, validation lines, timers, norms and curves. Only rank 0 prints and writes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from megatron.config.imports import named
from megatron.config.outputs import LoggingConfig
from megatron.data.history import tokens_read
from megatron.metrics.log_line import (
    LineNumbers,
    Printer,
    Sink,
    megatron_line,
    short_line,
    short_validation_line,
    validation_lines,
)
from megatron.metrics.measures import Timers, format_times, process_bytes, times_of_ranks
from megatron.model.build import Model
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.spec.counts import flops_per_step
from megatron.training.progress import Progress
from megatron.training.step import StepResult
from megatron.training.watch import METRICS

if TYPE_CHECKING:
    from megatron.metrics.history import HistoryFile
    from megatron.moe.balance import BalanceResult
    from megatron.training.gradient_noise import NoiseEstimate


@dataclass
class _Interval:
    """What the steps since the last log line add up to."""

    started: float
    """When it began, by time.perf_counter(). What is not training is left out: it is moved by that much."""
    steps: int = 0
    samples: int = 0
    attended: float = 0.0
    """How many whole sequences need as much attention."""
    skipped: int = 0
    spikes: int = 0
    nans: int = 0
    losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    noises: list[NoiseEstimate] = field(default_factory=list)
    mtp_losses: list[float] = field(default_factory=list)
    balances: list[BalanceResult] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)
    """Imbalances of the work of context ranks."""
    max_logits: list[float] = field(default_factory=list)


class Live(Protocol):
    """Lines below the log on a terminal, which change at each step."""

    def step(self, progress: Progress, result: StepResult | None, place: Mapping[str, Any], now: float) -> None:
        """Show a step, whose line has the numbers of `place`."""

    def doing(self, what: str, progress: Progress) -> None:
        """Show what is done between steps."""


class Pace:
    """Measures the pace of the run and estimates the time to its end, from the last steps and the share of time outside of steps.

    Args:
        total: samples of the whole run; 0 if that is not to be told.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._began: float | None = None
        self._in_steps = 0.0
        self._last: deque[tuple[float, int]] = deque(maxlen=20)

    def step(self, now: float, seconds: float, samples: int) -> None:
        """A step has been made. The first one, which makes connections and fills caches, is left out."""
        if self._began is None:
            self._began = now
            return
        self._in_steps += seconds
        self._last.append((seconds, samples))

    @property
    def samples_per_s(self) -> float | None:
        """Samples of a second, over the last steps; None before they are known."""
        seconds = sum(each for each, _ in self._last)
        return sum(samples for _, samples in self._last) / seconds if seconds else None

    def seconds_left(self, now: float, consumed_samples: int) -> float | None:
        """Return the estimated seconds to the end of the run; None before the first steps."""
        pace = self.samples_per_s
        if pace is None or self._began is None or not self._total:
            return None
        left = self._total - consumed_samples
        return None if left <= 0 else left / pace * max(1.0, (now - self._began) / self._in_steps)


class Reporter:
    """Collects the results of steps and logs them at intervals.

    Args:
        speaks: whether this rank prints and writes; the others only take part in gathering times.
        quiet: print nothing, and write all the same.
        total_iterations: number of steps of the whole run.
        total_samples: samples of the whole run, by which the time left is told; 0 where it is not.
        peak: FLOP/s of one device, if known.
        resumed: continue the metrics file instead of beginning it.
        judges: whether steps are judged as loss spikes, so that their number is logged.
        settings: saved with the curves where the sink can.
        folder: that of the run, in which its record is kept; None without one.
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
        speaks: bool,
        quiet: bool = False,
        peak: float | None = None,
        resumed: bool = False,
        judges: bool = False,
        settings: Mapping[str, Any] | None = None,
        folder: str | None = None,
    ) -> None:
        self._judges, self._quiet = judges, quiet
        self._config, self._model, self._context, self._timers = config, model, context, timers
        self._total_iterations, self._speaks, self._peak = total_iterations, speaks, peak
        self._file: Sink | None = None
        self._curves: list[Sink] = []
        if speaks and config.metrics_file:
            self._file = named("megatron_lab.monitoring.loggers:MetricsFile")(config.metrics_file, append=resumed)
        if speaks and (config.tensorboard_dir is not None or config.wandb_project is not None):
            self._curves = named("megatron_lab.monitoring.loggers:curve_sinks")(config, settings)
        self._sinks = [*self._curves, *([self._file] if self._file else [])]
        self._history: HistoryFile | None = None
        if speaks and folder is not None:
            self._history = named("megatron.metrics.history:HistoryFile")(folder, model.config.seq_length)
        self._printer, self._pace = Printer(), Pace(total_samples)
        terminal = speaks and not quiet and self._printer.on_terminal
        self._short = config.log_format == "short" or (config.log_format == "auto" and terminal)
        self._live: Live | None = None
        if self._short and terminal:
            self._live = named("megatron_lab.monitoring.live_lines:LiveLines")(self._printer, total_iterations)
        self._first = True
        self._last_step = time.perf_counter()
        self._interval = _Interval(self._last_step)

    @contextmanager
    def running(self, progress: Progress, facts: Mapping[str, Any]) -> Iterator[None]:
        """Within the block the run goes on from `progress`. Behind it everything is written and closed; where the block is left by
        an error, only the record of the run is, and nothing is waited for.

        Args:
            facts: what the record tells of this start.
        """
        if self._history is not None:
            tokens = tokens_read(progress.phases, progress.consumed_samples, self._model.config.seq_length)
            self._history.start(progress.iteration, progress.consumed_samples, tokens, facts)
        try:
            yield
        except BaseException as error:
            self._printer.show([])
            self.event("end", progress, str(error).partition("\n")[0] or type(error).__name__)
            raise
        self._printer.show([])
        for sink in self._sinks:
            sink.close()
        if self._history is not None:
            self._history.close()

    def step(
        self,
        progress: Progress,
        result: StepResult | None,
        learning_rate: float,
        batch: int,
        extras: Callable[[], dict[str, float]],
        recorded: Callable[[], dict[str, Any]],
    ) -> dict[str, float] | None:
        """Take the result of a step (None for one that the user skips), and log if it is time.

        Args:
            batch: sequences of the step.
            extras: returns further numbers to log; called on every rank, and only when a line is due.
            recorded: returns what the record of the run gets beside these.

        Returns:
            the numbers that were logged, by the names of the metrics file; None where no line was due.
        """
        sums = self._interval
        sums.steps += 1
        sums.samples += batch
        sums.attended += _attended(result, batch)
        sums.skipped += result is None or result.skipped
        if result is not None:
            sums.nans += math.isnan(result.loss)
            sums.spikes += result.spike is not None
            if not result.skipped:
                sums.losses.append(result.loss)
                sums.z_losses += [] if result.z_loss is None else [result.z_loss]
                sums.noises += [] if result.noise is None else [result.noise]
                sums.mtp_losses += [] if result.mtp_loss is None else [result.mtp_loss]
                sums.balances += [] if result.balance is None else [result.balance]
                sums.imbalances += [] if result.context_imbalance is None else [result.context_imbalance]
                sums.max_logits += [] if result.max_attention_logit is None else [result.max_attention_logit]
        now = time.perf_counter()
        self._pace.step(now, now - self._last_step, batch)
        if self._curves and progress.iteration % self._config.tensorboard_log_interval == 0 and result is not None:
            self._write_curves(progress, result, learning_rate, batch, now - self._last_step)
        if self._history is not None:
            made = result is not None and not result.skipped
            self._history.step(
                progress.iteration,
                progress.consumed_samples,
                batch,
                lm_loss=result.loss if result is not None else None,
                grad_norm=result.grad_norm if result is not None and made else None,
                learning_rate=learning_rate,
                seconds=now - self._last_step,
            )
        self._last_step = now
        values = None
        if self._first or progress.iteration % self._config.log_interval == 0:
            values = self._line(progress, result, learning_rate, batch, extras(), recorded)
            self._first = False
            self._last_step = time.perf_counter()
            self._interval = _Interval(self._last_step)
        if self._live is not None:
            pace = self._pace.samples_per_s
            tokens_per_s = None if pace is None else pace * self._model.config.seq_length
            self._live.step(progress, result, {**self._place(progress, learning_rate, batch), "tokens_per_s": tokens_per_s}, now)
        return values

    def evaluation(
        self, progress: Progress, loss: float, mtp_loss: float | None, split: Literal["validation", "test"]
    ) -> dict[str, float]:
        """Log the loss of a held-out split, and that of multi-token prediction; returns both, by the names of the metrics file."""
        lines = validation_lines(progress.iteration, loss, split, mtp_loss=mtp_loss)
        for line in [short_validation_line(progress.iteration, loss, split, mtp_loss=mtp_loss)] if self._short else lines:
            self.say(line)
        values = {f"{split}_loss": loss} | ({} if mtp_loss is None else {f"{split}_mtp_loss": mtp_loss})
        self._write(self._sinks, progress, values)
        self._record("evaluation", progress, values)
        return values

    def measured(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Write further numbers to the metrics file and the curves."""
        self._write(self._sinks, progress, values)
        self._record("measured", progress, values)

    def event(self, event: str, progress: Progress, words: str, **values: Any) -> None:
        """Write into the record of the run that something happened. The log has been told in other words."""
        self._record("event", progress, {"event": event, "words": words.strip(), **values})

    @contextmanager
    def paused(self, what: str, progress: Progress) -> Iterator[None]:
        """While it is entered, time does not count for the steps.

        Args:
            what: is done meanwhile.
        """
        began = time.perf_counter()
        if self._live is not None:
            self._live.doing(what, progress)
        yield
        away = time.perf_counter() - began
        self._interval.started += away
        self._last_step += away

    def say(self, line: str) -> None:
        """Print a line at once, on rank 0."""
        if self._speaks and not self._quiet:
            self._printer.say(line)

    def _record(self, kind: str, progress: Progress, values: Mapping[str, Any]) -> None:
        if self._history is not None:
            self._history.line(kind, progress.iteration, progress.consumed_samples, values)

    @staticmethod
    def _write(sinks: Iterable[Sink], progress: Progress, values: Mapping[str, float]) -> None:
        for sink in sinks:
            sink.scalars(progress.iteration, progress.consumed_samples, values)

    def _tflops(self, samples: int, attended: float, seconds: float) -> float:
        """TFLOP/s of each device."""
        flops = flops_per_step(self._model.config, self._model.vocab_size, samples, attended)
        return flops / seconds / self._context.topology.world_size / 1e12

    def _line(
        self,
        progress: Progress,
        result: StepResult | None,
        learning_rate: float,
        batch: int,
        extras: dict[str, float],
        recorded: Callable[[], dict[str, Any]],
    ) -> dict[str, float]:
        sums = self._interval
        seconds = time.perf_counter() - sums.started
        elapsed_ms, tflops = 1000 * seconds / sums.steps, self._tflops(sums.samples, sums.attended, seconds)
        loss, z_loss, mtp_loss = _mean(sums.losses), _mean(sums.z_losses), _mean(sums.mtp_losses)
        of_experts = sums.balances[0].log_values(sums.balances) if sums.balances else {}
        noise = named("megatron.training.gradient_noise:noise_scale")(sums.noises) if sums.noises else None
        imbalance = _mean(sums.imbalances)
        max_logit = max(sums.max_logits, default=None)
        tokens_per_s = sums.samples * self._model.config.seq_length / seconds
        mfu = None if self._peak is None else tflops * 1e12 / self._peak
        line = LineNumbers(
            **self._place(progress, learning_rate, batch),
            elapsed_ms=elapsed_ms,
            lm_loss=loss,
            tokens_per_s=tokens_per_s,
            mfu=mfu,
            z_loss=z_loss,
            mtp_loss=mtp_loss,
            load_balancing_loss=of_experts.get("load_balancing_loss"),
            moe_z_loss=of_experts.get("moe_z_loss"),
            busiest_expert=of_experts.get("busiest_expert"),
            dropped_share=of_experts.get("dropped_share"),
            loss_scale=result.loss_scale if result else 1.0,
            skipped=sums.skipped,
            nans=sums.nans,
            tflops_per_device=tflops if self._config.log_throughput else None,
            grad_norm=result.grad_norm if result and not result.skipped else None,
            num_zeros=result.num_zeros if result else None,
            params_norm=extras.get("params_norm"),
            gradient_noise=noise,
            context_imbalance=imbalance,
            max_attention_logit=max_logit,
            own={name: extras[name] for name in METRICS if name in extras},
        )
        self.say(short_line(line) if self._short else megatron_line(line))
        values = {
            "learning_rate": learning_rate,
            "global_batch_size": batch,
            "skipped": sums.skipped,
            **({"spikes": sums.spikes} if self._judges else {}),
            "elapsed_ms": elapsed_ms,
            "tokens_per_s": tokens_per_s,
            "tflops_per_device": tflops,
            **extras,
            **of_experts,
        }
        measured = {
            "mfu": mfu,
            "lm_loss": loss,
            "z_loss": z_loss,
            "mtp_loss": mtp_loss,
            "gradient_noise": noise,
            "context_imbalance": imbalance,
            "max_attention_logit": max_logit,
        }
        values |= {name: value for name, value in measured.items() if value is not None}
        if result is not None:
            values |= {"loss_scale": result.loss_scale, "grad_norm": result.grad_norm}
        if result is not None and result.num_zeros is not None:
            values["num_zeros"] = result.num_zeros
        if self._file:
            self._write([self._file], progress, values)
        memory = self._memory()
        self._write(self._curves, progress, {**extras, **memory})
        timers = self._report_times(progress) if self._config.timing_log_level > 0 else {}
        if self._history is not None:
            whole = {name: value for name, value in values.items() if "/" not in name}
            found = {**memory, **recorded(), **({"timers_ms": timers} if timers else {})}
            self._record("log", progress, {**whole, **found})
        return values

    def _place(self, progress: Progress, learning_rate: float, batch: int) -> dict[str, Any]:
        """The numbers that every line has."""
        return {
            "time": datetime.now(),
            "iteration": progress.iteration,
            "train_iterations": self._total_iterations,
            "consumed_samples": progress.consumed_samples,
            "learning_rate": learning_rate,
            "global_batch_size": batch,
            "seconds_left": self._pace.seconds_left(time.perf_counter(), progress.consumed_samples),
        }

    def _memory(self) -> dict[str, int]:
        host, device = process_bytes(), self._context.device
        return {"memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host, "host_bytes": host}

    def _write_curves(self, progress: Progress, result: StepResult, learning_rate: float, batch: int, seconds: float) -> None:
        values = {
            "learning_rate": learning_rate,
            "global_batch_size": batch,
            "loss_scale": result.loss_scale,
            **({"spikes": int(result.spike is not None)} if self._judges else {}),
            "elapsed_ms": 1000 * seconds,
            "tokens_per_s": batch * self._model.config.seq_length / seconds,
            "tflops_per_device": self._tflops(batch, _attended(result, batch), seconds),
        }
        if self._peak is not None:
            values["mfu"] = values["tflops_per_device"] * 1e12 / self._peak
        if not result.skipped:
            values |= {"lm_loss": result.loss, "grad_norm": result.grad_norm}
            values |= {} if result.z_loss is None else {"z_loss": result.z_loss}
            values |= {} if result.mtp_loss is None else {"mtp_loss": result.mtp_loss}
            values |= {} if result.balance is None else result.balance.log_values([result.balance])
            values |= {} if result.max_attention_logit is None else {"max_attention_logit": result.max_attention_logit}
        if result.num_zeros is not None:
            values["num_zeros"] = result.num_zeros
        if self._config.log_memory_to_tensorboard and torch.cuda.is_initialized():
            values |= {
                "mem-allocated-bytes": torch.cuda.memory_allocated(),
                "mem-max-allocated-bytes": torch.cuda.max_memory_allocated(),
            }
        self._write(self._curves, progress, values)

    def _report_times(self, progress: Progress) -> dict[str, float]:
        """Tell the times of all ranks. Returns the slowest rank's, in milliseconds an iteration."""
        ranks = gather_objects(self._timers.elapsed_ms(), self._context.world)
        times = {name: [ms / self._interval.steps for ms in each] for name, each in times_of_ranks(ranks).items()}
        if text := format_times(times, self._config.timing_log_option):
            self.say(text)
        if self._config.log_timers_to_tensorboard:
            self._write(self._curves, progress, {f"{name}-time": max(each) / 1000 for name, each in times.items()})
        return {name: max(each) for name, each in times.items()}


def _mean(numbers: Sequence[float]) -> float | None:
    """None if there are none."""
    return math.fsum(numbers) / len(numbers) if numbers else None


def _attended(result: StepResult | None, batch: int) -> float:
    """How many whole sequences need as much attention as the step."""
    return batch if result is None or result.attended_sequences is None else result.attended_sequences
