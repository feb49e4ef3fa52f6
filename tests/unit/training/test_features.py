"""The table of optional parts of a run."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.cli import load
from megatron.config.flags import find_flag
from megatron.training import features
from megatron.training.failure import Explanations
from megatron.training.features import FEATURES, Feature, Features
from tests.support.runs import arguments


def wanted(ranks: int, **settings: Any) -> set[str]:
    """The flags of the features that a run has; a feature of every run has none."""
    config = load(arguments(train_iters=2, **settings), ranks).config
    return {row.flag for row in FEATURES if row.is_enabled(config, ranks)}


def test_a_plain_run_has_only_its_description() -> None:
    assert wanted(1) == {""}


def test_every_row_is_a_feature_and_a_flag() -> None:
    for row in FEATURES:
        made: Any = row.load()
        assert issubclass(made, Feature), row.class_path
        assert not row.flag or find_flag(row.flag.removeprefix("--")) is not None, row.flag


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--save-trace", {"save_trace": "trace"}),
        ("--check-replicas-every", {"check_replicas_every": 1}),
        ("--log-memory", {"log_memory": True}),
        ("--plan-report", {"plan_report": "report"}),
        ("--sentinel-interval", {"sentinel_interval": 2}),
        ("--compile", {"compile": True}),
        ("--sample-interval", {"sample_interval": 5}),
        ("--profile", {"profile": True, "profile_step_start": 1, "profile_step_end": 2}),
        ("--profile-pipeline", {"profile_pipeline": True, "profile_step_start": 1}),
        ("--spike-policy", {"spike_policy": "warn"}),
        ("--log-params-norm", {"log_params_norm": True}),
        ("--loss-picture", {"save": "folder", "no_loss_picture": None}),
    ],
)
def test_a_feature_is_there_where_its_flag_asks(flag: str, settings: dict[str, Any]) -> None:
    assert wanted(1, **settings) == {"", flag}


def test_ranks_are_watched_where_there_are_several() -> None:
    assert wanted(2, hang_warn_s=30) == {"", "--hang-warn-s"} and wanted(1, hang_warn_s=30) == {""} == wanted(2, hang_warn_s=0)


def test_exhausted_memory_is_told_though_nothing_more_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(text: str) -> None:
        raise MemoryError

    explanations = Explanations()
    Features(load(arguments(train_iters=2), 1).config, 1, explanations)
    monkeypatch.setattr(features, "import_object", no_memory)
    words = explanations.explain(MemoryError("no more"))
    assert words == "out of memory: no more\n  (no further explanation: MemoryError)"
