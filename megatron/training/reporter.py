"""What a run reports while it trains: the log line, validation lines, timers, norms and curves. Only rank 0 prints and writes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import torch

from megatron.config.outputs import LoggingConfig
from megatron.metrics.log_line import training_log_line, validation_lines
from megatron.metrics.loggers import MetricsFile, Sink, curve_sinks
from megatron.metrics.timers import Timers, format_times, times_of_ranks
from megatron.optimizer.norms import square_sums
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Shard
from megatron.spec.weights import in_layer
from megatron.training.progress import Progress
from megatron.training.step import StepResult

Gather = Callable[[Any], Sequence[Any]]


class Reporter:
    """Collects the results of steps and logs them at intervals.

    Args:
        speaks: whether this rank prints and writes; the others only take part in gathering times.
        gather: gives a value of every rank, in the order of ranks.
        total_iterations: number of steps of the whole run.
        flops_of: model FLOPs of a number of sequences, whose attention takes as much as a number of whole ones.
        tokens_per_sample: the sequence length.
        num_devices: throughput is divided by it.
        peak: FLOP/s of one device, if known.
        resumed: continue the metrics file instead of beginning it.
        settings: saved with the curves where the sink can.
    """

    def __init__(
        self,
        config: LoggingConfig,
        *,
        speaks: bool,
        gather: Gather,
        timers: Timers,
        total_iterations: int,
        flops_of: Callable[[int, float], float],
        tokens_per_sample: int,
        num_devices: int,
        peak: float | None,
        resumed: bool,
        settings: Mapping[str, Any],
    ) -> None:
        self._config, self._speaks, self._gather, self._timers = config, speaks, gather, timers
        self._total_iterations, self._flops_of, self._tokens_per_sample = total_iterations, flops_of, tokens_per_sample
        self._num_devices, self._peak = num_devices, peak
        self._file = MetricsFile(config.metrics_file, append=resumed) if speaks and config.metrics_file else None
        self._curves: list[Sink] = curve_sinks(config, settings) if speaks else []
        self._first = True
        self._started = self._last_step = 0.0
        self._steps = self._samples = self._skipped = self._nans = 0
        self._attended = 0.0
        self._losses: list[float] = []
        self._start_interval()

    def step(
        self, progress: Progress, result: StepResult | None, learning_rate: float, batch: int, extras: Callable[[], dict]
    ) -> None:
        """Take the result of a step (None for one that the user skips), and log if it is time.

        Args:
            batch: sequences of the step.
            extras: further numbers to log; called on every rank, and only when a line is due.
        """
        self._steps += 1
        self._samples += batch
        self._attended += _attended(result, batch)
        if result is None or result.skipped:
            self._skipped += 1
        if result is not None:
            self._nans += math.isnan(result.loss)
            if not result.skipped:
                self._losses.append(result.loss)
        now = time.perf_counter()
        if self._curves and progress.iteration % self._config.tensorboard_log_interval == 0 and result is not None:
            self._write_curves(progress, result, learning_rate, batch, now - self._last_step)
        self._last_step = now
        if self._first or progress.iteration % self._config.log_interval == 0:
            self._line(progress, result, learning_rate, batch, extras())
            self._first = False
            self._start_interval()

    def evaluation(self, progress: Progress, loss: float, split: Literal["validation", "test"]) -> None:
        """Log the loss of a held-out split."""
        for line in validation_lines(progress.iteration, loss, split):
            self.say(line)
        for sink in self._sinks():
            sink.scalars(progress.iteration, progress.consumed_samples, {f"{split}_loss": loss})

    def pause(self) -> float:
        """Call before work that is not training; give the result to `resume`."""
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        """Leave the time since `pause` out of the times of steps."""
        away = time.perf_counter() - paused_at
        self._started += away
        self._last_step += away

    def say(self, line: str) -> None:
        """Print a line at once, on rank 0."""
        if self._speaks:
            print(line, flush=True)

    def close(self) -> None:
        """Close the sinks."""
        for sink in self._sinks():
            sink.close()

    def _sinks(self) -> list[Sink]:
        return [*self._curves, *([self._file] if self._file else [])]

    def _start_interval(self) -> None:
        self._started = self._last_step = time.perf_counter()
        self._steps = self._samples = self._skipped = self._nans = 0
        self._attended = 0.0
        self._losses = []

    def _line(
        self, progress: Progress, result: StepResult | None, learning_rate: float, batch: int, extras: dict[str, float]
    ) -> None:
        seconds = time.perf_counter() - self._started
        tflops = self._flops_of(self._samples, self._attended) / seconds / self._num_devices / 1e12
        loss = math.fsum(self._losses) / len(self._losses) if self._losses else None
        updated = result is not None and not result.skipped
        self.say(
            training_log_line(
                time=datetime.now(),
                iteration=progress.iteration,
                train_iterations=self._total_iterations,
                consumed_samples=progress.consumed_samples,
                elapsed_ms=1000 * seconds / self._steps,
                learning_rate=learning_rate,
                global_batch_size=batch,
                lm_loss=loss,
                loss_scale=result.loss_scale if result else 1.0,
                skipped=self._skipped,
                nans=self._nans,
                tflops_per_device=tflops if self._config.log_throughput else None,
                grad_norm=result.grad_norm if result and updated else None,
                num_zeros=result.num_zeros if result else None,
                params_norm=extras.get("params_norm"),
            )
        )
        values = {
            "learning_rate": learning_rate,
            "global_batch_size": batch,
            "skipped": self._skipped,
            "elapsed_ms": 1000 * seconds / self._steps,
            "tokens_per_s": self._samples * self._tokens_per_sample / seconds,
            "tflops_per_device": tflops,
            **extras,
        }
        if self._peak is not None:
            values["mfu"] = tflops * 1e12 / self._peak
        if loss is not None:
            values["lm_loss"] = loss
        if result is not None:
            values |= {"loss_scale": result.loss_scale, "grad_norm": result.grad_norm}
        if result is not None and result.num_zeros is not None:
            values["num_zeros"] = result.num_zeros
        if self._file:
            self._file.scalars(progress.iteration, progress.consumed_samples, values)
        for sink in self._curves:
            sink.scalars(progress.iteration, progress.consumed_samples, {"tokens_per_s": values["tokens_per_s"], **extras})
        self._report_times(progress)

    def _write_curves(self, progress: Progress, result: StepResult, learning_rate: float, batch: int, seconds: float) -> None:
        values = {
            "learning_rate": learning_rate,
            "global_batch_size": batch,
            "loss_scale": result.loss_scale,
            "elapsed_ms": 1000 * seconds,
            "tflops_per_device": self._flops_of(batch, _attended(result, batch)) / seconds / self._num_devices / 1e12,
        }
        if not result.skipped:
            values |= {"lm_loss": result.loss, "grad_norm": result.grad_norm}
        if result.num_zeros is not None:
            values["num_zeros"] = result.num_zeros
        if self._config.log_memory_to_tensorboard and torch.cuda.is_initialized():
            values |= {
                "mem-allocated-bytes": torch.cuda.memory_allocated(),
                "mem-max-allocated-bytes": torch.cuda.max_memory_allocated(),
            }
        for sink in self._curves:
            sink.scalars(progress.iteration, progress.consumed_samples, values)

    def _report_times(self, progress: Progress) -> None:
        if self._config.timing_log_level == 0:
            return
        times = times_of_ranks(self._timers.elapsed_ms(), self._gather)
        steps = max(1, self._steps)
        times = {name: [ms / steps for ms in ranks] for name, ranks in times.items()}
        text = format_times(times, self._config.timing_log_option)
        if text:
            self.say(text)
        if self._config.log_timers_to_tensorboard:
            for sink in self._curves:
                longest = {f"{name}-time": max(ranks) / 1000 for name, ranks in times.items()}
                sink.scalars(progress.iteration, progress.consumed_samples, longest)


def _attended(result: StepResult | None, batch: int) -> float:
    """How many whole sequences need as much attention as the step."""
    return batch if result is None or result.attended_sequences is None else result.attended_sequences


# ---- norms of gradient and weights for each layer (--log-layer-norms), and of all parameters (--log-params-norm)


def place_of(name: str) -> str:
    """The part of the model that a parameter belongs to: "layers.17", "embedding", "final_norm" or "output"."""
    layer, part = in_layer(name)
    return part.partition(".")[0] if layer is None else f"layers.{layer}"


def places(num_layers: int, tied: bool) -> list[str]:
    """Every part of the model, in the order of the depth."""
    return ["embedding", *(f"layers.{i}" for i in range(num_layers)), "final_norm", *([] if tied else ["output"])]


def layer_norms(
    shards: Sequence[Shard], gradient_squares: torch.Tensor, loss_scale: float, parts: Sequence[str], context: ParallelContext
) -> dict[str, float]:
    """Gradient and weight norm of each part over all ranks: {"grad-norm/layers.0": ..., "weight-norm/layers.0": ...}.

    Args:
        shards: those that this rank counts.
        gradient_squares: sums of squares of their gradients, float64 [len(shards)].
        loss_scale: the gradients are multiplied by it.
        parts: see `places`; the same on every rank.
    """
    index = torch.tensor([parts.index(place_of(s.record.name)) for s in shards], dtype=torch.long, device=context.device)
    sums = torch.zeros(2, len(parts), dtype=torch.float64, device=context.device)
    sums[0].index_add_(0, index, gradient_squares)
    sums[1].index_add_(0, index, square_sums([s.counted_main for s in shards], context.device))
    norms = all_reduce(sums, context.world).sqrt().tolist()
    return {
        **{f"grad-norm/{part}": norm / loss_scale for part, norm in zip(parts, norms[0], strict=True)},
        **{f"weight-norm/{part}": norm for part, norm in zip(parts, norms[1], strict=True)},
    }


def params_norm(shards: Sequence[Shard], context: ParallelContext) -> float:
    """Norm of all parameters, with each element counted once.

    Args:
        shards: those that this rank counts.
    """
    total = square_sums([s.counted_main for s in shards], context.device).sum()
    return float(all_reduce(total, context.world).sqrt())
