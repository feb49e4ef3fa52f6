"""Bar charts for HTML pages, as SVG.

Bar lengths are percentages of the width of the figure, and texts have a fixed size. So a figure fits both phones and wide screens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megatron_lab.pages.html import COLOURS, build_legend

_ROW_HEIGHT, _BAR_HEIGHT = 44, 18  # pixels: of a bar with the text above it, and of the bar
_MIN_DRAWN_SHARE = 0.002
"""Segments below this fraction of the full width are not drawn. The table next to the figure lists them."""


@dataclass(frozen=True)
class Bar:
    """One horizontal bar of a bar chart, which consists of segments one after another."""

    label: str
    segments: Mapping[str, float]
    """Value that each segment shows as its length, by the name of the segment."""
    value_text: str | None = None
    """Text after the bar's label; None for the sum of the segment values."""


def build_stacked_bars(
    bars: Sequence[Bar],
    format_value: Callable[[float], str],
    *,
    limit: float | None = None,
    limit_text: str = "",
    caption_text: str = "",
) -> str:
    """Return the HTML of a figure with horizontal bars below each other on a common scale, and a legend.

    Args:
        bars: bars to draw. Segments with equal names have equal colours in all bars. A bar may lack some names.
        format_value: function that formats the length of a segment or of a bar.
        limit: length that a bar should not exceed. A dashed line marks it.
        limit_text: text of the limit in the legend; by default its formatted value.
        caption_text: text below the figure.
    """
    names = [*dict.fromkeys(name for bar in bars for name, value in bar.segments.items() if value > 0)]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    axis_max = max([*(sum(bar.segments.values()) for bar in bars), limit or 0.0, 1e-30]) * 1.02
    height = _ROW_HEIGHT * len(bars)
    svg = [f'<svg width="100%" height="{height}" role="img" aria-label="{escape(caption_text or "bars", quote=True)}">']
    for row, bar in enumerate(bars):
        top, left, total = _ROW_HEIGHT * row, 0.0, sum(bar.segments.values())
        label_text = f"{bar.label}: {format_value(total) if bar.value_text is None else bar.value_text}"
        svg.append(f'<text x="0" y="{top + 15}">{escape(label_text)}</text>')
        for name, value in bar.segments.items():
            if value / axis_max >= _MIN_DRAWN_SHARE:
                svg.append(
                    f'<rect x="{100 * left / axis_max:.3f}%" y="{top + 20}" width="{100 * value / axis_max:.3f}%" '
                    f'height="{_BAR_HEIGHT}" fill="{colours[name]}">'
                    f"<title>{escape(f'{bar.label}, {name}: {format_value(value)}')}</title></rect>"
                )
            left += value
    if limit is not None:
        i = 100 * limit / axis_max
        svg.append(
            f'<line x1="{i:.3f}%" x2="{i:.3f}%" y1="0" y2="{height}" stroke="#c00000" stroke-width="1.5" stroke-dasharray="5 3"/>'
        )
    svg.append("</svg>")
    entries = [(colours[name], name) for name in names] + (
        [] if limit is None else [("#c00000", limit_text or format_value(limit))]
    )
    caption = f"<figcaption>{escape(caption_text)}</figcaption>" if caption_text else ""
    return f"<figure>{build_legend(entries)}{''.join(svg)}{caption}</figure>"
