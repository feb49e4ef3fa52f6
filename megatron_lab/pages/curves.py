"""Charts of curves that the reader of an HTML page can zoom. The script `curves.js`, which is part of the page, draws them in the
browser. This module prepares the data: it thins long curves, and finds the range of values that is worth looking at."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lab.pages.html import COLOURS

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_POINTS = 3000
"""Maximum number of points of a curve. In a longer curve each point is the mean of equally many neighbours, and the page also has
their minimum and maximum."""
START_SHARE, MIN_STEPS_FOR_START = 0.02, 100
"""Share of the steps, at the start of a run of at least so many steps, whose values may lie outside the visible range. Otherwise
the remaining curve might look flat."""
_MAX_START_FACTOR = 2.5
"""The start of a run lies outside the visible range only if it would make the range more than this factor higher."""
_OUTLIER_SHARE, _MIN_VALUES_FOR_OUTLIERS = 0.02, 20
"""Share of the values, at each end, that may be outliers; minimum number of values for a decision."""

_DARK_COLOURS = (
    *("#4aa8e8", "#ff8a3d", "#2fcf9f", "#e29cc6", "#f0b429", "#7cc9f5"),
    *("#a8adb5", "#c58ab8", "#f6b26b", "#8fce9f", "#cfca5c", "#94a6c4"),
)
"""`COLOURS` for curves on a dark ground."""
DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2")
"""Dash patterns of curves (SVG `stroke-dasharray`), for curves that share a colour or whose colours are close."""


def get_curve_colour(index: int) -> str:
    """Return the colour of a curve as a CSS variable, which has different values on a light and on a dark ground."""
    return f"var(--curve-{index % len(COLOURS)})"


def _build_style(mark_colours: Mapping[str, tuple[str, str]]) -> str:
    """Return the style sheet of the charts.

    Args:
        mark_colours: colours of each type of mark, on a light and on a dark ground.
    """
    light = "".join(f"--curve-{index}:{colour};" for index, colour in enumerate(COLOURS))
    dark = "".join(f"--curve-{index}:{colour};" for index, colour in enumerate(_DARK_COLOURS))
    names = {name: f"--mark-{name.replace(' ', '-')}" for name in mark_colours}
    light += "".join(f"{names[name]}:{colours[0]};" for name, colours in mark_colours.items())
    dark += "".join(f"{names[name]}:{colours[1]};" for name, colours in mark_colours.items())
    marks = "".join(f".mark.{name.replace(' ', '-')} {{ stroke: var({names[name]}); }}\n" for name in mark_colours)
    return (
        f"<style>\n:root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"@media print {{ :root {{ {light} }} }}\n{_read_file('curves.css')}{marks}</style>"
    )


def _read_file(name: str) -> str:
    """Return the text of a file of this package."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def smooth(values: NDArray[Any], half_width: int) -> NDArray[Any]:
    """Return the moving mean of `values`: each value is replaced by the mean of a window with `half_width` values on both sides.

    Near the start, where a loss falls fast, the window is smaller but still symmetric. Near the end the window contains only the
    values that exist. Values that are not finite are ignored.
    """
    import numpy as np

    is_finite, indices = np.isfinite(values), np.arange(len(values))
    prefix_sums = np.concatenate([[0.0], np.where(is_finite, values, 0.0).cumsum()])
    prefix_counts = np.concatenate([[0], is_finite.cumsum()])
    start, end = np.maximum(indices - half_width, 0), np.minimum(np.minimum(indices + half_width, 2 * indices), len(values) - 1) + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        means: NDArray[Any] = (prefix_sums[end] - prefix_sums[start]) / (prefix_counts[end] - prefix_counts[start])
    return means


@dataclass(frozen=True)
class Curve:
    """Curve of a chart: its points and its style. A point whose value is None is a gap in the line.

    `iterations` and `tokens` are the two possible horizontal positions of each point, between which the reader can switch.
    """

    name: str
    colour: str
    iterations: Sequence[float]
    tokens: Sequence[float]
    values: Sequence[float | None]
    is_faint: bool = False
    dash: str = ""
    """Dash pattern of the line, as in SVG; empty for a solid line."""
    has_dots: bool = False
    raw_values: Sequence[float | None] | None = None
    """Values before smoothing, which decide what is an outlier: smoothing spreads one over many points. None if not smoothed."""


def find_limits(curves: Iterable[Sequence[float | None]]) -> tuple[float | None, float | None]:
    """Return the limits beyond which values are outliers, which would flatten the rest of a chart.

    A value is an outlier if it is farther from the central 96 % of the values of its curve than the range of these. In a curve of
    100 values or more, the first 2 % are beyond the limits too if they would make the range of the chart more than 2.5 times as
    high.

    Args:
        curves: values of each curve of the chart, in the order of the steps. Gaps are None or not finite.

    Returns:
        (lower, upper) limit; None where there are no outliers.
    """
    start, middle, kept = list[float](), list[float](), list[float]()
    for values in curves:
        num_start = int(len(values) * START_SHARE) if len(values) >= MIN_STEPS_FOR_START else 0
        start += _select_finite(values[:num_start])
        usual = sorted(_select_finite(values[num_start:]))
        middle += usual[:1] + usual[-1:]
        kept += _find_usual_range(usual)
    if not kept:
        return None, None
    low, high = min(kept), max(kept)
    if start and max(*start, high) - min(*start, low) <= _MAX_START_FACTOR * (high - low):
        low, high = min(*start, low), max(*start, high)
    return (low if min([*middle, *start]) < low else None), (high if max([*middle, *start]) > high else None)


def _find_usual_range(values: Sequence[float]) -> list[float]:
    """Return the smallest and the largest of sorted values that are no outliers; an empty list without values."""
    if len(values) < _MIN_VALUES_FOR_OUTLIERS:
        return [*values[:1], *values[-1:]]
    num_outside = max(1, int(len(values) * _OUTLIER_SHARE))
    first, last = values[num_outside], values[-1 - num_outside]
    span = last - first or abs(first) or 1.0
    usual = [value for value in values if first - span <= value <= last + span]
    return [usual[0], usual[-1]]


def _select_finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def build_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    is_wide: bool = False,
    includes_zero: bool = False,
    has_log_button: bool = False,
    has_outliers: bool = True,
) -> str:
    """Return the HTML of a chart with curves, or an empty string if no curve has a point.

    Args:
        title: title of the chart.
        is_wide: give the chart the full width of the page.
        includes_zero: extend the vertical axis to zero.
        has_log_button: add a button that makes the vertical axis logarithmic.
        has_outliers: leave values far from the others outside the visible range.
    """
    curves = [curve for curve in curves if _select_finite(curve.values)]
    if not curves:
        return ""
    limits = find_limits([curve.raw_values or curve.values for curve in curves]) if has_outliers else (None, None)
    data: dict[str, object] = {"title": title, "is_wide": is_wide, "from_zero": includes_zero, "limits": limits}
    data["start"] = max(_select_finite(curve.values)[0] for curve in curves)
    data |= {"curves": [_thin(curve) for curve in curves]}
    button = '<button data-scale aria-pressed="false">log scale</button>' if has_log_button else ""
    legend = _build_legend(curves) if len(curves) > 1 else ""
    return (
        f'<figure class="chart{" wide" if is_wide else ""}"><figcaption>{escape(title)}{button}</figcaption>{legend}'
        f'<div class="area" tabindex="0" role="group" aria-label="{escape(title, quote=True)}: arrow keys read values, '
        'plus and minus zoom, 0 shows all"></div><div class="spoken" aria-live="polite"></div>'
        f'<script type="application/json">{_to_script_json(data)}</script></figure>'
    )


def _build_legend(curves: Sequence[Curve]) -> str:
    entries = (
        '<span><svg aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" '
        f'stroke="{curve.colour}" stroke-dasharray="{curve.dash}" stroke-opacity="{0.5 if curve.is_faint else 1}"/></svg>'
        f"{escape(curve.name)}</span>"
        for curve in curves
    )
    return f'<div class="curve-legend">{"".join(entries)}</div>'


@dataclass(frozen=True)
class AxisMark:
    """Mark on the horizontal axis of all charts of a page, such as a restart of the run."""

    type: str
    iteration: float
    tokens: float
    text: str
    """Text that the page shows when the reader points at the mark."""


def build_charts(
    charts: Sequence[str], marks: Sequence[AxisMark], colours: Mapping[str, tuple[str, str]], hidden: Sequence[str]
) -> str:
    """Return the HTML of all charts of a page, with their buttons and the script that draws them.

    Args:
        charts: results of `build_chart`.
        marks: marks on the horizontal axis of all charts.
        colours: colours of each type of mark, on a light and on a dark ground. The buttons have the same order.
        hidden: types of marks that appear only after their button is pressed.
    """
    buttons = "".join(
        f'<button data-mark="{name}" aria-pressed="{str(name not in hidden).lower()}"><svg aria-hidden="true" class="mark '
        f'{name.replace(" ", "-")}"><line x1="7" x2="7" y1="0" y2="12"/></svg>{name} ({count:,})</button>'
        for name in colours
        if (count := sum(mark.type == name for mark in marks))
    )
    positions = [{"type": mark.type, "iteration": mark.iteration, "tokens": mark.tokens, "text": mark.text} for mark in marks]
    return (
        f'{_build_style(colours)}<div class="choose"><span class="group" role="group" aria-label="horizontal axis">'
        '<button data-axis="iteration" aria-pressed="true">iterations</button>'
        '<button data-axis="tokens" aria-pressed="false">tokens</button></span>'
        '<span class="group" role="group" aria-label="range"><button data-last="1">all</button>'
        '<button data-last="0.5">last half</button><button data-last="0.1">last tenth</button></span>'
        + (f'<span class="group marks" role="group" aria-label="marks">{buttons}</span>' if buttons else "")
        + '</div><p class="faint hint"><span class="mouse">Drag over a chart to zoom in; a double click shows all again.</span>'
        '<span class="touch">Tap a chart to read its values.</span> Triangles at an edge mark values outside the range.</p>'
        "<noscript><p>The curves are drawn by JavaScript, which is switched off here.</p></noscript>"
        f'<div class="charts">{"".join(charts)}</div>'
        f'<script type="application/json" id="marks">{_to_script_json(positions)}</script>'
        f"<script>\n{_read_file('curves.js')}</script>"
    )


def _to_script_json(data: object) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # a name may contain </script>


def _thin(curve: Curve) -> dict[str, object]:
    """Return the data of a curve for `curves.js`, with at most `MAX_POINTS` points. In a longer curve, a point is the mean of
    neighbouring points; a faint curve also has their minimum and maximum."""
    num_values = len(curve.values)
    group_size = -(-num_values // MAX_POINTS) or 1
    starts = range(0, num_values, group_size)
    groups = [_select_finite(curve.values[start : start + group_size]) for start in starts]
    ends = [min(start + group_size, num_values) - 1 for start in starts]
    attributes = {"faint": curve.is_faint, "dash": curve.dash, "dots": curve.has_dots}
    data: dict[str, object] = {"name": curve.name, "colour": curve.colour}
    data |= {"iteration": [curve.iterations[end] for end in ends], "tokens": [curve.tokens[end] for end in ends]}
    data["y"] = [_round(math.fsum(group) / len(group)) if group else None for group in groups]
    if group_size > 1 and curve.is_faint:
        data["low"] = [_round(min(group)) if group else None for group in groups]
        data["high"] = [_round(max(group)) if group else None for group in groups]
    return data | {name: value for name, value in attributes.items() if value}


def _round(value: float) -> float:
    return float(f"{value:.6g}")
