"""tools/plan.py as a user calls it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron.config.cli import load
from megatron_lab.commands import plan
from tests.support.runs import launch, report
from tests.support.warm_python import warm_python

JOB = "--model llama2-7b --num-layers 4 --seq-length 1024 --vocab-size 32000 --gpus 8 --global-batch-size 32".split()
JOB += ["--max-tensor", "2", "--max-pipeline", "2"]


def test_a_plan_with_all_that_can_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a picture that shows every part."""
    pytest.importorskip("matplotlib")
    table, script, picture = tmp_path / "plan.json", tmp_path / "run.sh", tmp_path / "plan.svg"
    asked = ["--tokens", "2e12", "--price", "2", "--why", "--pipeline-schedule 1f1b", "--json", str(table)]
    asked += ["--write-script", str(script), "--output", str(picture)]
    assert plan.main([*JOB, "--fix", "micro=2", "--fix", "pipeline=2", *asked]) == 0
    out = capsys.readouterr().out
    for words in ("layouts estimated", "tok/s/GPU", "days", "cost", "why not --pipeline-schedule 1f1b: takes +"):
        assert words in out
    drawn = picture.read_text()
    for words in ("products", "attention", "pipeline idle", "1: PP2", "memory of the fullest rank in GB"):
        assert words in drawn
    found = json.loads(table.read_text())
    assert found and all(row["low"] < row["seconds"] < row["high"] for row in found)
    for row in found:
        given = [*JOB[: JOB.index("--gpus")], "--global-batch-size", "32"]
        assert load([*plan._list_default_argv(given), *given, *row["flags"]], 8).config.training.micro_batch_size == 2
    assert os.access(script, os.X_OK)
    more = ["--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--train-iters", "2", "--bf16", "--device", "cuda"]
    variables = {**os.environ, "DRY_RUN": "1", "PYTHON": warm_python()}
    ran = subprocess.run([str(script), *more], env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0 and "8 ranks on 1 node of 8" in ran.stdout, ran.stderr
    (number, milli) = re.findall(r"such a step takes about ([\d.]+) (m?)s", ran.stdout)[0]
    assert float(number) * (1e-3 if milli else 1) == pytest.approx(found[0]["seconds"], rel=0.005), "as it was foretold"


def test_a_launch_may_ask_for_other_layouts() -> None:
    """With the flags of the tool, for the ranks of the launch."""
    job = [word for word in JOB if word not in ("--gpus", "8")] + ["--world-size", "8"]
    job += ["--num-layers", "2", "--fix", "micro=2", "--fix", "pipeline=1"]
    (ended,) = launch([*job, "--plan", "--plan-cluster", "a100-40gb", "--max-expert", "1", "--rows", "1"])
    assert ended.code == 0 and ended.stdout.startswith("8 x NVIDIA A100-SXM4-40GB (8 x A100 SXM 40 GB"), report([ended])
    (ended,) = launch([*job, "--plan", "--fix", "tensor=x"])
    assert ended.code == 2 and "AXIS=N" in ended.stderr, report([ended])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--cluster", "h10"], "Did you mean"),
        (["--fix", "tensors=2"], "AXIS=N"),
        (["--json", "/dev/null/x.json"], "/dev/null is not a folder"),
        (["--num-layers", "-1"], "--num-layers"),
        (["--output", "plan.txt"], ".svg"),
    ],
)
def test_what_is_wrong_is_told(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*JOB, *more]) == 2
    assert said in capsys.readouterr().err


def test_without_a_model_a_user_is_told_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--gpus", "64"]):
        assert plan.main(argv) == 2
        told = capsys.readouterr().err
        assert told.startswith("plan.py: no model is given.") and "plan.py --model llama3-8b" in told and "is missing" not in told


def test_clusters_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--cluster", "list"]) == 0
    assert "h100" in capsys.readouterr().out
