"""Table of pipeline timelines: step time, bubble, idle time and kept activations, next to the values of the papers' formulas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from megatron.pipeline_parallel.simulate import Timeline
from megatron.pipeline_parallel.validate import compute_peak_live_activations
from megatron.spec.operations import OpType, Schedule
from megatron_lab import terminal
from megatron_lab.schedule_plots.formulas import ExpectedValues
from megatron_lab.schedule_plots.panel import Panel, format_number, index_chunks, summarize_panels

_MAX_LISTED_STAGES = 4
_HEADER = ("", "step ms", "paper", "bubble", "paper", "waits ms", "live", "paper", "live / v")
_NOTES = (
    "waits: idle time of each stage between its first and its last operation",
    "live: maximum number of activations held at once on each stage, each of one microbatch in one chunk; / v: of full stages",
)
_RECOMPUTE_NOTE = "with recomputation (R), an activation is only what the layers keep until they are recomputed"
_PAPER_NOTE = "paper: value of a closed formula; - if no formula is exact for this case"


class TimelineRow(NamedTuple):
    """Row of a table of pipeline timelines: a timeline and, if the table shows them, the values of the papers' formulas for its
    schedule."""

    panel: Panel
    expected: ExpectedValues | None = None


def format_table(rows: Sequence[TimelineRow], width: int | None = None) -> str:
    """Format a table with one row for each pipeline timeline, followed by notes on the columns and by the papers' formulas.

    The columns with the formulas' values are omitted if no row has such values.

    Args:
        width: maximum number of characters of a row; None for no limit.
    """
    has_expected = any(row.expected is not None for row in rows)
    is_visible = [has_expected or title != "paper" for title in _HEADER]
    cells = [list(compress(row_cells, is_visible)) for row_cells in (_HEADER, *map(_format_row, rows))]
    text = terminal.format_table(cells, range(1, len(_HEADER)), width=width)
    title_width = max(len(row.panel.title) for row in rows)
    formulas = [
        f"{row.panel.title:{title_width}}  {formula}"
        for row in rows
        if row.expected is not None
        for formula in row.expected.formulas
    ]
    has_recompute = any(OpType.RECOMPUTE in summarize_panels([row.panel]).op_types for row in rows)
    return "\n".join([*text, *_NOTES, *[_RECOMPUTE_NOTE] * has_recompute, *[_PAPER_NOTE] * has_expected, *formulas])


def compute_max_activations(timeline: Timeline) -> tuple[int, ...] | None:
    """Return for each stage the maximum number of activations that it keeps at the same time, or None if the timeline has only
    forwards.

    One activation means all saved tensors of one microbatch in one model chunk.
    """
    ops = tuple(tuple(span.op for span in spans) for spans in timeline.spans)
    if all(op.type is OpType.FORWARD for stage_ops in ops for op in stage_ops):
        return None
    return compute_peak_live_activations(Schedule(timeline.name, 0, (), ops))  # uses only the order of operations


def compute_idle_times(timeline: Timeline) -> tuple[float, ...]:
    """Return for each stage the time in milliseconds that it waits between its first and its last operation."""
    durations = (spans[-1].end - spans[0].start if spans else 0.0 for spans in timeline.spans)
    return tuple(duration - busy for duration, busy in zip(durations, timeline.busy_times, strict=True))


def _format_row(row: TimelineRow) -> tuple[str, ...]:
    """Return the texts of the cells of a table row."""
    timeline, activations = row.panel.timeline, compute_max_activations(row.panel.timeline)
    expected_step = expected_bubble = expected_activations = "-"
    if row.expected is not None and row.expected.bubble_time is not None:
        # All stages compute for equally long where a formula is exact.
        step_time = timeline.busy_times[0] + row.expected.bubble_time
        expected_step, expected_bubble = format_number(step_time), f"{row.expected.bubble_time / step_time:.1%}"
    if row.expected is not None and row.expected.max_activations is not None:
        expected_activations = _format_stage_values(row.expected.max_activations)
    chunks_per_stage = [max(len(chunk_indices), 1) for chunk_indices in index_chunks(timeline)]
    return (
        row.panel.title,
        format_number(timeline.step_time),
        expected_step,
        f"{timeline.bubble_share:.1%}",
        expected_bubble,
        _format_stage_values([round(idle, 6) for idle in compute_idle_times(timeline)]),
        "-" if activations is None else _format_stage_values(activations),
        expected_activations,
        "-"
        if activations is None
        else _format_stage_values([num_activations / v for num_activations, v in zip(activations, chunks_per_stage, strict=True)]),
    )


def _format_stage_values(values: Sequence[float]) -> str:
    """Format a value of each stage as a short text: a single number if all are equal, all numbers for few stages, else minimum and
    maximum."""
    if min(values) == max(values):
        return format_number(values[0])
    return (
        " ".join(map(format_number, values))
        if len(values) <= _MAX_LISTED_STAGES
        else f"{format_number(min(values))}..{format_number(max(values))}"
    )
