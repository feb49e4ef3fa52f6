"""--ema-decay: the moving average of the weights in a run, in its checkpoints, and in what the tools make of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError
from megatron_lab.commands.checkpoint import main
from megatron_lab.commands.generate_text import main as generate
from megatron_lab.foreign.open_source import open_source
from tests.support.equality import assert_equal_tensors
from tests.support.runs import arguments, at_iteration, run, saved_tensors, spoil

DECAY, STEPS, SPOILT = 0.75, 4, 2
RUN = {"train_iters": STEPS, "log_interval": 1, "ema_decay": DECAY, "save_interval": 1, "keep_last": None}


def averaged(folder: Path, first: int) -> dict[str, torch.Tensor]:
    """The average after the last step, from the saved weights of every step, beginning with that saved after the first."""
    found = saved_tensors(folder, first, "ema")
    for step in range(first + 1, STEPS + 1):
        now = saved_tensors(folder, step)
        if step != SPOILT:
            found = {name: torch.lerp(average, now[name], 1 - DECAY) for name, average in found.items()}
    return found


def test_a_skipped_step_leaves_the_average_alone(tmp_path: Path) -> None:
    """In float16, where a gradient overflows; the steps before and after it count. (Of equal weights it would move too.)"""

    def before(rank: int) -> None:
        at_iteration(SPOILT, spoil(math.inf, "layers.1.mlp.up.weight"))

    settings = {**RUN, "fp16": True, "initial_loss_scale": 256.0, "data_parallel_sharding_strategy": "optim"}
    run(arguments(**settings, save=tmp_path), 2, before=before)
    assert_equal_tensors(saved_tensors(tmp_path, SPOILT, "ema"), saved_tensors(tmp_path, SPOILT - 1, "ema"), tolerance=0.0)
    moved = saved_tensors(tmp_path, 1, "ema")
    assert any(not torch.equal(moved[name], weight) for name, weight in saved_tensors(tmp_path, 1).items())
    assert_equal_tensors(saved_tensors(tmp_path, STEPS, "ema"), averaged(tmp_path, 1), tolerance=1e-6)


def test_a_run_may_begin_or_leave_its_average(tmp_path: Path) -> None:
    """An average that the checkpoint does not have begins at its weights; without the flag one that it has is left there."""
    without = {**RUN, "ema_decay": None}
    run(arguments(**{**without, "exit_interval": 2}, save=tmp_path))
    told = run(arguments(**RUN, load=tmp_path, save=tmp_path))
    assert "the average of the weights begins at the weights of the checkpoint" in told
    expected = saved_tensors(tmp_path, 2)
    for step in (3, 4):
        expected = {name: torch.lerp(expected[name], now, 1 - DECAY) for name, now in saved_tensors(tmp_path, step).items()}
    assert_equal_tensors(saved_tensors(tmp_path, STEPS, "ema"), expected, tolerance=1e-6)
    told = run(arguments(**{**without, "train_iters": 5}, override_opt_param_scheduler=True, load=tmp_path, save=tmp_path))
    assert "the average of the weights in the checkpoint is left out" in told and "begins at the weights" not in told
    assert not saved_tensors(tmp_path, 5, "ema")


def test_tools_take_the_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imported as the weights of a new run, generated from; refused where there is none."""
    source, base = tmp_path / "run", tmp_path / "base"
    run(arguments(**{**RUN, "save_interval": None}, tokenizer_type="ByteTokenizer", vocab_size=None, save=source))
    assert main(["import", str(source), str(base), "--ema"]) == 0
    assert "the weights are exponential moving averages" in capsys.readouterr().out
    found, average = open_source(base), saved_tensors(source, STEPS, "ema")
    assert_equal_tensors({name: found.read(name) for name in found.weights}, average, tolerance=0.0)
    texts = []
    for more in (["--load", str(source), "--ema"], ["--load", str(base)], ["--load", str(source)]):
        generate([*more, "--prompt", "", "--max-new-tokens", "12", "--seed", "1", "--ignore-eod"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(CheckpointError, match="no averages of the weights, because its run did not set --ema-decay"):
        open_source(base, average=True)
