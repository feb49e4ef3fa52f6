"""Memory that peers published follows from what their software keeps, held as our schedules hold it."""

from __future__ import annotations

import json

import pytest

from megatron_lab.commands.published_memory import ROWS, compute_relative_error, load_stack_memory, predict_memory

OFF = 0.06
"""The largest error that is allowed: they are 3 to 5 %, of which rounding to whole GB may be 1."""


@pytest.mark.parametrize("schedule", ["1F1B", "1F1B-I", "ZB-1p"])
def test_published_memory_follows_from_what_is_kept(schedule: str) -> None:
    """A model of 6.2 billion parameters on 8 stages."""
    rows = json.loads((ROWS / "zero_bubble.json").read_text())["rows"]
    row = next(one for one in rows if one["id"] == f"zero_bubble/table4-6.2B-n8-mb3-m24-{schedule}")
    assert abs(compute_relative_error(row, load_stack_memory()["zero-bubble"])) < OFF


def test_by_hand() -> None:
    """Two stages of two layers, 1F1B: the first holds two microbatches, and the word embedding too."""
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 128 "
        "--bf16 --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b"
    )
    layer = 32 * 64 * 34 + 4 * 32 * 32 * 5
    parameters = 2 * (12 * 64 * 64 + 13 * 64) + (128 + 32) * 64
    keeps = {"state": 18, "by_hidden": 34, "by_scores": 5}
    assert predict_memory({"flags": flags, "gpus": 2}, keeps) == 2 * 2 * layer + 18 * parameters


def test_each_software_that_publishes_memory_is_told() -> None:
    """Either what it keeps, or why its rows are left out."""
    known = load_stack_memory()
    for path in sorted(ROWS.glob("*.json")):
        rows = json.loads(path.read_text())["rows"]
        assert {row["stack"] for row in rows if row["memory_gb"] is not None} <= set(known), path.stem
