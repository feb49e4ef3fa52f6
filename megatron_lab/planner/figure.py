"""Layouts as a figure (SVG or PNG) by matplotlib: where the time of a step goes, and time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lab.planner.step_time import StepTime
from megatron_lab.schedule_plots.figure import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _ROW, _AROUND, _FRONT = 10.0, 0.42, 1.3, 3.4
"""Inches."""
_SMALL = 0.01
"""A part below this share of every step is drawn with others."""


def draw_layouts(layouts: Sequence[tuple[str, StepTime]], memory_gb: float, path: Path) -> None:
    """Draw layouts, the fastest first, each with a short name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    save_figure(lambda: _draw(layouts, memory_gb), path)


def _draw(layouts: Sequence[tuple[str, StepTime]], memory_gb: float) -> Figure:
    from matplotlib.figure import Figure

    bars_height = _ROW * len(layouts) + _AROUND
    figure = Figure(figsize=(_WIDTH, bars_height + _FRONT), layout="constrained")
    bars, front = figure.subplots(2, 1, height_ratios=[bars_height, _FRONT])
    places = range(len(layouts))
    left = [0.0] * len(layouts)
    for number, (name, each) in enumerate(_parts([time for _, time in layouts]).items()):
        bars.barh(places, each, left=left, label=name, color=f"C{number % 10}", hatch="//" if number >= 10 else None)
        left = [before + seconds for before, seconds in zip(left, each, strict=True)]
    for place, (_, time) in enumerate(layouts):
        bars.plot([time.low, time.high], [place, place], color="black", linewidth=0.8, marker="|")
    bars.set_yticks(list(places), [name for name, _ in layouts])
    bars.invert_yaxis()
    bars.set_xlabel("seconds of a step (line: 9 of 10 such predictions lie in it)")
    bars.set_xlim(left=0)
    bars.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1.0), fontsize="small", frameon=False)
    front.scatter([time.device_bytes / 1e9 for _, time in layouts], [time.seconds for _, time in layouts])
    for number, (_, time) in enumerate(layouts):
        front.annotate(str(number + 1), (time.device_bytes / 1e9, time.seconds), xytext=(4, 4), textcoords="offset points")
    front.axvline(memory_gb, color="black", linestyle="--", linewidth=0.8)
    front.set_xlabel("memory of the fullest rank in GB (line: a device has)")
    front.set_ylabel("seconds of a step")
    return figure


def _parts(times: Sequence[StepTime]) -> dict[str, list[float]]:
    """Seconds by part, for each layout; small parts together."""
    names = dict.fromkeys(name for time in times for name in time.parts)
    found, rest = dict[str, list[float]](), [0.0] * len(times)
    for name in names:
        each = [time.parts.get(name, 0.0) for time in times]
        if any(seconds >= _SMALL * time.seconds for seconds, time in zip(each, times, strict=True)):
            found[name] = each
        else:
            rest = [before + seconds for before, seconds in zip(rest, each, strict=True)]
    return {**found, "all else": rest} if any(rest) else found
