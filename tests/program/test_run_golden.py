"""Losses of short runs equal those that are kept in tests/golden/losses.json.

A change that is meant to change them (initial values, order of data, the mathematics of the model) refreshes the file by

    python -m tests.program.test_run_golden

from the root of the repository, and its difference is part of the review.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.equality import number_differences
from tests.support.model_styles import STYLES
from tests.support.runs import arguments, losses, read_metrics, run

FILE = Path(__file__).parents[1] / "golden" / "losses.json"

SETTINGS: dict[str, Any] = {"train_iters": 8, "eval_iters": 2}

PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "float64": ({"fp64": True}, 1e-9),  # relative tolerances: matrix libraries differ between machines
    "float32": ({}, 1e-5),
}


def _losses(style: str, precision: str, folder: Path) -> list[float]:
    """Training losses, then the validation loss."""
    run(arguments(**SETTINGS, **STYLES[style], **PRECISIONS[precision][0], metrics_file=folder / "metrics"))
    return [*losses(folder / "metrics"), read_metrics(folder / "metrics")[-1]["validation_loss"]]


CASES = [(precision, style) for precision in PRECISIONS for style in STYLES]
OTHERS = pytest.mark.full("the same style and the same precision, each once")


@pytest.mark.parametrize(("precision", "style"), [CASES[0], *(pytest.param(*case, marks=OTHERS) for case in CASES[1:3]), CASES[3]])
def test_the_losses_are_those_that_are_kept(tmp_path: Path, style: str, precision: str) -> None:
    """Without dropout, whose masks depend on the build of torch."""
    kept = json.loads(FILE.read_text())[f"{style} {precision}"]
    problems = number_differences("losses", _losses(style, precision, tmp_path), kept, PRECISIONS[precision][1])
    assert not problems, "\n".join([*problems, "If this is meant: python -m tests.program.test_run_golden"])


def refresh() -> None:
    """Write the file."""
    found = {}
    for style in STYLES:
        for precision in PRECISIONS:
            with tempfile.TemporaryDirectory() as folder:
                found[f"{style} {precision}"] = _losses(style, precision, Path(folder))
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    refresh()
