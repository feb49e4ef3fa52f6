"""Figure of the coordinate check, as figure 5 of Yang et al. 2022: how much activations change in training, by the hidden size.

The figure has one row without muP and one with muP, one column per activation, and one line per update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lab.coordinates.check import ChangeSizes, fit_growth_exponent
from megatron_lab.schedule_plots.figure import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMN_WIDTH, _ROW_HEIGHT = 2.4, 2.3
"""Size of one diagram, in inches."""


def write_figure(widths: Sequence[int], rows: Mapping[str, Sequence[ChangeSizes]], path: Path) -> None:
    """Draw how the changes of activations in training depend on the hidden size, and write the figure to a file.

    Args:
        widths: hidden sizes.
        rows: for each row of the figure, by its title: the changes of activations at each hidden size. A row shows the model with
            or without muP.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    save_figure(lambda: _plot(widths, rows), path)


def _plot(widths: Sequence[int], rows: Mapping[str, Sequence[ChangeSizes]]) -> Figure:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    names = list(next(iter(rows.values()))[0])
    figure = Figure(figsize=(_COLUMN_WIDTH * len(names), _ROW_HEIGHT * len(rows) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(rows), len(names), squeeze=False, sharex=True, sharey="col")
    colours = colormaps["viridis"]
    for row_axes, (title, changes) in zip(all_axes, rows.items(), strict=True):
        for axes, name in zip(row_axes, names, strict=True):
            num_updates = len(changes[0][name])
            for update in range(num_updates):
                values = [width_changes[name][update] for width_changes in changes]
                colour = colours(0.85 * (1 - update / max(1, num_updates - 1)))
                axes.plot(widths, values, color=colour, marker="o", markersize=3, label=f"{update + 1}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(list(widths), [str(width) for width in widths], fontsize=7)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.tick_params(axis="y", which="both", labelsize=7)
            axes.set_title(
                f"{name}\n"
                f"grows as width$^{{{fit_growth_exponent(widths, [width_changes[name][-1] for width_changes in changes]):.2f}}}$",
                fontsize=8,
            )
        row_axes[0].set_ylabel(f"{title}\nchange since the start", fontsize=8)
    for axes in all_axes[-1]:
        axes.set_xlabel("hidden size", fontsize=8)
    handles, labels = all_axes[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, title="updates", fontsize=7, title_fontsize=7, loc="outside right upper")  # covers no line
    return figure
