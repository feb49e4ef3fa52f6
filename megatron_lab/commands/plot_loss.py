"""Draw the losses of a run from its history file: training and validation loss by iteration and tokens, and the learning rate.

    python tools/plot_loss.py RUN_FOLDER [--output FILE]

A run updates its own picture, `loss.png` in its folder, once a minute with this program. The program can also be called by hand at
any time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.optional_packages import import_optional
from megatron.config.regular_file import check_output, check_replaceable
from megatron.metrics.history import HISTORY_FILE, History, read_history
from megatron.metrics.log_line import format_compact
from megatron_lab.commands.parser import ToolParser
from megatron_lab.pages.curves import DASHES, find_limits, smooth
from megatron_lab.pages.html import COLOURS
from megatron_lab.pages.run_charts import SMOOTHING_DIVISOR
from megatron_lab.pages.run_facts import (
    find_last_loss,
    format_loss,
    list_evaluation_losses,
    list_validation_sets,
    name_validation_set,
)
from megatron_lab.pages.run_marks import MARK_COLOURS, list_marks

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROGRAM = "plot_loss.py"
PICTURE = "loss.png"
_MAX_POINTS = 4000
_MAX_MARKERS = 60
"""Maximum number of evaluations that have a marker each."""
_MIN_TICK_DISTANCE = 0.05
"""Minimum distance of two labels on the tokens axis, as a share of its length."""
_GREY = "#6b7280"
_LINE_STYLES: Mapping[str, Any] = {"restart": (0, (2, 3)), "extended": (0, (5, 2)), "rewind": (0, (4, 2, 1, 2)), "early end": "-"}
"""Line style of each type of mark (`run_marks.py`) that the plot shows as a vertical line."""


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
    smoothed_loss = smooth(loss, max(1, len(loss) // SMOOTHING_DIVISOR // 2))

    fig = Figure(figsize=(10, 6.4), dpi=120)
    FigureCanvasAgg(fig)
    loss_ax, rate_ax = fig.subplots(2, 1, sharex=True, height_ratios=(4.2, 1), gridspec_kw={"hspace": 0.09})
    fig.subplots_adjust(left=0.08, right=0.97, top=0.885, bottom=0.17)
    for ax in (loss_ax, rate_ax):
        ax.grid(color="#e4e6ea", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)

    _plot_step_losses(loss_ax, iterations, loss)
    loss_ax.plot(iterations, smoothed_loss, color=COLOURS[0], linewidth=2, label="training, smoothed")
    validation_losses = _plot_validation_losses(loss_ax, history)
    loss_ax.set_xlim(*_add_margin(iterations[0], iterations[-1]))
    _set_loss_range(loss_ax, iterations, loss, validation_losses)
    _draw_marks((loss_ax, rate_ax), history)
    loss_ax.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    loss_ax.set_ylabel("loss (nats per token)")
    fig.text(0.08, 0.965, _format_title(history), fontsize=10.5)
    legend_style = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.4, "frameon": False}
    loss_ax.legend(ncols=5, fontsize=9, **legend_style)

    rate_ax.plot(iterations, get_column("learning_rate"), color=_GREY, linewidth=1.5)
    rate_ax.set_ylim(bottom=0)
    rate_ax.text(0.99, 0.93, "learning rate", transform=rate_ax.transAxes, ha="right", va="top", color=_GREY)
    rate_ax.yaxis.set_major_formatter(lambda value, _: _format_rate(value))
    rate_ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    rate_ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 2.5, 5, 10]))
    rate_ax.xaxis.set_major_formatter(lambda value, _: format_compact(value))
    rate_ax.set_xlabel("iteration", labelpad=1)
    token_ax = rate_ax.twiny()
    token_ax.spines[["top", "right", "left"]].set_visible(False)
    token_ax.spines["bottom"].set_position(("outward", 34))
    token_ax.xaxis.set_ticks_position("bottom")
    token_ax.xaxis.set_label_position("bottom")
    token_ax.set_xlim(rate_ax.get_xlim())
    ticks = _find_token_ticks(iterations, tokens)
    token_ax.set_xticks([iteration for iteration, _ in ticks], [format_compact(tick) for _, tick in ticks])
    token_ax.set_xlabel("tokens", labelpad=1)

    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    check_replaceable(path)
    try:
        fig.savefig(temporary_path, format=path.suffix.removeprefix(".") or "png")
        temporary_path.replace(path)
    finally:
        with suppress(OSError):
            temporary_path.unlink(missing_ok=True)


def _find_token_ticks(iterations: NDArray[Any], tokens: NDArray[Any]) -> list[tuple[float, float]]:
    """Return (iteration, tokens) of each tick of the tokens axis.

    A run that skips data in a rewind passes several round numbers of tokens at one iteration. Only the first is labelled, because
    the labels would overlap.
    """
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    ticks: list[tuple[float, float]] = []
    for value in MaxNLocator(9, steps=[1, 2, 5, 10]).tick_values(tokens[0], tokens[-1]):
        position = float(np.interp(value, tokens, iterations))
        is_apart = not ticks or position - ticks[-1][0] > _MIN_TICK_DISTANCE * (iterations[-1] - iterations[0])
        ticks += [(position, value)] if tokens[0] <= value <= tokens[-1] and is_apart else []
    return ticks


def _add_margin(first: float, last: float) -> tuple[float, float]:
    margin = max(0.5, 0.01 * (last - first))
    return first - margin, last + margin


def _plot_step_losses(ax: Any, iterations: NDArray[Any], loss: NDArray[Any]) -> None:
    """Plot the loss of every step. For a long run, plot instead the range between minimum and maximum over groups of neighbouring
    steps."""
    import numpy as np

    if len(loss) <= _MAX_POINTS:
        markers = {"marker": "o", "markersize": 3} if len(loss) < 3 else {}
        ax.plot(iterations, loss, color=COLOURS[0], alpha=0.3, linewidth=0.9, label="training, each step", **markers)
        return
    starts = np.arange(0, len(loss), -(-len(loss) // _MAX_POINTS))
    low, high = np.fmin.reduceat(loss, starts), np.fmax.reduceat(loss, starts)
    label = "training, range of the steps"
    ax.fill_between(iterations[starts], low, high, color=COLOURS[0], alpha=0.25, linewidth=0, label=label)


def _plot_validation_losses(ax: Any, history: History) -> list[list[float]]:
    """Plot a curve for each validation set, and one for the mean of several sets. Returns the losses of each curve."""
    keys, losses = list_validation_sets(history), list[list[float]]()
    for index, key in enumerate(keys):
        points = list_evaluation_losses(history, key)
        markers = {"marker": "o", "markersize": 4.5} if len(points) <= _MAX_MARKERS else {}
        dashes = [float(length) / 2 for length in DASHES[index % len(DASHES)].split()]
        style = (0, tuple(dashes)) if dashes else "-"
        colour, label = COLOURS[(1 + index) % len(COLOURS)], name_validation_set(key, keys)
        ax.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, linestyle=style, label=label, **markers)
        losses.append([loss for _, loss in points])
    return losses


def _set_loss_range(
    ax: Any,
    iterations: NDArray[Any],
    loss: NDArray[Any],
    validation_losses: Sequence[Sequence[float]],
) -> None:
    """Set the vertical range of the plot so that all losses are visible, except for outliers among the step losses and the start of
    a long run (`find_limits`). Triangles at the edges mark what is not visible."""
    import numpy as np

    lower, upper = find_limits([loss.tolist(), *validation_losses])
    values = np.concatenate([loss, *validation_losses])
    values = values[np.isfinite(values)]
    if not values.size:
        return
    low, high = float(values.min()) if lower is None else lower, float(values.max()) if upper is None else upper
    margin = max(0.06 * (high - low), 0.01)
    low, high = low - margin, high + margin
    ax.set_ylim(low, high)
    is_outside = np.isfinite(loss) & ((loss > high) | (loss < low))
    if not is_outside.any():
        return
    heights, label = np.where(loss[is_outside] > high, 1.0, 0.0), "outside the range"
    transform, style = ax.get_xaxis_transform(), {"marker": "^", "markersize": 5, "linestyle": "", "clip_on": False}
    ax.plot(iterations[is_outside], heights, transform=transform, color=COLOURS[0], label=label, **style)
    first = int(np.flatnonzero(np.isfinite(loss))[0])
    if is_outside[first] and loss[first] > high:
        text = f"starts at {format_loss(float(loss[first]))}"
        ax.annotate(text, (0.035, 0.975), xycoords="axes fraction", va="top", fontsize=9, color=_GREY)


def _draw_marks(axes: Sequence[Any], history: History) -> None:
    """Draw vertical lines where the run was started again, extended, rewound or ended early, and triangles at its loss spikes."""
    marks = list_marks(history)
    for name, style in _LINE_STYLES.items():
        iterations = [mark.iteration for mark in marks if mark.type == name]
        for ax in axes if iterations else ():
            colour, transform = MARK_COLOURS[name][0], ax.get_xaxis_transform()
            ax.vlines(iterations, 0, 1, transform=transform, color=colour, linewidth=1.1, linestyle=style, label=name)
    spikes = [mark.iteration for mark in marks if mark.type == "loss spike"]
    if spikes:
        style = {"color": MARK_COLOURS["loss spike"][0], "marker": "v", "linestyle": ""}
        axes[0].plot(spikes, [0.985] * len(spikes), transform=axes[0].get_xaxis_transform(), label="loss spike", **style)


def _format_rate(value: float) -> str:
    """Format a learning rate as people write it, such as 2.5e-4."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def _format_title(history: History) -> str:
    last = history.steps[-1]
    total = history.starts[-1].get("total_iterations") if history.starts else None
    entries = [f"iteration {last.iteration:,}{f' of {total:,}' if total else ''}", f"{format_compact(last.tokens)} tokens"]
    last_loss = find_last_loss(history)
    entries += [] if last_loss is None else [f"training loss {last_loss} ({last_loss.definition})"]
    keys = list_validation_sets(history)
    validation_losses = list_evaluation_losses(history) or [loss for key in keys for loss in list_evaluation_losses(history, key)]
    name = "validation" if len(keys) == 1 else "validation (mean)"
    return " · ".join([*entries, *(f"{name} {format_loss(loss)}" for _, loss in validation_losses[-1:])])


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
