"""Whole runs: the best checkpoint (--keep-best) and early stopping (--early-stopping-patience)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.save_folder import find_checkpoint
from megatron.checkpoint.storage_url import open_storage
from megatron.training import loop
from megatron.training.step import TrainStep
from megatron_lab.checkpoints.best_checkpoint import find_best
from tests.support.runs import arguments, checkpoint, complete_checkpoints, run

LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 2.5, 6: 2.0, 7: math.nan, 8: 3.0}
"""Validation loss by iteration. The lowest comes twice, and the first counts."""
SETTINGS: dict[str, Any] = {"num_layers": 1, "train_iters": 8, "eval_interval": 1, "eval_iters": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "stages": (2, {"num_layers": 2, "pipeline_model_parallel_size": 2}),
    "data": (2, {"use_distributed_optimizer": True}),
}


def scripted(losses: Mapping[int, float] = LOSSES) -> Callable[[int], None]:
    """For `before`: an evaluation gives the loss of the table instead of the model's."""

    def before(rank: int) -> None:
        original = loop.evaluate

        def changed(step: TrainStep, *args: Any) -> tuple[float, float | None] | None:
            assert original(step, *args) is not None
            return losses[step.optimizer.num_steps], None

        loop.evaluate = changed

    return before


def names(*iterations: int) -> list[str]:
    return [f"iter_{iteration:07d}" for iteration in iterations]


def best(folder: Path) -> int | None:
    found = find_best(open_storage(folder))
    return None if found is None else found.iteration


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_save", [False, True])
def test_the_checkpoint_with_the_lowest_loss_is_kept(tmp_path: Path, layout: str, async_save: bool) -> None:
    ranks, flags = LAYOUTS[layout]
    settings = {**SETTINGS, **flags, "keep_best": True, "keep_last": 1, "save_interval": 3, "async_save": async_save}
    said = run(arguments(**settings, save=tmp_path), ranks, before=scripted())
    assert complete_checkpoints(tmp_path) == names(4, 8) and best(tmp_path) == 4
    assert f"best checkpoint: {checkpoint(tmp_path, 4)}, validation loss 2.000000E+00" in said
    assert find_checkpoint(tmp_path, "best") == checkpoint(tmp_path, 4)
    assert find_checkpoint(tmp_path) == checkpoint(tmp_path, 8)
