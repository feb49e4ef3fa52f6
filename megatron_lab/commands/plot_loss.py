"""Draw the losses of a run from its history file: training and validation loss by iteration and tokens, and the learning rate.

    python tools/plot_loss.py RUN_FOLDER [--output FILE]

A run updates its own picture, `loss.png` in its folder, once a minute with this program. The program can also be called by hand at
any time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.optional_packages import import_optional
from megatron.config.regular_file import check_output, check_replaceable
from megatron.metrics.history import HISTORY_FILE, History, read_history
from megatron.metrics.log_line import format_compact
from megatron_lab.commands.parser import ToolParser
from megatron_lab.pages.curves import smooth

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROGRAM = "plot_loss.py"
PICTURE = "loss.png"
_SMOOTHING_DIVISOR = 50
"""The smoothed curve is the moving mean over 1/50 of the steps."""
_CLIPPED_FRACTION = 0.02
"""Fraction of the steps, at the start of a long run, whose losses may lie above the visible range. Otherwise the rest of the
curve would look flat."""
_MIN_CLIPPED_STEPS = 100
_MAX_POINTS = 4000
_BLUE, _ORANGE, _RED, _GREY = "#2563a8", "#d9730d", "#c0392b", "#8a8f98"


def save_loss_plot(history: History, path: Path) -> None:
    """Write the loss plot of a run to a file, atomically: after an error the old file is unchanged.

    Args:
        history: recorded metrics of the run, with at least one step.
        path: file to write; its suffix selects the format (png without a suffix).

    Raises:
        OSError: the file cannot be written.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    def get_column(name: str) -> NDArray[Any]:
        return np.array([getattr(step, name) for step in history.steps], dtype=float)

    iterations, tokens, loss = get_column("iteration"), get_column("tokens"), get_column("lm_loss")
    smoothed_loss = smooth(loss, max(1, len(loss) // _SMOOTHING_DIVISOR // 2))
    validation_losses = [
        (record["iteration"], record["validation_loss"])
        for record in history.evaluations
        if record.get("validation_loss") is not None
    ]

    fig = Figure(figsize=(10, 6.4), dpi=120)
    FigureCanvasAgg(fig)
    loss_ax, rate_ax = fig.subplots(2, 1, sharex=True, height_ratios=(4.2, 1), gridspec_kw={"hspace": 0.09})
    fig.subplots_adjust(left=0.08, right=0.97, top=0.92, bottom=0.17)
    for ax in (loss_ax, rate_ax):
        ax.grid(color="#e4e6ea", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)

    _plot_step_losses(loss_ax, iterations, loss)
    loss_ax.plot(iterations, smoothed_loss, color=_BLUE, linewidth=2, label="training, smoothed")
    if validation_losses:
        markers = {"marker": "o", "markersize": 4.5} if len(validation_losses) <= 60 else {}
        loss_ax.plot(*zip(*validation_losses, strict=True), color=_ORANGE, linewidth=1.6, label="validation", **markers)
    loss_ax.set_xlim(*_add_margin(iterations[0], iterations[-1]))
    _set_loss_range(loss_ax, iterations, loss, smoothed_loss, [value for _, value in validation_losses])
    _mark_events(loss_ax, history, iterations)
    loss_ax.set_ylabel("loss (nats per token)")
    low, high = loss_ax.get_ylim()
    corner = "lower right" if smoothed_loss[-1] > (low + high) / 2 else "upper right"
    loss_ax.legend(loc=corner, frameon=True, framealpha=0.9, edgecolor="none")
    loss_ax.set_title(_format_title(history, smoothed_loss), loc="left", fontsize=11)

    rate_ax.plot(iterations, get_column("learning_rate"), color=_GREY, linewidth=1.5)
    rate_ax.set_ylim(bottom=0)
    rate_ax.text(0.99, 0.93, "learning rate", transform=rate_ax.transAxes, ha="right", va="top", color=_GREY)
    rate_ax.yaxis.set_major_formatter(lambda value, _: f"{value:.1e}".replace("e-0", "e-") if value else "0")
    rate_ax.yaxis.set_major_locator(MaxNLocator(3))
    rate_ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
    rate_ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    rate_ax.set_xlabel("iteration", labelpad=1)
    token_ax = rate_ax.twiny()
    token_ax.spines[["top", "right", "left"]].set_visible(False)
    token_ax.spines["bottom"].set_position(("outward", 34))
    token_ax.xaxis.set_ticks_position("bottom")
    token_ax.xaxis.set_label_position("bottom")
    token_ax.set_xlim(rate_ax.get_xlim())
    token_ticks = [
        tick for tick in MaxNLocator(9, steps=[1, 2, 5, 10]).tick_values(tokens[0], tokens[-1]) if tokens[0] <= tick <= tokens[-1]
    ]
    token_ax.set_xticks(np.interp(token_ticks, tokens, iterations), [format_compact(tick) for tick in token_ticks])
    token_ax.set_xlabel("tokens", labelpad=1)

    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    check_replaceable(path)
    try:
        fig.savefig(temporary_path, format=path.suffix.removeprefix(".") or "png")
        temporary_path.replace(path)
    finally:
        with suppress(OSError):
            temporary_path.unlink(missing_ok=True)


def _add_margin(first: float, last: float) -> tuple[float, float]:
    margin = max(0.5, 0.01 * (last - first))
    return first - margin, last + margin


def _plot_step_losses(ax: Any, iterations: NDArray[Any], loss: NDArray[Any]) -> None:
    """Plot the loss of every step. For a long run, plot instead the range between minimum and maximum over groups of neighbouring
    steps."""
    import numpy as np

    if len(loss) <= _MAX_POINTS:
        markers = {"marker": "o", "markersize": 3} if len(loss) < 3 else {}
        ax.plot(iterations, loss, color=_BLUE, alpha=0.3, linewidth=0.9, label="training, each step", **markers)
        return
    starts = np.arange(0, len(loss), -(-len(loss) // _MAX_POINTS))
    low, high = np.fmin.reduceat(loss, starts), np.fmax.reduceat(loss, starts)
    ax.fill_between(iterations[starts], low, high, color=_BLUE, alpha=0.25, linewidth=0, label="training, range of the steps")


def _set_loss_range(
    ax: Any, iterations: NDArray[Any], loss: NDArray[Any], smoothed_loss: NDArray[Any], validation_losses: list[float]
) -> None:
    """Set the vertical range of the plot so that all losses are visible, except for outliers among the step losses.

    In a long run, the first steps do not count, because their losses may be far above all later ones. They are cut off at the top.
    """
    import numpy as np

    num_clipped = int(len(loss) * _CLIPPED_FRACTION) if len(loss) >= _MIN_CLIPPED_STEPS else 0
    visible = np.concatenate(
        [smoothed_loss[num_clipped:], np.percentile(_select_finite(loss[num_clipped:]), [0.5, 99.5]), validation_losses]
    )
    visible = visible[np.isfinite(visible)]
    low, high = float(visible.min()), float(visible.max())
    margin = max(0.06 * (high - low), 0.01)
    ax.set_ylim(low - margin, high + margin)
    first = loss[np.isfinite(loss)][:1]
    if num_clipped and first.size and first[0] > high + margin:
        ax.annotate(f"begins at {first[0]:.2f}", (0.075, 0.985), xycoords="axes fraction", va="top", fontsize=9, color=_GREY)


def _select_finite(values: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    finite: NDArray[Any] = values[np.isfinite(values)]
    return finite if finite.size else np.zeros(1)


def _mark_events(ax: Any, history: History, iterations: NDArray[Any]) -> None:
    restarts = [record["iteration"] for record in history.starts if iterations[0] < record["iteration"] <= iterations[-1]]
    spikes = [
        record["iteration"] for record in history.events if record["event"] == "spike" and record["iteration"] <= iterations[-1]
    ]
    transform = ax.get_xaxis_transform()
    if restarts:
        ax.vlines(restarts, 0, 1, transform=transform, color=_GREY, linewidth=0.8, linestyle=(0, (2, 3)), label="started again")
    if spikes:
        ax.plot(spikes, [0.985] * len(spikes), transform=transform, color=_RED, marker="v", linestyle="", label="loss spike")


def _format_title(history: History, smoothed_loss: NDArray[Any]) -> str:
    last = history.steps[-1]
    total = history.starts[-1].get("total_iterations") if history.starts else None
    of = f" of {total:,}" if total else ""
    entries = [
        f"iteration {last.iteration:,}{of}",
        f"{format_compact(last.tokens)} tokens",
        f"training loss {smoothed_loss[-1]:.3f}",
    ]
    validation_losses = [record["validation_loss"] for record in history.evaluations if record.get("validation_loss") is not None]
    return " · ".join([*entries, *(f"validation {loss:.3f}" for loss in validation_losses[-1:])])


def main(arguments: list[str] | None = None) -> int:
    """Draw the losses of the run that the command line names. Returns the exit status: 0, or 1 if there is no history or the
    picture cannot be written."""
    if arguments is None:
        os.nice(5)  # give way to a run on this machine
    parser = ToolParser(prog=PROGRAM, description=__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="RUN_FOLDER", help="Folder of --save, or of --tensorboard-dir if the run has no --save."
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"Write a .png, .svg or .pdf file (default {PICTURE} in the run's folder)."
    )
    args = parser.parse_args(arguments)
    try:
        history = read_history(args.folder)
        if not history.steps:
            print(f"{PROGRAM}: {args.folder}/{HISTORY_FILE} has no steps yet")
            return 0
        import_optional("matplotlib", f"{PROGRAM} needs matplotlib")
        output = args.output or (args.folder if args.folder.is_dir() else args.folder.parent) / PICTURE
        check_output("--output", output)
        try:
            save_loss_plot(history, output)
        except (ValueError, OSError) as error:  # no format has the suffix, or there is no such folder
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"--output {output} cannot be written: {reason}. Give another path.") from error
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    return 0
