"""What a rank holds over a step as a figure (SVG or PNG) by matplotlib: state at the bottom, activations above it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import OpKind
from megatron_lab.memory_plots.measure import Measured
from megatron_lab.planner.peak import Held
from megatron_lab.planner.state_report import amount
from megatron_lab.schedule_plots.figure import save_figure
from megatron_lab.schedule_plots.panel import KIND_NAMES, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _PANEL, _LEGEND = 10.0, 2.4, 0.6
"""Inches."""
_LEGEND_COLUMNS = 5
_PARTS = 30
"""Of an operation that was measured: a picture with every allocation would be megabytes."""
_GREYS = ("0.55", "0.65", "0.75", "0.85", "0.93")
_MB = 1e6
_WAITING, _PLANNED = "waiting", "planned: the most, and what is left"


@dataclass(frozen=True)
class Panel:
    """A step of one rank."""

    title: str
    state: dict[str, int]
    """Bytes of all that stays, by its name, from the bottom of the picture to its top."""
    held: Sequence[Held]
    """By the plan, for each operation."""
    spans: Sequence[OpSpan]
    """When each operation runs, by the plan."""
    measured: Measured | None = None

    @property
    def planned_peak(self) -> int:
        """Bytes of activations at the peak, beside the step's inputs."""
        return max(one.peak for one in self.held)

    @property
    def caption(self) -> str:
        """The title, and the peak as planned and as measured."""
        run = "" if self.measured is None else f", measured {amount(self.measured.peak)}"
        return f"{self.title}: activations at their peak planned {amount(self.planned_peak)}{run}"


def write_figure(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels, one above the other, with one scale of memory.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    save_figure(lambda: _figure(panels), path)


def _figure(panels: Sequence[Panel]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _PANEL * len(panels) + _LEGEND), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel)
    all_axes[-1].set_xlim(0, max(panel.spans[-1].end for panel in panels))
    all_axes[-1].set_ylim(bottom=0)
    all_axes[-1].set_xticks([])
    all_axes[-1].set_xlabel("time, as the plan has it")
    handles = {label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = [*panels[0].state, *KIND_NAMES.values(), _WAITING, _PLANNED]
    shown = {label: handles[label] for label in order if label in handles}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=_LEGEND_COLUMNS, frameon=False, fontsize=8)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    begin, end = panel.spans[0].start, panel.spans[-1].end
    base = 0.0
    for (name, size), grey in zip(panel.state.items(), _GREYS, strict=False):
        axes.fill_between([begin, end], base, base + size / _MB, color=grey, linewidth=0, label=name)
        base += size / _MB
    if panel.measured is not None:
        _draw_measured(axes, panel.measured, panel.spans, base)
    _draw_planned(axes, panel, base)
    axes.set_title(panel.caption, loc="left", fontsize=10)
    axes.set_ylabel("MB")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_planned(axes: Axes, panel: Panel, base: float) -> None:
    """A line at the most of each operation, and at what is left until the next. Where nothing was measured, areas below it."""
    times: list[float] = []
    levels: list[float] = []
    for held, span, until in zip(panel.held, panel.spans, _untils(panel.spans), strict=True):
        op, peak, after = held.op, held.peak, held.after
        times += [span.start, span.end, span.end, until]
        levels += [base + size / _MB for size in (peak, peak, after, after)]
        if panel.measured is None:
            _area(axes, [span.start, span.end], [peak, peak], base, op.kind)
            _area(axes, [span.end, until], [after, after], base, None)
    axes.plot(times, levels, color="black", linewidth=1.0, label=_PLANNED)


def _draw_measured(axes: Axes, measured: Measured, spans: Sequence[OpSpan], base: float) -> None:
    """The area below what was allocated, for each part of an operation at its most. Each operation is stretched to the time that it
    has in the plan, and so is the time until the next one: machines are noisy, and what is held does not depend on times."""
    moments, allocated = (-math.inf, *measured.times), (0, *measured.allocated)
    for span, until, ran, next_ran in zip(spans, _untils(spans), measured.spans, _untils(measured.spans), strict=True):
        for kind, (begin, end), (left, right) in (
            (span.op.kind, (ran.start, ran.end), (span.start, span.end)),
            (None, (ran.end, next_ran), (span.end, until)),
        ):
            parts = [part / _PARTS for part in range(_PARTS + 1)] if kind is not None else [0.0, 1.0]
            places = [bisect.bisect_right(moments, begin + (end - begin) * part) for part in parts]
            sizes = [max(allocated[before - 1 : after]) for before, after in pairwise(places)]
            _area(axes, [left + (right - left) * part for part in parts], [*sizes, allocated[places[-1] - 1]], base, kind)


def _area(axes: Axes, times: Sequence[float], sizes: Sequence[int], base: float, kind: OpKind | None) -> None:
    """From the state up; hatched where the rank waits."""
    looks: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.7", "hatch": "////", "label": _WAITING}
    if kind is not None:
        looks = {"color": colour_of(kind, 0).hex, "label": KIND_NAMES[kind]}
    axes.fill_between(times, base, [base + size / _MB for size in sizes], step="post", linewidth=0, **looks)


def _untils(spans: Sequence[OpSpan]) -> list[float]:
    """When the operation after each begins."""
    return [*(span.start for span in spans[1:]), spans[-1].end]
