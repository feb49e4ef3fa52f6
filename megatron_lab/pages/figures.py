"""Bars as SVG. Lengths are shares of the width, so a figure fits a telephone and a wide screen, and its text keeps its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megatron_lab.pages.html import COLOURS, legend

_ROW, _BAR = 44, 18  # pixels: of a bar with the text above it, and of the bar
_SHOWN = 0.002
"""A part below this share of the whole width is not drawn; the table beside the figure has it."""


@dataclass(frozen=True)
class Bar:
    """One bar, made up of parts."""

    label: str
    parts: Mapping[str, float]
    told: str | None = None
    """Behind the label, in place of the sum of the parts."""


def stacked_bars(
    bars: Sequence[Bar], text: Callable[[float], str], *, limit: float | None = None, limit_text: str = "", note: str = ""
) -> str:
    """Bars of parts, one below the other on one scale; a line where the limit lies. HTML with one SVG and its legend.

    Args:
        bars: with the same names of parts in all, or some of them left out.
        text: a number as text.
        limit: what a bar should not exceed.
        note: below the figure, as text.
    """
    names = [*dict.fromkeys(name for bar in bars for name, value in bar.parts.items() if value > 0)]
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    longest = max([*(sum(bar.parts.values()) for bar in bars), limit or 0.0, 1e-30]) * 1.02
    height = _ROW * len(bars)
    drawn = [f'<svg width="100%" height="{height}" role="img" aria-label="{escape(note or "bars", quote=True)}">']
    for row, bar in enumerate(bars):
        top, left, total = _ROW * row, 0.0, sum(bar.parts.values())
        told = f"{bar.label}: {text(total) if bar.told is None else bar.told}"
        drawn.append(f'<text x="0" y="{top + 15}">{escape(told)}</text>')
        for name, value in bar.parts.items():
            if value / longest >= _SHOWN:
                drawn.append(
                    f'<rect x="{100 * left / longest:.3f}%" y="{top + 20}" width="{100 * value / longest:.3f}%" height="{_BAR}" '
                    f'fill="{colours[name]}"><title>{escape(f"{bar.label}, {name}: {text(value)}")}</title></rect>'
                )
            left += value
    if limit is not None:
        at = 100 * limit / longest
        drawn.append(
            f'<line x1="{at:.3f}%" x2="{at:.3f}%" y1="0" y2="{height}" stroke="#c00000" stroke-width="1.5" stroke-dasharray="5 3"/>'
        )
    drawn.append("</svg>")
    entries = [(colours[name], name) for name in names] + ([] if limit is None else [("#c00000", limit_text or text(limit))])
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f"<figure>{legend(entries)}{''.join(drawn)}{caption}</figure>"
