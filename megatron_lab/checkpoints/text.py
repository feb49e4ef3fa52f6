"""Formats numbers for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def size(num_bytes: float) -> str:
    """Bytes as `1.5 GB`: powers of 1000, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.4g} TB"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with aligned columns; those in `right` are aligned to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def in_order(full_names: Iterable[str], of_the_model: Iterable[str]) -> list[str]:
    """Names such as `exp_avg.layers.0.mlp.up.weight`: weights first, then each kind of moment; within one in the model's order.

    Args:
        full_names: what is to be ordered.
        of_the_model: the model's parameters in the order of the forward; what is not among them comes last.
    """
    place = {name: at for at, name in enumerate(of_the_model)}

    def key(full: str) -> tuple[bool, str, int, str]:
        kind, _, name = full.partition(".")
        return kind != "model", kind, place.get(name, len(place)), name

    return sorted(full_names, key=key)
