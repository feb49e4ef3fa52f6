"""How long runs take: the remaining time of a run from its first step on, and the duration of a command from an earlier run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.metrics.history import HISTORY_FILE, History, StepRecord
from megatron.metrics.log_line import LogLineValues, format_short_line
from megatron.spec.counts import count_flops_per_token, count_parameters
from megatron.training.reporter import ThroughputEstimator
from megatron_lab.monitoring.durations import (
    RunEstimate,
    estimate_run,
    find_latest_checkpoint,
    measure_folder,
    read_seconds_per_sample,
)
from tests.support.runs import arguments


def test_the_first_step_gives_an_upper_bound() -> None:
    """It also creates connections. From the second on, the speed is that of the steps, and time between steps counts."""
    estimator = ThroughputEstimator(total_samples=40)
    assert estimator.estimate_remaining_seconds(0.0, 0) is None
    estimator.step(10.0, 8.0, 4)
    assert estimator.is_upper_bound and estimator.estimate_remaining_seconds(10.0, 4) == 36 * 8 / 4
    estimator.step(12.0, 1.0, 4)
    assert not estimator.is_upper_bound and estimator.estimate_remaining_seconds(12.0, 8) == 32 / 4 * 2.0
    assert estimator.estimate_remaining_seconds(12.0, 40) is None and estimator.measured_seconds == 1.0
    empty = ThroughputEstimator(total_samples=0)
    empty.step(1.0, 1.0, 4)
    assert empty.estimate_remaining_seconds(1.0, 4) is None


def test_the_line_of_the_first_step_names_the_bound() -> None:
    values: Any = LogLineValues(
        time=None,  # type: ignore[arg-type]
        iteration=1,
        train_iterations=150,
        consumed_samples=8,
        elapsed_ms=1.0,
        learning_rate=1e-3,
        global_batch_size=8,
        lm_loss=8.5,
        loss_scale=1.0,
        num_skipped=0,
        num_nans=0,
        grad_norm=None,
        remaining_s=480.0,
        is_remaining_bound=True,
    )
    assert format_short_line(values).endswith(" | < 8 min left")
    assert format_short_line(replace(values, is_remaining_bound=False)).endswith(" | 8 min left")


def test_the_speed_of_a_run_is_read_from_the_end_of_its_record(tmp_path: Path) -> None:
    assert read_seconds_per_sample(tmp_path) is None
    lines = [
        '{"kind": "steps", "batch": 4, "seconds": [8.0, nul',
        json.dumps({"kind": "log", "seconds": [100.0]}),
        json.dumps({"kind": "steps", "batch": 4, "seconds": [40.0, 2.0, None, 2.0]}),
        json.dumps({"kind": "steps", "batch": 8, "seconds": [4.0]}),
        "broken",
    ]
    (tmp_path / HISTORY_FILE).write_text("\n".join(lines))
    assert read_seconds_per_sample(tmp_path) == 0.5


def history(*, saved_at: float = 130.0) -> History:
    """A first start of 100 steps of one second, and a second of 10 within 30 seconds."""
    made = History()
    made.starts = [{"iteration": 0, "time": 0.0}, {"iteration": 100, "time": 100.0}]
    for iteration in range(1, 111):
        seconds = 60.0 if iteration in (1, 101) else 1.0
        values: Any = dict.fromkeys(StepRecord._fields)
        made.steps.append(StepRecord(**{**values, "iteration": iteration, "seconds": seconds}))
    made.events = [{"event": "save", "time": 120.0}, {"event": "end", "time": 100.0 + 69.0 + saved_at}]
    return made


def config(**settings: Any) -> Config:
    return load(arguments(**{"train_iters": 110, "global_batch_size": 4, **settings}), 1).config


def test_a_command_takes_the_time_of_the_earlier_run() -> None:
    """The remaining steps, at the median without first steps, and the time of the last start outside of steps."""
    measured = config()
    longer = estimate_run(history(), 10_000_000, measured, config(train_iters=330), 61, 110)
    assert longer == RunEstimate(220.0 + 130.0, 220.0 + 130.0, 10_000_000, 1)
    assert longer.format() == "6 min, 10 MB of disk"
    assert estimate_run(history(), 1, measured, config(train_iters=330, global_batch_size=8), 61, 110).min_seconds == 440 + 130
    saves = config(train_iters=330, save="run", save_interval=100)
    assert estimate_run(history(), 1, measured, saves, 61, 110).num_checkpoints == 3
    with pytest.raises(ValueError, match="no measured steps"):
        estimate_run(History(), 1, measured, measured, 61, 0)


def test_a_bigger_model_takes_between_two_bounds() -> None:
    measured = config()
    bigger = config(num_layers=2 * measured.model.num_layers, hidden_size=2 * measured.model.hidden_size)
    estimate = estimate_run(history(), 10_000_000, measured, bigger, 61, 0)
    flops = count_flops_per_token(bigger.model, 61) / count_flops_per_token(measured.model, 61)
    assert (estimate.min_seconds, estimate.max_seconds) == pytest.approx((220 + 130, 110 * flops + 130)) and flops > 2
    parameters = count_parameters(bigger.model, 61) / count_parameters(measured.model, 61)
    assert estimate.checkpoint_bytes == pytest.approx(10_000_000 * parameters)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [((40.0, 50.0), "40 to 50 s"), ((50.0, 150.0), "50 s to 2 min"), ((600.0, 5400.0), "10 min to 1 h 30 min")],
)
def test_the_words_of_an_estimate(seconds: tuple[float, float], text: str) -> None:
    assert RunEstimate(*seconds, 2e9, 3).format() == f"{text}, 6.0 GB of disk"


def test_the_size_of_the_newest_checkpoint(tmp_path: Path) -> None:
    assert find_latest_checkpoint(tmp_path) is None
    for name in ("iter_0000002", "iter_0000010"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "file").write_bytes(b"12345")
    latest = find_latest_checkpoint(tmp_path)
    assert latest == tmp_path / "iter_0000010" and measure_folder(latest) == 5
