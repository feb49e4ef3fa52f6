"""A timeline as a figure (SVG or PNG) by matplotlib, which is needed for nothing else."""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.version import how_to_install
from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import OpKind
from megatron_lab.schedule_plots.panel import (
    KIND_NAMES,
    NUM_SHADES,
    Drawing,
    Panel,
    colour_of,
    depth_of_chunk,
    duration_at,
    look_at,
    tick_step,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_NARROWEST, _WIDEST = 9.0, 50.0
_BESIDE = 1.0
"""Width at both sides, for stage names and margins."""
_ROW = 0.3
_AROUND = 0.75
"""Height around a panel, for its title and time axis."""
_LEGEND = 0.45
_LEGEND_ENTRY = 1.6

_POINTS = 72
"""Points in an inch."""
_DIGIT = 0.64
"""Width of a digit in DejaVu Sans, as a share of the font size."""
_SIZES = (8.0, 7.0, 6.0, 5.0, 4.0)
"""Font sizes, in points, of the numbers on operations: the largest that fits is taken. A box too narrow for any has none."""
_AIM = 6.0
"""The font size, in points, for which a figure is made wide enough."""
_AROUND_NUMBER = 1.0
_BOX = 0.86
"""Height of an operation, as a share of its row."""
_EDGE = 0.6
"""Width of an operation's edge, in points; less where the operation is narrow."""
_DOTS_AN_INCH = 150


def require_matplotlib() -> None:
    """Check that matplotlib is there.

    Raises:
        ModuleNotFoundError: it is missing. The message says what to do.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"SVG and PNG pictures need matplotlib: {how_to_install('matplotlib')}. The text timeline and the trace (.json) "
            "work without it."
        )


def write_figure(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels, one above the other on one time axis, as SVG or PNG by the suffix of the path.

    The same panels give the same file, byte for byte, with the same matplotlib.

    Raises:
        ValueError: nothing in the panels takes any time.
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    save_figure(lambda: _draw(panels), path)


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Write what `draw` makes, which is the same file, byte for byte, whenever it draws the same.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc of the user says
        # Text stays text: small files, and words that can be searched.
        matplotlib.rcParams.update({"svg.hashsalt": "megatron", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]})
        is_svg = path.suffix.lower() == ".svg"
        no_versions = {"Date": None, "Creator": None} if is_svg else {"Software": None}
        draw().savefig(path, dpi=_DOTS_AN_INCH, metadata=no_versions)


def _draw(panels: Sequence[Panel]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    drawing = look_at(panels)
    # Wide enough for the numbers of nearly all operations.
    box = (len(str(drawing.largest_microbatch)) * _DIGIT * _AIM + _AROUND_NUMBER) / _POINTS
    across = drawing.step_time / duration_at(panels, 0.1) * box
    width = min(max(_NARROWEST, _BESIDE + across), _WIDEST)
    heights = [_AROUND + _ROW * len(panel.timeline.spans) for panel in panels]
    figure = Figure(figsize=(width, sum(heights) + _LEGEND), layout="constrained")
    rows = [len(panel.timeline.spans) + _AROUND / _ROW for panel in panels]
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=rows)[:, 0]
    points_per_ms = (width - _BESIDE) * _POINTS / drawing.step_time
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, points_per_ms)
        axes.set_xlim(0, drawing.step_time)
        axes.xaxis.set_major_locator(MultipleLocator(tick_step(drawing.step_time / (width * 1.2))))
    all_axes[-1].set_xlabel("time (ms)")
    _add_legend(figure, drawing, width)
    return figure


def _draw_panel(axes: Axes, panel: Panel, points_per_ms: float) -> None:
    timeline = panel.timeline
    boxes: defaultdict[tuple[OpKind, int], list[tuple[int, OpSpan]]] = defaultdict(list)
    for stage, (spans, depths) in enumerate(zip(timeline.spans, depth_of_chunk(timeline), strict=True)):
        for span in spans:
            boxes[span.op.kind, depths[span.op.chunk]].append((stage, span))
    for (kind, depth), placed in sorted(boxes.items(), key=lambda item: (item[0][0].value, item[0][1])):
        _draw_boxes(axes, kind, depth, placed, timeline.start, points_per_ms)
    stages = range(len(timeline.spans))
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_yticks(stages, [f"stage {stage}" for stage in stages], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_title(panel.caption, loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="0.9", linewidth=0.6)


def _draw_boxes(
    axes: Axes, kind: OpKind, depth: int, placed: Sequence[tuple[int, OpSpan]], start: float, points_per_ms: float
) -> None:
    """Draw all operations of one kind on the first (second, ...) chunks of their stages."""
    from matplotlib.collections import PolyCollection

    background = colour_of(kind, depth)
    text_colour = "white" if background.is_dark else "black"
    corners, edges = [], []
    for stage, span in placed:
        left, right, top, bottom = span.start - start, span.end - start, stage - _BOX / 2, stage + _BOX / 2
        corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        room = (span.end - span.start) * points_per_ms
        edges.append(min(_EDGE, room / 8))
        number = str(span.op.microbatch)
        size = next((size for size in _SIZES if len(number) * _DIGIT * size <= room - _AROUND_NUMBER), None)
        if size is not None:
            axes.text((left + right) / 2, stage, number, ha="center", va="center", fontsize=size, color=text_colour)
    boxes = PolyCollection(corners, facecolors=background.hex, edgecolors="white", linewidths=edges, clip_on=False)
    axes.add_collection(boxes, autolim=False)


def _add_legend(figure: Figure, drawing: Drawing, width: float) -> None:
    """Add the legend below all panels: a colour for each kind, and the shades for the chunks of a stage."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=colour_of(kind, 0).hex) for kind in drawing.kinds]
    labels = [KIND_NAMES[kind] for kind in drawing.kinds]
    if drawing.num_depths > 1:
        for depth in range(min(drawing.num_depths, NUM_SHADES)):
            handles.append(tuple(Patch(facecolor=colour_of(kind, depth).hex) for kind in drawing.kinds))
            same = ", ".join(_ordinal(number) for number in range(depth + 1, drawing.num_depths + 1, NUM_SHADES))
            labels.append(f"{same} chunk of a stage")
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels) if len(labels) * _LEGEND_ENTRY <= width else math.ceil(len(labels) / 2),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        frameon=False,
        fontsize=9,
    )


def _ordinal(number: int) -> str:
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'} if number % 100 not in (11, 12, 13) else {}).get(number % 10, 'th')}"
