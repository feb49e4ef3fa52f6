"""The coordinate check as a figure, as figure 5 of Yang et al. 2022: a row without muP and one with it, a column for each thing
that is looked at, a line for each update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lab.coordinates.check import Sizes, growth
from megatron_lab.schedule_plots.figure import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMN, _ROW = 2.4, 2.3
"""Inches."""


def write_figure(widths: Sequence[int], rows: Mapping[str, Sequence[Sizes]], path: Path) -> None:
    """Draw one row for each parametrisation, by its title: the sizes at each width.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    save_figure(lambda: _figure(widths, rows), path)


def _figure(widths: Sequence[int], rows: Mapping[str, Sequence[Sizes]]) -> Figure:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    names = list(next(iter(rows.values()))[0])
    figure = Figure(figsize=(_COLUMN * len(names), _ROW * len(rows) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(rows), len(names), squeeze=False, sharex=True, sharey="col")
    colours = colormaps["viridis"]
    for line_of_axes, (title, sizes) in zip(all_axes, rows.items(), strict=True):
        for axes, name in zip(line_of_axes, names, strict=True):
            updates = len(sizes[0][name])
            for update in range(updates):
                values = [one[name][update] for one in sizes]
                colour = colours(0.85 * (1 - update / max(1, updates - 1)))
                axes.plot(widths, values, color=colour, marker="o", markersize=3, label=f"{update + 1}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(list(widths), [str(width) for width in widths], fontsize=7)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.tick_params(axis="y", which="both", labelsize=7)
            axes.set_title(f"{name}\ngrows as width$^{{{growth(widths, [one[name][-1] for one in sizes]):.2f}}}$", fontsize=8)
        line_of_axes[0].set_ylabel(f"{title}\nchange since the start", fontsize=8)
    for axes in all_axes[-1]:
        axes.set_xlabel("hidden size", fontsize=8)
    lines, labels = all_axes[0][-1].get_legend_handles_labels()
    figure.legend(lines, labels, title="updates", fontsize=7, title_fontsize=7, loc="outside right upper")  # covers no line
    return figure
