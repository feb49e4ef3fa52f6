"""Figure (SVG or PNG) of timelines of a pipeline schedule, drawn with matplotlib, an optional dependency."""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.version import get_extra_install_command
from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import OpType
from megatron_lab.schedule_plots.panel import (
    NUM_SHADES,
    OP_TYPE_NAMES,
    Panel,
    PanelSummary,
    choose_tick_step,
    compute_duration_quantile,
    get_colour,
    index_chunks,
    summarize_panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_MIN_WIDTH, _MAX_WIDTH = 9.0, 50.0
_SIDE_MARGINS = 1.0
"""Total width left and right of the timeline, for stage names and margins, in inches."""
_ROW_HEIGHT = 0.3
_PANEL_MARGINS = 0.75
"""Height above and below the rows of a panel, for its title and time axis, in inches."""
_LEGEND_HEIGHT = 0.45
_LEGEND_ENTRY_WIDTH = 1.6

_POINTS_PER_INCH = 72
_DIGIT_WIDTH = 0.64
"""Width of a digit in DejaVu Sans, as a fraction of the font size."""
_FONT_SIZES = (8.0, 7.0, 6.0, 5.0, 4.0)
"""Font sizes of the microbatch numbers, in points. The largest that fits into the bar of an operation is used. A bar that is
too narrow for all of them has no number."""
_TARGET_FONT_SIZE = 6.0
"""Font size, in points, for which the figure is made wide enough."""
_LABEL_PADDING = 1.0
_BAR_HEIGHT = 0.86
"""Height of an operation's bar, as a fraction of its row."""
_EDGE_WIDTH = 0.6
"""Maximum width of the edge of an operation's bar, in points. Narrow bars have narrower edges."""
_DPI = 150


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        ModuleNotFoundError: matplotlib is missing. The message says how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"SVG and PNG pictures need matplotlib: {get_extra_install_command('matplotlib')}. The text timeline and the trace "
            "(.json) work without it."
        )


def write_figure(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels (timelines with titles) below each other on a common time axis, and write the figure as an SVG or PNG file.

    The suffix of the path selects the format. The file is reproducible: equal panels give equal bytes with the same version of
    matplotlib.

    Raises:
        ValueError: all operations of the panels have a duration of 0.
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    save_figure(lambda: _build_figure(panels), path)


def save_figure(build_figure: Callable[[], Figure], path: Path) -> None:
    """Build a figure and save it reproducibly: equal figures give equal bytes with the same version of matplotlib.

    Args:
        build_figure: function that builds the figure. It runs with matplotlib's default settings.
        path: path of the file; its suffix selects SVG or PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        # Keep text as text, not as paths: the file is smaller and its words can be searched.
        matplotlib.rcParams.update({"svg.hashsalt": "megatron", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]})
        is_svg = path.suffix.lower() == ".svg"
        metadata = {"Date": None, "Creator": None} if is_svg else {"Software": None}
        build_figure().savefig(path, dpi=_DPI, metadata=metadata)


def _build_figure(panels: Sequence[Panel]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    summary = summarize_panels(panels)
    # Make the figure wide enough for the microbatch numbers of nearly all operations (all but the shortest 10 %).
    target_bar_width = (len(str(summary.max_microbatch)) * _DIGIT_WIDTH * _TARGET_FONT_SIZE + _LABEL_PADDING) / _POINTS_PER_INCH
    timeline_width = summary.step_time / compute_duration_quantile(panels, 0.1) * target_bar_width
    width = min(max(_MIN_WIDTH, _SIDE_MARGINS + timeline_width), _MAX_WIDTH)
    heights = [_PANEL_MARGINS + _ROW_HEIGHT * len(panel.timeline.spans) for panel in panels]
    fig = Figure(figsize=(width, sum(heights) + _LEGEND_HEIGHT), layout="constrained")
    height_ratios = [len(panel.timeline.spans) + _PANEL_MARGINS / _ROW_HEIGHT for panel in panels]
    axs = fig.subplots(len(panels), squeeze=False, height_ratios=height_ratios)[:, 0]
    points_per_ms = (width - _SIDE_MARGINS) * _POINTS_PER_INCH / summary.step_time
    for ax, panel in zip(axs, panels, strict=True):
        _draw_panel(ax, panel, points_per_ms)
        ax.set_xlim(0, summary.step_time)
        ax.xaxis.set_major_locator(MultipleLocator(choose_tick_step(summary.step_time / (width * 1.2))))
    axs[-1].set_xlabel("time (ms)")
    _add_legend(fig, summary, width)
    return fig


def _draw_panel(ax: Axes, panel: Panel, points_per_ms: float) -> None:
    timeline = panel.timeline
    ops_by_colour: defaultdict[tuple[OpType, int], list[tuple[int, OpSpan]]] = defaultdict(list)
    for stage, (spans, chunk_indices) in enumerate(zip(timeline.spans, index_chunks(timeline), strict=True)):
        for span in spans:
            ops_by_colour[span.op.type, chunk_indices[span.op.chunk]].append((stage, span))
    for (op_type, chunk_index), ops in sorted(ops_by_colour.items(), key=lambda item: (item[0][0].value, item[0][1])):
        _draw_ops(ax, op_type, chunk_index, ops, timeline.start, points_per_ms)
    stages = range(len(timeline.spans))
    ax.set_ylim(len(stages) - 0.5, -0.5)
    ax.set_yticks(stages, [f"stage {stage}" for stage in stages], fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=9)
    ax.set_title(panel.caption, loc="left", fontsize=11)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(axis="x", color="0.9", linewidth=0.6)


def _draw_ops(
    ax: Axes, op_type: OpType, chunk_index: int, ops: Sequence[tuple[int, OpSpan]], start: float, points_per_ms: float
) -> None:
    """Draw bars for operations of one type that have the same colour.

    Args:
        chunk_index: index of the operations' model chunk among the chunks of its stage; it selects the shade of the colour.
        ops: (stage, start and end of the operation) for each operation.
        start: time at which the timeline starts, in milliseconds.
        points_per_ms: width of a millisecond in the figure, in points.
    """
    from matplotlib.collections import PolyCollection

    background = get_colour(op_type, chunk_index)
    text_colour = "white" if background.is_dark else "black"
    corners, edges = [], []
    for stage, span in ops:
        left, right, top, bottom = span.start - start, span.end - start, stage - _BAR_HEIGHT / 2, stage + _BAR_HEIGHT / 2
        corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        width = (span.end - span.start) * points_per_ms
        edges.append(min(_EDGE_WIDTH, width / 8))
        label = str(span.op.microbatch)
        font_size = next(
            (font_size for font_size in _FONT_SIZES if len(label) * _DIGIT_WIDTH * font_size <= width - _LABEL_PADDING), None
        )
        if font_size is not None:
            ax.text((left + right) / 2, stage, label, ha="center", va="center", fontsize=font_size, color=text_colour)
    bars = PolyCollection(corners, facecolors=background.hex, edgecolors="white", linewidths=edges, clip_on=False)
    ax.add_collection(bars, autolim=False)


def _add_legend(fig: Figure, summary: PanelSummary, width: float) -> None:
    """Add the legend below all panels: a colour for each type of operation, and a shade for each model chunk of a stage."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=get_colour(op_type, 0).hex) for op_type in summary.op_types]
    labels = [OP_TYPE_NAMES[op_type] for op_type in summary.op_types]
    if summary.max_chunks_per_stage > 1:
        for chunk_index in range(min(summary.max_chunks_per_stage, NUM_SHADES)):
            handles.append(tuple(Patch(facecolor=get_colour(op_type, chunk_index).hex) for op_type in summary.op_types))
            ordinals = ", ".join(_format_ordinal(n) for n in range(chunk_index + 1, summary.max_chunks_per_stage + 1, NUM_SHADES))
            labels.append(f"{ordinals} chunk of a stage")
    fig.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels) if len(labels) * _LEGEND_ENTRY_WIDTH <= width else math.ceil(len(labels) / 2),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        frameon=False,
        fontsize=9,
    )


def _format_ordinal(n: int) -> str:
    return f"{n}{({1: 'st', 2: 'nd', 3: 'rd'} if n % 100 not in (11, 12, 13) else {}).get(n % 10, 'th')}"
