"""Loss spikes: which steps stand out, what is remembered, and where the data goes on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.save_folder import check_counts
from megatron.config.training import SpikeConfig
from megatron.data.history import Phase, continue_phases, describe_phases, find_earlier_periods, merge_batch_phases, skip_samples
from megatron.training.progress import Progress
from megatron_lab.resilience.spikes import SpikeDetector, update_window
from tests.unit.data.test_data_history import A, phase

CONFIG = SpikeConfig(spike_policy="skip", spike_window=8, spike_threshold=6.0)
CALM = [(4.0 + 0.1 * (-1) ** step, 1.0 + 0.02 * step) for step in range(8)]
"""Losses with a robust deviation of 0.14826, norms with one of 0.0593 around 1.07."""


def _judged(loss: float, norm: float, recent: list[tuple[float, float]] = CALM, **changed: Any) -> bool:
    return SpikeDetector(replace(CONFIG, **changed), recent)(loss, norm) is not None


@pytest.mark.parametrize(
    ("loss", "norm", "spike"),
    [(4.0 + 5.9 * 0.14826, 1.0, False), (4.0 + 6.1 * 0.14826, 1.0, True), (0.1, 0.0, False), (4.0, 1.4, False), (4.0, 1.5, True)],
)
def test_a_step_stands_out_by_its_loss_or_its_norm(loss: float, norm: float, spike: bool) -> None:
    """By six robust deviations, above and not below."""
    assert _judged(loss, norm) is spike
    assert not _judged(loss, norm, spike_threshold=100.0)


def test_it_is_not_judged_before_half_of_the_window_is_known() -> None:
    assert not _judged(1e9, 1e9, CALM[:3]) and _judged(1e9, 1e9, CALM[:4])


def test_rounding_is_no_spike() -> None:
    """Where all steps are alike the spread is zero."""
    alike = [(2.0, 1.0)] * 8
    assert not _judged(2.0 * (1 + 1e-6), 1.0 + 1e-6, alike) and _judged(2.1, 1.0, alike)


def test_a_new_level_is_accepted_after_half_of_the_window() -> None:
    """So no run is skipped to its end."""
    recent, told = list(CALM), []
    for _ in range(12):
        told.append(_judged(9.0, 1.0, recent))
        recent = update_window(recent, 9.0, 1.0, CONFIG)
    assert told == [True] * 4 + [False] * 8 and len(recent) == 8


def test_what_is_no_number_is_not_remembered() -> None:
    assert update_window(CALM, 4.0, math.inf, CONFIG) == update_window(CALM, math.nan, 1.0, CONFIG) == CALM


def test_the_window_survives_a_checkpoint_bit_for_bit() -> None:
    progress = Progress(3, 12, 12, recent=[(1 / 3, 2 / 7), (4.0, 1e-30)])
    saved = json.loads(json.dumps(progress.to_json()))
    check_counts({"progress": saved}, 3)
    assert Progress.from_json(saved) == progress
    assert "recent" not in Progress(3, 12, 12).to_json()


@pytest.mark.parametrize(
    "recent", [3, {}, [[1.0]], [[1.0, "2"]], [[1.0, True]], [[1.0, math.nan]], [[1.0, 1.0]] * 5000, [(1.0, None)]]
)
def test_a_forged_window_is_refused(recent: Any) -> None:
    with pytest.raises(ValueError, match="recent in the checkpoint's training progress is"):
        check_counts({"progress": Progress(3, 12, 12).to_json() | {"recent": recent}}, 3)


# ---- the history of the data


def test_samples_passed_over_count_as_given() -> None:
    """A dataset that goes on in a later phase goes on behind them."""
    passed = skip_samples([phase(0, {A: 1.0})], 5, 20, 12)
    assert [(each.first_iteration, each.first_sample, each.passed_over) for each in passed] == [(0, 0, 0), (5, 32, 12)]
    assert len(merge_batch_phases(passed)) == 1, "the order is read on"
    later = continue_phases(passed, phase(40, {A: 1.0}, seq_length=16))
    assert [stretch.num_samples for stretch in find_earlier_periods(later, A)] == [40]
    assert describe_phases(passed) == ["samples 20 to 31 were skipped after a loss spike (after iteration 5)"]


def test_a_run_goes_on_behind_samples_passed_over(tmp_path: Path) -> None:
    """Resumed with the same settings it stays in the phase, which a checkpoint holds."""
    passed = skip_samples([phase(0, {A: 1.0})], 5, 20, 12)
    saved = [Phase.from_json(json.loads(json.dumps(each.to_json()))) for each in passed]
    assert continue_phases(saved, phase(36, {A: 1.0})) == passed
