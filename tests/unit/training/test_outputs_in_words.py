"""The lines of the start-up log on where a run can be watched, and on its learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.config.cli import load
from megatron.training.progress import BatchSizePlan
from megatron.training.startup import build_tensorboard_command, describe_outputs
from megatron_lab.monitoring.start_up_log import describe_learning_rate
from tests.support.runs import arguments


def test_the_command_of_tensorboard_names_the_run(tmp_path: Path) -> None:
    """After its folder, or the one above where that only says what is in it; paths that the longer form would cut stand alone."""
    for folder, told in (
        ("runs/small", f"--logdir_spec small:{tmp_path}/runs/small"),
        ("runs/small/tensorboard", f"--logdir_spec small:{tmp_path}/runs/small/tensorboard"),
        ("a b", f"--logdir_spec 'a b:{tmp_path}/a b'"),
        ("lr=1,2", f"--logdir {tmp_path}/lr=1,2"),
    ):
        assert build_tensorboard_command(str(tmp_path / folder)) == f"tensorboard {told}"
    assert build_tensorboard_command("s3://bucket/run") == "tensorboard --logdir s3://bucket/run"


def test_where_a_run_is_kept() -> None:
    """Checkpoints in an object store leave the folder of the curves; a run without either is told what would keep it."""

    def told(*, draws: bool = True, **settings: Any) -> str:
        config = load(arguments(train_iters=1, no_loss_picture=False, **settings), 1).config
        return "\n".join(describe_outputs(config, draw_record=draws))

    assert told(save="run", tensorboard_dir="b", save_interval=5) == (
        f"TensorBoard: {build_tensorboard_command('b')}\nthe record of the run is run/history.jsonl, its picture is loss.png there"
    )
    default = "checkpoints: every 30 minutes (the newest is kept), at the end and on a signal; --save-interval N: every N steps\n"
    assert told(save="run").startswith(default)
    assert "the record of the run is b/history.jsonl" in told(save="s3://bucket/run", tensorboard_dir="b")
    assert told(save="run", draws=False) == f"{default}the record of the run is run/history.jsonl"
    assert told(save="s3://bucket/run").startswith(f"{default}no record of the run and no loss.png: --save or --tensorboard-dir")


def test_the_rule_of_the_rate_is_for_adam() -> None:
    """And for a rate that is far off."""
    for told, settings in ((True, {}), (False, {"lr": 1e-2}), (False, {"optimizer": "sgd"}), (False, {"mup_base_width": 16})):
        config = load(arguments(**{"train_iters": 10, "lr": 5.0, **settings}), 1).config
        plan = BatchSizePlan(config.training, 1, config.model.seq_length)
        assert ([*describe_learning_rate(config, plan, 61)] != []) is told, settings
