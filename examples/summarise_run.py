"""Say in two lines how a run went, from its metrics file; fail if the training loss did not fall."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def summary(lines: list[dict[str, Any]]) -> list[str]:
    """How the loss went.

    Raises:
        ValueError: there is too little to compare, or the loss did not fall.
    """
    losses = [(line["iteration"], line["lm_loss"]) for line in lines if "lm_loss" in line]
    held_out = [(line["iteration"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    if len(losses) < 2:
        raise ValueError("fewer than two logged iterations")
    (first, before), (last, after) = losses[0], losses[-1]
    if not after < before:
        raise ValueError(f"the training loss did not fall: {before:.3f} at iteration {first}, {after:.3f} at iteration {last}")
    said = [f"training loss {before:.3f} at iteration {first}, {after:.3f} at iteration {last}"]
    if held_out:
        said.append("validation loss " + ", ".join(f"{loss:.3f} at iteration {at}" for at, loss in held_out))
    return said


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    flags = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    flags.add_argument("--metrics", type=Path, required=True, metavar="FILE", help="what --metrics-file wrote")
    given = flags.parse_args(arguments)
    try:
        lines = [json.loads(line) for line in given.metrics.read_text().splitlines()]
        print("\n".join(summary(lines)))
    except (ValueError, OSError) as error:
        print(f"summarise_run.py: error: {given.metrics}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
