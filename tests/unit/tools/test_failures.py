"""A job that fails now and then: its shares add up, and they are those of the theory where there is one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lab.cluster.failures import (
    Job,
    compute_daly_interval_s,
    compute_young_interval_s,
    find_best_interval,
    list_intervals,
    simulate,
)
from megatron_lab.commands import simulate_failures

JOB = Job(mtbf_s=10_000.0, step_s=1.0, save_stall_s=20.0, save_s=0.0, detect_s=10.0, restart_s=90.0)


@pytest.mark.parametrize("copies", [0, 7])
def test_the_shares_are_all_of_the_time(copies: int) -> None:
    job = replace(JOB, save_s=300.0, copy_interval=copies, copy_stall_s=0.5, copy_survives=0.8, copy_restart_s=20.0)
    for interval in (50, 200, 3000):
        one = simulate(job, interval, days=20, num_draws=20, seed=3)
        assert one.ettr + one.again + one.saving + one.down == pytest.approx(1, abs=1e-9)
        assert one.low <= one.ettr <= one.high


@pytest.mark.parametrize("interval", [100, 600, 3000])
def test_it_is_what_daly_derived(interval: int) -> None:
    """Time for a stretch of t with a save of w, where failures come with mean M and cost r: (M + r)(exp((t + w) / M) - 1), if it
    may fail while it starts again as well: M exp(r / M) (exp((t + w) / M) - 1) (Daly 2006, equation 13)."""
    stretch, mtbf = interval * JOB.step_s, JOB.mtbf_s
    takes = mtbf * math.exp((JOB.detect_s + JOB.restart_s) / mtbf) * (math.exp((stretch + JOB.save_stall_s) / mtbf) - 1)
    one = simulate(JOB, interval, days=200, num_draws=30, seed=1)
    assert one.ettr == pytest.approx(stretch / takes, rel=0.01)


def test_without_failures_only_saves_cost() -> None:
    one = simulate(replace(JOB, mtbf_s=1e15), 80, days=10, num_draws=2, seed=1)
    assert one.failures == one.again == one.down == 0
    assert one.ettr == pytest.approx(0.8, rel=1e-3)


def test_the_best_interval_is_near_the_formulas_and_copies_help() -> None:
    found = {number: simulate(JOB, number, days=100, num_draws=20, seed=2) for number in list_intervals(JOB)}
    best = find_best_interval(found)
    assert 0.5 * compute_young_interval_s(JOB) < best < 2 * compute_young_interval_s(JOB) and compute_daly_interval_s(
        JOB
    ) == pytest.approx(compute_young_interval_s(JOB), rel=0.1)
    copied = replace(JOB, copy_interval=10, copy_stall_s=0.1, copy_survives=0.95, copy_restart_s=30.0)
    assert simulate(copied, best, days=100, num_draws=20, seed=2).ettr > found[best].ettr + 0.02
    slow = replace(JOB, save_s=5000.0)  # the next save waits for it
    assert simulate(slow, 1000, days=50, num_draws=5, seed=2).saving > 0.4


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "new" / "report.json"
    assert simulate_failures.main(["--days", "5", "--draws", "3", "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "16,384 devices: a failure every 3.09 h" in said and "best: --save-interval" in said
    found = json.loads(report.read_text())
    assert found["job"]["step_s"] == 8.0 and all(0 < each["ettr"] < 1 for each in found["intervals"].values())
    assert simulate_failures.main(["--days", "5", "--draws", "3", "--save-interval", "40"]) == 0
    for wrong in (
        ["--gpus", "0"],
        ["--save-interval", "0"],
        ["--step-s", "nan"],
        ["--copy-survives", "2"],
        ["--json", "/dev/null/x"],
    ):
        assert simulate_failures.main([*wrong, "--days", "1", "--draws", "1"]) == 2
        assert capsys.readouterr().err.startswith("simulate_failures.py: ")
