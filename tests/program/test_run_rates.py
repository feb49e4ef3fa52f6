"""What a resume makes of a second course of the learning rate, and of other parameter groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import arguments, launch, read_metrics, report, run

FIRST = {"train_iters": 3, "lr_decay_style": "cosine", "min_lr": 1e-3, "global_batch_size": 4, "eval_iters": 0}
AGAIN = {**FIRST, "train_iters": 7, "lr_decay_iters": 3, "lr_rewarm_start_iters": 3, "lr_rewarm_iters": 1, "lr_rewarm_factor": 0.5}


def rates(path: Path) -> dict[int, float]:
    return {line["iteration"]: line["learning_rate"] for line in read_metrics(path) if "learning_rate" in line}


def test_a_run_goes_on_with_a_second_course(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(arguments(**AGAIN, metrics_file=whole))
    run(arguments(**FIRST, save=tmp_path / "run", metrics_file=parts))
    going_on = {**AGAIN, "load": tmp_path / "run", "save": tmp_path / "run", "metrics_file": parts}
    ended = launch(arguments(**going_on), 1)
    assert ended[0].code == 1 and "rewarm_start: None there, 12 here" in ended[0].stderr, report(ended)
    run(arguments(**going_on, override_opt_param_scheduler=True, exit_interval=5))
    run(arguments(**going_on))
    assert rates(parts) == pytest.approx(rates(whole), rel=1e-14)
    found = rates(whole)  # the rate of an update is that of the samples before it
    assert [found[number] for number in (1, 4, 5)] == pytest.approx([1e-2, 1e-3, 5e-3], rel=1e-12)
    assert found[5] > found[6] > found[7] > 1e-3


def test_groups_may_change_but_not_their_rules(tmp_path: Path) -> None:
    """Of other rates the log tells; of another rule there would be no state."""
    run(arguments(train_iters=3, exit_interval=2, save=tmp_path, param_groups=("*.mlp.* lr-mult=0.5",)))
    ended = launch(arguments(train_iters=3, load=tmp_path, param_groups=("*.mlp.* optimizer=sgd",)), 1)
    assert ended[0].code == 1, report(ended)
    assert "layers.0.mlp.up.weight was trained with adam, but this run uses sgd" in ended[0].stderr
    told = run(arguments(train_iters=3, load=tmp_path, param_groups=("*.mlp.* lr-mult=0.25",)))
    assert "differs from the checkpoint: --param-groups" in told


def test_blocks_of_a_group_must_be_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Rows of 32 make two blocks of 24 and two of 16: the shape of the state does not tell them apart."""
    groups = ("layers.*.attention.qkv.weight optimizer=adam8bit",)
    run(arguments(train_iters=3, exit_interval=2, save=tmp_path, param_groups=groups, adam_8bit_block_size=24))
    ended = launch(arguments(train_iters=3, load=tmp_path, param_groups=groups, adam_8bit_block_size=16), 1)
    assert ended[0].code == 1, report(ended)
    assert "holds 8-bit moments in blocks of 24 elements, but this run uses 16" in ended[0].stderr
