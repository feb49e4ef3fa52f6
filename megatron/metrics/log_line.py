"""The lines that training prints: for people, or byte for byte as Megatron-LM does, for programs that parse them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from io import UnsupportedOperation
from pathlib import Path
from typing import Literal, Protocol, TextIO


def perplexity(loss: float) -> float:
    """exp(loss), cut off at exp(20) so that a bad loss does not overflow."""
    return math.exp(min(20.0, loss))


@dataclass(frozen=True, kw_only=True)
class LineNumbers:
    """The numbers of a log line. Where one is None, it is not in the line."""

    time: datetime
    """When the line is printed."""
    iteration: int
    """The step just made; the first is 1."""
    train_iterations: int
    """Steps of the whole run."""
    consumed_samples: int
    """Sequences read so far."""
    elapsed_ms: float
    """Milliseconds for one iteration, mean over the interval."""
    learning_rate: float
    """Learning rate of the last update."""
    global_batch_size: int
    """Sequences of the last step."""
    lm_loss: float | None
    """Mean over the interval; None when no step of it had a loss."""
    z_loss: float | None = None
    """Mean over the interval of what --z-loss-coeff adds to what is minimised."""
    mtp_loss: float | None = None
    """Mean over the interval of the loss of --mtp-num-layers, without its factor."""
    load_balancing_loss: float | None = None
    """Mean over the interval and the layers with experts, without its coefficient."""
    moe_z_loss: float | None = None
    """Such a mean of the routers' z-loss."""
    busiest_expert: float | None = None
    """What the busiest expert gets, as a multiple of the mean of its layer; the largest of the interval."""
    dropped_share: float | None = None
    """Share of the experts' choices that were dropped."""
    loss_scale: float
    """Scale of the loss."""
    skipped: int
    """Steps of the interval without an update."""
    nans: int
    """Steps of the interval with a NaN."""
    tflops_per_device: float | None = None
    """Throughput, with --log-throughput."""
    grad_norm: float | None = None
    """Global gradient norm of the last update; None when there was none."""
    num_zeros: float | None = None
    """Zeros in the gradient, with --log-num-zeros-in-grad."""
    params_norm: float | None = None
    """Norm of all parameters, with --log-params-norm."""
    context_imbalance: float | None = None
    """What the busiest context rank attends to, as a multiple of the mean; shown where documents make it uneven."""
    gradient_noise: float | None = None
    """Noise scale of the gradient over the interval in sequences, with --log-gradient-noise."""
    max_attention_logit: float | None = None
    """Largest score of attention over the interval, with --log-max-attention-logit."""
    tokens_per_s: float | None = None
    """Tokens of all ranks in a second; in the short line alone."""
    mfu: float | None = None
    """Share of the devices' peak, where that is known; in the short line alone."""
    seconds_left: float | None = None
    """Time to the end of the run, once it can be told; in the short line alone."""
    own: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the user's own, by name."""

    @property
    def shown_imbalance(self) -> float | None:
        """The imbalance, where there is one."""
        return self.context_imbalance if self.context_imbalance is not None and self.context_imbalance > 1.0 else None


def megatron_line(line: LineNumbers) -> str:
    """One line of progress as Megatron-LM prints it, without a newline."""
    optional = [
        (line.lm_loss, "lm loss: {:.6E}"),
        (line.z_loss, "z loss: {:.6E}"),
        (line.mtp_loss, "mtp loss: {:.6E}"),
        (line.load_balancing_loss, "load_balancing_loss: {:.6E}"),
        (line.moe_z_loss, "router z loss: {:.6E}"),
        (line.busiest_expert, "busiest expert: {:.3f}"),
        (line.dropped_share, "dropped: {:.1%}"),
        (line.loss_scale, "loss scale: {:.1f}"),
        (line.grad_norm, "grad norm: {:.3f}"),
        (line.num_zeros, "num zeros: {:.1f}"),
        (line.params_norm, "params norm: {:.3f}"),
        (line.gradient_noise, "gradient noise scale: {:.1f}"),
        (line.shown_imbalance, "context imbalance: {:.3f}"),
        (line.max_attention_logit, "max attention logit: {:.3f}"),
    ]
    fields = [
        f" [{line.time:%Y-%m-%d %H:%M:%S.%f}] iteration {line.iteration:8d}/{line.train_iterations:8d}",
        f"consumed samples: {line.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {line.elapsed_ms:.1f}",
    ]
    if line.tflops_per_device is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {line.tflops_per_device:.1f}")
    fields += [f"learning rate: {line.learning_rate:.6E}", f"global batch size: {line.global_batch_size:5d}"]
    fields += [form.format(value) for value, form in optional if value is not None]
    fields += [f"{name}: {value:.6E}" for name, value in line.own.items()]
    fields += [f"number of skipped iterations: {line.skipped:3d}", f"number of nan iterations: {line.nans:3d}"]
    return " | ".join(fields) + " |"


def short_line(line: LineNumbers) -> str:
    """One line of progress for people: `it 120/5000 | loss 3.41 | norm 0.82 | lr 3e-4 | 41k tok/s | 38 % MFU | 2 h 14 min left`."""
    flops = None if line.tflops_per_device is None else 1e12 * line.tflops_per_device
    optional = [
        (line.lm_loss, "loss {:.3f}"),
        (line.z_loss, "z loss {:.2g}"),
        (line.mtp_loss, "mtp loss {:.3f}"),
        (line.load_balancing_loss, "balance loss {:.4g}"),
        (line.moe_z_loss, "router z loss {:.3g}"),
        (line.busiest_expert, "busiest expert {:.2f}"),
        (line.dropped_share, "{:.1%} dropped"),
        (line.loss_scale if line.loss_scale != 1.0 else None, "loss scale {:.0f}"),
        (line.grad_norm, "norm {:.3g}"),
        (line.num_zeros, "{:.0f} zeros"),
        (line.params_norm, "weights' norm {:.4g}"),
        (line.gradient_noise, "noise scale {:.4g}"),
        (line.shown_imbalance, "imbalance {:.2f}"),
        (line.max_attention_logit, "logit {:.3g}"),
    ]
    fields = [f"it {line.iteration:{len(str(line.train_iterations))}d}/{line.train_iterations}"]
    fields += [form.format(value) for value, form in optional if value is not None]
    fields += [f"{name} {value:.4g}" for name, value in line.own.items()]
    fields.append(f"lr {line.learning_rate:.2e}".replace("e-0", "e-").replace("e+00", ""))
    if line.tokens_per_s is not None:
        fields.append(f"{in_short(line.tokens_per_s)} tok/s")
    if flops is not None:
        rate = in_short(flops, "kMGTP")
        fields.append(f"{rate[:-1]} {rate[-1]}FLOP/s" if rate[-1].isalpha() else f"{rate} FLOP/s")
    if line.mfu is not None:
        fields.append(f"{100 * line.mfu:.0f} % MFU")
    fields += [f"{count} {what}" for count, what in ((line.skipped, "skipped"), (line.nans, "NaN")) if count]
    if line.seconds_left is not None:
        fields.append(f"{duration(line.seconds_left)} left")
    return " | ".join(fields)


def in_short(number: float, units: str = "kMBT") -> str:
    """A number with three digits and a unit for each factor of 1,000: 41.2k, 1.5M, 300B."""
    power = 0
    while abs(number) >= 999.5 and power < len(units):
        number, power = number / 1000, power + 1
    digits = f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
    return digits + ("", *units)[power]


def duration(seconds: float) -> str:
    """A time in its two largest units: 2 h 14 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {rest:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def progress_bar(share: float, width: int, *, plain: bool = False) -> str:
    """A bar of a share of so many characters, with the share behind it. `plain` takes ASCII alone."""
    full, empty = "#-" if plain else "━─"
    room = max(4, width - 7)
    done = int(room * min(1.0, max(0.0, share)))
    return f"{full * done}{empty * (room - done)} {100 * share:3.0f} %"


def validation_lines(
    iteration: int, loss: float, split: Literal["validation", "test"] = "validation", *, mtp_loss: float | None = None
) -> list[str]:
    """A rule of dashes, the loss with its perplexity, a rule.

    Args:
        iteration: The last step before the evaluation.
        loss: Mean over the tokens of the evaluation.
        split: Which part of the data it is; the test split is named in the line.
        mtp_loss: The loss of --mtp-num-layers, without its factor; None without them.
    """
    place = f"iteration {iteration}" if split == "validation" else f"iteration {iteration} on test set"
    line = f" validation loss at {place} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    if mtp_loss is not None:
        line += f"mtp loss value: {mtp_loss:.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def short_validation_line(
    iteration: int, loss: float, split: Literal["validation", "test"] = "validation", *, mtp_loss: float | None = None
) -> str:
    """The same for people, in one line."""
    further = "" if mtp_loss is None else f" | mtp loss {mtp_loss:.3f}"
    return f"{split} at it {iteration} | loss {loss:.3f} | perplexity {perplexity(loss):.4g}{further}"


# ---- Output of a run that may fail without ending it: a full disk, a closed pipe. What fails is told once, on stderr.


class Sink(Protocol):
    """Takes numbers by name. Only the rank that logs opens one.

    Names are those of the metrics file: lm_loss, z_loss, mtp_loss, load_balancing_loss, moe_z_loss, busiest_expert, dropped_share,
    grad_norm, learning_rate, loss_scale, skipped, spikes, elapsed_ms, tokens_per_s, tflops_per_device, global_batch_size,
    num_zeros, params_norm, gradient_noise, context_imbalance, max_attention_logit, validation_loss, validation_mtp_loss, test_loss,
    test_mtp_loss, goodput, and any other.
    """

    def scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Record values of step `iteration`, after `samples` sequences."""

    def close(self) -> None:
        """Write what is still in memory."""


class Output:
    """Whether one output of the run works.

    Args:
        name: what a user knows it by.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed = False

    def failed(self, error: Exception) -> None:
        """Tell that something could not be written, unless it was told before."""
        if self._failed:
            return
        self._failed = True
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        with suppress(OSError, ValueError):  # stderr may be gone too
            sys.stderr.write(f"{self._name} cannot be written ({reason}): training goes on, what comes meanwhile is lost there\n")
            sys.stderr.flush()

    def works(self) -> None:
        """Something was written."""
        if self._failed:
            self._failed = False
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{self._name} is written again\n")
                sys.stderr.flush()


class LineFile:
    """A file of lines, each written at once and whole. A line that cannot be written is lost; those before stay as they are.

    Args:
        flag: the flag that names it.
        path: its folder is made.
        append: keep what is there (a resumed run) instead of beginning a new file.

    Raises:
        ValueError: it cannot be opened.
    """

    def __init__(self, flag: str, path: str | Path, *, append: bool) -> None:
        path = Path(path)
        self._output = Output(f"{flag} {path}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            inside_line = append and _ends_inside_line(path)
            if not append:
                path.open("wb").close()
            self._file = path.open("ab", buffering=0)  # so that it goes on at the end, also after what is cut off
        except OSError as error:
            raise ValueError(
                f"{flag} {path} cannot be written ({error.strerror}). Give a path in a folder that you may write to."
            ) from error
        if inside_line:  # a run was killed while it wrote
            self._write(b"\n")

    def write(self, line: str) -> None:
        """Add a line."""
        self._write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            if written:
                with suppress(OSError):  # half a line would make the next one unreadable
                    self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
            self._output.failed(error)
        else:
            self._output.works()


class Printer:
    """Prints lines of a run's log, each at once; on a terminal with lines below them that change.

    What Python keeps in the buffer of a stream that fails, it would try to write again at the end, and turn the exit code to 120.
    So a line goes past that buffer.

    The cursor stays before the lines that change. So what others print goes over these, and is not itself printed over.
    """

    def __init__(self) -> None:
        self._output = Output("stdout")
        self._below = ""

    @property
    def on_terminal(self) -> bool:
        """Whether people look at what is printed, on a terminal that can move its cursor."""
        try:
            return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        except ValueError:  # it is closed
            return False

    @property
    def width(self) -> int:
        """Characters of a line on the terminal."""
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    @property
    def plain(self) -> bool:
        """Whether ASCII alone can be printed."""
        return "utf" not in (sys.stdout.encoding or "").lower()

    def say(self, line: str) -> None:
        """Print a line."""
        self._write(f"{_ERASE}{line}\n{self._below}" if self._below else f"{line}\n")

    def show(self, lines: Sequence[str]) -> None:
        """On a terminal: show these lines below what was printed, in place of those that were shown before."""
        erase = _ERASE if self._below else ""
        room = self.width - 1  # a full line would take two
        self._below = "\n".join(line[:room] for line in lines) + (f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else "") + "\r"
        self._below = self._below if lines else ""
        if erase or self._below:
            self._write(erase + self._below)

    def _write(self, text: str) -> None:
        stream: TextIO = sys.stdout
        try:
            stream.flush()
            try:
                file = stream.fileno()
            except UnsupportedOperation:  # a stand-in, as in a notebook
                print(text, end="", flush=True)
                return
            data = text.encode(stream.encoding or "utf-8", "backslashreplace")
            while data:
                data = data[os.write(file, data) :]
        except OSError as error:
            self._output.failed(error)
        else:
            self._output.works()


_ERASE = "\r\x1b[J"
"""From the beginning of the cursor's line to the end of the screen (ECMA-48)."""


def _ends_inside_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
