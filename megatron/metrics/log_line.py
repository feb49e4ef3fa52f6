"""Log lines of training: in a short format for people, or byte for byte in Megatron-LM's format for programs that parse them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from io import UnsupportedOperation
from pathlib import Path
from typing import Literal, Protocol, TextIO

from megatron.config.regular_file import check_output, open_regular


def compute_perplexity(loss: float) -> float:
    """Return the perplexity exp(loss). A loss above 20 counts as 20, so that the result does not overflow."""
    return math.exp(min(20.0, loss))


@dataclass(frozen=True, kw_only=True)
class LogLineValues:
    """Values of one progress line of the log. A value of None is omitted from the line. Means and counts are over the steps since
    the previous log line."""

    time: datetime
    """Date and time at which the line is printed."""
    iteration: int
    """Number of the last completed step, counted from 1."""
    train_iterations: int
    """Total number of steps of the run."""
    consumed_samples: int
    """Sequences read since the start of the run."""
    elapsed_ms: float
    """Milliseconds per step, averaged over the steps since the previous log line."""
    learning_rate: float
    """Learning rate of the last update."""
    global_batch_size: int
    """Number of sequences in the last step."""
    lm_loss: float | None
    """Mean language-model loss over the steps since the previous log line, without skipped steps; None if all were skipped."""
    z_loss: float | None = None
    """Z-loss term (--z-loss-coeff) of the training loss, averaged over the steps since the previous log line."""
    mtp_loss: float | None = None
    """Multi-token-prediction loss (--mtp-num-layers) without its coefficient, averaged over the steps since the previous log
    line."""
    load_balancing_loss: float | None = None
    """Load-balancing loss of the experts without its coefficient, averaged over the mixture-of-experts layers and over the
    steps since the previous log line."""
    moe_z_loss: float | None = None
    """Router z-loss without its coefficient, averaged over the mixture-of-experts layers and over the steps since the previous
    log line."""
    busiest_expert: float | None = None
    """Number of tokens of the most loaded expert, divided by the mean over the experts of its layer. Maximum over the steps
    since the previous log line."""
    dropped_share: float | None = None
    """Fraction of the (token, expert) assignments that were dropped because the expert's capacity was exceeded."""
    loss_scale: float
    """Loss scale of the last step."""
    num_skipped: int
    """Number of steps without a parameter update since the previous log line."""
    num_nans: int
    """Number of steps with a NaN loss since the previous log line."""
    tflops_per_device: float | None = None
    """Throughput in TFLOP/s per device, with --log-throughput."""
    grad_norm: float | None = None
    """Global gradient norm of the last step; None if the step had no update."""
    num_zeros: float | None = None
    """Number of zeros in the gradient of the last step, with --log-num-zeros-in-grad."""
    params_norm: float | None = None
    """Norm of all parameters, with --log-params-norm."""
    context_imbalance: float | None = None
    """Attention FLOPs of the most loaded context-parallel rank, divided by the mean over the context-parallel ranks. The line
    shows the quotient only if it is above 1."""
    gradient_noise: float | None = None
    """Gradient noise scale in sequences, estimated from the steps since the previous log line, with --log-gradient-noise."""
    max_attention_logit: float | None = None
    """Largest attention score in the steps since the previous log line, with --log-max-attention-logit."""
    tokens_per_s: float | None = None
    """Tokens per second over all ranks. Only the short log format (--log-format short) shows it."""
    mfu: float | None = None
    """Model FLOPs utilization, if the devices' peak rate is known. Only the short log format (--log-format short) shows it."""
    remaining_s: float | None = None
    """Estimated seconds until the end of the run; None before the first estimate. Only the short log format (--log-format
    short) shows it."""
    is_remaining_bound: bool = False
    """Whether `remaining_s` is an upper bound, because only the first step of this start was measured."""
    custom: Mapping[str, float] = field(default_factory=dict)
    """Values of user-defined metrics (`register_metric`), by name."""

    @property
    def logged_context_imbalance(self) -> float | None:
        """`context_imbalance` if the log line shows it, else None. The line omits an imbalance of 1, and any value without context
        parallelism."""
        return self.context_imbalance if self.context_imbalance is not None and self.context_imbalance > 1.0 else None


def format_megatron_line(values: LogLineValues) -> str:
    """Format a progress line as Megatron-LM prints it, without a newline."""
    optional = [
        (values.lm_loss, "lm loss: {:.6E}"),
        (values.z_loss, "z loss: {:.6E}"),
        (values.mtp_loss, "mtp loss: {:.6E}"),
        (values.load_balancing_loss, "load_balancing_loss: {:.6E}"),
        (values.moe_z_loss, "router z loss: {:.6E}"),
        (values.busiest_expert, "busiest expert: {:.3f}"),
        (values.dropped_share, "dropped: {:.1%}"),
        (values.loss_scale, "loss scale: {:.1f}"),
        (values.grad_norm, "grad norm: {:.3f}"),
        (values.num_zeros, "num zeros: {:.1f}"),
        (values.params_norm, "params norm: {:.3f}"),
        (values.gradient_noise, "gradient noise scale: {:.1f}"),
        (values.logged_context_imbalance, "context imbalance: {:.3f}"),
        (values.max_attention_logit, "max attention logit: {:.3f}"),
    ]
    fields = [
        f" [{values.time:%Y-%m-%d %H:%M:%S.%f}] iteration {values.iteration:8d}/{values.train_iterations:8d}",
        f"consumed samples: {values.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {values.elapsed_ms:.1f}",
    ]
    if values.tflops_per_device is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {values.tflops_per_device:.1f}")
    fields += [f"learning rate: {values.learning_rate:.6E}", f"global batch size: {values.global_batch_size:5d}"]
    fields += [template.format(value) for value, template in optional if value is not None]
    fields += [f"{name}: {value:.6E}" for name, value in values.custom.items()]
    fields += [f"number of skipped iterations: {values.num_skipped:3d}", f"number of nan iterations: {values.num_nans:3d}"]
    return " | ".join(fields) + " |"


def format_short_line(values: LogLineValues) -> str:
    """Format a progress line for people, in the short log format.

    Example: `it 120/5000 | loss 3.41 | norm 0.82 | lr 3e-4 | 41k tok/s | 38 % MFU | 2 h 14 min left`.
    """
    flops = None if values.tflops_per_device is None else 1e12 * values.tflops_per_device
    optional = [
        (values.lm_loss, "loss {:.3f}"),
        (values.z_loss, "z loss {:.2g}"),
        (values.mtp_loss, "mtp loss {:.3f}"),
        (values.load_balancing_loss, "balance loss {:.4g}"),
        (values.moe_z_loss, "router z loss {:.3g}"),
        (values.busiest_expert, "busiest expert {:.2f}"),
        (values.dropped_share, "{:.1%} dropped"),
        (values.loss_scale if values.loss_scale != 1.0 else None, "loss scale {:.0f}"),
        (values.grad_norm, "norm {:.3g}"),
        (values.num_zeros, "{:.0f} zeros"),
        (values.params_norm, "weights' norm {:.4g}"),
        (values.gradient_noise, "noise scale {:.4g}"),
        (values.logged_context_imbalance, "imbalance {:.2f}"),
        (values.max_attention_logit, "logit {:.3g}"),
    ]
    fields = [f"it {values.iteration:{len(str(values.train_iterations))}d}/{values.train_iterations}"]
    fields += [template.format(value) for value, template in optional if value is not None]
    fields += [f"{name} {value:.4g}" for name, value in values.custom.items()]
    fields.append(f"lr {values.learning_rate:.2e}".replace("e-0", "e-").replace("e+00", ""))
    if values.tokens_per_s is not None:
        fields.append(f"{format_compact(values.tokens_per_s)} tok/s")
    if flops is not None:
        rate = format_compact(flops, "kMGTP")
        fields.append(f"{rate[:-1]} {rate[-1]}FLOP/s" if rate[-1].isalpha() else f"{rate} FLOP/s")
    if values.mfu is not None:
        fields.append(f"{100 * values.mfu:.0f} % MFU")
    fields += [f"{count} {label}" for count, label in ((values.num_skipped, "skipped"), (values.num_nans, "NaN")) if count]
    if values.remaining_s is not None:
        is_bound = values.is_remaining_bound
        fields.append(f"{'< ' if is_bound else ''}{format_duration(max(values.remaining_s, float(is_bound)))} left")
    return " | ".join(fields)


def format_compact(value: float, units: str = "kMBT") -> str:
    """Format a value with three significant digits and a suffix for its power of 1,000: 41.2k, 1.5M, 300B.

    Args:
        units: suffixes for 1,000, 1,000^2 and so on, one letter each.
    """
    power = 0
    while abs(value) >= 999.5 and power < len(units):
        value, power = value / 1000, power + 1
    digits = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return digits + ("", *units)[power]


def format_duration(seconds: float) -> str:
    """Format a duration in its one or two largest units, for example `45 s` or `2 h 14 min`."""
    rounded = max(0, round(seconds))
    if rounded < 60:
        return f"{rounded} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes_of_hour = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes_of_hour:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def format_time(time: datetime, timespec: str = "seconds") -> str:
    """Format a date and time with its zone, for example `2026-11-30 14:05:09 UTC+01:00`.

    Args:
        time: time in the zone that its `tzinfo` names, or in that of this machine.
        timespec: smallest unit, as in `datetime.isoformat`.
    """
    local = time if time.tzinfo is not None else time.astimezone()
    return f"{local.replace(tzinfo=None).isoformat(' ', timespec)} {timezone(local.utcoffset() or timedelta()).tzname(None)}"


def format_progress_bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """Format a progress bar, followed by the percentage.

    Args:
        share: completed fraction of the run, 0 to 1.
        width: number of characters of the bar and the percentage together.
        ascii_only: use only ASCII characters.
    """
    full, empty = "#-" if ascii_only else "━─"
    bar_width = max(4, width - 7)
    num_full = int(bar_width * min(1.0, max(0.0, share)))
    return f"{full * num_full}{empty * (bar_width - num_full)} {100 * share:3.0f} %"


def format_validation_lines(
    iteration: int,
    loss: float,
    split: Literal["validation", "test"] = "validation",
    *,
    mtp_loss: float | None = None,
    set_name: str = "",
    num_averaged: int = 0,
) -> list[str]:
    """Format the result of an evaluation as Megatron-LM prints it: a line of dashes, the loss with its perplexity, and another line
    of dashes. For one of several validation sets, Megatron-LM prints `validation-0`, the index of the set; here it is the name.

    Args:
        iteration: last step before the evaluation.
        loss: mean over the tokens of the evaluation.
        split: split of the data. The line names the split only if it is the test split.
        mtp_loss: loss of multi-token prediction, without its coefficient; None without multi-token prediction.
        set_name: name of the validation set; "" without a name.
        num_averaged: number of validation sets of whose losses this is the mean; 0 for the loss of one set.
    """
    position = f"iteration {iteration}" if split == "validation" else f"iteration {iteration} on test set"
    set_suffix = f"-{set_name}" if set_name else ""
    loss_line = (
        f" validation{set_suffix} loss at {position} | lm loss value: {loss:.6E} | lm loss PPL: {compute_perplexity(loss):.6E} | "
    )
    if mtp_loss is not None:
        loss_line += f"mtp loss value: {mtp_loss:.6E} | "
    if num_averaged:
        loss_line += f"mean of sets: {num_averaged} | "
    rule = "-" * (len(loss_line) + 1)
    return [rule, loss_line, rule]


def format_short_validation_line(
    iteration: int,
    loss: float,
    split: Literal["validation", "test"] = "validation",
    *,
    mtp_loss: float | None = None,
    set_name: str = "",
    num_averaged: int = 0,
) -> list[str]:
    """Format the result of an evaluation for people, in one line. The arguments are those of `format_validation_lines`."""
    further = "" if mtp_loss is None else f" | mtp loss {mtp_loss:.3f}"
    further += f" | mean of {num_averaged} sets" if num_averaged else ""
    name = f" {set_name}" if set_name else ""
    return [f"{split}{name} at it {iteration} | loss {loss:.3f} | perplexity {compute_perplexity(loss):.4g}{further}"]


# ---- Outputs of a run that may fail without ending it (full disk, closed pipe). Failures are reported once, on stderr.


RunEnd = Literal["finished", "stopped", "failed"]
"""End of a run: all its steps are done or it decided to end, a signal or its time limit ended it early, or an error ended it."""


class MetricSink(Protocol):
    """Destination of metrics, such as a file or TensorBoard. Only the rank that writes the log opens sinks.

    Metrics have the same names as in the metrics file: lm_loss, z_loss, mtp_loss, load_balancing_loss, moe_z_loss, busiest_expert,
    dropped_share, grad_norm, learning_rate, loss_scale, skipped, spikes, elapsed_ms, tokens_per_s, tflops_per_device,
    global_batch_size, num_zeros, params_norm, gradient_noise, context_imbalance, max_attention_logit, validation_loss,
    validation_mtp_loss, test_loss, test_mtp_loss, goodput, and the names of user-defined metrics. Those of a validation set with a
    name have the suffix `/NAME`.
    """

    def log_scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Write metrics of the run to the destination.

        Args:
            iteration: number of completed steps.
            samples: number of sequences that these steps have consumed.
            values: metrics by name.
        """

    def log_text(self, iteration: int, samples: int, name: str, text: str) -> None:
        """Write a text, such as one that the model has generated.

        Args:
            iteration: number of completed steps.
            samples: number of sequences that these steps have consumed.
            name: name under which the texts of several iterations are shown together.
        """

    def rewind(self, iteration: int) -> None:
        """Called when the run goes back to an earlier checkpoint. The values of later steps no longer belong to the run.

        Args:
            iteration: iteration of the checkpoint.
        """

    def close(self, end: RunEnd = "finished") -> None:
        """Write all buffered metrics and close the destination.

        Args:
            end: how the run ended, for destinations that show the state of a run.
        """


class OutputStatus:
    """Reporter of write errors of one output of a run. It reports when writing starts to fail, and when writing works again.

    Args:
        name: name of the output in these messages.
        report: function that prints a message, by default to stderr.
    """

    def __init__(self, name: str, report: Callable[[str], object] | None = None) -> None:
        self._name = name
        self._report = _write_to_stderr if report is None else report
        self._failed = False

    def report_failure(self, error: Exception) -> None:
        """Report that writing to this output failed, unless the previous write failed too."""
        if self._failed:
            return
        self._failed = True
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self._report(
            f"{self._name} cannot be written ({reason}): "
            "training continues, but its output there is lost until writing works again\n"
        )

    def report_success(self) -> None:
        """Report that writing to this output works again, if the previous write failed."""
        if self._failed:
            self._failed = False
            self._report(f"{self._name} is written again\n")


def _write_to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be gone too
        sys.stderr.write(text)
        sys.stderr.flush()


class LineFile:
    """Text file to which lines are appended. Each line is written immediately and completely.

    A line that cannot be written is lost; the lines before it stay intact.

    Args:
        flag: text that introduces the path in error messages, such as the flag --metrics-file.
        path: path of the file. Its folder is created.
        append: keep existing lines (a resumed run) instead of starting a new file.

    Raises:
        ValueError: the file cannot be opened.
    """

    def __init__(self, flag: str, path: str | Path, *, append: bool) -> None:
        path = Path(path)
        self._status = OutputStatus(f"{flag} {path}")
        try:
            check_output(flag, path)
            path.parent.mkdir(parents=True, exist_ok=True)
            has_partial_line = append and _has_partial_line(path)
            if not append:
                path.open("wb").close()
            self._file = path.open("ab", buffering=0)  # append mode, so that writing continues at the end after a truncation
        except OSError as error:
            raise ValueError(
                f"{flag} {path} cannot be written ({error.strerror}). Give a path in a folder that you may write to."
            ) from error
        if has_partial_line:  # the previous run was killed while it wrote a line
            self._write(b"\n")

    def write(self, line: str) -> None:
        """Append a line. If that fails, the line is lost and the error is reported on stderr."""
        self._write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        num_written = 0
        try:
            while num_written < len(data):
                num_written += self._file.write(data[num_written:])
        except OSError as error:
            if num_written:
                with suppress(OSError):  # a partial line would make the next line unreadable
                    self._file.truncate(self._file.seek(0, os.SEEK_END) - num_written)
            self._status.report_failure(error)
        else:
            self._status.report_success()


class Printer:
    """Printer of a run's log to stdout.

    Lines are printed immediately. On a terminal, status lines below the log can be updated in place.

    Lines do not go through Python's stream buffer. Otherwise, if stdout failed, Python would try to write the buffer again at exit
    and change the exit code to 120.

    The cursor stays in front of the status lines. Output of other code therefore overwrites the status lines, and is never
    overwritten itself.
    """

    def __init__(self) -> None:
        self._status = OutputStatus("stdout")
        self._status_text = ""

    @property
    def is_terminal(self) -> bool:
        """Whether stdout is a terminal that can move its cursor."""
        try:
            return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        except ValueError:  # stdout is closed
            return False

    @property
    def width(self) -> int:
        """Width of the terminal, in characters."""
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    @property
    def is_ascii_only(self) -> bool:
        """Whether stdout can print only ASCII characters."""
        return "utf" not in (sys.stdout.encoding or "").lower()

    def print_line(self, line: str) -> None:
        """Print a line of the log, above the status lines."""
        self._write(f"{ERASE_TO_SCREEN_END}{line}\n{self._status_text}" if self._status_text else f"{line}\n")

    def show_status(self, lines: Sequence[str]) -> None:
        """Replace the status lines below the log. Call this only on a terminal (`is_terminal`)."""
        erase = ERASE_TO_SCREEN_END if self._status_text else ""
        max_width = self.width - 1  # a line of full width would wrap
        self._status_text = (
            "\n".join(line[:max_width] for line in lines) + (f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else "") + "\r"
        )
        self._status_text = self._status_text if lines else ""
        if erase or self._status_text:
            self._write(erase + self._status_text)

    def _write(self, text: str) -> None:
        stream: TextIO = sys.stdout
        try:
            stream.flush()
            try:
                fd = stream.fileno()
            except UnsupportedOperation:  # a replacement of stdout without a file descriptor, as in a notebook
                print(text, end="", flush=True)
                return
            data = text.encode(stream.encoding or "utf-8", "backslashreplace")
            while data:
                data = data[os.write(fd, data) :]
        except OSError as error:
            self._status.report_failure(error)
        else:
            self._status.report_success()


ERASE_TO_SCREEN_END = "\r\x1b[J"
"""Control sequence that erases from the start of the cursor's line to the end of the screen (ECMA-48)."""


def _has_partial_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with open_regular(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
