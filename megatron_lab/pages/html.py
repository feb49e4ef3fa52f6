"""Building blocks of HTML pages. A page is one file with style, sections and tables that opens without network access. Its figures
are SVG.

Texts that come from the user are escaped with `html.escape`. Parameters and attributes named `body` or `html` contain HTML already.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megatron.config.regular_file import check_output

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#7f7f7f", "#9a5b8c", "#f6b26b", "#8fce9f", "#b5b04a", "#43536b"),
)
"""Colours of curves and bars. The first six are those of Okabe and Ito 2008, which colour-blind readers can distinguish."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --faint: #667085; --ground: #ffffff; --panel: #f5f6f8; --line: #d5d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --faint: #9aa3b2; --ground: #14171c; --panel: #1d2129; --line: #3a404b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 16px 24px 48px; color: var(--ink); background: var(--ground);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 8px 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; padding-top: 8px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 16px 0 4px; }
p { margin: 6px 0; max-width: 80ch; }
.faint, figcaption { color: var(--faint); font-size: 13px; }
pre { background: var(--panel); padding: 12px; border-radius: 6px; overflow-x: auto; font-size: 12.5px; line-height: 1.4; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 4px 14px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; }
td.number, th.number { text-align: right; }
figure { margin: 12px 0 16px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr)); gap: 0 28px; margin: 8px 0; }
.facts div { padding: 7px 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.facts dt { color: var(--faint); font-size: 13px; } .facts dd { margin: 0; font-variant-numeric: tabular-nums; }
svg { display: block; }
svg text { fill: var(--ink); font: 12px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0; font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
h1, h2 { text-wrap: balance; } td { overflow-wrap: break-word; }
.number, td:first-child { white-space: nowrap; } td:last-child:not(:first-child, .number) { min-width: 22ch; }
@media print {
  :root { color-scheme: light; --ink: #1d2129; --faint: #4d5666; --ground: #ffffff; --panel: #f5f6f8; --line: #d5d9e0; }
  body { max-width: none; padding: 0; } .wide { overflow: visible; } pre { white-space: pre-wrap; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
}
@media (max-width: 600px) { body { padding: 10px 12px 32px; } h1 { font-size: 20px; } .roomy { display: none; }
  th, td { padding-right: 10px; } td:first-child:not(.number) { white-space: normal; min-width: 14ch; }
  td:last-child:not(:first-child, .number) { min-width: 10ch; }
  td:nth-child(2):not(:last-child, .number) { min-width: 12ch; overflow-wrap: anywhere; } }
"""


@dataclass(frozen=True)
class Section:
    """Section of an HTML page: a heading and its content."""

    heading: str
    body: str
    """Content of the section as HTML."""


def build_page(title: str, sections: Sequence[Section], lead: str = "") -> str:
    """Return a complete HTML file.

    Args:
        title: title of the browser window and of the page, as plain text.
        sections: sections in the order of the page.
        lead: HTML between the title and the first section.
    """
    section_html = [f"<section><h2>{escape(section.heading)}</h2>\n{section.body}</section>" for section in sections]
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{lead}\n" + "\n".join(section_html) + "\n</body>\n</html>\n"
    )


def build_table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric_columns: Sequence[int] = ()) -> str:
    """Return the HTML of a table of texts. The table scrolls horizontally if the window is too narrow.

    Args:
        header: titles of the columns.
        rows: cells of each row, as plain texts.
        numeric_columns: indices of the columns that are aligned to the right.
    """

    def build_cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="number">{escape(cell)}</{tag}>' if column in numeric_columns else f"<{tag}>{_escape_path(cell)}</{tag}>"
            for column, cell in enumerate(row)
        )

    body = "".join(f"<tr>{build_cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{build_cells("th", header)}</tr></thead><tbody>{body}</tbody></table></div>'


def _escape_path(text: str) -> str:
    """Return a text as HTML. A path in it may continue on the next line after a slash."""
    return re.sub(r"(?<=\w)/(?=\w)", "/<wbr>", escape(text))


def build_facts(facts: Mapping[str, str]) -> str:
    """Return the HTML of a list of facts in as many columns as fit the window.

    Args:
        facts: value of each fact, as plain text, by its name.
    """
    entries = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(entries)}</dl>'


def build_legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the HTML of a legend.

    Args:
        entries: (colour, text) of each entry.
    """
    return (
        '<div class="legend">'
        + "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in entries)
        + "</div>"
    )


def write_page(flag: str, path: str, html: str) -> None:
    """Write an HTML page to a file. Missing folders are created.

    Args:
        flag: command-line flag that set the path, named in the error message.
        path: path of the file.
        html: content of the file.

    Raises:
        ValueError: the file cannot be written.
    """
    check_output(flag, path)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        Path(path).write_text(html, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be written: {(error.strerror or str(error)).lower()}. Choose another path."
        ) from error
