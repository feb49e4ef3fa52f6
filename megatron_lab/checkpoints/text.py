"""Formatting of sizes and tensor names for the output of `tools/checkpoint.py`, and parsing of the iteration that a tool reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Literal


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with three digits and a decimal unit, such as `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.4g} TB"


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


Step = int | Literal["best"]
"""Iteration of a save folder that a tool reads: a number, or "best" for the lowest validation loss (--keep-best)."""


def parse_step(text: str) -> Step:
    """Parse the value of --step or --ckpt-step of a tool: a number or best.

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    if text == "best":
        return "best"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an iteration: give a whole number, or best") from None
