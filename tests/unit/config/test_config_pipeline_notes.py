"""Settings of the pipeline that do nothing, or save no time, because there is one stage: named at the start."""

from __future__ import annotations

import pytest

from megatron.config.checks.single_settings import list_idle_settings
from tests.support.rule_cases import config_of

PP, COUNT = "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"

NOTES = [
    ("--no-overlap-p2p-communication", ["--no-overlap-p2p-communication has no effect: "]),
    ("--pipeline-split balanced", ["--pipeline-split balanced has no effect: "]),
    (f"{EMBEDDING} {LOSS}", [f"{EMBEDDING} has no effect: ", f"{LOSS} has no effect: "]),
    (f"{LAYOUT} Et*4L", [f"{LAYOUT} 'Et*4L' has no effect: "]),
    ("--pipeline-schedule gpipe", ["--pipeline-schedule gpipe saves no time: "]),
    ("--pipeline-schedule zb-v", ["--pipeline-schedule zb-v saves no time: "]),
    (f"{COUNT} 2", [f"{COUNT} 2 saves no time: "]),
    (f"{LAYOUT} 'Ett|ttL'", [f"{LAYOUT} 'Ett|ttL' saves no time: "]),
    ("--pipeline-schedule 1f1b --overlap-p2p-communication --pipeline-split even --profile-pipeline", []),
]


@pytest.mark.parametrize(("extra", "starts"), NOTES)
def test_what_does_nothing_with_one_stage_is_noted(extra: str, starts: list[str]) -> None:
    found = list_idle_settings(config_of(extra), 1)
    assert len(found) == len(starts)
    assert all(note.startswith(start) for note, start in zip(found, starts, strict=True))


@pytest.mark.parametrize(
    "extra",
    [
        f"--no-overlap-p2p-communication {COUNT} 2 {EMBEDDING} {LOSS} --pipeline-schedule interleaved --num-layers 8",
        "--pipeline-schedule gpipe --pipeline-split balanced",
        f"{LAYOUT} 'Ett|ttL' --pipeline-schedule zb-h1",
    ],
)
def test_what_acts_with_two_stages_is_not_noted(extra: str) -> None:
    assert list_idle_settings(config_of(f"{PP} 2 {extra}"), 2) == []
