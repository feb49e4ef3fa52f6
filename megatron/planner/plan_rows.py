"""Stages side by side that look alike, for tables that a person reads: a pipeline of 64 stages is three rows, not 64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron.planner.plan import Kind, Plan
from megatron.planner.state_report import amount


@dataclass(frozen=True)
class Row:
    """Neighbouring stages whose ranks keep as much of the model's state and send as much, to three digits."""

    first: int
    last: int
    ranks: int
    kinds: tuple[Kind, ...]

    @property
    def name(self) -> str:
        """In words."""
        return f"stage {self.first}" if self.first == self.last else f"stages {self.first}-{self.last}"

    def spread(self, number: Callable[[Kind], float], text: Callable[[float], str]) -> str:
        """A number of the ranks; its range where they differ."""
        low, high = (text(bound(map(number, self.kinds))) for bound in (min, max))
        return high if low == high else f"{low} - {high}"


def rows_of(plan: Plan) -> list[Row]:
    """All stages."""
    rows: list[Row] = []
    looks: list[object] = []
    for stage in range(plan.job.pipeline):
        kinds = tuple(kind for kind in plan.kinds if stage in kind.stages)
        look = frozenset(_look(kind) for kind in kinds)
        ranks = sum(kind.ranks // len(kind.stages) for kind in kinds)
        if rows and looks[-1] == look:
            before = rows.pop()
            rows.append(Row(before.first, stage, before.ranks + ranks, tuple(dict.fromkeys((*before.kinds, *kinds)))))
        else:
            rows.append(Row(stage, stage, ranks, kinds))
            looks.append(look)
    return rows


def bytes_sent(row: Row) -> tuple[float, float]:
    """By a rank in a step inside its node, and to other nodes: the mean over the row's ranks."""
    ranks = sum(kind.ranks for kind in row.kinds)
    inside = sum(kind.ranks * kind.inside_bytes for kind in row.kinds)
    between = sum(kind.ranks * kind.between_bytes for kind in row.kinds)
    return inside / ranks, between / ranks


def leaving(kinds: Iterable[Kind], over: str, what: str) -> float:
    """Share of what ranks send over a group that goes to other nodes."""
    found = [
        (kind.ranks * one.bytes, one.between_nodes) for kind in kinds for one in kind.sent if (one.over, one.what) == (over, what)
    ]
    return sum(sent * share for sent, share in found) / sum(sent for sent, _ in found)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *body)]


def _look(kind: Kind) -> object:
    state = kind.memory.total.device - kind.memory.activations.device
    return amount(state), amount(kind.memory.total.host), tuple((one.over, one.what, amount(one.bytes)) for one in kind.sent)
