"""The ranks of a job as a grid in SVG: pipeline stages are rows, data, context and tensor ranks columns; lines part the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from megatron.parallel.topology import Topology

_MOST = 64
"""Rows and columns that are drawn of a larger grid: the first ones and the last."""
_CELL, _HEAD = 20, 22  # pixels
_SCALE = ("#e3eef7", "#b5d3e9", "#7fb4d8", "#4a93c4", "#1f73ab", "#08518c")
"""From little to much; texts on the last three are white."""
_NUMBERED = 24
"""Most columns in which the cells have room for their rank."""


def rank_grid(
    topology: Topology, gpus_per_node: int, value: Callable[[int], float], text: Callable[[float], str], what: str
) -> str:
    """HTML with the grid, coloured by a number of each rank, and a legend.

    Args:
        gpus_per_node: ranks of a node; node k has those from k x gpus_per_node on.
        value: of a rank, such as the bytes that it needs.
        text: a value as text.
        what: the value is, such as "device memory".
    """
    width = topology.tp * topology.cp
    stages, shown_data = _shown(topology.pp, _MOST), _shown(topology.dp, max(2, _MOST // width))
    columns = [(data, context, tensor) for data in shown_data for context in range(topology.cp) for tensor in range(topology.tp)][
        : 4 * _MOST
    ]
    ranks = {
        (row, at): topology.rank(tensor, context, data, stage)
        for row, stage in enumerate(stages)
        for at, (data, context, tensor) in enumerate(columns)
    }
    values = {rank: value(rank) for rank in set(ranks.values())}
    low, high = min(values.values()), max(values.values())
    height, share = _CELL * len(stages), 100 / len(columns)
    labels = [f'<svg width="62" height="{_HEAD + height}">']
    labels += [f'<text x="0" y="{_HEAD + _CELL * row + 14}">stage {stage}</text>' for row, stage in enumerate(stages)]
    cells = [
        f'<svg width="100%" height="{_HEAD + height + 1}" role="img" aria-label="ranks of the job, coloured by {escape(what)}">'
    ]
    cells += [
        f'<text class="roomy" x="{share * at * width:.3f}%" y="15">{_data(data, topology)}</text>'
        for at, data in enumerate(shown_data)
        if (at + 1) * width <= len(columns) and (len(shown_data) <= 16 or at % 4 == 0)
    ]
    for (row, at), rank in ranks.items():
        shade = _shade(values[rank], low, high)
        place = topology.coordinates(rank)
        where = ", ".join(f"{name} {place[axis]}" for axis, name in _named(topology))
        told = f"rank {rank} on node {rank // gpus_per_node}: {where}; {what} {text(values[rank])}"
        x, y = share * at, _HEAD + _CELL * row
        cells.append(
            f'<rect x="{x:.3f}%" y="{y}" width="{share:.3f}%" height="{_CELL}" fill="{_SCALE[shade]}" stroke="#fff" '
            f'stroke-width="0.5"><title>{escape(told)}</title></rect>'
        )
        if len(columns) <= _NUMBERED:
            ink = "#fff" if shade >= 3 else "#1d2129"
            cells.append(
                f'<text class="roomy" x="{x + share / 2:.3f}%" y="{y + 14}" text-anchor="middle" style="fill:{ink}" '
                f'pointer-events="none">{rank}</text>'
            )
    cells += _borders(ranks, gpus_per_node, len(stages), len(columns), share)
    left_out = topology.world_size - len(ranks)
    more = f" {left_out:,} of {topology.world_size:,} ranks are left out in the middle." if left_out else ""
    caption = f"Rows are pipeline stages, columns {_columns(topology)}. Lines part nodes of {gpus_per_node}.{more}"
    return (
        f"<figure>{_legend(low, high, text, what)}"
        f'<div style="display:flex">{"".join(labels)}</svg><div style="flex:1;min-width:0">{"".join(cells)}</svg></div></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _shown(size: int, most: int) -> Sequence[int]:
    return range(size) if size <= most else [*range(most - 1), size - 1]


def _named(topology: Topology) -> list[tuple[str, str]]:
    """The axes to tell, from outside to inside."""
    return [
        ("pp", "pipeline"),
        ("dp", "data"),
        *([("cp", "context")] if topology.cp > 1 else []),
        ("tp", "tensor"),
    ]


def _data(data: int, topology: Topology) -> str:
    return f"data {data}" if topology.dp <= 16 else str(data)


def _columns(topology: Topology) -> str:
    """What lies along a row, in words."""
    inner = [f"{size} {name}" for size, name in ((topology.cp, "context"), (topology.tp, "tensor")) if size > 1]
    return "data ranks" + (f", each of {' x '.join(inner)} ranks" if inner else "")


def _shade(value: float, low: float, high: float) -> int:
    """Which colour a value has; where all are the same, one in the middle."""
    return 2 if high == low else round((len(_SCALE) - 1) * (value - low) / (high - low))


def _borders(ranks: dict[tuple[int, int], int], per_node: int, rows: int, columns: int, share: float) -> list[str]:
    """Lines between neighbours of different nodes, and around all."""
    found = []
    style = 'stroke="#1d2129" stroke-width="1.6"'
    for (row, at), rank in ranks.items():
        x, y = share * at, _HEAD + _CELL * row
        beside, below = ranks.get((row, at + 1)), ranks.get((row + 1, at))
        if beside is not None and beside // per_node != rank // per_node:
            found.append(f'<line x1="{x + share:.3f}%" x2="{x + share:.3f}%" y1="{y}" y2="{y + _CELL}" {style}/>')
        if below is not None and below // per_node != rank // per_node:
            found.append(f'<line x1="{x:.3f}%" x2="{x + share:.3f}%" y1="{y + _CELL}" y2="{y + _CELL}" {style}/>')
    found.append(f'<rect x="0" y="{_HEAD}" width="100%" height="{_CELL * rows}" fill="none" {style}/>')
    return found


def _legend(low: float, high: float, text: Callable[[float], str], what: str) -> str:
    boxes = "".join(f'<i style="background:{colour};margin:0"></i>' for colour in _SCALE)
    told = f"{what}: {text(low)} on all ranks" if text(low) == text(high) else f"{what}: {text(low)}"
    scale = "" if text(low) == text(high) else f"<span>{boxes}</span><span>{escape(text(high))}</span>"
    return f'<div class="legend"><span>{escape(told)}</span>{scale}</div>'
