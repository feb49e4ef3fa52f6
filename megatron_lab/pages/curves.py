"""Curves that can be zoomed: figures of a page, drawn in the browser by `curves.js`, which the page carries with it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lab.pages.html import legend

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_POINTS = 4000
"""Of a curve. Of a longer one each point stands for the mean of as many neighbours."""

STYLE = """<style>
figure.chart .area { touch-action: pan-y; cursor: crosshair; user-select: none; }
figure.chart .said { min-height: 1.5em; font-variant-numeric: tabular-nums; }
.choose button { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  padding: 3px 12px; margin: 0 6px 6px 0; cursor: pointer; }
.choose button[aria-pressed="true"] { border-color: #0072b2; box-shadow: inset 0 0 0 1px #0072b2; }
</style>"""


def smoothed(values: NDArray[Any], half: int) -> NDArray[Any]:
    """The mean over `half` values on both sides. At the beginning, where a loss falls fast, over fewer, but as many on both sides;
    at the end over those that there are. What is not a number does not count."""
    import numpy as np

    counts, places = np.isfinite(values), np.arange(len(values))
    sums = np.concatenate([[0.0], np.where(counts, values, 0.0).cumsum()])
    numbers = np.concatenate([[0], counts.cumsum()])
    low, high = np.maximum(places - half, 0), np.minimum(np.minimum(places + half, 2 * places), len(values) - 1) + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        found: NDArray[Any] = (sums[high] - sums[low]) / (numbers[high] - numbers[low])
    return found


@dataclass(frozen=True)
class Curve:
    """A line of a chart. None is a gap."""

    name: str
    colour: str
    iteration: Sequence[float]
    tokens: Sequence[float]
    y: Sequence[float | None]
    faint: bool = False
    dashed: bool = False
    dots: bool = False


def chart(title: str, curves: Sequence[Curve], *, strip: bool = False, from_zero: bool = False) -> str:
    """HTML of a figure; empty where no curve has a point.

    Args:
        strip: lower than the others.
        from_zero: show zero as well.
    """
    curves = [one for one in curves if any(value is not None for value in one.y)]
    if not curves:
        return ""
    data = {"title": title, "strip": strip, "from_zero": from_zero, "curves": [_thinned(one) for one in curves]}
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # a name may hold the end of a script
    marks = legend([(one.colour, one.name) for one in curves if not one.faint]) if len(curves) > 1 else ""
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{marks}<div class="area"></div>'
        f'<div class="said faint"></div><script type="application/json">{text}</script></figure>'
    )


def choice() -> str:
    """Buttons that choose the axis of all charts of the page."""
    return (
        f'{STYLE}<p class="choose"><button data-axis="iteration" aria-pressed="true">iterations</button>'
        '<button data-axis="tokens" aria-pressed="false">tokens</button><button data-all>show all</button></p>'
        '<p class="faint">Drag over a chart to zoom in; a double click shows all again.</p>'
        "<noscript><p>The curves are drawn by JavaScript, which is switched off here.</p></noscript>"
    )


def script() -> str:
    """What draws the charts; to stand behind them."""
    return f"<script>\n{Path(__file__).with_name('curves.js').read_text(encoding='utf-8')}</script>"


def _thinned(curve: Curve) -> dict[str, object]:
    group = -(-len(curve.y) // MOST_POINTS) or 1
    places = range(0, len(curve.y), group)
    flags = {"faint": curve.faint, "dashed": curve.dashed, "dots": curve.dots}
    return {
        "name": curve.name,
        "colour": curve.colour,
        "iteration": [curve.iteration[min(at + group, len(curve.y)) - 1] for at in places],
        "tokens": [curve.tokens[min(at + group, len(curve.y)) - 1] for at in places],
        "y": [_mean(curve.y[at : at + group]) for at in places],
        **{name: True for name, given in flags.items() if given},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return float(f"{math.fsum(numbers) / len(numbers):.7g}") if numbers else None
