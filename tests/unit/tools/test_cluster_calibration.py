"""Reports of runs scale a cluster file: by what computing and sending took, within bounds, and the spread follows the errors."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_lab.cluster.calibration import COMPUTING, SENDING, RunReport, calibrate, fit_scales, is_communication, read_report
from megatron_lab.commands import check_cluster
from megatron_lab.monitoring.plan_report import MeasuredSteps, PredictedStep, format_comparison, group_by_timer, write_report
from megatron_lab.planner.cluster import load_cluster

PARTS = {
    "products": 0.5,
    "attention": 0.1,
    "elementwise": 0.1,
    "tp ranks": 0.1,
    "messages": 0.02,
    "pipeline idle": 0.08,
    "gradients": 0.1,
    "optimizer": 0.05,
    "other": 0.01,
}


def ran(computing: float, sending: float, parts: Mapping[str, float] = PARTS) -> RunReport:
    """A run in which these took so many times what was foretold."""
    real = {name: seconds * (sending if is_communication(name) else computing) for name, seconds in parts.items()}
    return RunReport(parts, group_by_timer(real), sum(real.values()))


def foretold(parts: Mapping[str, float] = PARTS) -> PredictedStep:
    whole = sum(parts.values())
    return PredictedStep("c", whole, 0.9 * whole, 1.1 * whole, parts, 10**9)


def test_parts_are_grouped_as_timers_see_them() -> None:
    assert group_by_timer(PARTS) == pytest.approx({"operations": 0.8, "waiting between operations": 0.1, "end of the step": 0.16})


def test_the_part_that_is_off_is_named() -> None:
    found = MeasuredSteps(
        [1.3, 1.5, 1.4], {"operations": 0.8, "waiting between operations": 0.1, "end of the step": 0.5}, 2 * 10**9
    )
    lines = format_comparison(foretold(), found)
    assert lines[0] == "plan: a step takes 1,400 ms, predicted 1,060 (+32%, outside of 954 to 1,166)"
    assert lines[1].endswith("(+100%)") and len(lines) == 6
    assert lines[-1] == "plan: largest difference in end of the step: 340.0 ms more than predicted"
    near = MeasuredSteps([1.06], group_by_timer(PARTS), 10**9)
    assert len(format_comparison(foretold(), near)) == 5 and "within" in format_comparison(foretold(), near)[0]


@pytest.mark.parametrize(("computing", "sending"), [(1.0, 1.0), (1.2, 1.0), (0.9, 1.5), (1.1, 0.6), (5.0, 5.0), (0.1, 0.1)])
def test_two_numbers_are_found(computing: float, sending: float) -> None:
    """From a few runs that differ in how much they send, within bounds. Three reports count three quarters."""
    quiet = {name: seconds * (0.2 if is_communication(name) else 1.0) for name, seconds in PARTS.items()}
    found = fit_scales([ran(computing, sending), ran(computing, sending, quiet), ran(computing, sending)])
    assert found[COMPUTING] == pytest.approx(min(3.0, max(1 / 3, computing)) ** 0.75, rel=0.05)
    assert found[SENDING] == pytest.approx(min(3.0, max(1 / 3, sending)) ** 0.75, rel=0.1)


def test_without_sending_nothing_is_said_of_links() -> None:
    alone = {name: seconds for name, seconds in PARTS.items() if not is_communication(name)}
    assert fit_scales([ran(1.5, 1.0, alone)])[SENDING] == pytest.approx(1.0)


def test_shares_stay_shares_and_the_spread_follows() -> None:
    """A device cannot be faster than its peak; good predictions narrow the range, bad ones widen it."""
    before = load_cluster("h100")
    fast, _ = calibrate(before, [ran(0.5, 0.5)] * 4)
    assert max(*fast.reached.products.values(), fast.reached.node, fast.reached.network, fast.reached.attention) <= 1.0
    assert fast.kernel_us < before.kernel_us and fast.node_us < before.node_us and fast.device == before.device
    slow, words = calibrate(before, [ran(1.25, 1.0)] * 4)
    assert slow.reached.products["bfloat16"] == pytest.approx(before.reached.products["bfloat16"] / 1.25**0.8, rel=0.03)
    assert slow.reached.network == pytest.approx(before.reached.network, rel=0.05) and "computation takes 1.2" in words[0]
    assert slow.spread < before.spread
    randoms = random.Random(1)
    wild, _ = calibrate(before, [ran(randoms.choice((0.5, 1.0, 2.0)), 1.0) for _ in range(12)])
    assert wild.spread > before.spread
    measured = calibrate(load_cluster("cpu"), [ran(0.5, 1.0)] * 4)[0]
    assert measured.reached.memory == pytest.approx(load_cluster("cpu").reached.memory * 2**0.8, rel=0.05)


def test_reports_make_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ran(1.3, 1.0)
    for i in range(2):
        write_report(
            tmp_path / f"{i}.json", foretold(), MeasuredSteps([report.step_s] * 3, report.measured_s, 10**9), {"device": "cpu"}
        )
    assert read_report(tmp_path / "0.json") == report
    command = ["--calibrate", f"{tmp_path}/0.json", f"{tmp_path}/1.json"]
    assert check_cluster.main([*command, "--cluster", "a100-80gb", "--output", f"{tmp_path}/mine.yaml"]) == 0
    assert "computation takes 1.1" in capsys.readouterr().out
    found, before = load_cluster(str(tmp_path / "mine.yaml")), load_cluster("a100-80gb")
    assert found.reached.products["bfloat16"] < before.reached.products["bfloat16"] and found.memory_gb == before.memory_gb
    assert "2 reports" in (tmp_path / "mine.yaml").read_text().splitlines()[0]
    for rest, words in (([], "needs --cluster"), (["--cluster", "a100", "--output", f"{tmp_path}/x"], "there is no cluster a100")):
        assert check_cluster.main([*command, *rest]) == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not a report"),
        ("[]", "is not a report"),
        ('{"foretold": {"parts": {}}}', "is not a report"),
        (
            json.dumps({"foretold": asdict(foretold()), "measured": {"parts": group_by_timer(PARTS), "seconds": -1}}),
            "not a finite number",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_report(path)
