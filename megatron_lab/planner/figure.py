"""Figure of layouts (SVG or PNG, with matplotlib): breakdown of the step time, and step time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lab.planner.step_time import StepTime
from megatron_lab.schedule_plots.figure import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _BAR_HEIGHT, _BARS_MARGIN, _SCATTER_HEIGHT = 10.0, 0.42, 1.3, 3.4
"""Sizes of the figure in inches."""
_MIN_SHARE = 0.01
"""Activities below this share of every layout's step are combined into one bar."""


def draw_layouts(layouts: Sequence[tuple[str, StepTime]], memory_gb: float, path: Path) -> None:
    """Draw a figure that compares layouts: bars with the breakdown of each step time, and a plot of step time against memory.

    Args:
        layouts: short name and predicted step time of each layout, fastest first.
        memory_gb: memory of a device in GB, drawn as a line.
        path: file to write; its suffix selects the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    save_figure(lambda: _draw(layouts, memory_gb), path)


def _draw(layouts: Sequence[tuple[str, StepTime]], memory_gb: float) -> Figure:
    from matplotlib.figure import Figure

    bars_height = _BAR_HEIGHT * len(layouts) + _BARS_MARGIN
    figure = Figure(figsize=(_WIDTH, bars_height + _SCATTER_HEIGHT), layout="constrained")
    bars, scatter = figure.subplots(2, 1, height_ratios=[bars_height, _SCATTER_HEIGHT])
    rows = range(len(layouts))
    left = [0.0] * len(layouts)
    for color, (name, widths) in enumerate(_collect_bars([time for _, time in layouts]).items()):
        bars.barh(rows, widths, left=left, label=name, color=f"C{color % 10}", hatch="//" if color >= 10 else None)
        left = [x + width for x, width in zip(left, widths, strict=True)]
    for row, (_, time) in enumerate(layouts):
        bars.plot([time.low, time.high], [row, row], color="black", linewidth=0.8, marker="|")
    bars.set_yticks(list(rows), [name for name, _ in layouts])
    bars.invert_yaxis()
    bars.set_xlabel("seconds of a step (line: predicted 90 % range)")
    bars.set_xlim(left=0)
    bars.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1.0), fontsize="small", frameon=False)
    scatter.scatter([time.device_bytes / 1e9 for _, time in layouts], [time.seconds for _, time in layouts])
    for color, (_, time) in enumerate(layouts):
        scatter.annotate(str(color + 1), (time.device_bytes / 1e9, time.seconds), xytext=(4, 4), textcoords="offset points")
    scatter.axvline(memory_gb, color="black", linestyle="--", linewidth=0.8)
    scatter.set_xlabel("memory of the fullest rank in GB (line: a device has)")
    scatter.set_ylabel("seconds of a step")
    return figure


def _collect_bars(times: Sequence[StepTime]) -> dict[str, list[float]]:
    """Return the lengths of the segments of the bars: for each activity, by name, the seconds that each layout spends on it.
    Activities that are small in every layout are added up."""
    names = dict.fromkeys(name for time in times for name in time.breakdown)
    bars, small = dict[str, list[float]](), [0.0] * len(times)
    for name in names:
        bar = [time.breakdown.get(name, 0.0) for time in times]
        if any(seconds >= _MIN_SHARE * time.seconds for seconds, time in zip(bar, times, strict=True)):
            bars[name] = bar
        else:
            small = [total + seconds for total, seconds in zip(small, bar, strict=True)]
    return {**bars, "all else": small} if any(small) else bars
