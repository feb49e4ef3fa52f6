"""Rendering of pipeline timelines as text: a row for each stage, a column for a time interval, a letter and a microbatch for each
operation.

    stage 0  F0─F1─······B0────F2─B1────···B2────
    stage 1  ···F0─B0────F1─B1────F2─B2────······

The time scale leaves enough columns for the microbatch number of nearly all operations. A timeline that is then wider than the
output is folded into several blocks of lines, like a line of prose. If the folded picture would have too many lines, the coarse
layout is used: a column is one letter, for the operation that takes most of the column's time.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import OpType
from megatron_lab.schedule_plots.panel import (
    ANSI_RESET,
    OP_TYPE_NAMES,
    Panel,
    PanelSummary,
    choose_tick_step,
    compute_duration_quantile,
    format_ms,
    get_colour,
    index_chunks,
    summarize_panels,
)

_MAX_LINES = 100
"""Maximum number of lines with stages. A picture that needs more with microbatch numbers is drawn in the coarse layout."""
_MIN_WIDTH = 40
"""Minimum number of columns, used even if the terminal has fewer."""
_COLUMNS_PER_TICK = 14


class _Cell(NamedTuple):
    """One character of a timeline drawn as text, with the operation type and chunk index that select its colour (None while the
    stage waits)."""

    character: str
    colour_key: tuple[OpType, int] | None


@dataclass(frozen=True)
class _Layout:
    """Division of the time axis of a timeline in text into columns of characters and, if one line is too short, into several
    blocks of lines."""

    width: int
    """Number of character columns of one line that show the timeline."""
    columns_per_ms: float
    """Number of character columns for one millisecond of the time axis."""
    num_folds: int = 1
    """Number of blocks of lines into which the time axis is folded."""
    is_coarse: bool = False
    """Whether the timeline has only one letter per column, without microbatch numbers, because it would take too many lines with
    numbers."""


def render_text(panels: Sequence[Panel], *, width: int = 120, uses_colour: bool = False, ascii_only: bool = False) -> str:
    """Render the panels (timelines with titles) as text below each other, each with its time axis, followed by a legend.

    Args:
        width: number of columns of a line.
        uses_colour: use the colour codes of a terminal.
        ascii_only: use only ASCII characters.

    Raises:
        ValueError: all operations of the panels have a duration of 0.
    """
    summary = summarize_panels(panels)
    name_width = len(_format_stage_name(max(len(panel.timeline.spans) for panel in panels) - 1))
    layout = _choose_layout(panels, summary, max(width, _MIN_WIDTH) - name_width)
    renderer = _RowRenderer(layout, uses_colour, *("-." if ascii_only else "─·"))
    blocks = [_iter_panel_lines(panel, fold, renderer, name_width) for fold in range(layout.num_folds) for panel in panels]
    return "\n\n".join(map("\n".join, [*blocks, _iter_legend_lines(panels, summary, renderer, name_width)]))


def _format_stage_name(stage: int) -> str:
    return f"stage {stage}  "


def _choose_layout(panels: Sequence[Panel], summary: PanelSummary, width: int) -> _Layout:
    """Choose the layout with the most detail in which the picture has at most `_MAX_LINES` lines.

    The first choice has space for the microbatch numbers of 90 % of the operations. The second choice has space for those of 60 %,
    because one type of operation may be very short. The last choice is the coarse layout, without microbatch numbers.
    """
    num_rows = sum(len(panel.timeline.spans) for panel in panels)
    for quantile in (0.1, 0.4):
        min_duration = compute_duration_quantile(panels, quantile)
        # An integer number of columns for an operation of the minimum duration, so that equal operations look equal: as many as
        # fit into one line, but at least those of its label.
        columns_per_ms = max(int(width * min_duration / summary.step_time * (1 + 1e-9)), _get_label_width(summary)) / min_duration
        total_width = math.ceil(summary.step_time * columns_per_ms * (1 - 1e-9))
        num_folds = math.ceil(total_width / width)
        if num_folds * num_rows <= _MAX_LINES:
            return _Layout(math.ceil(total_width / num_folds), columns_per_ms, num_folds)
    return _Layout(width, width / summary.step_time, is_coarse=True)


def _get_label_width(summary: PanelSummary) -> int:
    """Return the number of columns of an operation's label: a letter and the longest microbatch number."""
    return 1 + len(str(summary.max_microbatch))


def _compute_labelled_width(panels: Sequence[Panel], summary: PanelSummary, quantile: float) -> float:
    """Return the number of columns that a text timeline needs for the labels of its operations. Every operation longer than a
    quantile of the durations gets enough space for its label."""
    return summary.step_time / compute_duration_quantile(panels, quantile) * _get_label_width(summary)


# ---- rows


@dataclass(frozen=True)
class _RowRenderer:
    """Renderer of the line of characters that shows the operations of one stage."""

    layout: _Layout
    uses_colour: bool
    fill: str
    idle: str

    def render_row(self, spans: Sequence[OpSpan], chunk_indices: dict[int, int], start: float, fold: int) -> str:
        """Render the line of a stage in one block of the time axis.

        Args:
            spans: operations of the stage, with start and end in milliseconds.
            chunk_indices: index of each model chunk within the stage.
            start: time at which the first block starts, in milliseconds.
            fold: index of the block.
        """
        return self.render_cells(
            self._render_coarse(spans, chunk_indices, start)
            if self.layout.is_coarse
            else self._render_labelled(spans, chunk_indices, start, fold)
        )

    def render_cells(self, cells: Sequence[_Cell]) -> str:
        """Join the characters of a line to a string, with the colour codes of a terminal if `uses_colour` is set."""
        text = ""
        for colour_key, same_cells in itertools.groupby(cells, key=lambda cell: cell.colour_key):
            characters = "".join(cell.character for cell in same_cells)
            text += f"{get_colour(*colour_key).ansi}{characters}{ANSI_RESET}" if colour_key and self.uses_colour else characters
        return text

    def _render_labelled(self, spans: Sequence[OpSpan], chunk_indices: dict[int, int], start: float, fold: int) -> list[_Cell]:
        """Render each operation of a stage as a letter and its microbatch number. An operation without space for the number has
        only the letter."""
        width, columns_per_ms = self.layout.width, self.layout.columns_per_ms
        cells = [_Cell(self.idle, None)] * width
        for span in spans:
            start_column, end_column = (
                _round_column((time - start) * columns_per_ms) - fold * width for time in (span.start, span.end)
            )
            chunk_index = chunk_indices[span.op.chunk]
            label = f"{_get_letter(span.op.type, chunk_index)}{span.op.microbatch}"
            characters = (label if len(label) <= end_column - start_column else label[0]).ljust(
                end_column - start_column, self.fill
            )
            for column in range(max(start_column, 0), min(end_column, width)):
                cells[column] = _Cell(characters[column - start_column], (span.op.type, chunk_index))
        return cells

    def _render_coarse(self, spans: Sequence[OpSpan], chunk_indices: dict[int, int], start: float) -> list[_Cell]:
        """Render each column of a stage's line as the letter of the operation type that takes most of the column's time, or as
        waiting."""
        width, columns_per_ms = self.layout.width, self.layout.columns_per_ms
        time_by_column: list[defaultdict[tuple[OpType, int], float]] = [defaultdict(float) for _ in range(width)]
        for span in spans:
            start_column, end_column = ((time - start) * columns_per_ms for time in (span.start, span.end))
            for column in range(int(start_column), min(math.ceil(end_column), width)):
                time_by_column[column][span.op.type, chunk_indices[span.op.chunk]] += min(end_column, column + 1) - max(
                    start_column, column
                )
        cells = []
        for op_times in time_by_column:
            colour_key, max_time = max(op_times.items(), key=itemgetter(1), default=(None, 0.0))
            is_idle = colour_key is None or max_time < 1 - sum(op_times.values())
            cells.append(_Cell(self.idle, None) if colour_key is None or is_idle else _Cell(_get_letter(*colour_key), colour_key))
        return cells


def _round_column(position: float) -> int:
    """Round a position on the time axis to a character column.

    Halves are rounded up. So operations of equal integer length have equally many columns, wherever they start.
    """
    return math.floor(round(position, 6) + 0.5)


def _get_letter(op_type: OpType, chunk_index: int) -> str:
    """Return the letter of an operation type, in lower case for the second, fourth, ... chunk of a stage."""
    return op_type.value.lower() if chunk_index % 2 else op_type.value


def _iter_panel_lines(panel: Panel, fold: int, renderer: _RowRenderer, name_width: int) -> Iterator[str]:
    """Yield the lines of one panel (timeline with a title) in one block of the time axis.

    Args:
        fold: index of the block.
        name_width: number of columns for the name of a stage.
    """
    layout, timeline = renderer.layout, panel.timeline
    yield panel.caption + (f" (part {fold + 1} of {layout.num_folds})" if layout.num_folds > 1 else "")
    for stage, (spans, chunk_indices) in enumerate(zip(timeline.spans, index_chunks(timeline), strict=True)):
        yield _format_stage_name(stage).ljust(name_width) + renderer.render_row(spans, chunk_indices, timeline.start, fold)
    yield " " * name_width + _render_axis(layout, fold)


def _render_axis(layout: _Layout, fold: int) -> str:
    """Render the time axis of one block as text: a bar at each tick, followed by its time."""
    step = choose_tick_step(_COLUMNS_PER_TICK / layout.columns_per_ms)
    axis = ""
    for tick in range(math.ceil((fold + 1) * layout.width / layout.columns_per_ms / step)):
        column = _round_column(tick * step * layout.columns_per_ms) - fold * layout.width
        mark = f"|{format_ms(tick * step)}"
        if 0 <= column <= layout.width - len(mark):
            axis = axis.ljust(column) + mark
    return axis


# ---- legend


def _iter_legend_lines(panels: Sequence[Panel], summary: PanelSummary, renderer: _RowRenderer, name_width: int) -> Iterator[str]:
    layout = renderer.layout
    entries = [
        f"{renderer.render_cells([_Cell(op_type.value, (op_type, 0))])} {OP_TYPE_NAMES[op_type]}" for op_type in summary.op_types
    ]
    yield ", ".join([*entries, f"{renderer.idle} waiting"])
    if not layout.is_coarse:
        yield "the number is the microbatch"
    if summary.max_chunks_per_stage > 1:
        suffix = ", and again for its third and fourth" if summary.max_chunks_per_stage > 2 else ""
        yield f"upper case: first chunk of a stage, lower case: its second{suffix}"
    if layout.is_coarse:
        labelled_width = math.ceil(_compute_labelled_width(panels, summary, 0.1)) + name_width
        yield (
            f"coarse: a column is {format_ms(1 / layout.columns_per_ms)} and shows what took most of it; "
            f"numbers need {labelled_width:,} columns"
        )
        return
    durations = [span.end - span.start for panel in panels for spans in panel.timeline.spans for span in spans]
    num_hidden = sum(duration * layout.columns_per_ms < 0.5 for duration in durations)
    if num_hidden:
        yield f"{num_hidden:,} of {len(durations):,} operations are too short to be seen here"
