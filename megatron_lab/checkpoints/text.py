"""Formatting of sizes, tables and tensor names for the output of `tools/checkpoint.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with three digits and a decimal unit, such as `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.4g} TB"


def format_table(rows: Sequence[Sequence[str]], right_aligned: Sequence[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns. Columns whose index is in `right_aligned` are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(
            cell.rjust(width) if i in right_aligned else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def sort_tensor_names(full_names: Iterable[str], model_order: Iterable[str]) -> list[str]:
    """Sort full tensor names such as `exp_avg.layers.0.mlp.up.weight`: first the weights (prefix `model`), then each moment. Names
    with the same prefix have the order of the model.

    Args:
        full_names: names to sort.
        model_order: parameter names in the order of the forward pass. Names of other parameters come last.
    """
    position = {name: i for i, name in enumerate(model_order)}

    def key(full_name: str) -> tuple[bool, str, int, str]:
        prefix, _, name = full_name.partition(".")
        return prefix != "model", prefix, position.get(name, len(position)), name

    return sorted(full_names, key=key)
