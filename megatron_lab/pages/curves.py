"""Charts of curves that the reader of an HTML page can zoom. The script `curves.js`, which is part of the page, draws them in the
browser."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lab.pages.html import build_legend

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_POINTS = 4000
"""Maximum number of points of a curve. In a longer curve each point is the mean of equally many neighbours."""

STYLE = """<style>
figure.chart .area { touch-action: pan-y; cursor: crosshair; user-select: none; }
figure.chart .said { min-height: 1.5em; font-variant-numeric: tabular-nums; }
.choose button { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  padding: 3px 12px; margin: 0 6px 6px 0; cursor: pointer; }
.choose button[aria-pressed="true"] { border-color: #0072b2; box-shadow: inset 0 0 0 1px #0072b2; }
</style>"""


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
    is_dashed: bool = False
    has_dots: bool = False


def build_chart(title: str, curves: Sequence[Curve], *, is_strip: bool = False, includes_zero: bool = False) -> str:
    """Return the HTML of a chart with curves, or an empty string if no curve has a point.

    Args:
        title: title of the chart.
        is_strip: make the chart lower than usual.
        includes_zero: extend the vertical axis to zero.
    """
    curves = [curve for curve in curves if any(value is not None for value in curve.values)]
    if not curves:
        return ""
    data = {"title": title, "strip": is_strip, "from_zero": includes_zero, "curves": [_downsample(curve) for curve in curves]}
    data_json = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # a curve's name may contain </script>
    legend = build_legend([(curve.colour, curve.name) for curve in curves if not curve.is_faint]) if len(curves) > 1 else ""
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{legend}<div class="area"></div>'
        f'<div class="said faint"></div><script type="application/json">{data_json}</script></figure>'
    )


def build_axis_buttons() -> str:
    """Return the HTML of the buttons that select the horizontal axis of all charts of the page: iterations or tokens."""
    return (
        f'{STYLE}<p class="choose"><button data-axis="iteration" aria-pressed="true">iterations</button>'
        '<button data-axis="tokens" aria-pressed="false">tokens</button><button data-all>show all</button></p>'
        '<p class="faint">Drag over a chart to zoom in; a double click shows all again.</p>'
        "<noscript><p>The curves are drawn by JavaScript, which is switched off here.</p></noscript>"
    )


def build_script() -> str:
    """Return the script element of the page that draws the charts. It must come after all charts in the page."""
    return f"<script>\n{Path(__file__).with_name('curves.js').read_text(encoding='utf-8')}</script>"


def _downsample(curve: Curve) -> dict[str, object]:
    """Return the data of a curve for `curves.js`, with at most `MAX_POINTS` points. In a longer curve, a point is the mean of
    neighbouring points."""
    group_size = -(-len(curve.values) // MAX_POINTS) or 1
    starts = range(0, len(curve.values), group_size)
    attributes = {"faint": curve.is_faint, "dashed": curve.is_dashed, "dots": curve.has_dots}
    return {
        "name": curve.name,
        "colour": curve.colour,
        "iteration": [curve.iterations[min(start + group_size, len(curve.values)) - 1] for start in starts],
        "tokens": [curve.tokens[min(start + group_size, len(curve.values)) - 1] for start in starts],
        "y": [_compute_mean(curve.values[start : start + group_size]) for start in starts],
        **{name: True for name, is_set in attributes.items() if is_set},
    }


def _compute_mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return float(f"{math.fsum(finite) / len(finite):.7g}") if finite else None
