"""Timelines in numbers: step time, bubble, waiting and memory, beside what the papers say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from megatron.pipeline_parallel.simulate import Timeline
from megatron.pipeline_parallel.validate import peak_live_activations
from megatron.spec.operations import OpKind, Schedule
from megatron_lab.schedule_plots.formulas import Expected
from megatron_lab.schedule_plots.panel import Panel, depth_of_chunk, look_at, number

_MOST_STAGES_LISTED = 4
_HEADER = ("", "step ms", "paper", "bubble", "paper", "waits ms", "live", "paper", "live / v")
_NOTES = (
    "waits: for each stage, idle time between its first and its last operation",
    "live: for each stage, the most activations kept at once, each of one microbatch in one chunk; / v: counted in whole stages",
)
_NOTE_OF_RECOMPUTE = "where layers are run again (R), an activation is only what they keep until then"
_NOTE_OF_PAPERS = "paper: by a closed formula; - where none holds exactly"


class TimelineRow(NamedTuple):
    """A timeline, and what the papers say of its schedule, if that is shown beside it."""

    panel: Panel
    expected: Expected | None = None


def draw_table(rows: Sequence[TimelineRow]) -> str:
    """One line for each timeline, then notes on the columns and formulas. Columns of papers are left out where no row has any."""
    papers = any(row.expected is not None for row in rows)
    kept = [papers or title != "paper" for title in _HEADER]
    lines = [list(compress(line, kept)) for line in (_HEADER, *map(_cells, rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    titles = max(len(row.panel.title) for row in rows)
    formulas = [
        f"{row.panel.title:{titles}}  {formula}" for row in rows if row.expected is not None for formula in row.expected.formulas
    ]
    again = any(OpKind.RECOMPUTE in look_at([row.panel]).kinds for row in rows)
    return "\n".join([*text, *_NOTES, *[_NOTE_OF_RECOMPUTE] * again, *[_NOTE_OF_PAPERS] * papers, *formulas])


def peak_live(timeline: Timeline) -> tuple[int, ...] | None:
    """For each stage, the most microbatch activations, of one chunk each, kept at once; None if the timeline has only forwards."""
    ops = tuple(tuple(span.op for span in spans) for spans in timeline.spans)
    if all(op.kind is OpKind.FORWARD for stage_ops in ops for op in stage_ops):
        return None
    return peak_live_activations(Schedule(timeline.name, 0, (), ops))  # only the order of operations matters here


def idle_inside(timeline: Timeline) -> tuple[float, ...]:
    """For each stage, the time it waits between its first and its last operation."""
    whole = (spans[-1].end - spans[0].start if spans else 0.0 for spans in timeline.spans)
    return tuple(time - busy for time, busy in zip(whole, timeline.busy, strict=True))


def _cells(row: TimelineRow) -> tuple[str, ...]:
    timeline, live = row.panel.timeline, peak_live(row.panel.timeline)
    step = bubble = expected_live = "-"
    if row.expected is not None and row.expected.bubble_time is not None:
        # All stages compute equally long where a formula holds.
        step_time = timeline.busy[0] + row.expected.bubble_time
        step, bubble = number(step_time), f"{row.expected.bubble_time / step_time:.1%}"
    if row.expected is not None and row.expected.peak_live is not None:
        expected_live = _each(row.expected.peak_live)
    chunks = [max(len(of_stage), 1) for of_stage in depth_of_chunk(timeline)]
    return (
        row.panel.title,
        number(timeline.step_time),
        step,
        f"{timeline.bubble_share:.1%}",
        bubble,
        _each([round(idle, 6) for idle in idle_inside(timeline)]),
        "-" if live is None else _each(live),
        expected_live,
        "-" if live is None else _each([peak / v for peak, v in zip(live, chunks, strict=True)]),
    )


def _each(values: Sequence[float]) -> str:
    """The values of all stages: once if they are the same, in a row if they are few, else the least and the largest."""
    if min(values) == max(values):
        return number(values[0])
    return " ".join(map(number, values)) if len(values) <= _MOST_STAGES_LISTED else f"{number(min(values))}..{number(max(values))}"
