"""A run with --plan-report compares its first steps with what was foretold, and trains as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_lab.cluster.calibration import read_report
from megatron_lab.monitoring.plan_report import group_by_timer
from megatron_lab.planner.cluster import load_cluster
from tests.support.runs import arguments, launch, report, run, saved_tensors

BASE: dict[str, Any] = {"pipeline_model_parallel_size": 2, "train_iters": 5, "global_batch_size": 2, "micro_batch_size": 1}


def test_a_report_of_a_pipeline(tmp_path: Path) -> None:
    """Log lines, the file, and the same weights. One step is profiled, so it is not measured here."""
    path = tmp_path / "reports" / "plan.json"
    flags = {"plan_report": path, "profile_pipeline": True, "profile_step_start": 4, "profile_dir": tmp_path}
    out = run(arguments(**BASE, **flags, save=tmp_path / "a"), 2)
    lines = [line.strip() for line in out.splitlines()]
    assert sum(line.startswith("predicted: ") for line in lines) == 1
    assert any(line.startswith("plan: a step takes ") for line in lines)
    for name in ("memory", "operations", "waiting between operations", "end of the step"):
        assert any(line.startswith(f"plan: {name} ") for line in lines), name
    found = json.loads(path.read_text())
    assert found["device"] == "cpu" and found["ranks"] == {"tp": 1, "cp": 1, "pp": 2, "dp": 1}
    assert found["foretold"]["cluster"] == load_cluster("cpu").name and len(found["measured"]["steps"]) == 2
    assert min(found["foretold"]["device_bytes"], found["measured"]["device_bytes"]) > 0
    assert set(read_report(path).measured_s) == set(group_by_timer({}))
    run(arguments(**BASE, save=tmp_path / "b"), 2)
    one, other = (saved_tensors(tmp_path / name, 5) for name in "ab")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_is_too_short_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    out = run(arguments(train_iters=2, plan_report=path), 1)
    assert "--plan-report has nothing to compare: the run ended before step 3" in out and not path.exists()


def test_a_cluster_that_is_not_there_is_refused(tmp_path: Path) -> None:
    ended = launch(arguments(train_iters=2, plan_report=tmp_path / "plan.json", plan_cluster="h10"), 1)
    assert ended[0].code != 0 and "there is no cluster h10" in ended[0].stderr, report(ended)
