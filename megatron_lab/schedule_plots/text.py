"""A timeline as text: stages are rows, a column is a stretch of time, an operation is its letter and its microbatch.

    stage 0  F0─F1─······B0────F2─B1────···B2────
    stage 1  ···F0─B0────F1─B1────F2─B2────······

Every operation gets room for its number; what is then too long for the width is folded, like a line of prose. Where that would be
too many lines, a column is one letter, which says what took most of it.
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
from megatron.spec.operations import OpKind
from megatron_lab.schedule_plots.panel import (
    ANSI_RESET,
    KIND_NAMES,
    Drawing,
    Panel,
    colour_of,
    depth_of_chunk,
    duration_at,
    look_at,
    milliseconds,
    tick_step,
)

_MOST_LINES = 100
"""A picture that needs more lines with numbers is drawn without them."""
_NARROWEST = 40
"""The least number of columns that is used, even where the terminal has fewer."""
_COLUMNS_A_TICK = 14


class _Cell(NamedTuple):
    """A character, and the kind and depth of the operation that it is part of (None while waiting)."""

    character: str
    look: tuple[OpKind, int] | None


@dataclass(frozen=True)
class _Layout:
    """How time becomes columns."""

    columns: int
    """Columns of time in a line."""
    per_ms: float
    """Columns for each millisecond."""
    parts: int = 1
    """The number of lines into which the whole time is folded."""
    coarse: bool = False
    """Whether a column is one letter, without numbers."""


def draw_text(panels: Sequence[Panel], *, width: int = 120, colour: bool = False, ascii_only: bool = False) -> str:
    """Draw the panels, one above the other, each with its time axis, and a legend.

    Args:
        width: columns of a line.
        colour: use the escape codes of a terminal.
        ascii_only: use no line-drawing characters.

    Raises:
        ValueError: nothing in the panels takes any time.
    """
    drawing = look_at(panels)
    name_width = len(_name(max(len(panel.timeline.spans) for panel in panels) - 1))
    layout = _layout(panels, drawing, max(width, _NARROWEST) - name_width)
    painter = _Painter(layout, colour, *("-." if ascii_only else "─·"))
    blocks = [_block(panel, part, painter, name_width) for part in range(layout.parts) for panel in panels]
    return "\n\n".join(map("\n".join, [*blocks, _legend(panels, drawing, painter, name_width)]))


def _name(stage: int) -> str:
    return f"stage {stage}  "


def _layout(panels: Sequence[Panel], drawing: Drawing, columns: int) -> _Layout:
    """The layout with room for the numbers of nearly all operations; of most, where one kind is very short; or the coarse one."""
    rows = sum(len(panel.timeline.spans) for panel in panels)
    for share in (0.1, 0.4):
        shortest = duration_at(panels, share)
        # Whole columns for each operation, so that equal ones look equal: as many as fit, or as many as it needs.
        per_ms = max(int(columns * shortest / drawing.step_time * (1 + 1e-9)), _room(drawing)) / shortest
        needed = math.ceil(drawing.step_time * per_ms * (1 - 1e-9))
        parts = math.ceil(needed / columns)
        if parts * rows <= _MOST_LINES:
            return _Layout(math.ceil(needed / parts), per_ms, parts)
    return _Layout(columns, columns / drawing.step_time, coarse=True)


def _room(drawing: Drawing) -> int:
    """Columns of a letter and a number."""
    return 1 + len(str(drawing.largest_microbatch))


def _columns_needed(panels: Sequence[Panel], drawing: Drawing, share: float) -> float:
    """Columns in which all operations but this share have room for their numbers."""
    return drawing.step_time / duration_at(panels, share) * _room(drawing)


# ---- rows


@dataclass(frozen=True)
class _Painter:
    """Makes the row of one stage."""

    layout: _Layout
    colour: bool
    fill: str
    idle: str

    def row(self, spans: Sequence[OpSpan], depths: dict[int, int], start: float, part: int) -> str:
        """One part of the time of one stage, as text."""
        return self.paint(self._mixed(spans, depths, start) if self.layout.coarse else self._whole(spans, depths, start, part))

    def paint(self, cells: Sequence[_Cell]) -> str:
        """Cells as text."""
        text = ""
        for looks, run in itertools.groupby(cells, key=lambda cell: cell.look):
            characters = "".join(cell.character for cell in run)
            text += f"{colour_of(*looks).ansi}{characters}{ANSI_RESET}" if looks and self.colour else characters
        return text

    def _whole(self, spans: Sequence[OpSpan], depths: dict[int, int], start: float, part: int) -> list[_Cell]:
        """Cells that show operations with their numbers, as far as there is room."""
        columns, per_ms = self.layout.columns, self.layout.per_ms
        cells = [_Cell(self.idle, None)] * columns
        for span in spans:
            first, end = (_column((time - start) * per_ms) - part * columns for time in (span.start, span.end))
            depth = depths[span.op.chunk]
            label = f"{_letter(span.op.kind, depth)}{span.op.microbatch}"
            characters = (label if len(label) <= end - first else label[0]).ljust(end - first, self.fill)
            for column in range(max(first, 0), min(end, columns)):
                cells[column] = _Cell(characters[column - first], (span.op.kind, depth))
        return cells

    def _mixed(self, spans: Sequence[OpSpan], depths: dict[int, int], start: float) -> list[_Cell]:
        """Cells that show, for each column, the kind of operation, or the waiting, that took most of it."""
        columns, per_ms = self.layout.columns, self.layout.per_ms
        shares: list[defaultdict[tuple[OpKind, int], float]] = [defaultdict(float) for _ in range(columns)]
        for span in spans:
            first, end = ((time - start) * per_ms for time in (span.start, span.end))
            for column in range(int(first), min(math.ceil(end), columns)):
                shares[column][span.op.kind, depths[span.op.chunk]] += min(end, column + 1) - max(first, column)
        cells = []
        for share in shares:
            looks, most = max(share.items(), key=itemgetter(1), default=(None, 0.0))
            waits = looks is None or most < 1 - sum(share.values())
            cells.append(_Cell(self.idle, None) if looks is None or waits else _Cell(_letter(*looks), looks))
        return cells


def _column(place: float) -> int:
    """The column nearest to a place; halves are rounded up, so that a length of whole columns is the same wherever it begins."""
    return math.floor(round(place, 6) + 0.5)


def _letter(kind: OpKind, depth: int) -> str:
    """The letter of an operation; lower case for the second, fourth, ... chunk of a stage."""
    return kind.value.lower() if depth % 2 else kind.value


def _block(panel: Panel, part: int, painter: _Painter, name_width: int) -> Iterator[str]:
    """Lines of one panel in one part of the time."""
    layout, timeline = painter.layout, panel.timeline
    yield panel.caption + (f" (part {part + 1} of {layout.parts})" if layout.parts > 1 else "")
    for stage, (spans, depths) in enumerate(zip(timeline.spans, depth_of_chunk(timeline), strict=True)):
        yield _name(stage).ljust(name_width) + painter.row(spans, depths, timeline.start, part)
    yield " " * name_width + _axis(layout, part)


def _axis(layout: _Layout, part: int) -> str:
    """The time axis: bars at round times, each with its time after it."""
    step = tick_step(_COLUMNS_A_TICK / layout.per_ms)
    line = ""
    for tick in range(math.ceil((part + 1) * layout.columns / layout.per_ms / step)):
        column = _column(tick * step * layout.per_ms) - part * layout.columns
        mark = f"|{milliseconds(tick * step)}"
        if 0 <= column <= layout.columns - len(mark):
            line = line.ljust(column) + mark
    return line


# ---- legend


def _legend(panels: Sequence[Panel], drawing: Drawing, painter: _Painter, name_width: int) -> Iterator[str]:
    layout = painter.layout
    kinds = [f"{painter.paint([_Cell(kind.value, (kind, 0))])} {KIND_NAMES[kind]}" for kind in drawing.kinds]
    yield ", ".join([*kinds, f"{painter.idle} waiting" + ("" if layout.coarse else "; the number is the microbatch")])
    if drawing.num_depths > 1:
        again = ", and again for its third and fourth" if drawing.num_depths > 2 else ""
        yield f"upper case: first chunk of a stage, lower case: its second{again}"
    if layout.coarse:
        wide = math.ceil(_columns_needed(panels, drawing, 0.1)) + name_width
        yield f"coarse: a column is {milliseconds(1 / layout.per_ms)} and shows what took most of it; numbers need {wide:,} columns"
        return
    durations = [span.end - span.start for panel in panels for spans in panel.timeline.spans for span in spans]
    hidden = sum(duration * layout.per_ms < 0.5 for duration in durations)
    if hidden:
        yield f"{hidden:,} of {len(durations):,} operations are too short to be seen here"
