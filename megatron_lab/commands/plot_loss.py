"""Draw how the losses of a run went, from its record: training and validation loss by iterations and tokens, and the learning rate.

    python tools/plot_loss.py RUN_FOLDER [--output FILE]

A run has its own picture, `loss.png` in its folder, drawn by this program once a minute. It can be called by hand at any time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.extras import optional
from megatron.metrics.history import HISTORY, History, read_history
from megatron.metrics.log_line import in_short
from megatron_lab.commands.parser import ToolParser
from megatron_lab.pages.curves import smoothed

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROGRAM = "plot_loss.py"
PICTURE = "loss.png"
_SMOOTHED_OVER = 50
"""The smoothed curve is a mean over this part of the steps."""
_CUT_BEHIND = 0.02
"""In a run of many steps, losses of this first share of it may stand above the picture: what comes later would be a flat line."""
_MANY = 100
_MOST_POINTS = 4000
_BLUE, _ORANGE, _RED, _GREY = "#2563a8", "#d9730d", "#c0392b", "#8a8f98"


def draw(history: History, path: Path) -> None:
    """Draw a record that has steps into a file, which is then whole or as it was.

    Raises:
        OSError: it cannot be written.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    def column(name: str) -> NDArray[Any]:
        return np.array([getattr(step, name) for step in history.steps], dtype=float)

    iterations, tokens, loss = column("iteration"), column("tokens"), column("lm_loss")
    calm = smoothed(loss, max(1, len(loss) // _SMOOTHED_OVER // 2))
    held_out = [
        (line["iteration"], line["validation_loss"]) for line in history.evaluations if line.get("validation_loss") is not None
    ]

    figure = Figure(figsize=(10, 6.4), dpi=120)
    FigureCanvasAgg(figure)
    top, strip = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 1), gridspec_kw={"hspace": 0.09})
    figure.subplots_adjust(left=0.08, right=0.97, top=0.92, bottom=0.17)
    for axes in (top, strip):
        axes.grid(color="#e4e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)

    _draw_raw(top, iterations, loss)
    top.plot(iterations, calm, color=_BLUE, linewidth=2, label="training, smoothed")
    if held_out:
        marked = {"marker": "o", "markersize": 4.5} if len(held_out) <= 60 else {}
        top.plot(*zip(*held_out, strict=True), color=_ORANGE, linewidth=1.6, label="validation", **marked)
    top.set_xlim(*_with_margin(iterations[0], iterations[-1]))
    _set_range(top, iterations, loss, calm, [value for _, value in held_out])
    _mark_events(top, history, iterations)
    top.set_ylabel("loss (nats per token)")
    low, high = top.get_ylim()
    corner = "lower right" if calm[-1] > (low + high) / 2 else "upper right"
    top.legend(loc=corner, frameon=True, framealpha=0.9, edgecolor="none")
    top.set_title(_title(history, calm), loc="left", fontsize=11)

    strip.plot(iterations, column("learning_rate"), color=_GREY, linewidth=1.5)
    strip.set_ylim(bottom=0)
    strip.text(0.99, 0.93, "learning rate", transform=strip.transAxes, ha="right", va="top", color=_GREY)
    strip.yaxis.set_major_formatter(lambda value, _: f"{value:.1e}".replace("e-0", "e-") if value else "0")
    strip.yaxis.set_major_locator(MaxNLocator(3))
    strip.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
    strip.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    strip.set_xlabel("iteration", labelpad=1)
    below = strip.twiny()
    below.spines[["top", "right", "left"]].set_visible(False)
    below.spines["bottom"].set_position(("outward", 34))
    below.xaxis.set_ticks_position("bottom")
    below.xaxis.set_label_position("bottom")
    below.set_xlim(strip.get_xlim())
    shown = [
        each for each in MaxNLocator(9, steps=[1, 2, 5, 10]).tick_values(tokens[0], tokens[-1]) if tokens[0] <= each <= tokens[-1]
    ]
    below.set_xticks(np.interp(shown, tokens, iterations), [in_short(each) for each in shown])
    below.set_xlabel("tokens", labelpad=1)

    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(draft, format=path.suffix.removeprefix(".") or "png")
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _with_margin(first: float, last: float) -> tuple[float, float]:
    margin = max(0.5, 0.01 * (last - first))
    return first - margin, last + margin


def _draw_raw(axes: Any, iterations: NDArray[Any], loss: NDArray[Any]) -> None:
    """Every step; of very many the least and the greatest of as many as share a point."""
    import numpy as np

    if len(loss) <= _MOST_POINTS:
        alone = {"marker": "o", "markersize": 3} if len(loss) < 3 else {}
        axes.plot(iterations, loss, color=_BLUE, alpha=0.3, linewidth=0.9, label="training, each step", **alone)
        return
    places = np.arange(0, len(loss), -(-len(loss) // _MOST_POINTS))
    low, high = np.fmin.reduceat(loss, places), np.fmax.reduceat(loss, places)
    axes.fill_between(iterations[places], low, high, color=_BLUE, alpha=0.25, linewidth=0, label="training, range of the steps")


def _set_range(axes: Any, iterations: NDArray[Any], loss: NDArray[Any], calm: NDArray[Any], held_out: list[float]) -> None:
    """From the least to the greatest, without the fall at the beginning where that is far above all that comes later."""
    import numpy as np

    behind = int(len(loss) * _CUT_BEHIND) if len(loss) >= _MANY else 0
    seen = np.concatenate([calm[behind:], np.percentile(_numbers(loss[behind:]), [0.5, 99.5]), held_out])
    seen = seen[np.isfinite(seen)]
    low, high = float(seen.min()), float(seen.max())
    margin = max(0.06 * (high - low), 0.01)
    axes.set_ylim(low - margin, high + margin)
    first = loss[np.isfinite(loss)][:1]
    if behind and first.size and first[0] > high + margin:
        axes.annotate(f"begins at {first[0]:.2f}", (0.075, 0.985), xycoords="axes fraction", va="top", fontsize=9, color=_GREY)


def _numbers(values: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    found: NDArray[Any] = values[np.isfinite(values)]
    return found if found.size else np.zeros(1)


def _mark_events(axes: Any, history: History, iterations: NDArray[Any]) -> None:
    restarts = [line["iteration"] for line in history.starts if iterations[0] < line["iteration"] <= iterations[-1]]
    spikes = [line["iteration"] for line in history.events if line["event"] == "spike" and line["iteration"] <= iterations[-1]]
    top = axes.get_xaxis_transform()
    if restarts:
        axes.vlines(restarts, 0, 1, transform=top, color=_GREY, linewidth=0.8, linestyle=(0, (2, 3)), label="started again")
    if spikes:
        axes.plot(spikes, [0.985] * len(spikes), transform=top, color=_RED, marker="v", linestyle="", label="loss spike")


def _title(history: History, calm: NDArray[Any]) -> str:
    last = history.steps[-1]
    total = history.starts[-1].get("total_iterations") if history.starts else None
    of = f" of {total:,}" if total else ""
    said = [f"iteration {last.iteration:,}{of}", f"{in_short(last.tokens)} tokens", f"training loss {calm[-1]:.3f}"]
    held_out = [line["validation_loss"] for line in history.evaluations if line.get("validation_loss") is not None]
    return " · ".join([*said, *(f"validation {loss:.3f}" for loss in held_out[-1:])])


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    if arguments is None:
        os.nice(5)  # a run that goes on comes first
    parser = ToolParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="that of --save, or of --tensorboard-dir without it")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f".png, .svg or .pdf; by default {PICTURE} in the run's folder")
    given = parser.parse_args(arguments)
    try:
        history = read_history(given.folder)
        if not history.steps:
            print(f"{PROGRAM}: {given.folder}/{HISTORY} has no steps yet")
            return 0
        optional("matplotlib", f"{PROGRAM} needs matplotlib")
        draw(history, given.output or (given.folder if given.folder.is_dir() else given.folder.parent) / PICTURE)
    except OSError as error:
        print(f"{PROGRAM}: error: {error.strerror or error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    return 0
