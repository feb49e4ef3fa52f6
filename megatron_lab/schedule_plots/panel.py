"""Common parts of all plots of pipeline schedules: panels (timelines below each other on one time axis), number formats, and
colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron.pipeline_parallel.simulate import Timeline
from megatron.spec.operations import OpType

OP_TYPE_NAMES = {
    OpType.FORWARD: "forward",
    OpType.RECOMPUTE: "recompute",
    OpType.BACKWARD: "backward",
    OpType.INPUT_GRAD: "input gradient",
    OpType.WEIGHT_GRAD: "weight gradient",
}
"""Names of the operation types in legends."""


class Panel(NamedTuple):
    """One timeline of a picture (start and end of all operations on each pipeline stage), with its title.

    The time axis of the panel starts at the first operation.
    """

    title: str
    timeline: Timeline
    """Start and end of each operation of the schedule on each stage, in milliseconds. The first operation may start at any time."""

    @property
    def caption(self) -> str:
        """Text above the panel: title, step time and share of the bubble, in one line."""
        timeline = self.timeline
        return f"{self.title}: step {format_ms(timeline.step_time)}, bubble {timeline.bubble_share:.1%}"


class PanelSummary(NamedTuple):
    """Properties that all panels (timelines) of a picture share, such as the length of the common time axis."""

    step_time: float
    """Step time of the longest panel in milliseconds: the length of the common time axis."""
    op_types: tuple[OpType, ...]
    """Types of operations that occur in at least one panel. The legend lists them."""
    max_chunks_per_stage: int
    """Maximum number of model chunks on one stage, over all panels."""
    max_microbatch: int


def summarize_panels(panels: Sequence[Panel]) -> PanelSummary:
    """Compute the properties that all panels (timelines) of a picture share, such as the length of the common time axis.

    Raises:
        ValueError: all operations of the panels have a duration of 0.
    """
    step_time = max((panel.timeline.step_time for panel in panels), default=0.0)
    if not step_time > 0:
        raise ValueError(
            "a timeline in which nothing takes any time cannot be drawn: all operations have a duration of 0. Set the time of at "
            "least one operation above 0"
        )
    ops = [span.op for panel in panels for spans in panel.timeline.spans for span in spans]
    op_types = {op.type for op in ops}
    max_chunks = max(len(chunk_indices) for panel in panels for chunk_indices in index_chunks(panel.timeline))
    return PanelSummary(
        step_time, tuple(op_type for op_type in OpType if op_type in op_types), max_chunks, max(op.microbatch for op in ops)
    )


def index_chunks(timeline: Timeline) -> list[dict[int, int]]:
    """Return, for each stage, a dictionary from the index of a chunk in the whole model to its index within the stage (0, 1,
    ...)."""
    chunks_by_stage = [sorted({span.op.chunk for span in stage_spans}) for stage_spans in timeline.spans]
    return [{chunk: index for index, chunk in enumerate(stage_chunks)} for stage_chunks in chunks_by_stage]


def compute_duration_quantile(panels: Sequence[Panel], quantile: float) -> float:
    """Return a quantile of the durations of all operations in the panels, in milliseconds. Operations of duration 0 do not count.

    A small quantile such as 0.1 gives the duration of short operations, without outliers.

    Args:
        quantile: from 0 (shortest operation) to 1 (longest).
    """
    durations = sorted(span.end - span.start for panel in panels for spans in panel.timeline.spans for span in spans)
    durations = [duration for duration in durations if duration > 0]
    return durations[int(quantile * (len(durations) - 1))]


def choose_tick_step(min_step: float) -> float:
    """Return the distance between the ticks of a time axis: the smallest of ..., 0.5, 1, 2, 5, 10, 20, ... that is at least
    `min_step`."""
    power = 10.0 ** math.floor(math.log10(min_step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= min_step * (1 - 1e-9))


def format_ms(duration: float) -> str:
    """Format a duration in milliseconds as text with the unit ms."""
    return f"{format_number(duration)} ms"


def format_number(value: float) -> str:
    """Format a number with at most four significant digits, or as an integer if its absolute value is at least 1000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# From the eight colours of Okabe and Ito 2008, "Color Universal Design" (with grey for black): those whose shades can also be told
# apart under each type of colour blindness. The two most similar, for BACKWARD and INPUT_GRAD, never occur in the same schedule.
# None of the eight can be told apart from all four of these, so RECOMPUTE has a violet: the colour whose shades differ most.
_COLOURS = {
    OpType.FORWARD: (0x00, 0x72, 0xB2),
    OpType.RECOMPUTE: (0x80, 0x00, 0xF8),
    OpType.BACKWARD: (0xD5, 0x5E, 0x00),
    OpType.INPUT_GRAD: (0xE6, 0x9F, 0x00),
    OpType.WEIGHT_GRAD: (0x99, 0x99, 0x99),
}
_SHADES = (0.0, 0.5, -0.4, 0.75)
"""Shades of the first, second, ... chunk of a stage: the fraction of white that is mixed in, or of black if negative.
Neighbours differ most."""
NUM_SHADES = len(_SHADES)
"""Number of shades. The chunk with index `NUM_SHADES` has the shade of the first chunk again."""

ANSI_RESET = "\x1b[0m"
_CUBE = (0, 95, 135, 175, 215, 255)
"""Levels of red, green and blue in the terminal's colours 16 to 231."""


class Colour(NamedTuple):
    """Colour as red, green and blue, each from 0 to 255."""

    red: int
    green: int
    blue: int

    @property
    def hex(self) -> str:
        """Colour in the notation of SVG, such as #0072b2."""
        return "#{:02x}{:02x}{:02x}".format(*self)

    @property
    def is_dark(self) -> bool:
        """Whether white text is easier to read on this colour than black text is."""
        return 0.299 * self.red + 0.587 * self.green + 0.114 * self.blue < 128

    @property
    def ansi(self) -> str:
        """Escape code for a terminal that sets this colour as the background, with black or white text."""
        red, green, blue = map(_find_nearest_in_cube, self)
        return f"\x1b[{97 if self.is_dark else 30};48;5;{16 + 36 * red + 6 * green + blue}m"


def get_colour(op_type: OpType, chunk_index: int) -> Colour:
    """Return the colour in which all pictures show an operation.

    Args:
        op_type: type of the operation; it selects the colour.
        chunk_index: index of the operation's model chunk among the chunks of the stage; it selects the shade.
    """
    shade = _SHADES[chunk_index % NUM_SHADES]
    return Colour(*(round(level + ((255 if shade > 0 else 0) - level) * abs(shade)) for level in _COLOURS[op_type]))


def _find_nearest_in_cube(level: int) -> int:
    return min(range(len(_CUBE)), key=lambda i: abs(_CUBE[i] - level))
