"""What a picture shows: one or several timelines, one above the other, on one time axis; and its colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron.pipeline_parallel.simulate import Timeline
from megatron.spec.operations import OpKind

KIND_NAMES = {
    OpKind.FORWARD: "forward",
    OpKind.RECOMPUTE: "recompute",
    OpKind.BACKWARD: "backward",
    OpKind.INPUT_GRAD: "input gradient",
    OpKind.WEIGHT_GRAD: "weight gradient",
}
"""Kinds of operation in words, for legends."""


class Panel(NamedTuple):
    """A timeline with its title. It is drawn from its own start, whatever clock it was measured on."""

    title: str
    timeline: Timeline
    """Its times are milliseconds."""

    @property
    def caption(self) -> str:
        """Title, step time and bubble in one line."""
        timeline = self.timeline
        return f"{self.title}: step {milliseconds(timeline.step_time)}, bubble {timeline.bubble_share:.1%}"


class Drawing(NamedTuple):
    """What all panels of a picture share."""

    step_time: float
    """Step time of the longest panel, in milliseconds: the length of the time axis."""
    kinds: tuple[OpKind, ...]
    """The kinds of operation that occur."""
    num_depths: int
    """The most chunks on one stage."""
    largest_microbatch: int


def look_at(panels: Sequence[Panel]) -> Drawing:
    """What these panels have in common.

    Raises:
        ValueError: nothing in them takes any time.
    """
    step_time = max((panel.timeline.step_time for panel in panels), default=0.0)
    if not step_time > 0:
        raise ValueError("a timeline in which nothing takes any time cannot be drawn")
    ops = [span.op for panel in panels for spans in panel.timeline.spans for span in spans]
    kinds = {op.kind for op in ops}
    depths = max(len(of_stage) for panel in panels for of_stage in depth_of_chunk(panel.timeline))
    return Drawing(step_time, tuple(kind for kind in OpKind if kind in kinds), depths, max(op.microbatch for op in ops))


def depth_of_chunk(timeline: Timeline) -> list[dict[int, int]]:
    """For each stage, the place of each of its chunks: 0 for the first in the order of the model, 1 for the second, ..."""
    chunks = [sorted({span.op.chunk for span in spans}) for spans in timeline.spans]
    return [{chunk: depth for depth, chunk in enumerate(of_stage)} for of_stage in chunks]


def duration_at(panels: Sequence[Panel], share: float) -> float:
    """The duration below which this share of the operations lies: 0.1 finds the short ones and leaves outliers aside."""
    durations = sorted(span.end - span.start for panel in panels for spans in panel.timeline.spans for span in spans)
    durations = [duration for duration in durations if duration > 0]
    return durations[int(share * (len(durations) - 1))]


def tick_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, ... (and of 0.5, 0.2, ...) that is at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def milliseconds(duration: float) -> str:
    """A duration with its unit, and as many digits as a reader can use."""
    return f"{number(duration)} ms"


def number(value: float) -> str:
    """A number with four digits, or with all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# Of the eight colours of Okabe and Ito 2008, "Color Universal Design" (grey for black), those whose shades too stay apart under
# each kind of colour blindness. The two nearest, of whole backwards and of input gradients, occur in no schedule together. None of
# the eight stays apart from all of these: the violet of recompute is the colour whose shades do best.
_COLOURS = {
    OpKind.FORWARD: (0x00, 0x72, 0xB2),
    OpKind.RECOMPUTE: (0x80, 0x00, 0xF8),
    OpKind.BACKWARD: (0xD5, 0x5E, 0x00),
    OpKind.INPUT_GRAD: (0xE6, 0x9F, 0x00),
    OpKind.WEIGHT_GRAD: (0x99, 0x99, 0x99),
}
_SHADES = (0.0, 0.5, -0.4, 0.75)
"""The share of white, or if negative of black, for the first, second, ... chunk of a stage. Neighbours differ most."""
NUM_SHADES = len(_SHADES)
"""The number of shades; the fifth chunk of a stage looks like the first."""

ANSI_RESET = "\x1b[0m"
_CUBE = (0, 95, 135, 175, 215, 255)
"""Levels of red, green and blue in the terminal's colours 16 to 231."""


class Colour(NamedTuple):
    """Red, green and blue, 0 to 255."""

    red: int
    green: int
    blue: int

    @property
    def hex(self) -> str:
        """The colour as SVG writes it."""
        return "#{:02x}{:02x}{:02x}".format(*self)

    @property
    def is_dark(self) -> bool:
        """Whether white text reads better on it than black."""
        return 0.299 * self.red + 0.587 * self.green + 0.114 * self.blue < 128

    @property
    def ansi(self) -> str:
        """The escape code that switches a terminal to text on this colour."""
        red, green, blue = map(_nearest_in_cube, self)
        return f"\x1b[{97 if self.is_dark else 30};48;5;{16 + 36 * red + 6 * green + blue}m"


def colour_of(kind: OpKind, depth: int) -> Colour:
    """The colour of an operation on the first (depth 0), second, ... chunk of a stage."""
    share = _SHADES[depth % NUM_SHADES]
    return Colour(*(round(level + ((255 if share > 0 else 0) - level) * abs(share)) for level in _COLOURS[kind]))


def _nearest_in_cube(level: int) -> int:
    return min(range(len(_CUBE)), key=lambda i: abs(_CUBE[i] - level))
