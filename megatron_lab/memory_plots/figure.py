"""Figure (SVG or PNG, with matplotlib) of a rank's memory over a step: model state at the bottom, activations above it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import OpType
from megatron_lab.memory_plots.measure import MeasuredStep
from megatron_lab.planner.peak import OpMemory
from megatron_lab.planner.units import format_bytes
from megatron_lab.schedule_plots.figure import save_figure
from megatron_lab.schedule_plots.panel import OP_TYPE_NAMES, get_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _PANEL_HEIGHT, _LEGEND_HEIGHT = 10.0, 2.4, 0.6  # inches
_LEGEND_COLUMNS = 5
_INTERVALS_PER_OP = 30
"""Number of intervals into which a measured operation is divided. A picture of every allocation would take megabytes."""
_GREYS = ("0.55", "0.65", "0.75", "0.85", "0.93")
_MB = 1e6
_WAITING_LABEL, _PLANNED_LABEL = "waiting", "predicted: peak, and what remains"


@dataclass(frozen=True)
class MemoryPanel:
    """Panel of the figure: predicted memory of one rank over a step, and the measured memory if the step was run."""

    title: str
    state: dict[str, int]
    """Bytes of memory that is in use during the entire step, such as parameters and moments, by name. The first is drawn at the
    bottom."""
    op_memory: Sequence[OpMemory]
    """Predicted memory during and after each operation of the rank."""
    spans: Sequence[OpSpan]
    """Predicted start and end of each operation of the rank."""
    measurement: MeasuredStep | None = None

    @property
    def planned_peak(self) -> int:
        """Predicted peak of activation memory in bytes, without the step's inputs."""
        return max(memory.peak_bytes for memory in self.op_memory)

    @property
    def caption(self) -> str:
        """Title of the panel, followed by the predicted and the measured peak of activation memory."""
        measured_text = "" if self.measurement is None else f", measured {format_bytes(self.measurement.peak_bytes)}"
        return f"{self.title}: peak of activations: predicted {format_bytes(self.planned_peak)}{measured_text}"


def write_figure(panels: Sequence[MemoryPanel], path: Path) -> None:
    """Draw the panels below each other, with equal memory axes, and write the figure to a file. The suffix selects SVG or PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    save_figure(lambda: _build_figure(panels), path)


def _build_figure(panels: Sequence[MemoryPanel]) -> Figure:
    from matplotlib.figure import Figure

    fig = Figure(figsize=(_WIDTH, _PANEL_HEIGHT * len(panels) + _LEGEND_HEIGHT), layout="constrained")
    axs = fig.subplots(len(panels), squeeze=False, sharex=True, sharey=True)[:, 0]
    for ax, panel in zip(axs, panels, strict=True):
        _draw_panel(ax, panel)
    axs[-1].set_xlim(0, max(panel.spans[-1].end for panel in panels))
    axs[-1].set_ylim(bottom=0)
    axs[-1].set_xticks([])
    axs[-1].set_xlabel("time (as predicted)")
    handles = {label: handle for ax in axs for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = [*panels[0].state, *OP_TYPE_NAMES.values(), _WAITING_LABEL, _PLANNED_LABEL]
    legend_handles = {label: handles[label] for label in order if label in handles}
    fig.legend(
        legend_handles.values(), legend_handles.keys(), loc="outside lower center", ncols=_LEGEND_COLUMNS, frameon=False, fontsize=8
    )
    return fig


def _draw_panel(ax: Axes, panel: MemoryPanel) -> None:
    start, end = panel.spans[0].start, panel.spans[-1].end
    base = 0.0
    for (name, size), grey in zip(panel.state.items(), _GREYS, strict=False):
        ax.fill_between([start, end], base, base + size / _MB, color=grey, linewidth=0, label=name)
        base += size / _MB
    if panel.measurement is not None:
        _draw_measurement(ax, panel.measurement, panel.spans, base)
    _draw_planned(ax, panel, base)
    ax.set_title(panel.caption, loc="left", fontsize=10)
    ax.set_ylabel("MB")
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_planned(ax: Axes, panel: MemoryPanel, base: float) -> None:
    """Draw the predicted memory as a line: the peak during each operation, and then the memory that remains until the next
    operation starts.

    If nothing was measured, also fill the area below the line.

    Args:
        base: memory of the model state in MB, above which activations are drawn.
    """
    times: list[float] = []
    levels: list[float] = []
    for memory, span, next_start in zip(panel.op_memory, panel.spans, _list_next_starts(panel.spans), strict=True):
        op, peak, remaining = memory.op, memory.peak_bytes, memory.remaining_bytes
        times += [span.start, span.end, span.end, next_start]
        levels += [base + size / _MB for size in (peak, peak, remaining, remaining)]
        if panel.measurement is None:
            _fill_area(ax, [span.start, span.end], [peak, peak], base, op.type)
            _fill_area(ax, [span.end, next_start], [remaining, remaining], base, None)
    ax.plot(times, levels, color="black", linewidth=1.0, label=_PLANNED_LABEL)


def _draw_measurement(ax: Axes, measurement: MeasuredStep, spans: Sequence[OpSpan], base: float) -> None:
    """Fill the area below the measured memory. Each operation is divided into `_INTERVALS_PER_OP` intervals, each drawn at its
    maximum.

    Each measured operation, and each gap between two operations, is stretched to its predicted duration. Measured durations vary
    with the load of the machine, but memory does not depend on them.

    Args:
        spans: predicted start and end of each operation.
        base: memory of the model state in MB, above which activations are drawn.
    """
    times, allocated = (-math.inf, *measurement.times), (0, *measurement.allocated)
    for span, next_start, measured_span, next_measured_start in zip(
        spans, _list_next_starts(spans), measurement.spans, _list_next_starts(measurement.spans), strict=True
    ):
        for op_type, (start, end), (left, right) in (
            (span.op.type, (measured_span.start, measured_span.end), (span.start, span.end)),
            (None, (measured_span.end, next_measured_start), (span.end, next_start)),
        ):
            fractions = (
                [fraction / _INTERVALS_PER_OP for fraction in range(_INTERVALS_PER_OP + 1)] if op_type is not None else [0.0, 1.0]
            )
            event_counts = [bisect.bisect_right(times, start + (end - start) * fraction) for fraction in fractions]
            sizes = [max(allocated[first_count - 1 : last_count]) for first_count, last_count in pairwise(event_counts)]
            _fill_area(
                ax,
                [left + (right - left) * fraction for fraction in fractions],
                [*sizes, allocated[event_counts[-1] - 1]],
                base,
                op_type,
            )


def _fill_area(ax: Axes, times: Sequence[float], sizes: Sequence[int], base: float, op_type: OpType | None) -> None:
    """Fill the area between the memory of the model state and the memory of the state plus `sizes`.

    Args:
        times: points of the time axis.
        sizes: activation memory in bytes from each of these times on.
        base: memory of the model state in MB.
        op_type: type of the operation that runs; it selects the colour. None while the rank waits: the area is hatched.
    """
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.7", "hatch": "////", "label": _WAITING_LABEL}
    if op_type is not None:
        style = {"color": get_colour(op_type, 0).hex, "label": OP_TYPE_NAMES[op_type]}
    ax.fill_between(times, base, [base + size / _MB for size in sizes], step="post", linewidth=0, **style)


def _list_next_starts(spans: Sequence[OpSpan]) -> list[float]:
    """Return for each operation the start of the next operation; for the last operation, its own end."""
    return [*(span.start for span in spans[1:]), spans[-1].end]
