"""SVG figure of a job's rank grid.

The figure has a row for each pipeline stage, a column for each combination of data, context and tensor rank, and lines between
nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from megatron.parallel.topology import Topology

_MAX_CELLS = 64
"""Maximum number of rows, and of columns for small tensor and context groups. A larger grid shows the first ones and the
last."""
_CELL_HEIGHT, _HEADER_HEIGHT = 20, 22  # pixels
_COLOUR_SCALE = ("#e3eef7", "#b5d3e9", "#7fb4d8", "#4a93c4", "#1f73ab", "#08518c")
"""Colours from the minimum to the maximum. Texts on the last three are white."""
_MAX_LABELLED_COLUMNS = 24
"""Maximum number of columns at which the cells are wide enough for the number of their rank."""


def build_rank_grid(
    topology: Topology, gpus_per_node: int, get_value: Callable[[int], float], format_value: Callable[[float], str], value_name: str
) -> str:
    """Return the HTML of the rank grid and its legend. The colour of a cell shows a value of the rank, such as its memory.

    Args:
        gpus_per_node: number of ranks on a node. Node k has the ranks from k * gpus_per_node to (k + 1) * gpus_per_node - 1.
        get_value: function that returns the value of a rank, such as the bytes that it needs.
        format_value: function that formats a value as text.
        value_name: name of the value, such as "device memory".
    """
    ranks_per_data_rank = topology.tp * topology.cp
    stages, data_ranks = (
        _select_indices(topology.pp, _MAX_CELLS),
        _select_indices(topology.dp, max(2, _MAX_CELLS // ranks_per_data_rank)),
    )
    columns = [
        (data_rank, context_rank, tensor_rank)
        for data_rank in data_ranks
        for context_rank in range(topology.cp)
        for tensor_rank in range(topology.tp)
    ][: 4 * _MAX_CELLS]
    ranks = {
        (row, column): topology.find_rank(tensor_rank, context_rank, data_rank, stage)
        for row, stage in enumerate(stages)
        for column, (data_rank, context_rank, tensor_rank) in enumerate(columns)
    }
    values = {rank: get_value(rank) for rank in set(ranks.values())}
    min_value, max_value = min(values.values()), max(values.values())
    height, column_width = _CELL_HEIGHT * len(stages), 100 / len(columns)
    labels = [f'<svg width="62" height="{_HEADER_HEIGHT + height}">']
    labels += [
        f'<text x="0" y="{_HEADER_HEIGHT + _CELL_HEIGHT * row + 14}">stage {stage}</text>' for row, stage in enumerate(stages)
    ]
    cells = [
        f'<svg width="100%" height="{_HEADER_HEIGHT + height + 1}" role="img" '
        f'aria-label="ranks of the job, coloured by {escape(value_name)}">'
    ]
    cells += [
        f'<text class="roomy" x="{column_width * column * ranks_per_data_rank:.3f}%" y="15">'
        f"{_format_data_rank(data_rank, topology)}</text>"
        for column, data_rank in enumerate(data_ranks)
        if (column + 1) * ranks_per_data_rank <= len(columns) and (len(data_ranks) <= 16 or column % 4 == 0)
    ]
    for (row, column), rank in ranks.items():
        shade = _choose_shade(values[rank], min_value, max_value)
        coordinates = topology.get_coordinates(rank)
        position = ", ".join(f"{name} {coordinates[axis]}" for axis, name in _list_axes(topology))
        tooltip = f"rank {rank} on node {rank // gpus_per_node}: {position}; {value_name} {format_value(values[rank])}"
        x, y = column_width * column, _HEADER_HEIGHT + _CELL_HEIGHT * row
        cells.append(
            f'<rect x="{x:.3f}%" y="{y}" width="{column_width:.3f}%" height="{_CELL_HEIGHT}" fill="{_COLOUR_SCALE[shade]}" '
            f'stroke="#fff" stroke-width="0.5"><title>{escape(tooltip)}</title></rect>'
        )
        if len(columns) <= _MAX_LABELLED_COLUMNS:
            text_colour = "#fff" if shade >= 3 else "#1d2129"
            cells.append(
                f'<text class="roomy" x="{x + column_width / 2:.3f}%" y="{y + 14}" text-anchor="middle" style="fill:{text_colour}" '
                f'pointer-events="none">{rank}</text>'
            )
    cells += _build_borders(ranks, gpus_per_node, len(stages), len(columns), column_width)
    num_hidden = topology.world_size - len(ranks)
    hidden_text = f" {num_hidden:,} of {topology.world_size:,} ranks are left out in the middle." if num_hidden else ""
    caption = (
        f"Rows are pipeline stages, columns {_describe_columns(topology)}. "
        f"Lines separate nodes of {gpus_per_node} ranks.{hidden_text}"
    )
    return (
        f"<figure>{_build_legend(min_value, max_value, format_value, value_name)}"
        f'<div style="display:flex">{"".join(labels)}</svg><div style="flex:1;min-width:0">{"".join(cells)}</svg></div></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _select_indices(size: int, max_indices: int) -> Sequence[int]:
    """Return the indices of the rows or columns to show: all of them, or the first `max_indices` - 1 and the last if there are too
    many."""
    return range(size) if size <= max_indices else [*range(max_indices - 1), size - 1]


def _list_axes(topology: Topology) -> list[tuple[str, str]]:
    """Return (key, name) of each parallel axis that the tooltip of a cell lists, from the outermost axis to the innermost."""
    return [
        ("pp", "pipeline"),
        ("dp", "data"),
        *([("cp", "context")] if topology.cp > 1 else []),
        ("tp", "tensor"),
    ]


def _format_data_rank(data_rank: int, topology: Topology) -> str:
    return f"data {data_rank}" if topology.dp <= 16 else str(data_rank)


def _describe_columns(topology: Topology) -> str:
    """Return the part of the caption that says to which ranks the columns belong."""
    inner = [f"{size} {name}" for size, name in ((topology.cp, "context"), (topology.tp, "tensor")) if size > 1]
    return "data ranks" + (f", each of {' x '.join(inner)} ranks" if inner else "")


def _choose_shade(value: float, min_value: float, max_value: float) -> int:
    """Return the index of the colour for a value in the colour scale from `min_value` to `max_value`.

    If all values are equal, it is the index of a colour in the middle.
    """
    return 2 if max_value == min_value else round((len(_COLOUR_SCALE) - 1) * (value - min_value) / (max_value - min_value))


def _build_borders(
    ranks: dict[tuple[int, int], int], gpus_per_node: int, num_rows: int, num_columns: int, column_width: float
) -> list[str]:
    """Return SVG lines between neighbouring cells whose ranks are on different nodes, and an SVG frame around the grid.

    Args:
        ranks: rank of each cell, by (row, column).
        gpus_per_node: number of ranks on a node.
        column_width: width of a cell in percent of the figure's width.
    """
    borders = []
    style = 'stroke="#1d2129" stroke-width="1.6"'
    for (row, column), rank in ranks.items():
        x, y = column_width * column, _HEADER_HEIGHT + _CELL_HEIGHT * row
        right_rank, lower_rank = ranks.get((row, column + 1)), ranks.get((row + 1, column))
        if right_rank is not None and right_rank // gpus_per_node != rank // gpus_per_node:
            borders.append(
                f'<line x1="{x + column_width:.3f}%" x2="{x + column_width:.3f}%" y1="{y}" y2="{y + _CELL_HEIGHT}" {style}/>'
            )
        if lower_rank is not None and lower_rank // gpus_per_node != rank // gpus_per_node:
            borders.append(
                f'<line x1="{x:.3f}%" x2="{x + column_width:.3f}%" y1="{y + _CELL_HEIGHT}" y2="{y + _CELL_HEIGHT}" {style}/>'
            )
    borders.append(f'<rect x="0" y="{_HEADER_HEIGHT}" width="100%" height="{_CELL_HEIGHT * num_rows}" fill="none" {style}/>')
    return borders


def _build_legend(min_value: float, max_value: float, format_value: Callable[[float], str], value_name: str) -> str:
    swatches = "".join(f'<i style="background:{colour};margin:0"></i>' for colour in _COLOUR_SCALE)
    title = (
        f"{value_name}: {format_value(min_value)} on all ranks"
        if format_value(min_value) == format_value(max_value)
        else f"{value_name}: {format_value(min_value)}"
    )
    scale = (
        ""
        if format_value(min_value) == format_value(max_value)
        else f"<span>{swatches}</span><span>{escape(format_value(max_value))}</span>"
    )
    return f'<div class="legend"><span>{escape(title)}</span>{scale}</div>'
