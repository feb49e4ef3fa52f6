"""The commands of docs/trust.md do what the page says, and its numbers are those of the tests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron_lab.commands import verify_layout
from megatron_lab.verification.difference_text import NEGLIGIBLE
from tests.program.test_readme import commands, proof
from tests.program.test_run_curves import PRECISIONS
from tests.program.test_verify_faults import FAULTS
from tests.program.test_verify_peers import REPORTS
from tests.support.cli import ROOT
from tests.support.equality import TOLERANCE
from tests.support.runs import arguments, run

PAGE = (ROOT / "docs/trust.md").read_text()


def test_the_proof_of_the_page(tmp_path: Path, full: bool) -> None:
    (command,) = [command for command in commands(PAGE) if "verify_layout" in command]
    proof(command, tmp_path, full)


@pytest.mark.full("test_audit_trace.py, and test_verify_layout.py::test_two_traces_are_compared_as_json_too")
def test_the_traces_of_the_page(tmp_path: Path) -> None:
    """Two layouts of one run are equal to rounding, another run is not."""
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "two": (2, {"tensor_model_parallel_size": 2}),
        "other": (1, {"lr": 2e-2}),
    }
    traces = {name: str(tmp_path / name) for name in kinds}
    for name, (ranks, changes) in kinds.items():
        run(arguments(train_iters=3, save_trace=traces[name], **changes), ranks)
    assert "python tools/verify_layout.py --trace FILE1 --trace FILE2" in PAGE
    for (a, b), status in zip(itertools.combinations(traces, 2), (0, 1, 1), strict=True):
        assert verify_layout.main(["--trace", traces[a], "--trace", traces[b]]) == status, (a, b)


def test_the_bands_are_those_of_the_tests() -> None:
    for name in ("float32", "bfloat16", "8 bits", "float16"):
        (row,) = [line for line in PAGE.splitlines() if line.startswith((f"| {name} |", f"| {name} ("))]
        band = PRECISIONS[name][1]
        numbers = [float(word.strip(",")) for word in row.split() if word[0].isdigit() and "e-" in word]
        assert numbers == [band.greatest, band.mean]
    assert TOLERANCE == 1e-10 and NEGLIGIBLE == 1e-12 and "at most 1e-10" in PAGE and "below 1e-12 of" in PAGE


def test_the_number_of_planted_faults() -> None:
    assert f"planted in the code as it is imported, {len(FAULTS) + len(REPORTS)} of them" in PAGE
