"""From a model to a job: the first commands of docs/planning.md, run as they are written; their files are in the test's folder."""

from __future__ import annotations

import re
from pathlib import Path

from tests.program.test_readme import commands, proof, shell
from tests.support.cli import ROOT


def test_from_a_model_to_a_job(tmp_path: Path, full: bool) -> None:
    """The script takes what the plan foretold, and the layout that the page proves is the one that the plan chose.

    In the normal run among the layouts of one tensor rank and of one stage (tests/unit/planner/test_search.py has others), and
    nothing is proved.
    """
    page = re.sub(r"\b(train\.sh|plan\.html)", rf"{tmp_path}/\1", (ROOT / "docs/planning.md").read_text())
    plan, look, prove = [*commands(page)][:3]
    said = shell(plan if full else f"{plan} --max-tensor 1 --max-pipeline 1", tmp_path)
    script = (tmp_path / "train.sh").read_text()
    (foretold,) = re.findall(r"# Predicted: .*, ([\d.]+ GB) on the fullest rank", script)
    (layout,) = re.findall(r"^layout=\((.*)\)$", script, re.MULTILINE)
    assert layout in said and layout in prove and "--bf16" in script
    assert f"needs {foretold} of device memory" in shell(look, tmp_path)
    assert "Memory of a rank" in (tmp_path / "plan.html").read_text()
    proof(prove, tmp_path, full)
